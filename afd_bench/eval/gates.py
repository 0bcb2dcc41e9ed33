"""Limits for the deviation of each format from colocated vLLM, and checks against them. Pure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from afd_bench.eval.cases import REDUCES, Case

ANY = "*"
EXACT = REDUCES[0]
_ONE, _MANY = "1F", ">1F"
TOKENS = 6144
"""Number of scored tokens for which the perplexity limits hold. The change of perplexity is a mean
of mostly random per-token changes, so with n tokens the limit grows by sqrt(TOKENS / n)."""


@dataclass(frozen=True)
class Gate:
    """Limits for the cases that match ``wire``, ``reduce``, ``dtype``, ``ffn`` and ``text``.

    ffn: "1F" for one FFN process, ">1F" if the partial sums of several are added. kl: largest KL in
    nats. perplexity: largest relative change over TOKENS tokens, up or down. top1, cloze: smallest
    fraction of equal choices. why: source of the limits. 0 and 1 mean identical.
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
    """The numbers of one case that have limits; see afd_bench/eval/numbers.py.

    cloze_same: None if the text has no cloze items. positions: scored tokens.
    """

    kl: float
    perplexity: float
    peer_perplexity: float
    top1: float
    cloze_same: float | None
    positions: int

    @property
    def perplexity_change(self) -> float:
        """Relative change, signed: 0.001 is 0.1 % above the peer."""
        return self.perplexity / self.peer_perplexity - 1.0


GATES = (
    Gate(
        "exact", EXACT, ANY, _ONE, ANY, 0.0, 0.0, 1.0, 1.0,
        "one FFN instance computes the same as vLLM",
    ),
    Gate(
        "exact", EXACT, "float32", _MANY, ANY, 1e-5, 1e-4, 0.999, 0.98,
        "the order of additions differs, which can decide a near tie in a router",
    ),
    Gate(
        "exact", EXACT, ANY, _MANY, ANY, 5e-4, 1e-3, 0.98, 0.9,
        "measured; each partial sum is rounded to the dtype",
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
"""The first gate that matches a case applies. A case without a gate has no limits."""

KL_GOAL = 1e-3
"""KL in nats with which the records' ratios compare a lossy format, even if its gate is wider."""
KL_FLOOR = 1e-6
"""KL in nats below which errors of the reported float32 log-probabilities dominate."""


def gate_of(case: Case) -> Gate | None:
    """Returns the limits of a case, None if it has none."""
    ffn = _ONE if case.topology.endswith("A1F") else _MANY
    facts = (case.wire, case.reduce, case.dtype, ffn, case.text)
    for gate in GATES:
        wanted = (gate.wire, gate.reduce, gate.dtype, gate.ffn, gate.text)
        if all(want in (ANY, fact) for want, fact in zip(wanted, facts, strict=True)):
            return gate
    return None


def breaches(case: Case, found: Reading) -> Iterator[str]:
    """Yields one sentence for every exceeded limit; nothing if the case has no limits."""
    gate = gate_of(case)
    if gate is None:
        return
    change = abs(found.perplexity_change)
    allowed = gate.perplexity * max(1.0, math.sqrt(TOKENS / found.positions))
    if found.kl > gate.kl:
        yield f"{case.name}: KL is {found.kl:.2e} nats, above the limit {gate.kl:g} ({gate.why})"
    if change > allowed:
        yield (
            f"{case.name}: perplexity {found.perplexity:.4f} differs by {change:.3%} from colocated"
            f" vLLM's {found.peer_perplexity:.4f}; the limit for {found.positions} tokens is"
            f" {allowed:.3%} ({gate.why})"
        )
    if found.top1 < gate.top1:
        yield (
            f"{case.name}: {found.top1:.4f} of the most likely tokens are equal, below the limit"
            f" {gate.top1:g} ({gate.why})"
        )
    if found.cloze_same is not None and found.cloze_same < gate.cloze:
        yield (
            f"{case.name}: {found.cloze_same:.3f} of the cloze choices are equal, below the limit"
            f" {gate.cloze:g} ({gate.why})"
        )
