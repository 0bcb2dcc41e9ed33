"""All Triton kernels of the project and the signatures to build. Needs neither torch nor a GPU."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, compile
from triton.runtime.jit import JITFunction

from afd.wire import codecs_triton as wire
from afd.wire import slot_triton as slot
from afd_bench.step3 import kernel_norm as norm
from afd_bench.step3 import kernel_rope_cache as rope_cache
from attention_worker.kernels import decode, dispatch, fused, slots
from ffn_worker.allreduce import formats_triton as reduce
from ffn_worker.allreduce import quickreduce_triton as quickreduce
from ffn_worker.allreduce.formats_table import FORMATS, FP16, ReduceFormat
from ffn_worker.allreduce.quickreduce_plan import CUDA, HIP, ONE_SHOT_BLOCK, Tuning
from ffn_worker.kernels import moe, placed, sorting

TARGETS = {
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "sm_90": GPUTarget("cuda", 90, 32),
}
FP8_MAX = {"fp8e4nv": 448.0, "fp8e4b8": 240.0}
NATIVE_FP8 = {"gfx942": "fp8e4b8", "gfx950": "fp8e4nv", "sm_90": "fp8e4nv"}


@dataclass(frozen=True)
class Build:
    """One specialisation of a kernel.

    types: Triton types of the run-time arguments, in order. constants: constexpr arguments.
    aligned: arguments known to be multiples of 16 (pointers always are). options: compiler options
    other than the number of warps. wanted: patterns that the ISA must contain, by target.
    """

    name: str
    kernel: JITFunction
    types: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...] = ()
    warps: int = 4
    options: dict[str, int] = field(default_factory=dict)
    wanted: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def compile(self, target: str, **options: Any) -> CompiledKernel:
        names = self.kernel.arg_names
        signature = {n: self.types.get(n, "constexpr") for n in names}
        constants = {(names.index(n),): v for n, v in self.constants.items()}
        multiples = [n for n, t in self.types.items() if t.startswith("*") or n in self.aligned]
        attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in multiples}
        source = ASTSource(self.kernel, signature, constants, attributes)
        options = {"num_warps": self.warps, **self.options, **options}
        return compile(source, target=TARGETS[target], options=options)


def codec_builds(target: str) -> Iterator[Build]:
    """The wire codecs; FP8 in every type that the target supports."""
    cvt = {
        "gfx942": (r"v_cvt_pk_fp8_f32",),
        "gfx950": (r"v_cvt_scalef32_pk_fp8_f32|v_cvt_pk_fp8_f32",),
        "sm_90": (r"cvt\.rn\.satfinite\.e4m3x2",),
    }
    back = {
        "gfx942": (r"v_cvt_(pk_)?f32_fp8",),
        "gfx950": (r"v_cvt_scalef32_pk_\w+_fp8|v_cvt_(pk_)?f32_fp8",),
        "sm_90": (r"cvt\.rn\.f16x2\.e4m3x2",),
    }
    for fp8 in ("fp8e4nv", "fp8e4b8"):
        if target == "sm_90" and fp8 == "fp8e4b8":
            continue  # Triton has no e4m3fnuz on NVIDIA
        native = fp8 == NATIVE_FP8[target]
        yield Build(
            f"quantise_fp8[{fp8}]",
            wire.quantise_fp8_kernel,
            {
                "x_ptr": "*bf16",
                "codes_ptr": f"*{fp8}",
                "scales_ptr": "*fp32",
                "hidden": "i32",
                "x_stride": "i32",
            },
            {"FP8_MAX": FP8_MAX[fp8], "GROUP": 128, "GROUPS": 8},
            aligned=("hidden", "x_stride"),
            wanted=cvt if native else {},
        )
        yield Build(
            f"dequantise_fp8[{fp8}]",
            wire.dequantise_fp8_kernel,
            {"codes_ptr": f"*{fp8}", "scales_ptr": "*fp32", "x_ptr": "*bf16", "hidden": "i32"},
            {"GROUP": 128, "GROUPS": 8},
            aligned=("hidden",),
            wanted=back if native else {},
        )
    yield Build(
        "quantise_mxfp4",
        wire.quantise_mxfp4_kernel,
        {
            "x_ptr": "*bf16",
            "codes_ptr": "*u8",
            "scales_ptr": "*u8",
            "hidden": "i32",
            "x_stride": "i32",
        },
        {"GROUPS": 32},
        aligned=("hidden", "x_stride"),
    )
    yield Build(
        "dequantise_mxfp4",
        wire.dequantise_mxfp4_kernel,
        {"codes_ptr": "*u8", "scales_ptr": "*u8", "x_ptr": "*bf16", "hidden": "i32"},
        {"GROUPS": 32},
        aligned=("hidden",),
    )


_FAR = dict.fromkeys(slot.FAR, "i32")


def slot_builds(target: str) -> Iterator[Build]:
    """Kernels that read the rows of three messages from their slots and sum three answers."""
    fp8 = NATIVE_FP8[target]
    bytes_, words = (
        ("payload_ptr", "scales_ptr", "to_payload_ptr", "to_scales_ptr"),
        ("ids", "weights"),
    )
    begins = dict.fromkeys((f"begin{i}" for i in range(1, 8)), "i32")
    sizes = dict.fromkeys(("masked", "row_bytes", "scale_bytes"), "i32")
    kinds = {
        f"{to}{w}_ptr": t
        for to in ("", "to_")
        for w, t in zip(words, ("*i32", "*fp32"), strict=True)
    }
    for suffix, block in (("", 4), ("[unscaled]", 0)):
        yield Build(
            f"take_rows{suffix}",
            slot.take_rows_kernel,
            {**dict.fromkeys(bytes_, "*u8"), **kinds, **_FAR, **begins, **sizes},
            {"MESSAGES": 3, "TOP_K": 3, "KINDS": 4, "BLOCK": 1024, "SCALE_BLOCK": block * 8},
            aligned=("row_bytes",),
        )
        yield Build(
            f"take_bucket{suffix}",
            slot.take_bucket_kernel,
            {
                **dict.fromkeys(bytes_, "*u8"),
                **kinds,
                "rows_ptr": "*i32",
                **dict.fromkeys(("apart", "bucket", "tp", "row_bytes", "scale_bytes"), "i32"),
            },
            {"TOP_K": 3, "KINDS": 4, "BLOCK": 1024, "SCALE_BLOCK": block * 8},
            aligned=("row_bytes",),
        )
    for name, kind, scaled in (("bf16", "bf16", False), ("fp8", fp8, True)):
        yield Build(
            f"sum_messages[{name}]",
            slot.sum_messages_kernel,
            {
                "payload_ptr": f"*{kind}",
                "scales_ptr": "*fp32",
                "out_ptr": "*bf16",
                "hidden": "i32",
                **_FAR,
            },
            {"MESSAGES": 3, "SCALED": scaled, "BLOCK": 1024},
            aligned=("hidden",),
        )


def dispatch_builds(target: str) -> Iterator[Build]:
    """Kernels that split a micro-batch by FFN instance and add up the answers."""
    lists = dict.fromkeys(("rows_ptr", "of_rows_ptr", "counts_ptr", "sent_ptr"), "*i32")
    yield Build(
        "places",
        dispatch.places_kernel,
        {"slots_ptr": "*i32", "bounds_ptr": "*i32", **lists, "rows": "i32", "bank": "i32"},
        {"TOP_K": 3, "BLOCK": 256},
    )
    bytes_ = ("payload_ptr", "scales_ptr", "to_payload_ptr", "to_scales_ptr")
    for suffix, block in (("", 32), ("[unscaled]", 0)):
        yield Build(
            f"gather_message{suffix}",
            dispatch.gather_rows_kernel,
            {
                **dict.fromkeys(bytes_, "*u8"),
                **dict.fromkeys(("ids_ptr", "to_ids_ptr", "rows_ptr", "counts_ptr"), "*i32"),
                **dict.fromkeys(("weights_ptr", "to_weights_ptr"), "*fp32"),
                **dict.fromkeys(("row_bytes", "scale_bytes"), "i32"),
            },
            {"TOP_K": 3, "KINDS": 4, "BLOCK": 1024, "SCALE_BLOCK": block},
            aligned=("row_bytes",),
        )
    for name, kind, scaled in (("bf16", "bf16", False), ("fp8", NATIVE_FP8[target], True)):
        yield Build(
            f"sum_places[{name}]",
            slot.sum_places_kernel,
            {
                "payload_ptr": f"*{kind}",
                "scales_ptr": "*fp32",
                "of_rows_ptr": "*i32",
                "far_ptr": "*i64",
                "out_ptr": "*bf16",
                **dict.fromkeys(("hidden", "instances", "tp"), "i32"),
            },
            {"SCALED": scaled, "BLOCK": 1024},
            aligned=("hidden",),
        )


def attention_builds(target: str) -> Iterator[Build]:
    """The kernels around an attention layer's projections and attention kernel."""
    fp8 = NATIVE_FP8[target]
    largest = {"FP8_MAX": FP8_MAX[fp8]}
    quantised = {"codes_ptr": f"*{fp8}", "scale_ptr": "*fp32"}
    scales = {"row_scale_ptr": "*fp32", "column_scale_ptr": "*fp32"}
    yield Build(
        "sum_norm_quantise",
        norm.sum_norm_quantise_kernel,
        {
            "payload_ptr": "*bf16",
            "residual_ptr": "*bf16",
            "weight_ptr": "*bf16",
            **quantised,
            **_FAR,
            "hidden": "i32",
            "eps": "fp32",
        },
        {"MESSAGES": 2, "BLOCK": 1024, **largest},
        aligned=("hidden",),
    )
    for copies in (1, 3):
        yield Build(
            f"expert_slots[{copies}]",
            slots.expert_slots_kernel,
            {
                **dict.fromkeys(("ids_ptr", "slots_ptr", "count_ptr", "out_ptr"), "*i32"),
                **dict.fromkeys(("pairs", "experts", "first"), "i32"),
            },
            {"TOP_K": 3, "COPIES": copies, "BLOCK": 256},
        )
    yield Build(
        "add_norm",
        norm.add_norm_kernel,
        {
            **dict.fromkeys(("product_ptr", "residual_ptr", "weight_ptr", "out_ptr"), "*bf16"),
            **scales,
            "hidden": "i32",
            "eps": "fp32",
        },
        {"BLOCK": 1024},
        aligned=("hidden",),
    )
    yield Build(
        "quantise_rows",
        norm.quantise_rows_kernel,
        {"x_ptr": "*bf16", **quantised, "columns": "i32"},
        {"BLOCK": 1024, **largest},
        aligned=("columns",),
    )
    rope = {"cos_sin_ptr": "*bf16", "positions_ptr": "*i64"}
    strides = ("low", "page", "block_stride", "token_stride", "head_stride")
    for name, kind, limit in (("fp8", fp8, FP8_MAX[fp8]), ("bf16", "bf16", 0.0)):
        yield Build(
            f"norm_store[{name}]",
            rope_cache.norm_store_kernel,
            {
                "qkv_ptr": "*bf16",
                **scales,
                "weight_ptr": "*bf16",
                **quantised,
                **rope,
                "slots_ptr": "*i64",
                "keys_ptr": f"*{kind}",
                "values_ptr": f"*{kind}",
                "key_scale_ptr": "*fp32",
                "value_scale_ptr": "*fp32",
                **dict.fromkeys(strides, "i32"),
                "kv_heads": "i32",
                "eps": "fp32",
            },
            {"CACHE_MAX": limit, "HALF": 64, "BLOCK": 512, **largest},
            aligned=strides,
        )
        yield Build(
            f"rope_quantise[{name}]",
            rope_cache.rope_quantise_kernel,
            {
                "q_ptr": "*bf16",
                **scales,
                **rope,
                "out_ptr": f"*{kind}",
                "scale_ptr": "*fp32",
                "heads": "i32",
            },
            {"FP8_MAX": limit, "HALF": 64, "HEADS": 4},
        )


