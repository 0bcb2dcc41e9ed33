"""What `afd doctor --active` measured, what was expected, and the line that says so. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from afd.errors import ConfigError


@dataclass(frozen=True)
class Row:
    """One line of the table. level: ok, note or bad. remedy: "" if it is ok."""

    level: str
    what: str
    found: str
    expected: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.level:4}  {self.what:18} {self.found:42} expected {self.expected}"
        return f"{line}\n      {'':18} {self.remedy}" if self.remedy else line


@dataclass(frozen=True)
class Kind:
    """A kind of measurement. more_is_better: rates; otherwise times.

    default: the limit where neither the hardware's data nor the user give one; None: none.
    """

    name: str
    quantity: str
    unit: str
    more_is_better: bool
    default: float | None
    remedy: str


_TCP = "check the interface (ip -s link, ethtool), its MTU, and who else uses the network"
_RDMA = (
    "check the cable, MTU, PCIe width (lspci -vv: LnkSta) and the lossless class (docs/rdma.md);"
    " compare with ib_write_bw"
)
_GPUS = "check the links between the GPUs (nvidia-smi topo -m, rocm-smi --showtopo) and ACS"
_KINDS = (
    Kind("tcp_gbits", "rate", "Gb/s", True, None, _TCP),
    Kind("tcp_us", "latency", "us", False, 200.0, _TCP),
    Kind("rdma_gbits", "rate", "Gb/s", True, None, _RDMA),
    Kind("rdma_us", "latency", "us", False, 13.0, "check the switch, IRQ affinity and NUMA nodes"),
    Kind("slots_gbytes", "rate", "GB/s", True, None, _GPUS),
    Kind("copy_gbytes", "rate", "GB/s", True, 10.0, _GPUS),
    Kind("doorbell_us", "round trip", "us", False, 40.0, "look for other work on the GPU"),
    Kind("all_reduce_gbytes", "bus rate", "GB/s", True, None, _GPUS),
    Kind("all_reduce_us", "time", "us", False, None, "look for other work on the GPUs or cores"),
)
KINDS = {kind.name: kind for kind in _KINDS}
"""Names of limits, in the order of docs/doctor.md, which has the source of each default."""

PARITY = "parity"
"""Name of the limit of a container's rates, as a share of bare metal's."""
_PARITY = 0.9


@dataclass(frozen=True)
class Measured:
    """One measurement. kind: a key of :data:`KINDS`. where: such as "tcp eth0".

    turns: what each turn gave, in the kind's unit. limit: of the hardware; None: unknown. note: for
    the reader.
    """

    kind: str
    where: str
    turns: tuple[float, ...]
    limit: float | None = None
    note: str = ""

    @property
    def value(self) -> float:
        return median(self.turns)

    @property
    def key(self) -> str:
        """The same on bare metal and in a container."""
        return f"{self.where} {KINDS[self.kind].quantity}"


def limits_of(words: Iterable[str]) -> dict[str, float]:
    """Limits that the user gives, as NAME=VALUE. Raises ConfigError."""
    found = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in KINDS and name != PARITY:
            known = ", ".join((*KINDS, PARITY))
            raise ConfigError(f"--expect {word}: there is no limit {name!r}; use one of {known}")
        try:
            found[name] = float(value)
        except ValueError:
            raise ConfigError(f"--expect {word}: {value!r} is no number") from None
    return found


def judged(measured: Measured, limits: Mapping[str, float]) -> Row:
    """The line of one measurement. The user's limit counts first, then the hardware's."""
    kind = KINDS[measured.kind]
    limit = limits.get(kind.name, kind.default if measured.limit is None else measured.limit)
    found = f"{kind.quantity} {_number(measured.value)} {kind.unit}"
    if measured.note:
        found += f" ({measured.note})"
    if limit is None:
        return Row("ok", measured.where, found, f"no limit: --expect {kind.name}=VALUE")
    good = measured.value >= limit if kind.more_is_better else measured.value <= limit
    words = f"{'at least' if kind.more_is_better else 'at most'} {_number(limit)} {kind.unit}"
    if good:
        return Row("ok", measured.where, found, words)
    return Row("bad", measured.where, found, words, kind.remedy)


def compared_with_bare(
    bare: Iterable[Measured], here: Iterable[Measured], limits: Mapping[str, float]
) -> list[Row]:
    """A container's measurements beside those of bare metal, one line each.

    A median below the share is bad, unless the turns of both overlap: then it may be noise, which
    is a note. What only one side measured is a note too.
    """
    share = limits.get(PARITY, _PARITY)
    before, now = ({m.key: m for m in found} for found in (bare, here))
    rows = []
    for key in dict.fromkeys((*before, *now)):
        if key not in before or key not in now:
            where = "bare metal" if key in before else "the container"
            remedy = "run the same command on both sides"
            rows.append(Row("note", key, f"measured on {where} only", "measured on both", remedy))
            continue
        rows.append(_parity(key, before[key], now[key], share))
    return rows


def _parity(key: str, bare: Measured, here: Measured, share: float) -> Row:
    kind = KINDS[here.kind]
    better: Callable[[Iterable[float]], float] = max if kind.more_is_better else min
    worse: Callable[[Iterable[float]], float] = min if kind.more_is_better else max
    reached = here.value / bare.value if kind.more_is_better else bare.value / here.value
    found = (
        f"{_number(here.value)} {kind.unit} here, {_number(bare.value)} on bare metal:"
        f" {reached:.2f} of it"
    )
    words = f"at least {share:g}"
    if reached >= share:
        return Row("ok", key, found, words)
    ours, theirs = better(here.turns), worse(bare.turns)
    if ours >= theirs if kind.more_is_better else ours <= theirs:
        return Row("note", key, found, words, "within the noise of either: run both again, longer")
    return Row("bad", key, found, words, _parity_remedy(here.kind))


def _parity_remedy(kind: str) -> str:
    if kind.startswith("rdma"):
        return (
            "give the container the host's network and /dev/infiniband, no limit of locked memory,"
            " and the host's driver library of the NIC (LD_PRELOAD)"
        )
    if kind.startswith("tcp"):
        return "give the container the host's network (--network host) and all cores"
    return "give the container the host's IPC (--ipc host), all cores and all GPUs"


def worst(rows: Iterable[Row]) -> int:
    """Exit status: 1 if a line is bad."""
    return int(any(row.level == "bad" for row in rows))


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
