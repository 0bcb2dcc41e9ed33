"""The arithmetic of one layer of Step-3, as its attention GPU and its FFN GPU see it.

On CUDA attention is vLLM's kernels in FP8 (scaled matrix products, norms fused with quantisation)
around our decode kernel or FlashAttention 3, and the experts are the FFN instance's own. On CPU
everything is plain torch: it shows that the two sides fit together, and is no measurement. Weights
and caches are random, and ``distinct`` layers of them are used in turn: one layer's are larger than
any cache of a GPU.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from afd.bench.gpu.step3_load import Load
from afd.errors import ConfigError
from afd.models import MoeModel
from afd.wire import codecs_torch
from afd.wire.layout import Tag
from afd.wire.rows_torch import EncodedRows
from afd.wire.slot_torch import SlotView

_FP8 = torch.float8_e4m3fn
_EPS = 1e-5
_PAGE = 64
_ROPE_THETA = 500_000.0


@dataclass(frozen=True)
class Rows:
    """What goes to the FFN: FP8 codes [rows, hidden] with float32 scales [rows, hidden/128], int32
    ids and float32 weights [rows, top_k]."""

    codes: torch.Tensor
    scales: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class Attention(Protocol):
    def attend(self, layer: int, micro_batch: int, hidden: torch.Tensor) -> Rows:
        """Norm, attention, residual, norm, router. hidden: bfloat16 [rows, hidden]."""


def make_attention(load: Load, distinct: int, device: torch.device) -> Attention:
    """Raises ConfigError where vLLM's kernels are missing."""
    if device.type == "cpu":
        return TorchAttention(load, distinct)
    try:
        return CudaAttention(load, distinct, device)
    except ImportError as err:
        raise ConfigError(
            f"the Step-3 slice needs vLLM with FlashAttention 3 ({err}); install vllm==0.26.0"
        ) from None


def _route(hidden: torch.Tensor, gate: torch.Tensor, top_k: int) -> tuple[torch.Tensor, ...]:
    weights, ids = F.linear(hidden, gate).float().softmax(-1).topk(top_k, dim=-1)
    return ids.int(), weights.contiguous()


class TorchAttention:
    """Float32, without rotary embedding and with a cache that is never written."""

    def __init__(self, load: Load, distinct: int) -> None:
        def draw(*shape: int) -> torch.Tensor:
            return 0.02 * torch.randn(distinct, *shape, generator=generator)

        generator = torch.Generator().manual_seed(0)
        q = load.heads * load.head_dim
        self._load, self._distinct = load, distinct
        self._down, self._up = draw(load.q_rank, load.hidden), draw(q, load.q_rank)
        self._out, self._gate = draw(load.hidden, q), draw(load.experts, load.hidden)
        cache = (load.depth, load.rows, load.context, load.head_dim)
        self._keys, self._values = draw(*cache), draw(*cache)

    def attend(self, layer: int, micro_batch: int, hidden: torch.Tensor) -> Rows:
        load, n = self._load, layer % self._distinct
        x = F.rms_norm(hidden.float(), (load.hidden,), eps=_EPS)
        low = F.rms_norm(x @ self._down[n].T, (load.q_rank,), eps=_EPS)
        q = (low @ self._up[n].T).view(load.rows, load.heads, load.head_dim)
        scores = q @ self._keys[n, micro_batch].transpose(1, 2) / load.head_dim**0.5
        out = (scores.softmax(-1) @ self._values[n, micro_batch]).flatten(1) @ self._out[n].T
        x = F.rms_norm(hidden.float() + out, (load.hidden,), eps=_EPS)
        ids, weights = _route(x, self._gate[n], load.top_k)
        codes, scales = codecs_torch.quantise_fp8(x)
        return Rows(codes, scales, ids, weights)


