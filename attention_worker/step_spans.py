"""Spans of steps, below the requests that a step served (docs/traces.md).

Only used if ``metrics.otlp`` and ``metrics.stage_every`` are set. The engine's thread notes which
requests a step has; that is one entry of a queue. A thread of its own makes spans of the stage
timestamps and message times that are kept anyway.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from afd.metrics.otlp import PARENT, make_provider, shutdown
from afd.metrics.role import RoleMetrics
from afd.metrics.step_trace import StepTrace
from afd.metrics.trace import events_of
from afd.wire.message import TraceEvent

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

PERIOD_S = 0.25
"""Seconds between two looks. A role keeps its last 64 steps (afd.metrics.step_trace)."""
_KEPT = 1024  # notes of steps


class StepRequests:
    """Which traced requests each of the last steps served. One thread writes; any may read."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}  # traced requests that run: id -> traceparent
        self._steps: deque[tuple[int, tuple[str, ...]]] = deque(maxlen=_KEPT)

    def began(self, request: str, arguments: Mapping[str, object] | None) -> None:
        """arguments: the request's ``vllm_xargs``."""
        parent = (arguments or {}).get(PARENT)
        if isinstance(parent, str):
            self._parents[request] = parent

    def finished(self, requests: Iterable[str]) -> None:
        if self._parents:
            for request in requests:
                self._parents.pop(request, None)

    def step(self, requests: Iterable[str]) -> None:
        """A step with these requests is about to run."""
        parents = self._parents
        found = tuple(parents[r] for r in requests if r in parents) if parents else ()
        self._steps.append((time.monotonic_ns(), found))

    def parents_at(self, began_ns: int) -> tuple[str, ...]:
        """Returns the traceparents of the requests of the step that began at this time."""
        steps = list(self._steps)
        place = bisect_right([noted_ns for noted_ns, _ in steps], began_ns)
        return steps[place - 1][1] if place else ()


@dataclass(frozen=True)
class FfnCall:
    """One micro-batch in the experts of one layer, as the attention side saw it. Times in ns.

    member: the FFN rank; "ffn" for all of them. answered_ns: when it posted its answer, by this
    host's clock; None: not known.
    """

    member: str
    layer: int
    micro_batch: int
    rows: int
    began_ns: int
    ended_ns: int
    answered_ns: int | None = None


def ffn_calls(step: StepTrace, answers: Mapping[str, Sequence[TraceEvent]]) -> list[FfnCall]:
    """Returns the FFN calls of a step.

    A call lasts from the end of the attention half to the arrival of the answer. Without message
    times (GPU transports) it lasts to the next work on the micro-batch.

    Args:
        answers: by FFN rank, its last messages.
    """
    calls = []
    within = [
        (member, e) for member, events in answers.items() for e in events
        if e[4] >= 0 and step.began_ns <= e[2] <= step.ended_ns
    ]  # fmt: skip
    by_position: dict[tuple[int, int], list[tuple[str, TraceEvent]]] = {}
    for member, event in within:
        by_position.setdefault((event[4], event[5]), []).append((member, event))
    for place, span in enumerate(step.spans):
        where = (span.layer, span.micro_batch, span.rows, span.done_ns)
        later = (s.started_ns for s in step.spans[place + 1 :] if s.micro_batch == where[1])
        found = by_position.get(where[:2], ())
        calls += [FfnCall(member, *where, event[2], event[0]) for member, event in found]
        if not found:
            calls.append(FfnCall("ffn", *where, next(later, step.ended_ns)))
    return calls


class StepSpans:
    """Sends the spans of an attention instance's steps.

    Args:
        metrics: of the instance; its step_traces and wire_traces are read.
    """

    def __init__(
        self, provider: TracerProvider, metrics: RoleMetrics, requests: StepRequests
    ) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("afd.attention")
        self._metrics = metrics
        self._requests = requests
        self._seen_ns = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="afd-spans", daemon=True)

    @classmethod
    def start(
        cls, endpoint: str, member: str, metrics: RoleMetrics, requests: StepRequests
    ) -> StepSpans:
        """Sends to ``endpoint`` from now on. Raises ConfigError if a package is missing."""
        made = cls(make_provider(endpoint, member), metrics, requests)
        made._thread.start()
        return made

    def close(self) -> None:
        """Sends what is left. May be called again."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
        shutdown(self._provider)

    def _run(self) -> None:
        while not self._end.wait(PERIOD_S):
            self.export()
        self.export()

    def export(self) -> None:
        """Makes the spans of the steps since the last call."""
        steps = [s for s in self._metrics.step_traces.all() if s.began_ns > self._seen_ns]
        if not steps:
            return
        self._seen_ns = max(step.began_ns for step in steps)
        served = [(step, self._requests.parents_at(step.began_ns)) for step in steps]
        if any(parents for _, parents in served):
            answers = events_of(dict(self._metrics.wire_traces))
            for step, parents in served:
                self._emit(step, parents, answers)

    def _emit(
        self,
        step: StepTrace,
        parents: Sequence[str],
        answers: Mapping[str, Sequence[TraceEvent]],
    ) -> None:
        """Makes one span of the step per request. The first one has the FFN calls below it, and the
        others link to it, so that the number of spans does not multiply."""
        from opentelemetry.trace import Link, SpanContext, SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        to_epoch = time.time_ns() - time.monotonic_ns()
        facts = {
            "afd.rows": step.rows,
            "afd.depth": step.depth,
            "afd.requests": len(parents),
            "afd.replayed": step.replayed,
            "afd.attention_ms": step.busy_ns / 1e6,
            "afd.waited_ms": step.waited_ns / 1e6,
        }
        first: SpanContext | None = None
        for parent in parents:
            span = self._tracer.start_span(
                "step",
                TraceContextTextMapPropagator().extract({"traceparent": parent}),
                attributes=facts,
                links=[] if first is None else [Link(first)],
                start_time=to_epoch + step.began_ns,
            )
            if first is None:
                first = span.get_span_context()
                below = set_span_in_context(span)
                for call in ffn_calls(step, answers):
                    inner = self._tracer.start_span(
                        f"{call.member} layer {call.layer}",
                        below,
                        SpanKind.CLIENT,
                        {
                            "afd.member": call.member,
                            "afd.layer": call.layer,
                            "afd.micro_batch": call.micro_batch,
                            "afd.rows": call.rows,
                        },
                        start_time=to_epoch + call.began_ns,
                    )
                    if call.answered_ns is not None:
                        inner.add_event("answer posted", timestamp=to_epoch + call.answered_ns)
                    inner.end(to_epoch + call.ended_ns)
            span.end(to_epoch + step.ended_ns)
