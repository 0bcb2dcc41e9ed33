"""The records of `afd eval`, and the pages rendered from them. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from afd.errors import ConfigError
from afd.records import Record
from afd.wire.layout import layouts
from afd_bench.eval.cases import Case, parse_case
from afd_bench.eval.gates import GATES, KL_FLOOR, KL_GOAL, Reading, breaches, gate_of
from afd_bench.eval.numbers import Numbers

PEER = "vllm colocated"
_BEGIN, _END = "<!-- afd eval: begin -->", "<!-- afd eval: end -->"
_NATS, _SHARE = "nats", "fraction"


@dataclass(frozen=True)
class Origin:
    """Origin of a record; fields as in :class:`afd.records.Record`."""

    machine: str
    command: str
    date: str


@dataclass(frozen=True)
class WireBytes:
    """Bytes per token and layer, to one FFN instance and back. peer: with the exact format."""

    ours: int
    peer: int


def wire_bytes(wire: str, dtype: str, hidden: int, top_k: int) -> WireBytes:
    """Returns the bytes per token and layer. Raises ConfigError if the format cannot encode it."""

    def both_ways(name: str) -> int:
        return sum(layout.message_bytes(1) for layout in layouts(name, dtype, 1, hidden, top_k))

    return WireBytes(both_ways(wire), both_ways("exact"))


def records(case: Case, found: Numbers, size: WireBytes, origin: Origin) -> list[Record]:
    """Returns the records of one case. A ratio of 1 or more means that the goal is met."""

    def record(metric: str, value: float, unit: str, peer: float, ratio: float) -> Record:
        return Record(
            "eval", case.name, metric, value, unit, PEER, peer, ratio,
            origin.machine, origin.command, origin.date,
        )  # fmt: skip

    ours, theirs = found.perplexity, found.peer_perplexity
    lines = [
        record("kl", found.kl, _NATS, 0.0, kl_ratio(case, found.kl)),
        record("perplexity", ours, "per token", theirs, theirs / ours),
        record("top1", found.top1, _SHARE, 1.0, found.top1),
        record("positions", found.positions, "tokens", found.positions, 1.0),
        record("covered", found.covered, "probability", 1.0, found.covered),
    ]
    if found.cloze is not None:
        accuracy, peer, same = found.cloze.accuracy, found.cloze.peer, found.cloze.same
        lines += [
            record("cloze", accuracy, _SHARE, peer, accuracy / peer if peer else 1.0),
            record("cloze_same", same, _SHARE, 1.0, same),
        ]
    if found.whole is not None:
        kl, share = found.whole.kl, found.whole.share
        lines += [
            record("kl_whole_vocabulary", kl, _NATS, 0.0, kl_ratio(case, kl)),
            record("kl_share", share, _SHARE, 1.0, share),
        ]
    lines.append(record("wire_bytes", size.ours, "bytes", size.peer, size.peer / size.ours))
    return lines


def kl_ratio(case: Case, kl: float) -> float:
    """Returns the allowed KL / ``kl``. The allowed KL is that of the gate, at most KL_GOAL."""
    gate = gate_of(case)
    allowed = KL_GOAL if gate is None else min(gate.kl, KL_GOAL)
    return max(allowed, KL_FLOOR) / max(kl, KL_FLOOR)


_COLUMNS = ("wire", "reduce", "depth", "topology", "dtype", "text")
_HEAD = (
    "KL", "KL (all)", "perplexity", "colocated", "change", "top-1", "cloze", "colocated", "same",
)  # fmt: skip
_Values = Mapping[str, Record]


def table(found: Sequence[Record]) -> list[str]:
    """Returns Markdown rows, one per case; depths with equal numbers share a row."""
    lines = ["| " + " | ".join((*_COLUMNS, *_HEAD)) + " |"]
    lines.append("|" + "---|" * (len(_COLUMNS) + len(_HEAD)))
    rows: dict[tuple[str, ...], list[str]] = {}
    whole: dict[tuple[str, ...], str] = {}
    for case, values in by_case(found).items():
        fixed = (case.wire, case.reduce, case.topology, case.dtype, case.text)
        key = fixed + _cells(values)
        rows.setdefault(key, []).append(str(case.depth))
        if "kl_whole_vocabulary" in values:
            whole[key] = _small(values["kl_whole_vocabulary"].value)
    for key, depths in rows.items():
        wire, reduce, topology, dtype, text, kl, *rest = key
        cells = [wire, reduce, ", ".join(depths), topology, dtype, text, kl, whole.get(key, "")]
        lines.append("| " + " | ".join((*cells, *rest)) + " |")
    return lines


def by_case(found: Sequence[Record]) -> Mapping[Case, _Values]:
    """Groups records: case -> metric -> record, in the given order."""
    cases: dict[Case, dict[str, Record]] = {}
    for record in found:
        cases.setdefault(parse_case(record.case), {})[record.metric] = record
    return dict[Case, _Values](cases)


def _cells(values: _Values) -> tuple[str, ...]:
    """Returns all cells but ``KL (all)``, which is measured at one depth only."""
    read = reading(values)
    cells = [
        _small(read.kl),
        f"{read.perplexity:.4f}",
        f"{read.peer_perplexity:.4f}",
        f"{read.perplexity_change:+.3%}",
        f"{read.top1:.4f}",
    ]
    if "cloze" not in values:
        return (*cells, "", "", "")
    cloze = values["cloze"]
    cells += [f"{cloze.value:.3f}", f"{cloze.peer_value:.3f}", f"{values['cloze_same'].value:.3f}"]
    return tuple(cells)


def _small(kl: float) -> str:
    if kl and abs(kl) < KL_FLOOR:
        return f"< {KL_FLOOR:g}"
    return f"{kl:.1e}" if kl else "0"


def reading(values: _Values) -> Reading:
    """Returns the numbers with limits from one case's records."""
    perplexity, cloze = values["perplexity"], values.get("cloze_same")
    return Reading(
        values["kl"].value,
        perplexity.value,
        perplexity.peer_value,
        values["top1"].value,
        cloze.value if cloze else None,
        int(values["positions"].value),
    )


