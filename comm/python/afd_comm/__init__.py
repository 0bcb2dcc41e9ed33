"""Slots and doorbells between processes: the receiver owns memory, senders write into it.

See ``_core.pyi`` for the interface.
"""

from ._core import (
    MAX_PARTS,
    USER_BYTES,
    CommError,
    Group,
    Guard,
    Header,
    Histogram,
    Hold,
    Link,
    Message,
    PeerTrace,
    Recording,
    Region,
    Status,
    StepGate,
    StepPlan,
    VerbsOptions,
    backends,
    make_flag,
    memcpy_ping_pong,
    ping_pong,
    post_each,
)

__all__ = [
    "MAX_PARTS",
    "USER_BYTES",
    "CommError",
    "Group",
    "Guard",
    "Header",
    "Histogram",
    "Hold",
    "Link",
    "Message",
    "PeerTrace",
    "Recording",
    "Region",
    "Status",
    "StepGate",
    "StepPlan",
    "VerbsOptions",
    "backends",
    "make_flag",
    "memcpy_ping_pong",
    "ping_pong",
    "post_each",
]