def fused_builds(target: str) -> Iterator[Build]:
    """The kernels of served attention halves."""
    fp8 = NATIVE_FP8[target]
    around = {"cos_sin_ptr": "*bf16", "positions_ptr": "*i64", "slots_ptr": "*i64"}
    scales = ("key_scale_ptr", "value_scale_ptr")
    strides = ("qkv_stride", "page", "block_stride", "token_stride", "head_stride")
    sizes = {**dict.fromkeys((*strides, "kv_heads", "stored"), "i32"), "eps": "fp32"}
    for name, kind, limit in (("fp8", fp8, FP8_MAX[fp8]), ("bf16", "bf16", 0.0)):
        cache = {"keys_ptr": f"*{kind}", "values_ptr": f"*{kind}", **dict.fromkeys(scales, "*fp32")}
        limits = {"CACHE_MAX": limit, "HALF": 64}
        for form, normed in (("heads", True), ("rotation", False)):
            weights = dict.fromkeys(("qkv_ptr", "q_weight_ptr", "k_weight_ptr"), "*bf16")
            yield Build(
                f"{form}[{name}]",
                fused.heads_kernel,
                {
                    **weights,
                    **around,
                    "out_ptr": f"*{kind}",
                    **cache,
                    "q_scale_ptr": "*fp32",
                    **sizes,
                    "q_heads": "i32",
                },
                {"Q_MAX": limit, "NORMED": normed, **limits},
                aligned=strides,
                warps=1,
            )
        yield Build(
            f"low_rank[{name}]",
            fused.low_rank_kernel,
            {
                **dict.fromkeys(("qkv_ptr", "weight_ptr", "out_ptr"), "*bf16"),
                **around,
                **cache,
                **sizes,
                "low": "i32",
            },
            {"BLOCK": 512, **limits},
            aligned=(*strides, "low"),
        )
    yield Build(
        "add_norm_encode",
        fused.add_norm_encode_kernel,
        {
            **dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr"), "*bf16"),
            "codes_ptr": f"*{fp8}",
            "scales_ptr": "*fp32",
            "hidden": "i32",
            "x_stride": "i32",
            "eps": "fp32",
        },
        {"FP8_MAX": FP8_MAX[fp8], "GROUP": 128, "GROUPS": 8},
        aligned=("hidden", "x_stride"),
        warps=8,
    )


