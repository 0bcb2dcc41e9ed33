"""The section ``transport`` of a deployment file, and the base of all sections."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypedDict

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from afd.config.values import one_of
from afd_comm import backends

PORT_LIST = "a list of at most 8 RDMA ports, such as [mlx5_0:1, mlx5_1:1]"
_PORT = r"[^:/\s]+(:[1-9]\d{0,2})?"


def transport_backends() -> tuple[str, ...]:
    """Returns the backends of the installed ``afd_comm``: valid values besides auto."""
    return backends()


def _backend(name: str) -> str:
    return one_of(name, ("auto", *transport_backends()))


class Section(BaseModel):
    """Base of all sections. Strict: refuses ``depth: "2"`` and ``instances: true``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def are_ports(ports: tuple[str, ...]) -> tuple[str, ...]:
    """Returns ``ports`` if each is device:port. Raises ValueError otherwise."""
    if len(ports) > 8 or any(not re.fullmatch(_PORT, port) for port in ports):
        raise ValueError("must be " + PORT_LIST)
    return ports


class VerbsKeywords(TypedDict):
    """The keyword arguments of ``afd_comm.VerbsOptions``."""

    host: str
    ports: list[str]
    qps_per_port: int
    gid_index: int
    traffic_class: int
    service_level: int
    timeout: int
    retry: int
    library: str


class Verbs(Section):
    """RDMA over InfiniBand or RoCE (docs/rdma.md). Not used without ``ports``."""

    # Ports as device:port, in rail order: port i of one side connects to port i of the other
    ports: tuple[str, ...] = Field(default=(), max_length=8, description=PORT_LIST)
    # Ports of FFN instances, if their names differ; default: the same as ports
    ffn_ports: tuple[str, ...] = Field(default=(), max_length=8, description=PORT_LIST)
    host: str | None = None  # address of the connection handshake; null: transport.host
    qps_per_port: int = Field(default=2, ge=1, le=16)  # queue pairs per pair of ports
    # Index into the port's GID table; auto: the first RoCE v2 address
    gid_index: Literal["auto"] | Annotated[int, Field(ge=0, le=255)] = Field(
        default="auto", description="auto (the first RoCE v2 address) or a whole number to 255"
    )
    traffic_class: int = Field(default=0, ge=0, le=255)  # RoCE: 4 times the DSCP
    service_level: int = Field(default=0, ge=0, le=15)  # InfiniBand service level
    timeout: int = Field(default=14, ge=1, le=31)  # wait per acknowledgement: 4.096 us << timeout
    retry: int = Field(default=6, ge=0, le=6)  # resends before a failure; 7: endless on some NICs
    library: str = "libibverbs.so.1"  # the system's library; a bundled copy finds no devices

    @field_validator("ports", "ffn_ports")
    @classmethod
    def _are_ports(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return are_ports(value)


class Tcp(Section):
    """Backend tcp."""

    # Connections per link: messages of more than 256 KiB are spread over them. Each has a thread
    # on either side. auto: one per 4 usable CPUs, at most 4
    connections: Literal["auto"] | Annotated[int, Field(ge=1, le=8)] = Field(
        default="auto", description="auto (one per 4 usable CPUs, at most 4) or 1 to 8"
    )


class Transport(Section):
    """How attention and FFN members exchange messages."""

    # auto: the fastest backend that connects a pair. shm: CPUs of one host; ipc: GPUs of one host;
    # verbs: RDMA; tcp: any hosts. verbs and tcp connect CPUs and GPUs of any kind
    backend: Annotated[str, AfterValidator(_backend)] = "auto"
    host: str = "127.0.0.1"  # address at which peers reach this host
    trace: bool = True  # messages carry timestamps, for afd_wire_seconds and `afd trace`
    tcp: Tcp = Tcp()
    verbs: Verbs = Verbs()

    @property
    def tcp_host(self) -> str | None:
        """Address on which a role listens for backend tcp; None if tcp is not used."""
        return self.host if self.backend in ("auto", "tcp") else None

    @property
    def tcp_connections(self) -> int:
        """The argument ``tcp_connections`` of ``afd_comm.Link``."""
        return 0 if self.tcp.connections == "auto" else self.tcp.connections

    def verbs_keywords(self, role: Literal["attention", "ffn"]) -> VerbsKeywords | None:
        """Options of backend verbs for one role; None if verbs is not used."""
        v = self.verbs
        if not v.ports or self.backend not in ("auto", "verbs"):
            return None
        return VerbsKeywords(
            host=v.host or self.host,
            ports=list(v.ffn_ports or v.ports if role == "ffn" else v.ports),
            qps_per_port=v.qps_per_port,
            gid_index=-1 if v.gid_index == "auto" else v.gid_index,
            traffic_class=v.traffic_class,
            service_level=v.service_level,
            timeout=v.timeout,
            retry=v.retry,
            library=v.library,
        )
