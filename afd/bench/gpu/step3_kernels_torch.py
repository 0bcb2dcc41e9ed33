"""The arithmetic of one layer of Step-3, as its attention GPU and its FFN GPU see it.

On CUDA attention is in FP8: products of cuBLAS, our decode kernel or FlashAttention 3, and around
them kernels of ours (attention_worker/fused.py); the experts are the FFN instance's. On CPU
everything is plain torch: it shows that the two sides fit together, and is no measurement. Weights
and caches are random, and ``distinct`` layers of them are used in turn: one layer's are larger than
any cache of a GPU.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from afd.bench.gpu.step3_load import Load
from afd.errors import ConfigError
from afd.models import MoeModel
from afd.wire.layout import Tag, layouts
from afd.wire.rows_torch import EncodedRows
from afd.wire.slot_torch import RoutedRows, SlotView, take_rows

# Both workers are imported for this one measurement.
from attention_worker import fused
from attention_worker.decode_attention import decode_attention
from attention_worker.decode_plan import plan_decode
from attention_worker.outgoing import Outgoing, encode

_FP8 = torch.float8_e4m3fn
_EPS = 1e-5
_PAGE = 64
_ROPE_THETA = 500_000.0


class Attention(Protocol):
    def attend(self, layer: int, micro_batch: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Norm, attention, residual, norm; bfloat16 [rows, hidden]. parts: what the layer before it
        answered, to be added up, bfloat16 [rows, hidden] each."""

    def message(self, layer: int, hidden: torch.Tensor) -> Outgoing:
        """Router and encoding, of :meth:`attend`'s."""


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


def _encoded(
    load: Load, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> Outgoing:
    layout, _ = layouts("fp8", "bfloat16", load.rows, load.hidden, load.top_k)
    return encode(layout, layer, hidden, ids, weights)


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

    def attend(self, layer: int, micro_batch: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        load, n = self._load, layer % self._distinct
        hidden = torch.stack(list(parts)).float().sum(dim=0)
        x = F.rms_norm(hidden, (load.hidden,), eps=_EPS)
        low = F.rms_norm(x @ self._down[n].T, (load.q_rank,), eps=_EPS)
        q = (low @ self._up[n].T).view(load.rows, load.heads, load.head_dim)
        scores = q @ self._keys[n, micro_batch].transpose(1, 2) / load.head_dim**0.5
        out = (scores.softmax(-1) @ self._values[n, micro_batch]).flatten(1) @ self._out[n].T
        return F.rms_norm(hidden + out, (load.hidden,), eps=_EPS).bfloat16()

    def message(self, layer: int, hidden: torch.Tensor) -> Outgoing:
        gate = self._gate[layer % self._distinct]
        ids, weights = _route(hidden.float(), gate, self._load.top_k)
        return _encoded(self._load, layer, hidden, ids, weights)


class CudaAttention:
    """FP8, the attention core as the cache. Imports fail without vLLM's CUDA build."""

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
        self._rope = fused.Rope(self._rope_table(), positions)
        self._lengths = torch.full((load.rows,), load.context, dtype=torch.int32, device=device)
        self._starts = torch.arange(load.rows + 1, dtype=torch.int32, device=device)
        self._one, self._unit = torch.ones(1, device=device), torch.ones((), device=device)
        scales = (self._one, self._one)
        self._cache = [
            [
                fused.PagedCache(
                    self._bf16(*shape).to(kind), self._bf16(*shape).to(kind), scales, slots
                )
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
            residual.zero_()  # or it would grow from step to step
        codes, scale = fused.sum_norm_quantise(parts, residual, self._norm, _EPS, _FP8)
        qkv = self._product(codes, scale, self._qkv[n])
        codes, scale = fused.norm_store(qkv, self._low_norm, _EPS, self._rope, cache, _FP8)
        q = self._product(codes, scale, self._up[n])
        q = fused.rope_quantise(q, load.head_dim, self._rope, self._one, cache.keys.dtype)
        shape = (load.rows, load.heads, load.head_dim)
        out = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        self._core(q.view(shape), cache.keys, cache.values, out)
        codes, scale = fused.quantise_rows(out.flatten(1), _FP8)
        product = self._product(codes, scale, self._out[n])
        return fused.add_norm(product, residual, self._norm, _EPS)

    def message(self, layer: int, hidden: torch.Tensor) -> Outgoing:
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
        """FP8 [into, out] stored by columns, and its scales [out]."""
        codes = self._bf16(out, into).to(_FP8).t()
        return codes, torch.full((out,), 0.02, device=self._device)

    def _product(
        self, codes: torch.Tensor, scale: torch.Tensor, weight: tuple[torch.Tensor, torch.Tensor]
    ) -> fused.Product:
        # cuBLAS, which knows one scale per matrix, and is quicker here than vLLM's kernel
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
        """[context, head_dim]: cosines, then sines."""
        size = self._load.head_dim
        step = torch.arange(0, size, 2, device=self._device) / size
        angle = torch.arange(self._load.context, device=self._device)[:, None] * _ROPE_THETA**-step
        return torch.cat([angle.cos(), angle.sin()], dim=-1).to(torch.bfloat16)


class Experts:
    """Experts of one FFN GPU, for all rows of its deployment's attention GPUs: those of an FFN
    instance, on CUDA in FP8 with rows taken as they come.

    Of ``ffn_rows`` rows those of its own messages come by the wire; the others, which in the real
    deployment the instance's GPUs gather from each other, are random and stay the same, each
    micro-batch's its own.
    """

    def __init__(self, load: Load, distinct: int, device: torch.device) -> None:
        from ffn_worker.dummy import dummy_shard, whole_shard
        from ffn_worker.model import FfnModel
        from ffn_worker.moe import Scheme

        self._load, self._distinct = load, distinct
        self._own = load.rows * load.attention_instances
        self._rows = [_random_rows(load, device) for _ in range(load.depth)]
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

    def compute(self, layer: int, micro_batch: int, views: list[SlotView]) -> torch.Tensor:
        """Partial sums of the rows of these messages, one below the other: bfloat16."""
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
