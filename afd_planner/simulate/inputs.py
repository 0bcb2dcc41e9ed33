"""Computes the stage times and transfers of a step from the spec and the step's work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afd_planner.cost.interpolate import Array
from afd_planner.simulate.batching import Work
from afd_planner.simulate.spec import Spec, Wire
from afd_planner.simulate.step import Outage, StepInput
from afd_planner.simulate.times import RoutingLoads, StageTimes, jittered


@dataclass(frozen=True)
class Sources:
    """The inputs from which all steps of a simulation draw their times.

    fewer: stage times by the number of attention instances in a step, where they differ.
    """

    spec: Spec
    times: StageTimes
    fewer: Mapping[int, StageTimes]
    loads: RoutingLoads | None
    rng: np.random.Generator

    def of(self, work: Work) -> StageTimes:
        """Returns the stage times of a step of the instances in ``work``."""
        return self.fewer.get(work.tokens.size, self.times)


def micro_batch_rows(rows: NDArray[np.int64], depth: int, min_rows: int) -> NDArray[np.int64]:
    """Returns the rows of every micro-batch, [depth, x]; the last micro-batch takes the remainder.

    The rules are those of :func:`afd.schedule.choose_depth` and ``split_rows``, for all instances.
    """
    count = np.clip(rows // min_rows, 1, depth)
    index, each = np.arange(depth)[:, None], rows // count
    return np.where(index < count, each + np.where(index == count - 1, rows % count, 0), 0)


def step_input(
    sources: Sources,
    work: Work,
    start: Array,
    outages: Sequence[tuple[int, float, float]] = (),
    deaths: Mapping[int, float] | None = None,
    ffn_from: float = -np.inf,
) -> StepInput:
    """Returns the input of :func:`run_step` for instances with at least one row.

    Args:
        work: Work of the participating instances only, [x].
        start: [x] seconds.
        outages: (FFN instance, from, until), ascending.
        deaths: Moment of death by position in ``work``.
        ffn_from: See StepInput.
    """
    spec, rng = sources.spec, sources.rng
    shape = (spec.layers, spec.depth)
    total = work.decode + work.prefill
    rows = micro_batch_rows(total, spec.depth, spec.min_rows)
    share = rows / total
    times = sources.of(work)
    attention = _attention(times, work, share)
    pattern = np.resize(np.array(spec.attention_pattern), spec.layers)
    per_layer = pattern[:, None, None] * attention
    wire = _transfers(spec, times, rows)
    ffn = _ffn(sources, times, rows.sum(axis=1), prompts=bool(work.prefill.any()))
    jitter = spec.jitter
    steady = jitter.wire.model_copy(update={"spike_chance": 0.0})
    back_burst, back_latency = wire.back_burst[:, None], wire.back_latency[:, None]
    x, y = total.size, spec.ffn.instances
    return StepInput(
        start=start,
        rows=rows.astype(float),
        attention=jittered(per_layer, jitter.attention, rng),
        ffn=jittered(ffn, jitter.ffn, rng),
        out_burst=jittered(np.broadcast_to(wire.out_burst, (*shape, x)), steady, rng),
        out_each=wire.out_each,
        back_burst=jittered(np.broadcast_to(back_burst, (*shape, y)), steady, rng),
        back_each=wire.back_each,
        out_latency=jittered(np.broadcast_to(wire.out_latency, (*shape, x)), jitter.wire, rng),
        back_latency=jittered(np.broadcast_to(back_latency, (*shape, y)), jitter.wire, rng),
        outages=[Outage(j, begin, end, wire.resend) for j, begin, end in outages],
        deaths=deaths or {},
        detect=spec.detect_s,
        ffn_from=ffn_from,
    )


def rest_times(sources: Sources, work: Work) -> Array:
    """Returns the seconds [x] between the last answer of an instance and its next step."""
    rest = sources.of(work).rest(work.tokens.astype(float))
    return jittered(rest, sources.spec.jitter.rest, sources.rng)


def _attention(times: StageTimes, work: Work, share: Array) -> Array:
    """Returns [d, x] seconds.

    Decode rows and prompt rows of a micro-batch run in the same kernels, so their times add up but
    for what even one row takes (launches, weights, the wake-up of the host): that is paid once.
    """
    decode, prefill = share * work.decode, share * work.prefill
    context = np.broadcast_to(work.context, decode.shape)
    took = np.where(decode > 0, times.attention(decode, context), 0.0)
    if not prefill.any():
        return np.asarray(took)
    attended = np.broadcast_to(work.prefill_context, prefill.shape)
    prompts = np.where(prefill > 0, times.prefill(prefill, attended), 0.0)
    one, none = np.ones(1), np.zeros(1)
    fixed = np.minimum(times.attention(one, none), times.prefill(one, none))
    return np.asarray(took + prompts - np.minimum(fixed, np.minimum(took, prompts)))


def _ffn(sources: Sources, times: StageTimes, rows: NDArray[np.int64], *, prompts: bool) -> Array:
    """Returns [L, d, y] seconds. ``rows``: [d] rows of all attention instances."""
    spec = sources.spec
    shape = (spec.layers, spec.depth, spec.ffn.instances)
    if sources.loads is None:
        return np.broadcast_to(times.ffn(rows.astype(float), prompts)[:, None], shape)
    effective = sources.loads.factors(rows, sources.rng) * rows[:, None]
    return times.ffn(effective, prompts)


@dataclass(frozen=True)
class _Transfers:
    """Fields of StepInput, seconds: [d, x], but [d] for back_burst and back_latency."""

    out_burst: Array
    out_each: Array
    out_latency: Array
    back_burst: Array
    back_each: Array
    back_latency: Array
    resend: float


def _transfers(spec: Spec, times: StageTimes, rows: NDArray[np.int64]) -> _Transfers:
    wire = spec.wire
    nothing: Array = np.zeros(rows.shape)
    if wire is None:
        none = np.zeros(rows.shape[0])
        return _Transfers(nothing, nothing, nothing, none, nothing, none, 0.0)
    y = spec.ffn.instances
    to_each: Array = rows.astype(float) * received_share(wire, y)
    out_bytes, back_bytes = to_each * wire.out_bytes_per_row, to_each * wire.back_bytes_per_row
    latency: Array = np.full(rows.shape, wire.latency_us * 1e-6)
    if wire.gbit_per_s is None:
        out = latency + times.wire(out_bytes)
        back = latency + times.wire(back_bytes)
        none = np.zeros(rows.shape[0])
        resend = float(out.max())
        return _Transfers(nothing, nothing, out, none, nothing, back.max(axis=1), resend)
    attention_s_per_byte = 8e-9 / (wire.gbit_per_s * spec.attention.gpus)
    ffn_s_per_byte = 8e-9 / (wire.gbit_per_s * spec.ffn.gpus)
    out_each = out_bytes * ffn_s_per_byte
    return _Transfers(
        out_burst=out_bytes * y * attention_s_per_byte,
        out_each=out_each,
        out_latency=latency,
        back_burst=back_bytes.sum(axis=1) * ffn_s_per_byte,
        back_each=back_bytes * attention_s_per_byte,
        back_latency=latency.max(axis=1),
        resend=float(latency.max() + out_each.sum(axis=1).max()),
    )


def received_share(wire: Wire, instances: int) -> float:
    """Returns the share of all rows that one FFN instance receives and answers.

    The share is 1 for broadcast delivery. For routed delivery it is the probability that the
    instance holds at least one of a row's top_k experts.
    """
    if wire.delivery == "broadcast":
        return 1.0
    assert wire.top_k is not None
    return 1.0 - (1.0 - 1.0 / instances) ** wire.top_k
