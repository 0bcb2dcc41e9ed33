"""The computation of one Step-3 layer on its attention GPU and on its FFN GPU.

On CUDA the attention is in FP8: products of cuBLAS, our decode kernel or FlashAttention 3, and our
fused kernels (afd_bench/step3/fused_kernels.py) for the rest. The experts are those of an FFN
instance. On CPU the attention is plain torch: a check that both sides fit together, not a
measurement. Weights and KV caches are random. ``distinct`` layers are used in turn, so that
weights come from memory and not from the L2 cache.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from afd.errors import ConfigError
from afd.models import MoeModel
from afd.wire.layout import Tag, layouts
from afd.wire.rows_torch import EncodedRows
from afd.wire.slot_torch import take_rows
from afd.wire.slot_view_torch import RoutedRows, SlotView

# This benchmark is the only module that imports both workers.
from afd_bench.step3 import fused_kernels as fused
from afd_bench.step3.load import Load
from attention_worker.kernels.decode_attention import decode_attention
from attention_worker.kernels.decode_plan import plan_decode
from attention_worker.kernels.fused_attention import PagedCache, Rope
from attention_worker.remote.encoded_batch import EncodedBatch, encode

_FP8 = torch.float8_e4m3fn
_EPS = 1e-5
_PAGE = 64
_ROPE_THETA = 500_000.0


class Attention(Protocol):
    def attend(self, layer: int, micro_batch: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns norm, attention, residual and norm of a micro-batch: bfloat16 [rows, hidden].

        parts: answers of the previous layer, to be added up, each bfloat16 [rows, hidden].
        """

    def message(self, layer: int, hidden: torch.Tensor) -> EncodedBatch:
        """Routes and encodes the result of :meth:`attend`."""


def make_attention(load: Load, distinct: int, device: torch.device) -> Attention:
    """Returns the attention for a device. Raises ConfigError if vLLM's kernels are missing."""
    if device.type == "cpu":
        return TorchAttention(load, distinct)
    try:
        return CudaAttention(load, distinct, device)
    except ImportError as err:
        raise ConfigError(
            f"the Step-3 slice needs vLLM with FlashAttention 3 ({err}); install vllm==0.26.0"
        ) from None


