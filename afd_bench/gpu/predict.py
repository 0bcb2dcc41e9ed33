"""Predicts a cell with the planner's cost model, to compare it with the measurement. Pure."""

from dataclasses import dataclass, replace

from afd_bench.gpu.targets import Afd, Colocated, Target
from afd_planner.cost.colocated import colocated_step
from afd_planner.cost.disaggregated import afd_stages, tokens_per_gpu_second
from afd_planner.cost.shape import AfdShape, ColocatedShape, Efficiency, Pool
from afd_planner.cost.stages import StageTime, layer_period, layers_seconds, step_seconds
from afd_planner.facts.hardware import Accelerator
from afd_planner.facts.model import ModelSpec
from afd_planner.facts.precision import PRECISIONS, Precision


@dataclass(frozen=True)
class Prediction:
    """A prediction. tpot_s: of a step. layers_s, rest_s: its time on the devices, in the layers and
    outside of them. words: breakdown of the time as text."""

    tpot_s: float
    layers_s: float
    rest_s: float
    tokens_per_s_per_gpu: float
    words: str


def predict(
    target: Target,
    depth: int,
    requests: int,
    context: float,
    model: ModelSpec,
    accelerator: Accelerator,
    efficiency: Efficiency | None = None,
    kv: str = "bfloat16",
) -> Prediction:
    """Predicts one decode step in bfloat16.

    depth: ignored for colocated vLLM. requests: over all schedulers. context: mean tokens per
    request. kv: dtype of the KV cache. Rows choose experts by chance.
    """
    chosen, precision = efficiency or Efficiency(), replace(PRECISIONS["bf16"], kv=kv)
    if isinstance(target, Colocated):
        return _colocated(target, requests, context, model, accelerator, chosen, precision)
    return _disaggregated(target, depth, requests, context, model, accelerator, chosen, precision)


def _disaggregated(
    target: Afd,
    depth: int,
    requests: int,
    context: float,
    model: ModelSpec,
    accelerator: Accelerator,
    efficiency: Efficiency,
    precision: Precision,
) -> Prediction:
    shape = AfdShape(
        Pool(accelerator, target.attention, 1),
        Pool(accelerator, target.ffn, target.tp, target.tp),
        depth,
        requests / depth,
        context,
        replace(precision, wire=target.wire),
    )
    stages = afd_stages(model, shape, efficiency)
    step = step_seconds(stages, depth)
    remote = next(group for group in stages.groups if group.ffn is not None)
    assert remote.ffn is not None
    busiest = max(remote.attention.seconds, remote.ffn.seconds)
    busy = depth * busiest / layer_period(remote, depth)
    words = (
        f"attention {_stage(remote.attention)}, ffn {_stage(remote.ffn)}, wire"
        f" {(remote.to_ffn + remote.to_attention) * 1e6:.0f} us, busiest side busy {busy:.2f}"
    )
    layers = layers_seconds(stages, depth)
    return Prediction(step, layers, stages.rest_s, tokens_per_gpu_second(shape, step), words)


def _colocated(
    target: Colocated,
    requests: int,
    context: float,
    model: ModelSpec,
    accelerator: Accelerator,
    efficiency: Efficiency,
    precision: Precision,
) -> Prediction:
    shape = ColocatedShape(
        accelerator,
        target.gpus,
        target.tp,
        1 if target.dp == 1 else target.gpus,
        requests,
        context,
        precision,
    )
    step = colocated_step(model, shape, efficiency)
    last = step.layers[-1]
    words = f"layer {_stage(last.compute)}, exchange {last.exchange_s * 1e6:.0f} us"
    rate = requests / step.seconds / target.gpus
    return Prediction(step.seconds, step.layers_s, step.rest_s, rate, words)


def _stage(stage: StageTime) -> str:
    return f"{stage.seconds * 1e6:.0f} us ({stage.bound})"
