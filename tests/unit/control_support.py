"""What the control plane's tests share: a contract and a clock that only moves when told to."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from afd.control.contract import Contract
from afd.control.messages import Timing

CONTRACT = Contract(
    model_hash="c0ffee",
    dtype="bfloat16",
    wire="exact",
    hidden=64,
    num_layers=4,
    moe_layers=(1, 2, 3),
    num_experts=8,
    top_k=2,
    capacity_rows=32,
    max_depth=3,
    attention_instances=2,
    ffn_instances=2,
    expert_map=((0, 4), (4, 8)),
)

FAST = Timing(interval_s=0.05, timeout_s=0.5)


def contract_with(**changes: object) -> Contract:
    return msgspec.structs.replace(CONTRACT, **changes)


class FakeClock:
    """Seconds that pass only in :meth:`sleep`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def eventually(condition: Callable[[], object], deadline_s: float) -> float:
    """Waits for the condition; returns the seconds it took; AssertionError at the deadline."""
    start = time.monotonic()
    while not condition():
        took = time.monotonic() - start
        assert took < deadline_s, f"not within {deadline_s} s"
        time.sleep(0.005)
    return time.monotonic() - start
