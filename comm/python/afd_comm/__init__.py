"""Slots and doorbells between processes: the receiver owns memory, senders write into it.

See ``_core.pyi`` for the interface.
"""

from ._core import (
    MAX_PARTS,
    CommError,
    Group,
    Guard,
    Header,
    Histogram,
    Link,
    PeerTrace,
    Region,
    Status,
    VerbsOptions,
    make_flag,
    memcpy_ping_pong,
    ping_pong,
)

__all__ = [
    "MAX_PARTS",
    "CommError",
    "Group",
    "Guard",
    "Header",
    "Histogram",
    "Link",
    "PeerTrace",
    "Region",
    "Status",
    "VerbsOptions",
    "make_flag",
    "memcpy_ping_pong",
    "ping_pong",
]
