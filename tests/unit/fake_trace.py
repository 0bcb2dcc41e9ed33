"""A stand-in for afd_comm.PeerTrace, made of plain lists."""

from __future__ import annotations

from dataclasses import dataclass, field

from afd.wire.layout import Kind
from afd.wire.message import message


@dataclass
class FakeHistogram:
    values: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.values)

    @property
    def total_ns(self) -> int:
        return sum(self.values)

    def cumulative(self, bounds_ns: list[int]) -> list[int]:
        return [sum(value <= bound for value in self.values) for bound in bounds_ns]


@dataclass
class FakeTrace:
    inbound: FakeHistogram = field(default_factory=FakeHistogram)
    outbound: FakeHistogram = field(default_factory=FakeHistogram)
    round_trip: FakeHistogram = field(default_factory=FakeHistogram)
    waiting: FakeHistogram = field(default_factory=FakeHistogram)
    offset_error_ns: int = 0

    def events(self) -> list[tuple[int, int, int, int, bytes, int, int]]:
        leave = message(0, [], 0, layer=-1, micro_batch=-1, depth=1, kind=Kind.LEAVE)
        data = message(0, [], 5, layer=7, micro_batch=1, depth=2, kind=Kind.DATA)
        return [
            (1000, 1100, 3000, 4000, data.user, 5, 640),
            (2000, 2100, 2900, 3000, leave.user, 0, 0),
        ]
