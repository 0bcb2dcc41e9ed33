"""The load per GPU in the Step-3 report's deployments. Pure.

Step-3 report (arXiv 2507.19427), section 7 and table 8: 2A2F, 8 GPUs per instance, 3 micro-batches
of 128 rows per attention GPU at 4,096 tokens of context, FP8. Each FFN instance holds half of the
experts, each of its 8 GPUs an eighth of every expert's width.
"""

from dataclasses import dataclass

from afd_planner.facts.hardware import Accelerator

PAPER_TOKENS_PER_S = {"fp8": 4039.0, "bf16": 3321.0}
"""The report's tokens/s per GPU by dtype of attention: 2A2F (fp8) and 3A2F (bf16), table 8."""
PAPER_BUDGET_US = 272.0
"""Time per layer and micro-batch: 50 ms over 61 layers and 3 micro-batches."""
CORES = ("mqa", "fa3")
"""Attention kernels: ours (attention_worker/kernels/decode_attention.py), vLLM's FlashAttention 3.
"""
AIM_US = 200.0
MODEL_LAYERS = 61


@dataclass(frozen=True)
class Load:
    """One micro-batch of one layer, per GPU.

    rows: of an attention GPU. context: tokens per request. ffn_rows: rows of an FFN GPU, from all
    attention GPUs. width, shared_width: intermediate size of an expert and of the shared expert on
    one FFN GPU. held: experts of an FFN instance. attention_instances, ffn_instances: messages of
    ``rows`` rows that an FFN GPU, or an attention GPU, receives per position. gpus: GPUs of the
    emulated deployment. kv_element: bytes of a cache element, 1 for FP8 and 2 for bfloat16; the
    attention uses the same dtype. core: attention kernel, one of CORES.
    """

    rows: int = 128
    depth: int = 3
    context: int = 4096
    hidden: int = 7168
    heads: int = 64
    head_dim: int = 256
    q_rank: int = 2048
    experts: int = 48
    held: int = 24
    top_k: int = 3
    width: int = 640
    shared_width: int = 320
    ffn_rows: int = 2048
    attention_instances: int = 2
    ffn_instances: int = 2
    gpus: int = 32
    kv_element: int = 1
    core: str = "mqa"

    @property
    def kv(self) -> str:
        """Dtype of the cache: "fp8" or "bf16"."""
        return "fp8" if self.kv_element == 1 else "bf16"

    @property
    def attention_weights(self) -> int:
        """Parameters of a layer's attention projections."""
        q = self.heads * self.head_dim
        return self.hidden * (self.q_rank + 2 * self.head_dim) + self.q_rank * q + q * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of one micro-batch in one layer, with one KV head."""
        return self.rows * self.context * 2 * self.head_dim * self.kv_element

    @property
    def expert_weights(self) -> int:
        return 3 * self.hidden * (self.held * self.width + self.shared_width)

    @property
    def expert_flops(self) -> float:
        pairs = self.ffn_rows * self.top_k * self.held / self.experts
        return 2.0 * 3 * self.hidden * (pairs * self.width + self.ffn_rows * self.shared_width)

    @property
    def attention_flops(self) -> float:
        core = 4.0 * self.rows * self.heads * self.context * self.head_dim
        return 2.0 * self.rows * self.attention_weights + core

    def tokens_per_s_per_gpu(self, us: float) -> float:
        """Returns the deployment's tokens/s per GPU at ``us`` per layer and micro-batch."""
        half = (
            self.gpus * self.attention_instances // (self.attention_instances + self.ffn_instances)
        )
        step_s = MODEL_LAYERS * self.depth * us / 1e6
        return self.rows * self.depth * half / step_s / self.gpus


PAPER = Load()
TINY = Load(
    rows=8,
    context=32,
    hidden=256,
    heads=4,
    head_dim=32,
    q_rank=64,
    experts=8,
    held=4,
    top_k=2,
    width=128,
    shared_width=64,
    ffn_rows=32,
)


@dataclass(frozen=True)
class LowerBound:
    """Lower bounds of the stage times in us, from an accelerator's peak rates alone."""

    attention_us: float
    ffn_us: float


def lower_bound(load: Load, accelerator: Accelerator) -> LowerBound:
    """Returns the roofline times of both stages.

    A time is the maximum of memory and arithmetic time, separately for projections, attention core
    and experts. All are in FP8, except an attention core on a bfloat16 cache.
    """
    rate, bandwidth = accelerator.math_flops("fp8"), accelerator.memory_bandwidth
    core_rate = accelerator.math_flops("fp8" if load.kv_element == 1 else "bfloat16")
    core_flops = 4.0 * load.rows * load.heads * load.context * load.head_dim
    projections = max(
        2.0 * load.rows * load.attention_weights / rate, load.attention_weights / bandwidth
    )
    core = max(core_flops / core_rate, load.kv_bytes / bandwidth)
    experts = max(load.expert_flops / rate, load.expert_weights / bandwidth)
    return LowerBound(1e6 * (projections + core), 1e6 * experts)
