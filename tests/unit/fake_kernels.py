"""Stand-ins in torch for the Triton kernels of the experts.

They compute what the kernels' docstrings say, so that the launches of the backend are tested
without Triton and without a GPU.
"""

import inspect
import sys
import types
from dataclasses import replace

import torch

from afd.wire.dtypes_torch import DTYPE_OF_TAG
from afd.wire.layout import Tag
from afd.wire.rows_torch import EncodedRows
from ffn_worker.moe import deep_gemm, grouped, grouped_plain, reference
from ffn_worker.moe.quantise import Weight, dequantise_weight
from ffn_worker.moe.registry import BACKENDS
from ffn_worker.moe.sorting import place_pairs, sort_pairs

TAG = {DTYPE_OF_TAG[t]: t for t in (Tag.BFLOAT16, Tag.FLOAT16, Tag.FLOAT32, Tag.E4M3FN)}


class Kernel:
    """Accepts Triton's syntax ``kernel[grid](...)``; drops Triton's own launch keywords."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            given = {k: v for k, v in kwargs.items() if k not in ("num_warps", "num_stages")}
            bound = inspect.signature(self.function).bind(grid, *args, **given)
            self.function(*bound.args, **bound.kwargs)

        return launch


def tag_of(kind, payload):
    return Tag.E2M1 if kind == "mxfp4" else TAG[payload.dtype]


def grouped_gemm(
    grid, a, a_scale, b, b_scale, c, c_scale, pairs_ptr, experts_ptr, used, N, K, pairs, rows_per,
    shared_expert, shared_width, *, A, B, C, GATED, SHARED, FP8_MAX, BM, BN, BK, GROUP_M, SWAP,
):  # fmt: skip
    assert K % BK == 0 and (C == "plain" or N % BN == 0)
    assert grid == (experts_ptr.numel() * -(-N // BN),)
    plain = "plain"
    rows = EncodedRows(tag_of(A, a), a, None if plain == A else a_scale).decode(torch.float32)
    weight = dequantise_weight(Weight(tag_of(B, b), b, None if plain == B else b_scale))
    assert weight.shape[1:] == (2 * N if GATED else N, K)
    for at in range(int(used)):
        pair, expert = int(pairs_ptr[at]), int(experts_ptr[at // BM])
        if pair >= pairs:
            continue
        x, w, n, narrow = rows[pair // rows_per], weight[expert], N, SHARED
        if narrow and expert == shared_expert:
            if GATED:  # the kernel computes whole tiles
                n = min(N, -(-shared_width // BN) * BN)
            else:
                assert shared_width % BK == 0
                x, w = x[:shared_width], w[:, :shared_width]
        if GATED:
            gate, up = w[:N] @ x, w[N:] @ x
            value = gate / (1 + torch.exp(-gate)) * up
        else:
            value = w @ x
        value = value[:n]
        if plain == C:
            c[pair, :n] = value.to(c.dtype)
            continue
        out = EncodedRows.of(value[None], tag_of(C, c))
        c[pair, : out.payload.shape[1]] = out.payload[0]
        c_scale[pair, : out.scales.shape[1]] = out.scales[0]


def combine(grid, y, ids, weights, out, hidden, first, last, *, TOP_K, SHARED, BLOCK):
    rows, each = len(out), TOP_K + SHARED
    assert y.shape == (rows * each, hidden) and ids.shape == (rows, TOP_K)
    for row in range(rows):
        total = torch.zeros(hidden)
        for k in range(TOP_K):
            if first <= ids[row, k] < last:
                total += y[row * each + k].float() * weights[row, k]
        if SHARED:
            total += y[row * each + TOP_K].float()
        out[row] = total.to(out.dtype)


def chunks_of(grid, pairs, experts, counts, CHUNK, BINS, EXPERTS):
    assert grid == (-(-pairs // CHUNK), -(-experts // BINS)) and EXPERTS & (EXPERTS - 1) == 0
    assert counts.shape == (grid[0], EXPERTS) and max(experts, BINS) <= EXPERTS


def count_pairs(grid, ids, counts, pairs, start, experts, *, K, SHARED, CHUNK, BINS, EXPERTS):
    chunks_of(grid, pairs, experts + SHARED, counts, CHUNK, BINS, EXPERTS)
    counts.fill_(1 << 30)


def add_load(ids, load, start, experts, LOAD):
    if LOAD:
        assert load.dtype == torch.int64 and load.is_contiguous() and load.shape == (experts,)
        local = ids[(ids >= start) & (ids < start + experts)] - start
        load += torch.bincount(local.long(), minlength=experts)


def sort_kernel(
    grid, ids, counts, load, sorted_, owners, used, pairs, start, experts,
    *, K, SHARED, CHUNK, BINS, EXPERTS, LOAD, BLOCK,
):  # fmt: skip
    assert pairs == ids.shape[0] * (K + SHARED)
    chunks_of(grid, pairs, experts + SHARED, counts, CHUNK, BINS, EXPERTS)
    add_load(ids, load, start, experts, LOAD)
    order = sort_pairs(ids, start, start + experts, BLOCK, shared=SHARED)
    sorted_.fill_(1 << 30), owners.fill_(1 << 30)  # entries beyond ``used`` are undefined
    count = int(order.used)
    used.copy_(order.used)
    sorted_[:count] = order.pairs[:count]
    owners[: count // BLOCK] = order.experts[: count // BLOCK]


def place_kernel(
    grid, ids, counts, load, slots, order, ends, taken, pairs, start, experts,
    *, K, CHUNK, BINS, EXPERTS, LOAD, BLOCK,
):  # fmt: skip
    assert pairs == ids.shape[0] * K
    chunks_of(grid, pairs, experts, counts, CHUNK, BINS, EXPERTS)
    add_load(ids, load, start, experts, LOAD)
    placed = place_pairs(ids, start, start + experts, BLOCK)
    slots.copy_(placed.slots), ends.copy_(placed.ends), taken.copy_(placed.taken)
    assert order.shape == placed.pairs.shape
    order.copy_(torch.where(placed.pairs < pairs, placed.pairs, 1 << 30))


def undefined(codes, scales):
    """Fills the output with NaN, because slots without a pair are undefined."""
    if scales is None:
        codes.fill_(torch.nan)
    else:
        codes.view(torch.uint8).fill_(0x7F), scales.fill_(torch.nan)


def gather_rows(grid, x, x_scale, slots, a, a_scale, hidden, capacity, *, EACH, SCALED, BLOCK):
    assert grid == (len(x),) and hidden <= BLOCK < 2 * hidden and x.dtype == a.dtype
    assert x.shape[1] == a.shape[1] == hidden and a.shape[0] == capacity
    assert x.dtype == (torch.float8_e4m3fn if SCALED else torch.bfloat16)
    undefined(a, a_scale if SCALED else None)
    for pair, slot in enumerate(slots.tolist()):
        if slot >= 0:
            a.view(torch.uint8)[slot] = x.view(torch.uint8)[pair // EACH]
            if SCALED:
                a_scale[:, slot] = x_scale[pair // EACH]


def silu(
    grid, h, slots, a, a_scale, pairs, width, capacity, *, PLACED, FP8_MAX, PAIRS, GROUPS
):  # fmt: skip
    if not PLACED:
        slots = torch.arange(pairs)
    assert grid == (-(-pairs // PAIRS), -(-width // (128 * GROUPS))) and pairs == len(slots)
    assert h.shape == (capacity, 2 * width) and a.shape == (capacity, width)
    assert a.dtype == (torch.float8_e4m3fn if FP8_MAX else torch.bfloat16) and FP8_MAX in (0, 448)
    undefined(a, a_scale if FP8_MAX else None)
    for slot in slots[slots >= 0].tolist():
        gate, up = h[slot].float().chunk(2)
        value = (gate / (1 + torch.exp(-gate)) * up)[None]
        if FP8_MAX == 0:
            a[slot] = value[0].to(a.dtype)
            continue
        row = EncodedRows.of(value, TAG[a.dtype])
        a.view(torch.uint8)[slot] = row.payload.view(torch.uint8)[0]
        a_scale[:, slot] = row.scales[0]


def summed(y, slots, weights, hidden):
    total = torch.zeros(len(weights), hidden)
    for row, places in enumerate(slots.view(weights.shape).tolist()):
        for k, slot in enumerate(places):
            if slot >= 0:
                total[row] += y[slot].float() * weights[row, k]
    return total


def sum_slots(grid, y, slots, weights, shared, out, hidden, *, TOP_K, SHARED, BLOCK):
    assert grid == (len(out), -(-hidden // BLOCK)) and weights.shape == (len(out), TOP_K)
    out.copy_(summed(y, slots, weights, hidden) + (shared.float() if SHARED else 0))


class DeepGemm:
    """The products of DeepGEMM that the backend uses, computed in float32.

    Asserts the requirements that the library's source states for the operands
    (csrc/apis/gemm.hpp, csrc/utils/layout.hpp of version 2.5.0).
    """

    tile = 128
    sms = 132

    def get_num_sms(self):
        return self.sms

    def set_num_sms(self, sms):
        assert 0 < sms <= 132 and sms % 2 == 0
        self.sms = sms

    def fp8_gemm_nt(self, a, b, d):
        (codes, scales), (weight, weight_scales) = a, b
        (m, k), (n, _) = codes.shape, weight.shape
        assert codes.dtype == weight.dtype == torch.float8_e4m3fn and d.dtype == torch.bfloat16
        assert codes.is_contiguous() and weight.is_contiguous() and d.shape == (m, n)
        assert scales.shape == (m, k // 128) and weight_scales.shape == (n // 128, k // 128)
        assert scales.dtype == weight_scales.dtype == torch.float32 and n % 8 == k % 128 == 0
        assert scales.is_contiguous() or scales.stride() == (1, -(-m // 4) * 4)
        rows = EncodedRows(Tag.E4M3FN, codes, scales.contiguous()).decode(torch.float32)
        d.copy_(rows @ dequantise_weight(Weight(Tag.E4M3FN, weight, weight_scales)).T)

    def bf16_gemm_nt(self, a, b, d):
        assert a.dtype == b.dtype == d.dtype == torch.bfloat16 and a.shape[1] % 64 == 0
        assert a.is_contiguous() and b.is_contiguous() and d.shape == (len(a), len(b))
        d.copy_(a.float() @ b.float().T)

    def set_mk_alignment_for_contiguous_layout(self, tile):
        assert tile in (64, 128)
        self.tile = tile

    def m_grouped_fp8_gemm_nt_contiguous(
        self, a, b, d, ends, *, use_psum_layout, expected_m_for_psum_layout
    ):
        (codes, scales), (weight, weight_scales) = a, b
        (m, k), (groups, n, _) = codes.shape, weight.shape
        assert codes.dtype == weight.dtype == torch.float8_e4m3fn and d.dtype == torch.bfloat16
        assert codes.is_contiguous() and weight.is_contiguous() and d.shape == (m, n)
        assert scales.shape == (m, k // 128) and scales.stride() == (1, m) and m % 4 == 0
        assert weight_scales.is_contiguous() and weight_scales.shape == (groups, n // 128, k // 128)
        rows = EncodedRows(Tag.E4M3FN, codes, scales.contiguous()).decode(torch.float32)
        values = dequantise_weight(Weight(Tag.E4M3FN, weight, weight_scales))
        assert use_psum_layout
        self.grouped(rows, values, d, ends, expected_m_for_psum_layout)

    def m_grouped_bf16_gemm_nt_contiguous(
        self, a, b, d, ends, *, use_psum_layout, expected_m_for_psum_layout
    ):
        (m, k), (_, n, depth) = a.shape, b.shape
        assert a.dtype == b.dtype == d.dtype == torch.bfloat16 and k == depth and k % 64 == 0
        assert a.is_contiguous() and b.is_contiguous() and d.shape == (m, n)
        assert use_psum_layout
        self.grouped(a.float(), b.float(), d, ends, expected_m_for_psum_layout)

    def grouped(self, rows, values, d, ends, expected):
        assert ends.dtype == torch.int32 and ends.shape == (len(values),)
        assert expected % self.tile == 0 < expected
        d.fill_(torch.nan)
        begin = 0
        for group, end in enumerate(ends.tolist()):
            assert begin <= end <= len(d)
            d[begin:end] = (rows[begin:end] @ values[group].T).bfloat16()
            begin = -(-end // self.tile) * self.tile


def gate_up(rows, weight, placed, top_k, layout):
    """Stands in for kernels/grouped.cu; asserts the requirements of its asynchronous copies."""
    experts, columns, k = weight.shape
    assert rows.tag == weight.tag == Tag.E4M3FN and columns % 256 == k % 128 == 0
    assert weight.codes.is_contiguous() and weight.scales.is_contiguous()
    assert rows.payload.data_ptr() % 16 == 0 and rows.scales.shape == (len(rows), k // 128)
    a = deep_gemm.Operand.empty(rows.tag, layout.room, columns // 2, rows.device)
    assert len(placed.ends) == experts
    made = EncodedRows.of(reference.gate_up(rows, weight, placed, top_k, layout.tile), rows.tag)
    a.codes.copy_(made.payload), a.scales.copy_(made.scales.T)
    return a


def gate_up_plain(rows, weight, placed, top_k, layout):
    """Stands in for gate_up of kernels/grouped_plain.cu; asserts what its copies require."""
    experts, columns, k = weight.shape
    assert rows.tag == weight.tag == Tag.BFLOAT16 and columns % 256 == k % 128 == 0
    assert weight.codes.is_contiguous() and rows.payload.is_contiguous()
    assert rows.payload.data_ptr() % 16 == weight.codes.data_ptr() % 16 == 0
    assert len(placed.ends) == experts and int(placed.taken[0]) == 0
    placed.taken[0] = 1
    a = deep_gemm.Operand.empty(rows.tag, layout.room, columns // 2, rows.device)
    a.codes.copy_(reference.gate_up(rows, weight, placed, top_k, layout.tile))
    return a


def down_plain(a, weight, placed, layout):
    """Stands in for down of kernels/grouped_plain.cu; asserts what its copies require."""
    experts, hidden, k = weight.shape
    assert a.codes.dtype == weight.codes.dtype == torch.bfloat16 and hidden % 128 == k % 128 == 0
    assert a.codes.shape == (layout.room, k) and weight.codes.is_contiguous()
    assert len(placed.ends) == experts and int(placed.taken[1]) == 0
    placed.taken[1] = 1
    return reference.down(a.codes, weight, placed, layout.tile).bfloat16()


def allow_cpu(monkeypatch, *names):
    """Allows these backends on CPUs for the duration of a test."""
    for name in names:
        monkeypatch.setitem(BACKENDS, name, replace(BACKENDS[name], devices=("cpu",)))


def install(monkeypatch):
    """Installs the stand-ins in place of the kernels for the duration of a test."""
    modules = {
        "ffn_worker.kernels.moe": {
            "grouped_gemm_kernel": Kernel(grouped_gemm),
            "combine_kernel": Kernel(combine),
        },
        "ffn_worker.kernels.sorting": {
            "count_pairs_kernel": Kernel(count_pairs),
            "sort_pairs_kernel": Kernel(sort_kernel),
            "place_pairs_kernel": Kernel(place_kernel),
        },
        "ffn_worker.kernels.placed": {
            "gather_rows_kernel": Kernel(gather_rows),
            "silu_kernel": Kernel(silu),
            "sum_slots_kernel": Kernel(sum_slots),
        },
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        for member, value in members.items():
            setattr(module, member, value)
        monkeypatch.setitem(sys.modules, name, module)
    fake = DeepGemm()
    monkeypatch.setattr(deep_gemm, "library", lambda: fake)
    monkeypatch.setattr(grouped, "gate_up", gate_up)
    monkeypatch.setattr(grouped_plain, "gate_up", gate_up_plain)
    monkeypatch.setattr(grouped_plain, "down", down_plain)
