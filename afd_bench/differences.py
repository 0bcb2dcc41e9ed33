"""Turns the measurements of `afd bench identity` into findings. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from afd_bench.agreement import compare
from afd_bench.cases import Case
from afd_bench.measure import Measured, Run, Scores
from afd_bench.workload import Answer, first_difference, matching

KL_TARGET = 1e-3
"""Peer value of a mean KL in nats if no float32 reference was measured; chosen, not measured."""
_KL_METRICS = ("kl", "kl_whole_vocabulary")  # over the most likely tokens, over all tokens
_KL_FLOOR = 1e-6  # below it, errors of the reported float32 log-probabilities dominate


@dataclass(frozen=True)
class Finding:
    """One number of one case.

    case, metric, value, unit, peer_value, ratio: as in a Record. words: text of the progress line.
    details: one line per request whose tokens differ. is_fault: the finding is an error.
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
    """Returns all findings of a case; a reference is compared with its own second run.

    float32: the family's float32 reference, if it ran. The divergence of bfloat16 colocated vLLM
    from it is the yardstick for the other divergences.
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
    """Returns KL(float32 || reference) in nats by metric: the effect of rounding alone."""
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
        # These cases name the wire format, exact included.
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
                f"{case}: request {index} differs from token {at} of {len(a.tokens)} on; the top"
                f" two log-probabilities are {a.gaps[at]:.2g} apart, {b.gaps[at]:.2g} in the"
                " reference"
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
    """Yields one line on positions whose most likely tokens differ, if there are any."""
    leads = []
    for left, right in zip(ours, theirs, strict=True):
        for q, p in zip(left, right, strict=True):
            best, other = max(p, key=p.__getitem__), max(q, key=q.__getitem__)
            if best != other and other in p:
                leads.append(p[best] - p[other])
    if leads:
        yield (
            f"{case}: {len(leads)} most likely tokens differ; in the reference they lead by at most"
            f" {max(leads):.2g} in log-probability"
        )


def _counters(case: Case, measured: Measured, reference: Measured) -> Iterator[Finding]:
    """Yields what the workload triggered; the ratio is 1 if it happened at all, else 0."""
    ours, theirs = measured.counters, reference.counters
    for metric, unit, value, peer in (
        ("preemptions", "requests", ours.preemptions, theirs.preemptions),
        ("prefix_hits", "tokens", ours.prefix_hits, theirs.prefix_hits),
    ):
        words = f"{metric} {value}"
        yield Finding(case.name, metric, value, unit, peer, float(value > 0), words)
