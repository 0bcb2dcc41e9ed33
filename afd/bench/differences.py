"""What the measurements of `afd bench identity` come to. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from afd.bench.agreement import compare
from afd.bench.cases import Case
from afd.bench.measure import Measured, Run, Scores
from afd.bench.workload import Answer, first_difference, matching

KL_TARGET = 1e-3
"""Mean KL in nats that others are held against where no yardstick was measured (a choice)."""
_KL_METRICS = ("kl", "kl_whole_vocabulary")  # over the likeliest tokens, over all
_KL_FLOOR = 1e-6  # below it the float32 log-probabilities of the reports are all noise


@dataclass(frozen=True)
class Finding:
    """One number of one case.

    case, metric, value, unit, peer_value, ratio: as in a Record. words: for the progress line.
    details: one line per request whose tokens differ. is_fault: it should not be so.
    """

    case: str
    metric: str
    value: float
    unit: str
    peer_value: float
    ratio: float
    words: str
    details: tuple[str, ...] = ()
    is_fault: bool = False


def findings(
    case: Case, measured: Measured, reference: Measured, float32: Measured | None
) -> list[Finding]:
    """Everything to be said of a case; for a reference, how it agrees with itself.

    float32: the family's float32 reference, if it ran: how far bfloat16 takes plain vLLM from it is
    the yardstick of the other divergences.
    """
    first = reference.runs[1]
    yardstick = _yardstick(reference, float32) if case.scored else {}
    found: list[Finding] = []
    if case.is_reference:
        found += _of_run(case, f"{case.name} again", measured.runs[2], first, yardstick)
        if yardstick and measured.float32 and float32 and float32.float32:
            name = f"{case.name} against-float32"
            found += _agreement(name, measured.float32, float32.float32, yardstick)
    else:
        for depth, run in measured.runs.items():
            found += _of_run(case, f"{case.name} depth{depth}", run, first, yardstick)
    return [*found, *_counters(case, measured, reference)]


def _yardstick(reference: Measured, float32: Measured | None) -> dict[str, float]:
    """KL(float32 || reference) by metric, nats: what rounding alone does to colocated vLLM."""
    if float32 is None or float32.float32 is None or reference.float32 is None:
        return {}
    pairs = zip(_KL_METRICS, float32.float32, reference.float32, strict=True)
    return {metric: compare(p, q).kl for metric, p, q in pairs}


def _of_run(
    case: Case, name: str, run: Run, reference: Run, yardstick: dict[str, float]
) -> Iterator[Finding]:
    label = name.rpartition(" ")[2]
    if case.wire == "exact":
        must = not case.scored
        yield _match(name, label, run.answers, reference.answers, must=must)
        if run.one_by_one:
            name_alone, label_alone = f"{name} one by one", f"{label} one by one"
            alone = run.one_by_one
            yield _match(name_alone, label_alone, alone, reference.one_by_one, must=False)
    if run.top:
        # Named with the wire: "exact" is what it is compared with.
        full = name if case.wire != "exact" else name.replace(case.dtype, f"{case.dtype} exact", 1)
        ours, theirs = (run.top, run.whole), (reference.top, reference.whole)
        yield from _agreement(full, ours, theirs, yardstick)


def _match(
    case: str, label: str, ours: Sequence[Answer], theirs: Sequence[Answer], *, must: bool
) -> Finding:
    value = matching(ours, theirs)
    return Finding(
        case,
        "match",
        value,
        "fraction of requests",
        1.0,
        value,
        f"{label} {round(value * len(ours))}/{len(ours)}",
        tuple(_differences(case, ours, theirs)),
        is_fault=must and value < 1.0,
    )


def _differences(case: str, ours: Sequence[Answer], theirs: Sequence[Answer]) -> Iterator[str]:
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        at = first_difference(a, b)
        if at is not None:
            yield (
                f"{case}: request {index} differs from token {at} of {len(a.tokens)}; top two"
                f" log-probabilities are {a.gaps[at]:.2g} apart here, {b.gaps[at]:.2g} there"
            )


def _agreement(
    case: str,
    ours: tuple[Scores, Scores],
    theirs: tuple[Scores, Scores],
    yardstick: dict[str, float],
) -> Iterator[Finding]:
    label = case.rpartition(" ")[2]
    for metric, mine, other in zip(_KL_METRICS, ours, theirs, strict=True):
        if not mine:
            continue
        value, target = compare(other, mine).kl, yardstick.get(metric, KL_TARGET)
        yield Finding(
            case,
            metric,
            value,
            "nats",
            target,
            max(target, _KL_FLOOR) / max(value, _KL_FLOOR),
            f"{label} {metric} {value:.1e}",
        )
    likeliest = compare(theirs[0], ours[0])
    yield Finding(
        case,
        "top1",
        likeliest.top1,
        "fraction of positions",
        1.0,
        likeliest.top1,
        f"{label} top1 {likeliest.top1:.4f} of {likeliest.positions} positions",
        tuple(_flips(case, ours[0], theirs[0])),
    )


def _flips(case: str, ours: Scores, theirs: Scores) -> Iterator[str]:
    """The widest lead of a best token that is not best on the other side."""
    leads = []
    for left, right in zip(ours, theirs, strict=True):
        for q, p in zip(left, right, strict=True):
            best, other = max(p, key=p.__getitem__), max(q, key=q.__getitem__)
            if best != other and other in p:
                leads.append(p[best] - p[other])
    if leads:
        yield (
            f"{case}: {len(leads)} most likely tokens differ; the reference's leads by at most"
            f" {max(leads):.2g} in log-probability"
        )


def _counters(case: Case, measured: Measured, reference: Measured) -> Iterator[Finding]:
    """That the workload did what it is for: ratio is 1 where it happened at all."""
    ours, theirs = measured.counters, reference.counters
    for metric, unit, value, peer in (
        ("preemptions", "requests", ours.preemptions, theirs.preemptions),
        ("prefix_hits", "tokens", ours.prefix_hits, theirs.prefix_hits),
    ):
        words = f"{metric} {value}"
        yield Finding(case.name, metric, value, unit, peer, float(value > 0), words)
