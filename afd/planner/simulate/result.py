"""What a simulation answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from afd.planner.simulate.step import StepSpans


@dataclass(frozen=True)
class Quantiles:
    """Seconds; all 0 where there was nothing to measure."""

    p50: float
    p99: float
    most: float


@dataclass(frozen=True)
class FailureImpact:
    """What one failure did. what: in words. at_s: when. stall_s: how much longer than the median
    the longest step took that it fell into; 0 if it fell into none. replayed: requests that began
    anew; reprocessed_tokens: their prompts and answers so far."""

    what: str
    at_s: float
    stall_s: float
    replayed: int
    reprocessed_tokens: int


@dataclass(frozen=True)
class RequestCounts:
    """total = finished + unfinished + refused; refused ones fit into no KV cache. replays: starts
    beyond the first. All 0 for a constant load."""

    total: int = 0
    finished: int = 0
    unfinished: int = 0
    refused: int = 0
    replays: int = 0


@dataclass(frozen=True)
class TracedStep:
    """Spans of one step. instances: the attention instances that took part, in the spans' order."""

    number: int
    instances: tuple[int, ...]
    spans: StepSpans


@dataclass(frozen=True)
class Result:
    """One simulation. Times in seconds, shares from 0 to 1.

    tokens: made; tokens_per_s: over ``elapsed_s``, idle time included. tpot: time between two
    tokens of a request, over all tokens; request_tpot: its mean per request; ttft: from arrival to
    the first token; the last two are 0 for a constant load. step: from the moment at which the last
    of its instances began until its last token was out.
    attention_busy, ffn_busy: computing time over elapsed time, means over the instances.
    attention_bubble, ffn_bubble: waiting time inside of steps over the steps' time.
    wire_out, wire_back: share of the time in which the sending links of the attention (FFN) pool
    carry rows.
    """

    name: str
    seed: int
    gpus: int
    steps: int
    elapsed_s: float
    tokens: int
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    step: Quantiles
    tpot: Quantiles
    request_tpot: Quantiles
    ttft: Quantiles
    attention_busy: float
    ffn_busy: float
    attention_bubble: float
    ffn_bubble: float
    wire_out: float
    wire_back: float
    requests: RequestCounts
    failures: tuple[FailureImpact, ...]
    timeline: tuple[TracedStep, ...]


def describe(result: Result, sources: Sequence[str] = ()) -> str:
    """The result as lines for a terminal."""
    r = result
    lines = [
        f"{r.name}: {r.gpus} accelerators, {r.steps} steps in {r.elapsed_s:.3f} s, seed {r.seed}",
        f"  tokens/s        {r.tokens_per_s:,.0f}   per accelerator {r.tokens_per_s_per_gpu:,.1f}",
        f"  TPOT            p50 {_ms(r.tpot.p50)}   p99 {_ms(r.tpot.p99)}   max {_ms(r.tpot.most)}",
        f"  busy            attention {r.attention_busy:.1%}   FFN {r.ffn_busy:.1%}",
        f"  bubbles         attention {r.attention_bubble:.1%}   FFN {r.ffn_bubble:.1%}   of steps",
        f"  wire use        A->F {r.wire_out:.1%}   F->A {r.wire_back:.1%}",
    ]
    if r.requests.total:
        q = r.requests
        lines += [
            f"  TTFT            p50 {_ms(r.ttft.p50)}   p99 {_ms(r.ttft.p99)}",
            f"  requests        {q.total}: {q.finished} finished, {q.unfinished} unfinished,"
            f" {q.refused} refused; {q.replays} replayed",
        ]
    lines += [
        f"  failure         {f.what} at {f.at_s:.3f} s: stall {f.stall_s:.3f} s, {f.replayed}"
        f" requests replayed ({f.reprocessed_tokens:,} tokens again)"
        for f in r.failures
    ]
    return "\n".join([*lines, *(f"  source: {source}" for source in sources)])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