PROTOCOL = (
    ("fp16", 4, 1, 1, True), ("fp16", 3, 1, 1, False), ("int8", 2, 1, 1, True),
    ("int6", 2, 2, 2, False), ("int4", 2, 2, 1, True), ("fp4", 2, 2, 1, True),
    ("exact", 2, 1, 1, True), ("exact", 3, 1, 1, False),
)  # fmt: skip
"""Two-shot builds that tests/amd runs: (format or "exact", world, atoms of a tile, atoms at once,
whether all ranks get the sum)."""


def reduce_builds(target: str) -> Iterator[Build]:
    """The kernels of the quantised all-reduce: codecs, two-shot, one-shot, spin."""
    for fmt in FORMATS.values():
        shape = {"BITS": fmt.bits, "FP4": fmt.is_fp4, "AMD": target != "sm_90"}
        yield Build(
            f"encode[{fmt.name}]",
            reduce.encode_kernel,
            {"x_ptr": "*fp16", "data_ptr": "*u8", "n": "i32"},
            {"FACTOR": fmt.factor, **shape},
        )
        yield Build(
            f"decode[{fmt.name}]",
            reduce.decode_kernel,
            {"data_ptr": "*u8", "x_ptr": "*fp16", "n": "i32"},
            shape,
        )
        yield Build(
            f"decode_sum[{fmt.name}]",
            reduce.decode_sum_kernel,
            {"data_ptr": "*u8", "x_ptr": "*fp16", "n": "i32", "rank_stride": "i64"},
            {"WORLD": 4, **shape},
            aligned=("rank_stride",),
        )
    for name, world, tile, atoms, gather in PROTOCOL:
        yield two_shot(target, FORMATS.get(name), world, tile, atoms, gather)
    tuning = _tuning(target)
    for fmt in FORMATS.values():  # tiles of large messages
        # With 8 ranks, fp16 sums are unrolled, and on AMD 10 scalars spill to lanes of a vector.
        ranks = 8 if fmt.bits < 16 else 4
        yield two_shot(target, fmt, ranks, tuning.tile_atoms, tuning.atoms, True)
    yield one_shot(target, 2)
    names = ("flags_ptr", "late_ptr", "note_ptr")
    yield Build(
        "spin", quickreduce.spin_kernel, {**dict.fromkeys(names, "*i32"), "spins": "i32"}, {}
    )