def page(found: Sequence[Record]) -> str:
    """Returns the page docs/results/eval.md for its records."""
    cases = by_case(found)
    failures = [line for case, v in cases.items() for line in breaches(case, reading(v))]
    commands = dict.fromkeys(f"`{r.command}`, {r.machine}, {r.date}." for r in found)
    counts = [r for r in found if r.metric in ("positions", "covered")]
    sizes = {
        (parse_case(r.case).text, r.metric): r.value
        for r in counts  # equal in every case up to rounding
    }
    texts = [
        f"`{text}`: {sizes[text, 'positions']:.0f} scored tokens; the compared tokens cover"
        f" {sizes[text, 'covered']:.1%} of the probability."
        for text in dict.fromkeys(text for text, _ in sizes)
    ]
    lines = [
        "# Accuracy against colocated vLLM",
        "",
        *commands,
        "",
        "Each deployment and colocated vLLM in the same dtype score the same held-out text with"
        " teacher forcing. [formats](../formats.md) explains the columns and the limits.",
        "",
        *(f"- {line}" for line in texts),
        "",
        *table(found),
        "",
        *(["## Exceeded limits", "", *(f"- {line}" for line in failures)] if failures else
          ["Every case is within its limits."]),
        *_beyond_goal(cases),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _beyond_goal(cases: Mapping[Case, _Values]) -> list[str]:
    """Returns a section on cases above the KL goal, which may still be within their limits."""
    rows = [
        f"- {case.name}: {values['kl'].value:.1e}"
        for case, values in cases.items()
        if values["kl"].value > KL_GOAL
    ]
    return ["", f"## KL above the goal of {KL_GOAL:g} nats", "", *rows] if rows else []


def gate_table() -> list[str]:
    """Returns the limits as a Markdown table."""
    lines = [
        "| wire | reduce | dtype | FFN processes | text | KL | perplexity | top-1 | cloze"
        " | source |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for gate in GATES:
        cells = (
            gate.wire, gate.reduce, gate.dtype, gate.ffn, gate.text, f"{gate.kl:g}",
            f"{gate.perplexity:.2%}", f"{gate.top1:g}", f"{gate.cloze:g}", gate.why,
        )  # fmt: skip
        lines.append("| " + " | ".join("any" if cell == "*" else cell for cell in cells) + " |")
    return lines


def insert(text: str, lines: Sequence[str], where: str) -> str:
    """Returns the page ``text`` with ``lines`` between its two markers.

    Args:
        where: the page's name, for the error message.

    Raises:
        ConfigError: a marker is missing.
    """
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ConfigError(f"{where} has no lines {_BEGIN} and {_END} for the table; add them")
    return "\n".join([before + begin, "", *lines, "", end + after])
