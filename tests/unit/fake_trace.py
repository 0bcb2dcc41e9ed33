"""A peer's trace made of plain lists, in the place of afd_comm.PeerTrace."""

from __future__ import annotations

from dataclasses import dataclass, field


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

    def events(self) -> list[tuple[int, int, int, int, int, int, int, int]]:
        return [(1000, 1100, 3000, 4000, 7, 1, 5, 640), (2000, 2100, 2900, 3000, -1, -1, 0, 0)]