_PEER_TYPES = {
    "x_ptr": "*bf16", "out_ptr": "*bf16", "peers_ptr": "*i64", "sequence_ptr": "*i32",
    "late_ptr": "*i32", "note_ptr": "*i32",
}  # fmt: skip
# Memory order across GPUs: a flag is raised after all stores and read before all loads.
_ORDER = {
    "gfx942": (r"buffer_wbl2 sc0 sc1", r"buffer_inv sc0 sc1"),
    "gfx950": (r"buffer_wbl2 sc0 sc1", r"buffer_inv sc0 sc1"),
    "sm_90": (r"atom\.global\.sys\.release", r"atom\.global\.acquire\.sys\.cas"),
}


def _tuning(target: str) -> Tuning:
    return CUDA if target == "sm_90" else HIP


def two_shot(
    target: str, fmt: ReduceFormat | None, world: int, tile: int, atoms: int, gather: bool
) -> Build:
    """A two-shot sum. fmt: None for exact sums of bfloat16."""
    name, bf16, fmt = fmt.name if fmt else "exact", fmt is None, fmt or FP16
    words = (
        "n",
        "unit",
        "base",
        "longer",
        "first",
        "tiles",
        "spins",
        "my_rank",
        "max_tiles",
        "inbox_offset",
        "segment_bytes",
    )
    tuning = _tuning(target)
    return Build(
        f"two_shot[{name},{world},{tile},{atoms},{'all' if gather else 'own'}]",
        quickreduce.two_shot_kernel,
        {**_PEER_TYPES, **dict.fromkeys(words, "i32")},
        {
            "FACTOR": fmt.factor, "BITS": fmt.bits, "FP4": fmt.is_fp4, "BF16": bf16, "TILE": tile,
            "ATOMS": atoms,
            "WORLD": world, "LANES": 1 << (world - 1).bit_length(), "GATHER": gather,
            "AMD": target != "sm_90",
        },
        aligned=("n", "unit", "inbox_offset", "segment_bytes"),
        warps=tuning.warps,
        options=tuning.options,
        wanted=_ORDER,
    )  # fmt: skip


