"""The list ``hosts`` of a deployment file: the machines, and what runs on each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from afd.config.transport import PORT_LIST, Section, Transport, are_ports
from afd.places import HostOffer, HostPlaces, Pool, place

Instances = tuple[Annotated[int, Field(ge=0)], ...]

CONTROL_PORT = 5555
"""Port of the control plane if ``control.address`` is auto and the file names hosts."""

_LOOPBACK = "127.0.0.1"


class Accelerators(Section):
    """The GPUs of one host."""

    count: int = Field(ge=0)  # how many; the host is checked at its start
    # Name in `afd plan --list`, such as h800; its memory is checked by `afd serve --check`
    kind: str | None = None


class Host(Section):
    """One machine of the deployment. ``afd serve FILE --host NAME`` starts its roles."""

    name: str = Field(min_length=1)  # as in --host and in messages
    # Address at which the other hosts reach this one: API of its attention instances, handshakes
    # and backend tcp; on the first host also the control plane
    address: str = Field(min_length=1)
    accelerators: Accelerators | None = None  # its GPUs; null: a host without GPUs
    # RDMA ports in rail order, in place of transport.verbs.ports. auto: those of
    # transport.verbs, else the ones nearest to the GPU of each instance
    ports: Literal["auto"] | tuple[str, ...] = Field(default="auto", description=PORT_LIST)
    # Numbers of the instances that run here; null: `afd serve` spreads them over such hosts
    attention: Instances | None = Field(
        default=None, description="a list of instance numbers, such as [0, 1], or null"
    )
    ffn: Instances | None = Field(
        default=None, description="a list of instance numbers, such as [0, 1], or null"
    )

    @field_validator("ports")
    @classmethod
    def _are_ports(cls, value: Literal["auto"] | tuple[str, ...]) -> tuple[str, ...] | str:
        return value if value == "auto" else are_ports(value)


def places_of(
    hosts: tuple[Host, ...], attention: Pool, ffn: Pool, *, shared: bool
) -> tuple[HostPlaces, ...]:
    """Returns which host runs what; without hosts, one nameless host that runs everything.

    shared: the processes of a host share its GPUs, so their number is no limit.

    Raises:
        ValueError: a mistake in the list, one sentence.
    """
    if not hosts:
        everything = tuple(range(attention.instances)), tuple(range(ffn.instances))
        return (HostPlaces("", *everything),)
    limited = not shared and (attention.each or ffn.each)
    offers = [
        HostOffer(
            host.name,
            (host.accelerators.count if host.accelerators else 0) if limited else None,
            host.attention,
            host.ffn,
        )
        for host in hosts
    ]
    return place(offers, attention, ffn)


def check_hosts(hosts: tuple[Host, ...], transport: Transport, attention_host: str) -> None:
    """Raises ValueError if other keys of the file contradict its hosts."""
    names = [host.name for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"hosts has the name {twice} twice; give every host its own name")
    # A role's own file has the address of its host in these keys.
    allowed = {_LOOPBACK, *(host.address for host in hosts)}
    for key, value in (("attention.host", attention_host), ("transport.host", transport.host)):
        if value not in allowed:
            raise ValueError(
                f"{key} is {value}, which is the address of no host; remove {key}, because hosts"
                " gives every instance the address of its host"
            )
    if len(hosts) > 1 and transport.backend in ("shm", "ipc"):
        raise ValueError(
            f"transport.backend {transport.backend} ends at one host, but hosts names {len(hosts)};"
            " use auto, tcp or verbs"
        )
    if transport.verbs.ffn_ports:
        raise ValueError(
            "transport.verbs.ffn_ports is for files without hosts; give each host its own ports"
        )
