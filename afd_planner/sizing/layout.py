"""A deployment that the user states, to be priced instead of searched: ``2A2F``, ``DP8+EP``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from afd.errors import ConfigError

FORMS = "2A2F, 2A2Fx8-tp8, TP8, DP8+EP or TP2xDP4+EP8"


@dataclass(frozen=True)
class AfdLayout:
    """x attention and y FFN instances.

    Attributes:
        text: As the user wrote it.
        gpus: GPUs per instance; None: a server.
        tp: GPUs among which each expert is divided.
    """

    text: str
    x: int
    y: int
    gpus: int | None
    tp: int


@dataclass(frozen=True)
class ColocatedLayout:
    """``dp`` attention groups of ``tp`` GPUs; experts in ``ep`` shards, 1: TP over all GPUs."""

    text: str
    tp: int
    dp: int
    ep: int

    @property
    def gpus(self) -> int:
        return self.tp * self.dp


Layout = AfdLayout | ColocatedLayout


def parse_layout(text: str) -> Layout:
    """Parses a layout.

    ``XAYF`` has X attention and Y FFN instances of one server each; ``xN``: of N GPUs each;
    ``-tpN``: N GPUs divide each expert. ``TPn`` is one tensor-parallel group. ``DPm+EP`` has m
    attention replicas and expert parallelism over all GPUs; ``+EPk``: over k shards.

    Raises:
        ConfigError: ``text`` is none of these.
    """
    if found := re.fullmatch(r"(\d+)A(\d+)F(?:x(\d+))?(?:-tp(\d+))?", text, re.IGNORECASE):
        x, y, gpus, tp = (int(number) if number else None for number in found.groups())
        if x and y and gpus != 0 and tp != 0 and (gpus is None or gpus % (tp or 1) == 0):
            return AfdLayout(text, x, y, gpus, tp or 1)
    elif text and (found := _COLOCATED.fullmatch(text)):
        tp, dp = (int(found[name] or 1) for name in ("tp", "dp"))
        gpus = tp * dp
        ep = int(found["shards"] or gpus) if found["ep"] else 1
        named = found["tp"] or found["dp"]
        if named and gpus and ep and gpus % ep == 0 and (ep > 1 or dp == 1):
            return ColocatedLayout(text, tp, dp, ep)
    raise ConfigError(f"--layout {text} is not a layout; write {FORMS}")


_COLOCATED = re.compile(
    r"(?:TP(?P<tp>\d+))?x?(?:DP(?P<dp>\d+))?(?P<ep>\+EP(?P<shards>\d+)?)?", re.IGNORECASE
)