def one_shot(target: str, world: int) -> Build:
    words = ("n", "spins", "my_rank", "max_tiles", "flags_offset", "inbox_offset")
    return Build(
        f"one_shot[{world}]",
        quickreduce.one_shot_kernel,
        {**_PEER_TYPES, **dict.fromkeys(words, "i32")},
        {
            "BLOCK": ONE_SHOT_BLOCK,
            "WORLD": world,
            "LANES": 1 << (world - 1).bit_length(),
            "AMD": target != "sm_90",
        },
        aligned=("n", "max_tiles", "flags_offset", "inbox_offset"),
        wanted=_ORDER,
    )


_GEMM_TYPES = {
    "a_ptr": "*bf16", "a_scale_ptr": "*fp32", "b_ptr": "*bf16", "b_scale_ptr": "*fp32",
    "c_ptr": "*bf16", "c_scale_ptr": "*fp32", "pairs_ptr": "*i32", "experts_ptr": "*i32",
    "used_ptr": "*i32", "N": "i32", "K": "i32", "pairs": "i32", "rows_per": "i32",
    "shared_expert": "i32", "shared_width": "i32",
}  # fmt: skip
_MFMA_FP8 = {
    "gfx942": (r"v_mfma_f32_\d+x\d+x\d+_fp8_fp8",),
    "gfx950": (r"v_mfma_f32_\d+x\d+x\d+_f8f6f4",),
    "sm_90": (r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.e4m3\.e4m3|mma\.sync.*e4m3",),
}
_MFMA_BF16 = {
    "gfx942": (r"v_mfma_f32_\d+x\d+x\d+_bf16",),
    "gfx950": (r"v_mfma_f32_\d+x\d+x\d+_bf16",),
    "sm_90": (r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16|mma\.sync.*bf16",),
}
# gfx942 and Hopper have no FP4 instructions, so Triton converts to bfloat16 and multiplies.
_MFMA_MX = {**_MFMA_BF16, "gfx950": (r"v_mfma_scale_f32_\d+x\d+x\d+_f8f6f4",)}


def moe_builds(target: str) -> Iterator[Build]:
    """Gate-up and down products in every pair of formats, sorting, and the weighted sum."""
    fp8 = NATIVE_FP8[target]
    pointers = {"plain": ("*bf16", "*fp32"), "fp8": (f"*{fp8}", "*fp32"), "mxfp4": ("*u8", "*u8")}
    cases = [
        ("plain", "plain", _MFMA_BF16, 64, 64, False, False),
        ("fp8", "fp8", _MFMA_FP8, 64, 128, False, False),
        ("fp8", "fp8", _MFMA_FP8, 64, 128, True, False),
        ("fp8", "fp8", _MFMA_FP8, 16, 128, False, True),
        ("mxfp4", "mxfp4", _MFMA_MX, 64, 128, False, False),
        ("plain", "mxfp4", _MFMA_BF16, 64, 64, False, False),
    ]
    if target != "sm_90":  # wgmma needs 64 rows; with fewer, Triton does not multiply in FP8
        cases.append(("fp8", "fp8", _MFMA_FP8, 16, 128, False, False))
    for a, b, wanted, rows, step, shared, swap in cases:
        for gated in (True, False):
            out = a if gated else "plain"
            types = dict(_GEMM_TYPES)
            for letter, form in (("a", a), ("b", b), ("c", out)):
                types[f"{letter}_ptr"], types[f"{letter}_scale_ptr"] = pointers[form]
            formats = {"A": a, "B": b, "C": out, "GATED": gated, "FP8_MAX": FP8_MAX[fp8]}
            formats["SHARED"], formats["SWAP"] = shared, swap
            options = (",shared" if shared else "") + (",swap" if swap else "")
            yield Build(
                f"{'gate_up' if gated else 'down'}[{a},{b},{rows}{options}]",
                moe.grouped_gemm_kernel,
                types,
                {**formats, "BM": rows, "BN": 128, "BK": step, "GROUP_M": 8},
                aligned=("N", "K"),
                warps=8 if rows > 32 else 4,
                wanted=wanted,
            )
    for shared in (False, True):
        top_k, suffix = (3, "[shared]") if shared else (8, "")
        yield Build(
            f"combine{suffix}",
            moe.combine_kernel,
            {
                "y_ptr": "*bf16",
                "ids_ptr": "*i32",
                "weights_ptr": "*fp32",
                "out_ptr": "*bf16",
                "hidden": "i32",
                "first_expert": "i32",
                "last_expert": "i32",
            },
            {"TOP_K": top_k, "SHARED": shared, "BLOCK": 1024},
            aligned=("hidden",),
        )
        yield from _sorting_builds(top_k, shared, suffix)
    yield from _sorting_builds(3, True, "[large]", chunk=512, warps=8)


def _sorting_builds(
    top_k: int, shared: bool, suffix: str, chunk: int = 8, warps: int = 4
) -> Iterator[Build]:
    sizes = {"pairs": "i32", "start": "i32", "experts": "i32"}
    constants = {"K": top_k, "CHUNK": chunk, "BINS": 32, "EXPERTS": 64}
    given = {"ids_ptr": "*i32", "counts_ptr": "*i32"}
    yield Build(
        f"count_pairs{suffix}",
        sorting.count_pairs_kernel,
        {**given, **sizes},
        {**constants, "SHARED": shared},
        warps=warps,
    )
    given["load_ptr"] = "*i64"
    constants |= {"LOAD": True, "BLOCK": 16}
    yield Build(
        f"sort_pairs{suffix}",
        sorting.sort_pairs_kernel,
        {**given, "sorted_ptr": "*i32", "owners_ptr": "*i32", "used_ptr": "*i32", **sizes},
        {**constants, "SHARED": shared},
        warps=warps,
    )
    yield Build(
        f"place_pairs{suffix}",
        sorting.place_pairs_kernel,
        {
            **given, "slots_ptr": "*i32", "order_ptr": "*i32", "ends_ptr": "*i32",
            "taken_ptr": "*i32", **sizes,
        },
        constants,
        warps=warps,
    )  # fmt: skip


def placed_builds(target: str) -> Iterator[Build]:
    """The kernels around DeepGEMM's products. They serve Hopper; the tests emulate them for AMD."""
    fp8 = NATIVE_FP8[target]
    scales = {"a_scale_ptr": "*fp32", "capacity": "i32"}
    yield Build(
        "gather_rows",
        placed.gather_rows_kernel,
        {
            "x_ptr": "*u8", "x_scale_ptr": "*fp32", "slots_ptr": "*i32", "a_ptr": "*u8",
            "hidden": "i32", **scales,
        },
        {"EACH": 3, "SCALED": True, "BLOCK": 1024},
        aligned=("hidden", "capacity"),
    )  # fmt: skip
    yield Build(
        "gather_rows[plain]",
        placed.gather_rows_kernel,
        {
            "x_ptr": "*bf16", "x_scale_ptr": "*bf16", "slots_ptr": "*i32", "a_ptr": "*bf16",
            "a_scale_ptr": "*bf16", "hidden": "i32", "capacity": "i32",
        },
        {"EACH": 3, "SCALED": False, "BLOCK": 1024},
        aligned=("hidden", "capacity"),
    )  # fmt: skip
    yield Build(
        "silu[plain]",
        placed.silu_kernel,
        {
            "h_ptr": "*bf16", "slots_ptr": "*i32", "a_ptr": "*bf16", "a_scale_ptr": "*bf16",
            "pairs": "i32", "width": "i32", "capacity": "i32",
        },
        {"PLACED": True, "FP8_MAX": 0.0, "PAIRS": 2, "GROUPS": 4},
        aligned=("width", "capacity"),
    )  # fmt: skip
    for suffix, is_placed in (("", True), ("[rows]", False)):
        yield Build(
            f"silu{suffix}",
            placed.silu_kernel,
            {
                "h_ptr": "*bf16",
                "slots_ptr": "*i32",
                "a_ptr": f"*{fp8}",
                "pairs": "i32",
                "width": "i32",
                **scales,
            },
            {"PLACED": is_placed, "FP8_MAX": FP8_MAX[fp8], "PAIRS": 2, "GROUPS": 4},
            aligned=("width", "capacity"),
        )
    results = {"y_ptr": "*bf16", "slots_ptr": "*i32", "weights_ptr": "*fp32"}
    for suffix, shared in (("", False), ("[shared]", True)):
        yield Build(
            f"sum_slots{suffix}",
            placed.sum_slots_kernel,
            {**results, "shared_ptr": "*bf16", "out_ptr": "*bf16", "hidden": "i32"},
            {"TOP_K": 3, "SHARED": shared, "BLOCK": 1024},
            aligned=("hidden",),
        )


_MFMA_FP16 = {
    "gfx942": (r"v_mfma_f32_\d+x\d+x\d+_f16",),
    "gfx950": (r"v_mfma_f32_\d+x\d+x\d+_f16",),
    "sm_90": (r"wgmma\.mma_async\.sync\.aligned\.m64n256k16\.f32\.f16\.f16",),
}
DECODE = {"step3": (256, 64, 64, 64), "few": (64, 4, 32, 16)}
"""(head size, query heads, tile, page) of the decode attention builds; the emulator runs "few"."""


def decode_builds(target: str) -> Iterator[Build]:
    """Decode attention on an FP8 cache: Step-3's shape, and a small one."""
    fp8 = NATIVE_FP8[target]
    strides = ("q_stride", "table_stride", "page_stride", "token_stride", "head_stride")
    for name, (dim, group, tile, page) in DECODE.items():
        yield Build(
            f"decode[{name}]",
            decode.decode_kernel,
            {
                **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), f"*{fp8}"),
                **dict.fromkeys(("table_ptr", "lengths_ptr"), "*i32"),
                **dict.fromkeys(("q_scale_ptr", "k_scale_ptr", "v_scale_ptr"), "*fp32"),
                "out_ptr": "*fp16", "lse_ptr": "*fp32",
                "softmax_scale": "fp32", **dict.fromkeys((*strides, "splits"), "i32"),
            },
            {
                "GROUP": group, "KV_HEADS": 1, "DIM": dim, "BLOCK": 16 if group <= 16 else 64,
                "TILE": tile, "PAGE": page, "SPLIT": True, "P": tl.float16,
                "STAGES": 3 if target == "sm_90" else 2,
            },
            aligned=("q_stride", "page_stride", "token_stride", "head_stride"),
            wanted={t: _MFMA_FP8[t] + _MFMA_FP16[t] for t in TARGETS} if dim == 256 else {},
        )  # fmt: skip
    yield Build(
        "combine_decode",
        decode.combine_kernel,
        {
            "parts_ptr": "*fp16", "lse_ptr": "*fp32", "v_scale_ptr": "*fp32", "out_ptr": "*bf16",
            "rows": "i32", "splits": "i32",
        },
        {"DIM": 64, "LANES": 4, "BLOCK": 4, "SCALED": True},
    )  # fmt: skip


def builds(target: str) -> list[Build]:
    """Raises ValueError if two builds have one name: one code would replace the other."""
    found = [
        *codec_builds(target),
        *slot_builds(target),
        *dispatch_builds(target),
        *attention_builds(target),
        *fused_builds(target),
        *reduce_builds(target),
        *moe_builds(target),
        *placed_builds(target),
        *decode_builds(target),
    ]
    names = [build.name for build in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two builds are called {', '.join(twice)}; rename one")
    return found
