"""Every Triton kernel of the project with the signatures it is built for. No torch, no GPU."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, compile
from triton.runtime.jit import JITFunction

from afd.wire import codecs_triton as wire
from ffn_worker.allreduce import formats_triton as reduce
from ffn_worker.allreduce import quick_triton as quick
from ffn_worker.allreduce.formats import FORMATS, ReduceFormat
from ffn_worker.allreduce.quick_plan import CUDA, HIP, ONE_SHOT_BLOCK
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
    aligned: arguments known to be multiples of 16 (pointers always are).
    wanted: per target, patterns that the ISA must contain.
    """

    name: str
    kernel: JITFunction
    types: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...] = ()
    warps: int = 4
    wanted: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def compile(self, target: str, **options: Any) -> CompiledKernel:
        names = self.kernel.arg_names
        signature = {n: self.types.get(n, "constexpr") for n in names}
        constants = {(names.index(n),): v for n, v in self.constants.items()}
        multiples = [n for n, t in self.types.items() if t.startswith("*") or n in self.aligned]
        attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in multiples}
        source = ASTSource(self.kernel, signature, constants, attributes)
        options = {"num_warps": self.warps, **options}
        return compile(source, target=TARGETS[target], options=options)


def codec_builds(target: str) -> Iterator[Build]:
    """The codecs of the wire; FP8 in every kind the target can be asked for."""
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


PROTOCOL = (
    ("fp16", 4, 1, True), ("fp16", 3, 1, False), ("int8", 2, 1, True), ("int6", 2, 1, False),
    ("int4", 2, 2, True), ("fp4", 2, 1, True),
)  # fmt: skip
"""Formats, worlds, atoms of a tile, and whether all ranks get the sum, of what tests/amd runs."""


def reduce_builds(target: str) -> Iterator[Build]:
    """The block formats of the quantised all-reduce, among 4 ranks."""
    for fmt in FORMATS.values():
        shape = {"BITS": fmt.bits, "FP4": fmt.is_fp4}
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
    for name, world, atoms, gather in PROTOCOL:
        yield two_shot(target, FORMATS[name], world, atoms, gather)
    yield one_shot(target, 2)
    names = ("flags_ptr", "late_ptr", "note_ptr")
    yield Build("spin", quick.spin_kernel, {**dict.fromkeys(names, "*i32"), "spins": "i32"}, {})


_PEER_TYPES = {
    "x_ptr": "*bf16", "out_ptr": "*bf16", "peers_ptr": "*i64", "sequence_ptr": "*i32",
    "late_ptr": "*i32", "note_ptr": "*i32",
}  # fmt: skip
# A flag is raised after all stores and read before all loads, as other GPUs see them.
_ORDER = {
    "gfx942": (r"buffer_wbl2 sc0 sc1", r"buffer_inv sc0 sc1"),
    "gfx950": (r"buffer_wbl2 sc0 sc1", r"buffer_inv sc0 sc1"),
    "sm_90": (r"atom\.global\.sys\.release", r"atom\.global\.acquire\.sys\.cas"),
}


def two_shot(target: str, fmt: ReduceFormat, world: int, atoms: int, gather: bool) -> Build:
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
    )
    return Build(
        f"two_shot[{fmt.name},{world},{atoms},{'all' if gather else 'own'}]",
        quick.two_shot_kernel,
        {**_PEER_TYPES, **dict.fromkeys(words, "i32"), "segment_bytes": "i64"},
        {
            "FACTOR": fmt.factor, "BITS": fmt.bits, "FP4": fmt.is_fp4, "ATOMS": atoms,
            "WORLD": world, "LANES": 1 << (world - 1).bit_length(), "GATHER": gather,
            "AMD": target != "sm_90",
        },
        aligned=("n", "unit", "inbox_offset", "segment_bytes"),
        warps=(CUDA if target == "sm_90" else HIP).warps,
        wanted=_ORDER,
    )  # fmt: skip


def one_shot(target: str, world: int) -> Build:
    words = ("n", "spins", "my_rank", "max_tiles", "flags_offset", "inbox_offset")
    return Build(
        f"one_shot[{world}]",
        quick.one_shot_kernel,
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
# gfx942 and Hopper have no FP4: Triton converts and multiplies in bfloat16.
_MFMA_MX = {**_MFMA_BF16, "gfx950": (r"v_mfma_scale_f32_\d+x\d+x\d+_f8f6f4",)}


def moe_builds(target: str) -> Iterator[Build]:
    """Gate-up and down products in every pair of formats, and the weighted sum."""
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
    if target != "sm_90":  # wgmma has 64 rows at least; with fewer, Triton would not multiply FP8
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
        {**given, "slots_ptr": "*i32", "ends_ptr": "*i32", **sizes},
        constants,
        warps=warps,
    )


def placed_builds(target: str) -> Iterator[Build]:
    """What stands around DeepGEMM's products. They are for Hopper; they run on the emulator."""
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


def builds(target: str) -> list[Build]:
    return [
        *codec_builds(target),
        *reduce_builds(target),
        *moe_builds(target),
        *placed_builds(target),
    ]