def _encoded(
    load: Load, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> EncodedBatch:
    layout, _ = layouts("fp8", "bfloat16", load.rows, load.hidden, load.top_k)
    return encode(layout, layer, hidden, ids, weights)


def _route(hidden: torch.Tensor, gate: torch.Tensor, top_k: int) -> tuple[torch.Tensor, ...]:
    weights, ids = F.linear(hidden, gate).float().softmax(-1).topk(top_k, dim=-1)
    return ids.int(), weights.contiguous()


class TorchAttention:
    """Attention in float32, without rotary embedding, on a cache that is never written."""

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

    def attend(self, layer: int, micro_batch: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        load, n = self._load, layer % self._distinct
        hidden = torch.stack(list(parts)).float().sum(dim=0)
        x = F.rms_norm(hidden, (load.hidden,), eps=_EPS)
        low = F.rms_norm(x @ self._down[n].T, (load.q_rank,), eps=_EPS)
        q = (low @ self._up[n].T).view(load.rows, load.heads, load.head_dim)
        scores = q @ self._keys[n, micro_batch].transpose(1, 2) / load.head_dim**0.5
        out = (scores.softmax(-1) @ self._values[n, micro_batch]).flatten(1) @ self._out[n].T
        return F.rms_norm(hidden + out, (load.hidden,), eps=_EPS).bfloat16()

    def message(self, layer: int, hidden: torch.Tensor) -> EncodedBatch:
        gate = self._gate[layer % self._distinct]
        ids, weights = _route(hidden.float(), gate, self._load.top_k)
        return _encoded(self._load, layer, hidden, ids, weights)


class CudaAttention:
    """Attention in FP8, with a core in the dtype of the cache.

    Raises:
        ImportError: vLLM's CUDA kernels are missing.
    """

    def __init__(self, load: Load, distinct: int, device: torch.device) -> None:
        from vllm import _custom_ops
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

        self._ops, self._flash = _custom_ops, flash_attn_varlen_func
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
        order = torch.randperm(load.rows * pages, device=device).int()
        self._blocks = order.view(load.rows, pages)
        last = load.context - 1
        slots = self._blocks[:, last // _PAGE].long() * _PAGE + last % _PAGE
        positions = torch.full((load.rows,), last, device=device)
        self._rope = Rope(self._rope_table(), positions)
        self._lengths = torch.full((load.rows,), load.context, dtype=torch.int32, device=device)
        self._starts = torch.arange(load.rows + 1, dtype=torch.int32, device=device)
        self._one, self._unit = torch.ones(1, device=device), torch.ones((), device=device)
        scales = (self._one, self._one)
        self._cache = [
            [
                PagedCache(self._bf16(*shape).to(kind), self._bf16(*shape).to(kind), scales, slots)
                for _ in range(load.depth)
            ]
            for _ in range(distinct)
        ]
        ones = torch.ones(load.rows, 1, device=device)
        scaled = ("q_descale", "k_descale", "v_descale") if load.kv_element == 1 else ()
        self._scales = dict.fromkeys(scaled, ones)
        self._core = self._mqa if load.core == "mqa" else self._fa3

    def attend(self, layer: int, micro_batch: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        load, n = self._load, layer % self._distinct
        cache = self._cache[n][micro_batch]
        residual = self._residual[micro_batch]
        if layer == 0:
            residual.zero_()  # else it would grow from step to step
        codes, scale = fused.sum_norm_quantise(parts, residual, self._norm, _EPS, _FP8)
        qkv = self._product(codes, scale, self._qkv[n])
        codes, scale = fused.norm_store(qkv, self._low_norm, _EPS, self._rope, cache, _FP8)
        up = self._product(codes, scale, self._up[n])
        q = fused.rope_quantise(up, load.head_dim, self._rope, self._one, cache.keys.dtype)
        shape = (load.rows, load.heads, load.head_dim)
        out = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        self._core(q.view(shape), cache.keys, cache.values, out)
        codes, scale = fused.quantise_rows(out.flatten(1), _FP8)
        product = self._product(codes, scale, self._out[n])
        return fused.add_norm(product, residual, self._norm, _EPS)

    def message(self, layer: int, hidden: torch.Tensor) -> EncodedBatch:
        shape, device = (len(hidden), self._load.top_k), self._device
        weights = torch.empty(shape, device=device)
        ids, pairs = (torch.empty(shape, dtype=torch.int32, device=device) for _ in range(2))
        scores = F.linear(hidden, self._gate[layer % self._distinct])
        self._ops.topk_softmax(weights, ids, pairs, scores)
        return _encoded(self._load, layer, hidden, ids, weights)

    def _mqa(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
    ) -> None:
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
        """Returns FP8 [into, out] in column-major order and its scales [out]."""
        codes = self._bf16(out, into).to(_FP8).t()
        return codes, torch.full((out,), 0.02, device=self._device)

    def _product(
        self, codes: torch.Tensor, scale: torch.Tensor, weight: tuple[torch.Tensor, torch.Tensor]
    ) -> fused.Product:
        # cuBLAS takes only one scale per matrix, but is faster here than vLLM's kernel
        values = torch._scaled_mm(
            codes,
            weight[0],
            scale_a=self._unit,
            scale_b=self._unit,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return fused.Product(values, scale, weight[1])

    def _rope_table(self) -> torch.Tensor:
        """Returns [context, head_dim]: cosines, then sines."""
        size = self._load.head_dim
        step = torch.arange(0, size, 2, device=self._device) / size
        angle = torch.arange(self._load.context, device=self._device)[:, None] * _ROPE_THETA**-step
        return torch.cat([angle.cos(), angle.sin()], dim=-1).to(torch.bfloat16)


class Experts:
    """The experts of one FFN GPU, for the rows of all attention GPUs; FP8 on CUDA.

    Of ``ffn_rows`` rows only those of this GPU's messages arrive over the wire. In a real
    deployment the instance's GPUs gather the other rows from each other; here they are random and
    constant per micro-batch.
    """

    def __init__(self, load: Load, distinct: int, device: torch.device) -> None:
        from ffn_worker.experts.build import build_ffn_model
        from ffn_worker.experts.dummy import dummy_layers, whole_shard
        from ffn_worker.moe.scheme import Scheme

        self._load, self._distinct = load, distinct
        self._own = load.rows * load.attention_instances
        self._rows = [_random_rows(load, device) for _ in range(load.depth)]
        model = _model(load, distinct)
        shard = whole_shard(model, load.held)
        on_gpu = device.type != "cpu"
        self._model = build_ffn_model(
            model,
            shard,
            dummy_layers(model, shard, device),
            backend="auto",
            device=device,
            scheme=Scheme.FP8_BLOCK if on_gpu else Scheme.PLAIN,
        )

    def compute(self, layer: int, micro_batch: int, views: list[SlotView]) -> torch.Tensor:
        """Returns the partial sums of the messages' rows, concatenated: bfloat16 [rows, hidden]."""
        rows, layer = self._rows[micro_batch], layer % self._distinct
        take_rows(views, [self._load.rows] * len(views), rows)
        return self._model.forward(layer, rows.x, rows.ids, rows.weights)[: self._own]


def _random_rows(load: Load, device: torch.device) -> RoutedRows:
    x = torch.randn(load.ffn_rows, load.hidden, dtype=torch.bfloat16, device=device)
    scores = torch.rand(load.ffn_rows, load.experts, device=device)
    weights, ids = scores.topk(load.top_k, dim=-1)
    weights = (weights / load.top_k).contiguous()
    return RoutedRows(EncodedRows.of(x, Tag.E4M3FN), ids.int(), weights)


def _model(load: Load, distinct: int) -> MoeModel:
    """Returns a model whose experts have the width of one GPU's shard."""
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
