"""How far a format may be from colocated vLLM: the limits as data, and who breaks them. Pure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from afd.eval.cases import REDUCES, Case

ANY = "*"
EXACT = REDUCES[0]
_ONE, _MANY = "1F", ">1F"
TOKENS = 6144
"""How many the limits of perplexity are for. Its change is a mean over tokens whose changes are
mostly chance, either way: fewer tokens may change it more, by the root of how many times fewer."""


@dataclass(frozen=True)
class Gate:
    """Limits of the cases that match ``wire``, ``reduce``, ``dtype``, ``ffn`` ("1F": one process,
    ">1F": the parts of several are added up) and ``text``.

    kl: nats, at most. perplexity: relative change over TOKENS, at most, either way. top1, cloze:
    fractions of equal choices, at least. why: where the limits come from. 0 and 1 mean identical.
    """

    wire: str
    reduce: str
    dtype: str
    ffn: str
    text: str
    kl: float
    perplexity: float
    top1: float
    cloze: float
    why: str


@dataclass(frozen=True)
class Reading:
    """What is judged of one case, see afd/eval/numbers.py. cloze_same: None where the text has no
    cloze items. positions: tokens scored."""

    kl: float
    perplexity: float
    peer_perplexity: float
    top1: float
    cloze_same: float | None
    positions: int

    @property
    def perplexity_change(self) -> float:
        """Relative, signed: 0.001 is 0.1 % more than the peer's."""
        return self.perplexity / self.peer_perplexity - 1.0


GATES = (
    Gate(
        "exact", EXACT, ANY, _ONE, ANY, 0.0, 0.0, 1.0, 1.0,
        "one FFN instance computes what vLLM does",
    ),
    Gate(
        "exact", EXACT, "float32", _MANY, ANY, 1e-5, 1e-4, 0.999, 0.98,
        "sums in another order, which may decide a near tie in a router",
    ),
    Gate(
        "exact", EXACT, ANY, _MANY, ANY, 5e-4, 1e-3, 0.98, 0.9,
        "measured; each part is rounded to the dtype, and all that follows rounds anew",
    ),
    Gate("fp8", EXACT, ANY, ANY, ANY, 1e-3, 1e-3, 0.97, 0.9, "the project's goal for FP8"),
    Gate("mxfp4", EXACT, ANY, ANY, "heldout", 2e-2, 2e-2, 0.9, 0.85, "measured"),
    Gate("mxfp4", EXACT, ANY, ANY, "heldout-chat", 1e-2, 2e-2, 0.96, 0.9, "measured"),
    Gate("mxfp4", "int8", ANY, ANY, ANY, 2e-2, 2e-2, 0.9, 0.85, "measured"),
    Gate("exact", "int8", ANY, ANY, ANY, 1e-3, 1e-3, 0.97, 0.9, "measured"),
    Gate("exact", "int6", ANY, ANY, ANY, 3e-3, 5e-3, 0.95, 0.9, "measured"),
    Gate("exact", "int4", ANY, ANY, ANY, 2.5e-2, 3e-2, 0.87, 0.85, "measured"),
    Gate("exact", "fp4", ANY, ANY, ANY, 2.5e-2, 3e-2, 0.87, 0.85, "measured"),
)  # fmt: skip
"""The first one that matches holds. A format without one is measured, not judged."""

KL_GOAL = 1e-3
"""What a lossy format is held against in the records' ratios, whatever its gate: nats."""
KL_FLOOR = 1e-6
"""Below it the float32 log-probabilities of the reports are all noise: nats."""


def gate_of(case: Case) -> Gate | None:
    ffn = _ONE if case.topology.endswith("A1F") else _MANY
    facts = (case.wire, case.reduce, case.dtype, ffn, case.text)
    for gate in GATES:
        wanted = (gate.wire, gate.reduce, gate.dtype, gate.ffn, gate.text)
        if all(want in (ANY, fact) for want, fact in zip(wanted, facts, strict=True)):
            return gate
    return None


def breaches(case: Case, found: Reading) -> Iterator[str]:
    """One sentence for every limit that is not kept; none where there is no gate."""
    gate = gate_of(case)
    if gate is None:
        return
    change = abs(found.perplexity_change)
    allowed = gate.perplexity * max(1.0, math.sqrt(TOKENS / found.positions))
    if found.kl > gate.kl:
        yield f"{case.name}: KL is {found.kl:.2e} nats, the limit is {gate.kl:g} ({gate.why})"
    if change > allowed:
        yield (
            f"{case.name}: perplexity {found.perplexity:.4f} is {change:.3%} from colocated vLLM's"
            f" {found.peer_perplexity:.4f}, the limit for {found.positions} tokens is"
            f" {allowed:.3%} ({gate.why})"
        )
    if found.top1 < gate.top1:
        yield (
            f"{case.name}: {found.top1:.4f} of the most likely tokens are the same, the limit is"
            f" {gate.top1:g} ({gate.why})"
        )
    if found.cloze_same is not None and found.cloze_same < gate.cloze:
        yield (
            f"{case.name}: {found.cloze_same:.3f} of the cloze choices are the same, the limit is"
            f" {gate.cloze:g} ({gate.why})"
        )
