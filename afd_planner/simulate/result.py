"""The result of a simulation, and its text form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from afd_planner.simulate.step import StepSpans


@dataclass(frozen=True)
class Quantiles:
    """Mean and quantiles of a time in seconds, or of a number of requests; 0 without values.

    ``most``: the maximum.
    """

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    most: float = 0.0


@dataclass(frozen=True)
class FailureImpact:
    """The effect of one failure.

    Attributes:
        what: The failure in words.
        at_s: Moment of the failure.
        stall_s: Excess of the longest affected step over the median step; 0 if none was affected.
        replayed: Number of requests that started again.
        reprocessed_tokens: Prompt and answer tokens that these requests process again.
    """

    what: str
    at_s: float
    stall_s: float
    replayed: int
    reprocessed_tokens: int


@dataclass(frozen=True)
class RequestCounts:
    """Numbers of requests; all 0 for a constant load. total = finished + unfinished + refused.

    Refused requests do not fit into any KV cache. ``replays`` counts starts after a failure,
    ``preemptions`` those after the KV cache was full.
    """

    total: int = 0
    finished: int = 0
    unfinished: int = 0
    refused: int = 0
    replays: int = 0
    preemptions: int = 0


@dataclass(frozen=True)
class TracedStep:
    """Spans of one step. ``instances``: participating attention instances, in the spans' order."""

    number: int
    instances: tuple[int, ...]
    spans: StepSpans


@dataclass(frozen=True)
class Result:
    """Result of one simulation. Times in seconds, shares from 0 to 1.

    Attributes:
        tokens: Output tokens.
        tokens_per_s: Output tokens over ``elapsed_s``, idle time included.
        step: Time from the start of the step's last instance to the step's last token.
        itl: Time between two tokens of a request, over all tokens (inter-token latency).
        tpot: Mean time per token after the first, per request.
        ttft: Time from sending to the first token, per request.
        e2el: Time from sending to the last token, per request.
        engine_ttft: Time from the step that first sees a request to its first token: what vLLM
            counts as queue and prefill time.
        queued: Time from sending to the first admission to a batch, per request.
        waiting, running: Requests sent and not yet admitted to a batch (admitted and not finished),
            over time. Preempted and replayed requests count as running.
        For a constant load, all but ``itl`` are 0.
        attention_busy, ffn_busy: Computing time over elapsed time, mean over the instances.
        attention_bubble, ffn_bubble: Waiting time inside steps over the time of steps.
        wire_out, wire_back: Share of time in which the sending links of the attention (FFN) pool
            are busy.
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
    itl: Quantiles
    tpot: Quantiles
    ttft: Quantiles
    e2el: Quantiles
    engine_ttft: Quantiles
    queued: Quantiles
    waiting: Quantiles
    running: Quantiles
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
    """Formats the result for a terminal."""
    r = result
    lines = [
        f"{r.name}: {r.gpus} accelerators, {r.steps} steps in {r.elapsed_s:.3f} s, seed {r.seed}",
        f"  tokens/s        {r.tokens_per_s:,.0f}   per accelerator {r.tokens_per_s_per_gpu:,.1f}",
        f"  ITL             {_times(r.itl)}   max {_ms(r.itl.most)}",
        f"  busy            attention {r.attention_busy:.1%}   FFN {r.ffn_busy:.1%}",
        f"  bubbles         attention {r.attention_bubble:.1%}   FFN {r.ffn_bubble:.1%}   of steps",
        f"  wire use        A->F {r.wire_out:.1%}   F->A {r.wire_back:.1%}",
    ]
    if r.requests.total:
        q = r.requests
        lines += [
            f"  TPOT            {_times(r.tpot)}   per request",
            f"  TTFT            {_times(r.ttft)}",
            f"  in the engine   {_times(r.engine_ttft)}   of TTFT",
            f"  E2EL            {_times(r.e2el)}",
            f"  queued          {_times(r.queued)}",
            f"  queue length    {_level(r.waiting)}",
            f"  batch           {_level(r.running)}   running, all attention instances",
            f"  requests        {q.total}: {q.finished} finished, {q.unfinished} unfinished,"
            f" {q.refused} refused; {q.replays} replayed, {q.preemptions} preempted",
        ]
    lines += [
        f"  failure         {f.what} at {f.at_s:.3f} s: stall {f.stall_s:.3f} s, {f.replayed}"
        f" requests replayed ({f.reprocessed_tokens:,} tokens again)"
        for f in r.failures
    ]
    return "\n".join([*lines, *(f"  source: {source}" for source in sources)])


def _times(q: Quantiles) -> str:
    return f"p50 {_ms(q.p50)}   p90 {_ms(q.p90)}   p99 {_ms(q.p99)}"


def _level(q: Quantiles) -> str:
    return f"mean {q.mean:.1f}   p99 {q.p99:.0f}   max {q.most:.0f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
