"""What the processes of `afd bench scale` share: the case, and counters in shared memory."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.context import BaseContext

import numpy as np
import numpy.typing as npt

from afd.errors import ConfigError

ROWS = 2
"""Rows that an attention instance sends per layer."""


@dataclass(frozen=True)
class Case:
    """x attention and y FFN instances."""

    x: int
    y: int

    @property
    def name(self) -> str:
        return f"{self.x}A{self.y}F"

    @classmethod
    def of(cls, text: str) -> Case:
        """Parses ``40A24F``. Raises ConfigError."""
        found = re.fullmatch(r"([1-9]\d*)A([1-9]\d*)F", text)
        if found is None:
            raise ConfigError(f"{text!r} is not a topology; write it like 40A24F")
        return cls(int(found[1]), int(found[2]))


@dataclass(frozen=True)
class LeaderTime:
    """CPU time of the leader per announced step, us: of the median step and of the 99th in 100.
    load: of the machine, 1-minute average."""

    median_us: float
    p99_us: float
    load: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> LeaderTime:
        middle, high = np.percentile(np.array(seconds) * 1e6, [50, 99])
        return cls(float(middle), float(high), os.getloadavg()[0])


@dataclass(frozen=True)
class Rows:
    """The rows that every attention instance sends for one layer, and their exact answer.

    x, answer: float32 [ROWS, hidden]. ids: int32 [ROWS, top_k]. weights: float32 [ROWS, top_k].
    """

    layer: int
    x: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    answer: npt.NDArray[np.float32]


class Count(IntEnum):
    """Counters of one process."""

    STEPS = 0
    LEADER_NS = 1  # CPU time that the leader spent on its decisions and orders, without waits
    ORDER_NS = 2  # the part of it for orders
    WAIT_NS = 3  # CPU time inside of waits: system calls and wake-ups
    ANSWER_NS = 4  # CPU time of one FFN rank for the calls themselves
    READY = 5  # generation with which the process became ready


class Tally:
    """Counters that one process writes and the benchmark reads. ``running``: of the attention
    instances, whether to run steps. ``stop``: ends the process."""

    def __init__(self, context: BaseContext) -> None:
        self._counts = context.RawArray(ctypes.c_int64, len(Count))
        self._flags = context.RawArray(ctypes.c_int8, 2)

    def add(self, count: Count, value: int) -> None:
        self._counts[count] += value

    def __getitem__(self, count: Count) -> int:
        return int(self._counts[count])

    @property
    def running(self) -> bool:
        return bool(self._flags[0])

    @running.setter
    def running(self, on: bool) -> None:
        self._flags[0] = on

    @property
    def stop(self) -> bool:
        return bool(self._flags[1])

    @stop.setter
    def stop(self, on: bool) -> None:
        self._flags[1] = on


def total(tallies: Sequence[Tally], count: Count) -> int:
    return sum(tally[count] for tally in tallies)
