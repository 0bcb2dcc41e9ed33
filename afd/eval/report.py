"""Records of `afd eval`, and the pages made from them. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from afd.bench.records import Record
from afd.errors import ConfigError
from afd.eval.cases import Case, parse_case
from afd.eval.gates import GATES, KL_FLOOR, KL_GOAL, Reading, breaches, gate_of
from afd.eval.numbers import Numbers
from afd.wire.layout import layouts

PEER = "vllm colocated"
_BEGIN, _END = "<!-- afd eval: begin -->", "<!-- afd eval: end -->"
_NATS, _SHARE = "nats", "fraction"


@dataclass(frozen=True)
class Origin:
    """How a record came about, see afd/bench/records.py."""

    machine: str
    command: str
    date: str


@dataclass(frozen=True)
class WireBytes:
    """Bytes of one token in one layer, to one FFN instance and back; peer: of the exact wire."""

    ours: int
    peer: int


def wire_bytes(wire: str, dtype: str, hidden: int, top_k: int) -> WireBytes:
    """Raises ConfigError where the format does not fit the model."""

    def both_ways(name: str) -> int:
        return sum(layout.message_bytes(1) for layout in layouts(name, dtype, 1, hidden, top_k))

    return WireBytes(both_ways(wire), both_ways("exact"))


def records(case: Case, found: Numbers, size: WireBytes, origin: Origin) -> list[Record]:
    """All numbers of one case; ratios say how good ours is, 1 being as good as asked for."""

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
    """Allowed over found; a gate that is wider than the project's goal does not count."""
    gate = gate_of(case)
    allowed = KL_GOAL if gate is None else min(gate.kl, KL_GOAL)
    return max(allowed, KL_FLOOR) / max(kl, KL_FLOOR)


_COLUMNS = ("wire", "reduce", "depth", "topology", "dtype", "text")
_HEAD = (
    "KL", "KL (all)", "perplexity", "colocated", "change", "top-1", "cloze", "colocated", "same",
)  # fmt: skip
_Values = Mapping[str, Record]


def table(found: Sequence[Record]) -> list[str]:
    """Markdown rows, one per case; depths with the same numbers share a row."""
    lines = ["| " + " | ".join((*_COLUMNS, *_HEAD)) + " |"]
    lines.append("|" + "---|" * (len(_COLUMNS) + len(_HEAD)))
    rows: dict[tuple[str, ...], list[str]] = {}
    whole: dict[tuple[str, ...], str] = {}
    for case, values in by_case(found).items():
        fixed = (case.wire, case.reduce, case.topology, case.dtype, case.text)
        cells = _cells(values)
        rows.setdefault((*fixed, *cells), []).append(str(case.depth))
        if "kl_whole_vocabulary" in values:
            whole[(*fixed, *cells)] = _small(values["kl_whole_vocabulary"].value)
    for key, depths in rows.items():
        wire, reduce, topology, dtype, text, kl, *rest = key
        cells = [wire, reduce, ", ".join(depths), topology, dtype, text, kl, whole.get(key, "")]
        lines.append("| " + " | ".join((*cells, *rest)) + " |")
    return lines


def by_case(found: Sequence[Record]) -> dict[Case, _Values]:
    """case -> metric -> record, in order."""
    cases: dict[Case, dict[str, Record]] = {}
    for record in found:
        cases.setdefault(parse_case(record.case), {})[record.metric] = record
    return cases


def _cells(values: _Values) -> tuple[str, ...]:
    """All but ``KL (all)``, which is taken at one depth only."""
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
    """What is judged of one case's records."""
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
    """The page beside the records."""
    cases = by_case(found)
    failures = [line for case, v in cases.items() for line in breaches(case, reading(v))]
    commands = dict.fromkeys(f"`{r.command}`, {r.machine}, {r.date}." for r in found)
    counts = [r for r in found if r.metric in ("positions", "covered")]
    sizes = {
        (parse_case(r.case).text, r.metric): r.value
        for r in counts  # the same in every case, up to rounding
    }
    texts = [
        f"`{text}`: {sizes[text, 'positions']:.0f} tokens are scored; the compared ones have"
        f" {sizes[text, 'covered']:.1%} of the probability."
        for text in dict.fromkeys(text for text, _ in sizes)
    ]
    lines = [
        "# Accuracy against colocated vLLM",
        "",
        *commands,
        "",
        "Colocated vLLM in the same dtype reads the same held-out text, teacher-forced. What the"
        " columns are and how far each format may be: [formats](../formats.md).",
        "",
        *(f"- {line}" for line in texts),
        "",
        *table(found),
        "",
        *(["## Limits not kept", "", *(f"- {line}" for line in failures)] if failures else
          ["Every case is within its limits."]),
        *_beyond_goal(cases),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _beyond_goal(cases: Mapping[Case, _Values]) -> list[str]:
    """A limit may be wider than the goal; which cases miss the goal is said all the same."""
    rows = [
        f"- {case.name}: {values['kl'].value:.1e}"
        for case, values in cases.items()
        if values["kl"].value > KL_GOAL
    ]
    return ["", f"## KL beyond the goal of {KL_GOAL:g} nats", "", *rows] if rows else []


def gate_table() -> list[str]:
    """The limits as Markdown."""
    lines = [
        "| wire | reduce | dtype | FFN processes | text | KL | perplexity | top-1 | cloze"
        " | because |",
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
    """A page with ``lines`` between its two markers. Raises ConfigError if it has none.

    Args:
        where: the page's name, for the message.
    """
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ConfigError(f"{where} has no lines {_BEGIN} and {_END} for the table; add them")
    return "\n".join([before + begin, "", *lines, "", end + after])
