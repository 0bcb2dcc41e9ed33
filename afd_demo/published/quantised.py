"""Turns a random checkpoint into a quantised one, laid out as publishers do, and into its twin.

The twin is unquantised and has the values that the quantised tensors stand for, in float32. So an
engine without kernels for a format can say what the answers are. The decoding here is written for
this module: it shares nothing with the loaders under test.

Layouts: config.json of the checkpoint that each function names, and ``create_weights`` of vLLM 0.26
(model_executor/layers/quantization).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from afd_demo.weights import Config, Tensors

_FP8, _FP8_MAX = ml_dtypes.float8_e4m3fn, 448.0
_BLOCK, _GROUP = 128, 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_NEVER = ("embed_tokens", "lm_head", "norm", "gate.weight", "router", "eh_proj", "vision", "conv1d")
_NAMES = ("proj.weight", ".w1.weight", ".w2.weight", ".w3.weight", "_proj_with_mqa.weight")


@dataclass
class Quantised:
    """The stored tensors, the decoded ones, and quantization_config."""

    stored: Tensors = field(default_factory=dict)
    twin: Tensors = field(default_factory=dict)
    quantization: Config = field(default_factory=dict)


Quantiser = Callable[[np.ndarray], tuple[dict[str, np.ndarray], np.ndarray]]
"""A weight, float32 [n, k] -> its tensors by the last part of their name, and its decoded value."""


def fp8_block(tensors: Tensors) -> Quantised:
    """deepseek-ai/DeepSeek-V3, Qwen/Qwen3-235B-A22B-FP8, MiniMaxAI/MiniMax-M2."""

    def weight(w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        *leading, n, k = w.shape
        rows, columns = -(-n // _BLOCK), -(-k // _BLOCK)
        padded = np.zeros((*leading, rows * _BLOCK, columns * _BLOCK), np.float32)
        padded[..., :n, :k] = w
        blocks = padded.reshape(*leading, rows, _BLOCK, columns, _BLOCK)
        scales = np.maximum(np.abs(blocks).max(axis=(-3, -1)), 1e-6) / np.float32(_FP8_MAX)
        spread = scales.repeat(_BLOCK, -2).repeat(_BLOCK, -1)[..., :n, :k]
        codes = (w / spread).astype(_FP8)
        parts = {"weight": codes, "weight_scale_inv": scales.astype(np.float32)}
        return parts, codes.astype(np.float32) * spread

    config: Config = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [_BLOCK, _BLOCK],
    }
    return _each(tensors, weight, config)


def fp8_channel(tensors: Tensors) -> Quantised:
    """zai-org/GLM-4.5-FP8: compressed-tensors, one scale per row."""

    def weight(w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        scales = np.abs(w).max(axis=1, keepdims=True) / np.float32(_FP8_MAX)
        scales = scales.astype(ml_dtypes.bfloat16)
        codes = (w / scales.astype(np.float32)).astype(_FP8)
        decoded = codes.astype(np.float32) * scales.astype(np.float32)
        return {"weight": codes, "weight_scale": scales}, decoded

    weights = {"dynamic": False, "num_bits": 8, "strategy": "channel", "type": "float"}
    inputs = {"dynamic": True, "num_bits": 8, "strategy": "token", "type": "float"}
    return _each(tensors, weight, _compressed("float-quantized", weights, inputs))


def fp8_tensor(tensors: Tensors) -> Quantised:
    """nvidia/*-FP8 (ModelOpt): one scale per tensor, and one for the activations."""

    def weight(w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        scale = np.array(np.abs(w).max() / _FP8_MAX, np.float32)
        codes = (w / scale).astype(_FP8)
        parts = {
            "weight": codes,
            "weight_scale": scale,
            "input_scale": np.array(0.01, np.float32),
        }
        return parts, codes.astype(np.float32) * scale

    config: Config = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "ignore": ["lm_head", "*.gate", "*router*"],
        "producer": {"name": "modelopt", "version": "0.33.0"},
    }
    return _each(tensors, weight, config)


def int4(tensors: Tensors) -> Quantised:
    """moonshotai/Kimi-K2-Thinking: compressed-tensors, routed experts only."""
    ignored = ["re:.*self_attn.*", "re:.*shared_experts.*", _DENSE]
    return _int4(tensors, ignored, only=".experts.")


def int4_all(tensors: Tensors) -> Quantised:
    """RedHatAI/*-quantized.w4a16: compressed-tensors, attention too."""
    return _int4(tensors, ["re:.*mlp.gate$"])


def _int4(tensors: Tensors, ignored: Sequence[str], only: str = "") -> Quantised:
    def weight(w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        groups = w.reshape(w.shape[0], -1, _GROUP)
        scales = (np.abs(groups).max(-1) / 7).astype(ml_dtypes.bfloat16)
        spread = scales.astype(np.float32).repeat(_GROUP, 1)
        codes = np.clip(np.rint(w / spread), -8, 7).astype(np.int32)
        parts = {
            "weight_packed": _packed(codes + 8, range(8)),
            "weight_scale": scales,
            "weight_shape": np.array(w.shape, np.int32),
        }
        return parts, codes.astype(np.float32) * spread

    weights = {
        "dynamic": False,
        "group_size": _GROUP,
        "num_bits": 4,
        "strategy": "group",
        "symmetric": True,
        "type": "int",
    }
    config = _compressed("pack-quantized", weights, None)
    config["ignore"] = ["lm_head", *ignored]
    return _each(tensors, weight, config, only)


_DENSE = "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"


def gptq(tensors: Tensors) -> Quantised:
    """Qwen/Qwen3-235B-A22B-GPTQ-Int4: transposed, eight input rows in a word."""
    return _gptq(tensors, lambda k: np.arange(k) // _GROUP, desc_act=False)


def gptq_ordered(tensors: Tensors) -> Quantised:
    """GPTQ with desc_act: the groups of input rows are not in order."""
    draw = np.random.default_rng(0)
    return _gptq(tensors, lambda k: draw.permutation(k) // _GROUP, desc_act=True)


def _gptq(tensors: Tensors, groups_of: Callable[[int], np.ndarray], *, desc_act: bool) -> Quantised:
    def weight(w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        group = groups_of(w.shape[1])
        scales, _ = _scales_by_group(w[:, np.argsort(group, kind="stable")])
        spread = scales.astype(np.float32)[:, group]
        codes = np.clip(np.rint(w / spread), -8, 7).astype(np.int32)
        parts = {
            "qweight": np.ascontiguousarray(_packed(codes + 8, range(8)).T),
            "qzeros": np.full((scales.shape[1], w.shape[0] // 8), 0x77777777, np.int32),
            "scales": np.ascontiguousarray(scales.T),
            "g_idx": group.astype(np.int32),
        }
        return parts, codes.astype(np.float32) * spread

    config: Config = {
        "bits": 4,
        "checkpoint_format": "gptq",
        "desc_act": desc_act,
        "dynamic": {"-:.*mlp\\.gate$": {}, "-:.*shared_expert_gate$": {}},
        "group_size": _GROUP,
        "lm_head": False,
        "quant_method": "gptq",
        "sym": True,
    }
    return _each(tensors, weight, config)


def awq(tensors: Tensors) -> Quantised:
    """cognitivecomputations/DeepSeek-V3-AWQ: transposed, interleaved, with zero points."""

    def weight(w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        scales, spread = _scales_by_group(w)
        zeros = np.full(scales.shape, 7, np.int32)
        codes = np.clip(np.rint(w / spread) + 7, 0, 15).astype(np.int32)
        parts = {
            "qweight": _packed(np.ascontiguousarray(codes.T), _AWQ_ORDER),
            "qzeros": _packed(np.ascontiguousarray(zeros.T), _AWQ_ORDER),
            "scales": np.ascontiguousarray(scales.T),
        }
        return parts, (codes - 7).astype(np.float32) * spread

    config: Config = {
        "bits": 4,
        "group_size": _GROUP,
        "modules_to_not_convert": None,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    }
    return _each(tensors, weight, config)


def mxfp4(tensors: Tensors) -> Quantised:
    """openai/gpt-oss-20b: the stacked experts only, input columns in blocks of 32."""
    result = Quantised(
        quantization={
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        }
    )
    for name, tensor in tensors.items():
        if not name.endswith((".gate_up_proj", "experts.down_proj")):
            result.stored[name] = result.twin[name] = tensor
            continue
        codes, scales, values = _mx(tensor.astype(np.float32).swapaxes(1, 2))  # [experts, out, in]
        result.stored[f"{name}_blocks"] = codes.reshape(*scales.shape, _GROUP // 2)
        result.stored[f"{name}_scales"] = scales
        result.twin[name] = np.ascontiguousarray(values.swapaxes(1, 2))
    return result


def mxfp4_quark(tensors: Tensors) -> Quantised:
    """amd/*-MXFP4: Quark, two-dimensional tensors, attention too."""

    def weight(w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        codes, scales, values = _mx(w)
        return {"weight": codes, "weight_scale": scales}, values

    kind = {
        "dtype": "fp4",
        "group_size": _GROUP,
        "is_dynamic": False,
        "qscheme": "per_group",
        "scale_format": "e8m0",
    }
    config: Config = {
        "exclude": ["lm_head", "re:.*mlp.gate$"],
        "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
        "global_quant_config": {"input_tensors": kind | {"is_dynamic": True}, "weight": kind},
        "quant_method": "quark",
    }
    return _each(tensors, weight, config)


def _mx(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns codes uint8 [..., n, k/2], scales uint8 [..., n, k/32], and what they stand for."""
    groups = w.reshape(*w.shape[:-1], -1, _GROUP)
    exponents = np.ceil(np.log2(np.maximum(np.abs(groups).max(-1), 1e-9) / 6))
    powers = np.exp2(exponents)[..., None].astype(np.float32)
    codes = np.abs((groups / powers)[..., None] - _E2M1).argmin(-1).astype(np.uint8)
    packed = (codes[..., 0::2] | (codes[..., 1::2] << 4)).reshape(*w.shape[:-1], -1)
    return packed, (exponents + 127).astype(np.uint8), (_E2M1[codes] * powers).reshape(w.shape)


FORMATS: Mapping[str, Callable[[Tensors], Quantised]] = {
    "fp8_block": fp8_block,
    "fp8_channel": fp8_channel,
    "fp8_tensor": fp8_tensor,
    "mxfp4": mxfp4,
    "mxfp4_quark": mxfp4_quark,
    "int4": int4,
    "int4_all": int4_all,
    "gptq": gptq,
    "gptq_ordered": gptq_ordered,
    "awq": awq,
}
"""By name, what quantises the tensors of a checkpoint."""


def _each(
    tensors: Tensors, quantise: Quantiser, config: Mapping[str, object], only: str = ""
) -> Quantised:
    """Quantises every linear layer except routers and the head; ``only``: those of that name."""
    result = Quantised(quantization=dict(config))
    for name, tensor in tensors.items():
        linear = name.endswith(_NAMES) and tensor.ndim >= 2 and only in name
        if not linear or any(part in name for part in _NEVER):
            result.stored[name] = result.twin[name] = tensor
            continue
        parts, decoded = quantise(tensor.astype(np.float32))
        module = name.removesuffix(".weight")
        result.stored |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
        result.twin[name] = decoded
    return result


def _compressed(name: str, weights: Config, inputs: Config | None) -> dict[str, object]:
    group = {"input_activations": inputs, "output_activations": None, "targets": ["Linear"]}
    return {
        "config_groups": {"group_0": group | {"weights": weights}},
        "format": name,
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*router$", "re:.*eh_proj$"],
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _scales_by_group(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scales of groups of columns, float16 [n, groups], and spread over columns."""
    groups = w.reshape(w.shape[0], -1, _GROUP)
    scales = (np.abs(groups).max(-1) / 7).astype(np.float16)
    return scales, scales.astype(np.float32).repeat(_GROUP, 1)


def _packed(codes: np.ndarray, order: range | tuple[int, ...]) -> np.ndarray:
    """Packs [a, 8 * b] values of 4 bits into int32 [a, b]; ``order``: the value in each nibble."""
    values = codes.astype(np.uint32).reshape(codes.shape[0], -1, 8)
    words = np.zeros(values.shape[:2], np.uint32)
    for nibble, place in enumerate(order):
        words |= values[..., place] << np.uint32(4 * nibble)
    return words.view(np.int32)