class CudaAttention:
    """FP8, the attention core as the cache. Imports fail without vLLM's CUDA build."""

    def __init__(self, load: Load, distinct: int, device: torch.device) -> None:
        from vllm import _custom_ops
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

        from afd.wire.codecs_gpu_torch import quantise_fp8

        self._ops, self._flash, self._quantise = _custom_ops, flash_attn_varlen_func, quantise_fp8
        self._load, self._distinct, self._device = load, distinct, device
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        hidden, q = load.hidden, load.heads * load.head_dim
        self._qkv = [self._weight(load.q_rank + 2 * load.head_dim, hidden) for _ in range(distinct)]
        self._up = [self._weight(q, load.q_rank) for _ in range(distinct)]
        self._out = [self._weight(hidden, q) for _ in range(distinct)]
        self._gate = 0.02 * self._bf16(distinct, load.experts, hidden)
        self._norm, self._low_norm = (
            torch.ones(size, dtype=torch.bfloat16, device=device) for size in (hidden, load.q_rank)
        )
        self._residual = self._bf16(load.depth, load.rows, hidden)
        pages = -(-load.context // _PAGE)
        shape = (load.rows * pages, _PAGE, 1, load.head_dim)
        kind = _FP8 if load.kv_element == 1 else torch.bfloat16
        self._cache = [
            [tuple(self._bf16(*shape).to(kind) for _ in range(2)) for _ in range(load.depth)]
            for _ in range(distinct)
        ]
        order = torch.randperm(load.rows * pages, device=device).int()
        self._blocks = order.view(load.rows, pages)
        last = load.context - 1
        self._slots = self._blocks[:, last // _PAGE].long() * _PAGE + last % _PAGE
        self._positions = torch.full((load.rows,), last, device=device)
        self._lengths = torch.full((load.rows,), load.context, dtype=torch.int32, device=device)
        self._starts = torch.arange(load.rows + 1, dtype=torch.int32, device=device)
        self._one = torch.ones(1, device=device)
        ones = torch.ones(load.rows, 1, device=device)
        scaled = ("q_descale", "k_descale", "v_descale") if load.kv_element == 1 else ()
        self._scales = dict.fromkeys(scaled, ones)
        self._core_kernel = self._mqa if load.core == "mqa" else self._fa3
        self._rope = self._rope_table()

    def attend(self, layer: int, micro_batch: int, hidden: torch.Tensor) -> Rows:
        load, ops, n = self._load, self._ops, layer % self._distinct
        residual = self._residual[micro_batch]
        if layer == 0:
            residual.zero_()  # or it would grow from step to step
        codes, scale = ops.rms_norm_dynamic_per_token_quant(
            hidden, self._norm, _EPS, _FP8, None, residual
        )
        qkv = self._product(codes, scale, self._qkv[n])
        low = qkv[:, : load.q_rank].contiguous()
        codes, scale = ops.rms_norm_dynamic_per_token_quant(low, self._low_norm, _EPS, _FP8)
        q = self._product(codes, scale, self._up[n])
        k, v = qkv[:, load.q_rank :].split(load.head_dim, dim=-1)
        ops.rotary_embedding(self._positions, q, k, load.head_dim, self._rope, True)
        out = self._core(n, micro_batch, q, k, v)
        codes, scale = ops.scaled_fp8_quant(out, use_per_token_if_dynamic=True)
        x = self._product(codes, scale, self._out[n])
        ops.fused_add_rms_norm(x, residual, self._norm, _EPS)
        ids, weights = self._route(x, self._gate[n])
        codes, scales = self._quantise(x)
        return Rows(codes, scales, ids, weights)

    def _route(self, hidden: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape, device = (len(hidden), self._load.top_k), self._device
        weights = torch.empty(shape, device=device)
        ids, pairs = (torch.empty(shape, dtype=torch.int32, device=device) for _ in range(2))
        self._ops.topk_softmax(weights, ids, pairs, F.linear(hidden, gate))
        return ids, weights

    def _core(
        self, n: int, micro_batch: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attention over the cache: bfloat16 [rows, heads * head_dim]."""
        load = self._load
        keys, values = self._cache[n][micro_batch]
        kind, stored = "auto", (keys, values)
        out = torch.empty_like(q).view(load.rows, load.heads, load.head_dim)
        if load.kv_element == 1:
            kind, stored = "fp8", (keys.view(torch.uint8), values.view(torch.uint8))
            q, _ = self._ops.scaled_fp8_quant(q, self._one)
        self._ops.reshape_and_cache_flash(
            k.unsqueeze(1), v.unsqueeze(1), *stored, self._slots, kind, self._one, self._one
        )
        self._core_kernel(q.view(out.shape), keys, values, out)
        return out.flatten(1)

    def _mqa(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
    ) -> None:
        # Imported where it is used, as the experts are: the bench needs them for this measurement.
        from attention_worker.decode_attention import decode_attention
        from attention_worker.decode_plan import plan_decode

        load = self._load
        plan = plan_decode(
            load.rows, 1, load.heads, load.head_dim, load.kv_element, self._processors
        )
        scale = load.head_dim**-0.5
        one = self._one
        decode_attention(
            q, keys, values, self._blocks, self._lengths, out, scale, plan, one, one, one
        )

    def _fa3(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
    ) -> None:
        self._flash(
            q,
            keys,
            values,
            max_seqlen_q=1,
            cu_seqlens_q=self._starts,
            max_seqlen_k=self._load.context,
            seqused_k=self._lengths,
            block_table=self._blocks,
            causal=True,
            out=out,
            fa_version=3,
            **self._scales,
        )

    def _bf16(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self._device)

    def _weight(self, out: int, into: int) -> tuple[torch.Tensor, torch.Tensor]:
        """FP8 [into, out] stored by columns, and its scales [1, out]."""
        codes = self._bf16(out, into).to(_FP8).t()
        return codes, torch.full((1, out), 0.02, device=self._device)

    def _product(
        self, codes: torch.Tensor, scale: torch.Tensor, weight: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        return self._ops.cutlass_scaled_mm(codes, weight[0], scale, weight[1], torch.bfloat16)

    def _rope_table(self) -> torch.Tensor:
        """[context, head_dim]: cosines, then sines."""
        size = self._load.head_dim
        step = torch.arange(0, size, 2, device=self._device) / size
        angle = torch.arange(self._load.context, device=self._device)[:, None] * _ROPE_THETA**-step
        return torch.cat([angle.cos(), angle.sin()], dim=-1).to(torch.bfloat16)


class Experts:
    """Experts of one FFN GPU, for all rows of its deployment's attention GPUs: those of an FFN
    instance, on CUDA in FP8 with rows taken as they come.

    Of ``ffn_rows`` rows those of its own messages come by the wire; the others, which in the real
    deployment the instance's GPUs gather from each other, are random and stay the same.
    """

    def __init__(self, load: Load, distinct: int, device: torch.device) -> None:
        # Imported where it is used: the bench needs the FFN workers for this one measurement.
        from ffn_worker.dummy import dummy_shard, whole_shard
        from ffn_worker.model import FfnModel
        from ffn_worker.moe import Scheme

        self._load, self._distinct = load, distinct
        self._own = load.rows * load.attention_instances
        x = torch.randn(load.ffn_rows, load.hidden, dtype=torch.bfloat16, device=device)
        self._rows = EncodedRows.of(x, Tag.E4M3FN)
        scores = torch.rand(load.ffn_rows, load.experts, device=device)
        weights, ids = scores.topk(load.top_k, dim=-1)
        self._ids, self._weights = ids.int(), (weights / load.top_k).contiguous()
        model = _model(load, distinct)
        shard = whole_shard(model, load.held)
        on_gpu = device.type != "cpu"
        self._model = FfnModel(
            model,
            shard,
            dummy_shard(model, shard, device),
            backend="auto",
            device=device,
            scheme=Scheme.FP8_BLOCK if on_gpu else Scheme.PLAIN,
        )

    def compute(self, layer: int, views: list[SlotView]) -> torch.Tensor:
        """Partial sums of the rows of these messages, one below the other: bfloat16."""
        rows, scales = self._load.rows, self._rows.scales
        assert scales is not None
        for index, view in enumerate(views):
            here = slice(index * rows, (index + 1) * rows)
            assert view.scales is not None and view.ids is not None and view.weights is not None
            self._rows.payload[here].copy_(view.payload[:rows])
            scales[here].copy_(view.scales[:rows])
            self._ids[here].copy_(view.ids[:rows])
            self._weights[here].copy_(view.weights[:rows])
        layer %= self._distinct
        return self._model.forward(layer, self._rows, self._ids, self._weights)[: self._own]


def _model(load: Load, distinct: int) -> MoeModel:
    """The GPU's part of the model, as if its experts were that narrow."""
    return MoeModel(
        family="step3",
        architecture="Step3TextForCausalLM",
        num_layers=distinct,
        moe_layers=tuple(range(distinct)),
        hidden=load.hidden,
        moe_intermediate=load.width,
        num_experts=load.experts,
        top_k=load.top_k,
        shared_intermediate=load.shared_width,
        routed_scaling=1.0,
        dtype="bfloat16",
    )
