"""The transport section of a deployment file (afd/config.py), and what every section is."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

PORT_LIST = "a list of at most 8 RDMA ports, such as [mlx5_0:1, mlx5_1:1]"


class Section(BaseModel):
    """Strict: ``depth: "2"`` and ``instances: true`` are mistakes, not numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class VerbsKeywords(TypedDict):
    """Keyword arguments of the transport library's ``VerbsOptions``."""

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
    """RDMA over InfiniBand or RoCE (docs/rdma.md). Without ports there is none."""

    # device:port, in rail order: the i-th of one end talks to the i-th of the other
    ports: tuple[str, ...] = Field(default=(), max_length=8, description=PORT_LIST)
    ffn_ports: tuple[str, ...] = Field(  # of FFN instances, where their ports have other names
        default=(), max_length=8, description=PORT_LIST
    )
    host: str | None = None  # address of the handshake; null: transport.host
    qps_per_port: int = Field(default=2, ge=1, le=16)  # connections per pair of ports
    gid_index: Literal["auto"] | Annotated[int, Field(ge=0, le=255)] = Field(
        default="auto", description="auto (the first RoCE v2 address) or a whole number to 255"
    )
    traffic_class: int = Field(default=0, ge=0, le=255)  # RoCE: DSCP times 4
    service_level: int = Field(default=0, ge=0, le=15)
    timeout: int = Field(default=14, ge=1, le=31)  # of an acknowledgement: 4.096 us << timeout
    retry: int = Field(default=6, ge=0, le=6)  # 7 is "for ever" on some devices
    library: str = "libibverbs.so.1"  # the system's; a bundled copy would see no device

    @field_validator("ports", "ffn_ports")
    @classmethod
    def _are_ports(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not re.fullmatch(r"[^:/\s]+(:[1-9]\d{0,2})?", port) for port in value):
            raise ValueError("must be " + PORT_LIST)
        return value


class Transport(Section):
    backend: Literal["auto", "shm", "tcp", "ipc", "verbs"] = "auto"
    host: str = "127.0.0.1"  # address at which peers reach this host
    trace: bool = True  # messages carry their times: afd_wire_seconds, and the wire's stage times
    verbs: Verbs = Verbs()

    @model_validator(mode="after")
    def _consistent(self) -> Transport:
        if self.backend == "verbs" and not self.verbs.ports:
            raise ValueError(
                "backend verbs needs verbs.ports, the RDMA ports to use, such as [mlx5_0:1];"
                " `afd doctor` lists this host's"
            )
        return self

    @property
    def tcp_host(self) -> str | None:
        """Where a role listens for backend tcp; None where that backend is not wanted."""
        return self.host if self.backend in ("auto", "tcp") else None

    def verbs_keywords(self, role: Literal["attention", "ffn"]) -> VerbsKeywords | None:
        """Options of backend verbs for one role; None where that backend is not wanted."""
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
