"""Predictions of the cost model, with default efficiencies, for measured figures.

The figures are Tables 8 and 9 of the Step-3 report, and the DeepSeek-V3 deployment DSv3-profile
that Table 8 quotes. The defaults of ``Efficiency`` are fitted to these figures. The predictions
show how well one set of constants fits, not how well it predicts other machines.
"""

from dataclasses import dataclass

from afd_planner.cost.colocated import colocated_step
from afd_planner.cost.disaggregated import (
    afd_stages,
    collective_s,
    tokens_per_gpu_second,
)
from afd_planner.cost.roofline import attention_parts
from afd_planner.cost.shape import AfdShape, ColocatedShape, Efficiency, Pool
from afd_planner.cost.stages import step_seconds
from afd_planner.facts.hardware import load_accelerator
from afd_planner.facts.model_hf import load_model
from afd_planner.facts.precision import Precision, dtype_bytes

TABLE_9 = {
    ("step-3", 8192): (281, 438, 531),
    ("deepseek-v3", 8192): (372, 1252, None),
    ("qwen3-235b-a22b", 8192): (382, 812, 791),
    ("step-3", 32768): (791, 1452, 1484),
    ("deepseek-v3", 32768): (1125, 4817, None),
    ("qwen3-235b-a22b", 32768): (1391, 3042, 3010),
}
"""(model, context) to microseconds per attention layer on H800, H20, A800."""

BF16_ATTENTION = Precision(kv="bfloat16", attention_math="bfloat16")
"""FP8 weights with a bfloat16 cache."""

TABLE_9_GPUS = ("h800", "h20", "a800")
TABLE_9_BATCH = 256
TABLE_9_SERVER = 4


@dataclass(frozen=True)
class Prediction:
    """A measured figure and its prediction. ``where``, ``row``, ``column``: as in Cell."""

    where: str
    row: str
    column: str
    measured: float
    predicted: float
    unit: str

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def predictions(efficiency: Efficiency | None = None) -> tuple[Prediction, ...]:
    """Returns every measured figure of Tables 8 and 9 that the model covers."""
    chosen = efficiency or Efficiency()
    return (*_table_8(chosen), *_deepseek(chosen), *_table_9(chosen))


def _table_8(efficiency: Efficiency) -> list[Prediction]:
    """Three micro-batches, a total batch of 6144 (3A2F: 6048), FFN under EP only (section 7.3)."""
    step3, h800 = load_model("step-3"), load_accelerator("h800")
    runs = (
        ("2A2F", 2, 4096, 6144, Precision(), 4039),
        ("3A2F, BF16 attention", 3, 4096, 6048, BF16_ATTENTION, 3321),
        ("4A2F", 4, 8192, 6144, Precision(), 2643),
    )
    found = []
    for row, x, context, batch, precision, measured in runs:
        shape = AfdShape(
            attention=Pool(h800, x, 8),
            ffn=Pool(h800, 2, 8),
            depth=3,
            rows=batch / 3,
            context=context,
            precision=precision,
            dense_on_ffn=True,
        )
        step_s = step_seconds(afd_stages(step3, shape, efficiency), shape.depth)
        tgs = tokens_per_gpu_second(shape, step_s)
        found.append(Prediction("Table 8", row, "TGS", measured, tgs, "tokens/GPU/s"))
    return found


def _deepseek(efficiency: Efficiency) -> list[Prediction]:
    """DSv3-profile: EP128, 128 rows per GPU, 4K, two micro-batches (deepseek-ai/profile-data)."""
    h800 = load_accelerator("h800")
    shape = ColocatedShape(
        accelerator=h800,
        gpus=128,
        tp=1,
        ep=128,
        rows=128 * 128,
        context=4096,
        precision=BF16_ATTENTION,
        overlap=True,
    )
    seconds = colocated_step(load_model("deepseek-v3"), shape, efficiency).seconds
    tgs = shape.rows / seconds / shape.gpus
    return [Prediction("Table 8", "DSv3-profile", "TGS", 2324, tgs, "tokens/GPU/s")]


def _table_9(efficiency: Efficiency) -> list[Prediction]:
    """4 GPUs, 256 rows, BF16 attention; MFA and MLA under DP, GQA under TP."""
    found = []
    for (name, context), times in TABLE_9.items():
        model = load_model(name)
        tp = TABLE_9_SERVER if name.startswith("qwen3") else 1
        rows = TABLE_9_BATCH * tp / TABLE_9_SERVER
        for gpu, measured in zip(TABLE_9_GPUS, times, strict=True):
            if measured is None:
                continue
            accelerator = load_accelerator(gpu)
            weights = "fp8" if "fp8" in accelerator.flops else "int8"
            precision = Precision(weights, kv="bfloat16", attention_math="bfloat16")
            parts = attention_parts(
                model.groups[-1], accelerator, rows, context, precision, tp, efficiency
            )
            nbytes = rows * model.hidden * dtype_bytes(precision.activations)
            link = 2 * collective_s(nbytes, tp, accelerator, efficiency)
            seconds = sum(p.seconds for p in parts) + link + efficiency.attention_overhead_s
            column = f"{context // 1024}K, {gpu}"
            found.append(Prediction("Table 9", name, column, measured, seconds * 1e6, "us"))
    return found
