"""Reads ``quantization_config`` of a checkpoint: which format each module's weight has.

Each quantiser has its own keys and its own way to name modules. All of them become one list of
rules: a regular expression over module names and a format; the first that matches decides.

Sources: ``from_config`` and the matching functions of vLLM 0.26 (quantization/fp8.py, mxfp4.py,
modelopt.py, auto_awq.py, auto_gptq.py, compressed_tensors/compressed_tensors.py, quark/quark.py,
utils/quant_utils.py ``is_layer_skipped``); config.json of deepseek-ai/DeepSeek-V3,
Qwen/Qwen3-235B-A22B-FP8, MiniMaxAI/MiniMax-M2, zai-org/GLM-4.6-FP8, moonshotai/Kimi-K2-Thinking,
openai/gpt-oss-120b and amd/DeepSeek-R1-0528-MXFP4.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from afd.errors import ConfigError
from afd.models.weight_format import (
    FP8_BLOCK_SIZE,
    INT4_PER_WORD,
    MX_GROUP,
    PLAIN,
    Layout,
    WeightFormat,
)

Facts = Mapping[str, object]

SUPPORTED = (
    "FP8 in blocks of 128 x 128, per row or per tensor (fp8, compressed-tensors, modelopt, quark), "
    "MXFP4 (mxfp4, quark, compressed-tensors) and INT4 in groups (compressed-tensors "
    "pack-quantized, gptq, awq)"
)


@dataclass(frozen=True)
class Quantization:
    """The formats of a checkpoint's linear layers.

    method: ``quant_method`` in config.json; "": the checkpoint is not quantised.
    rules: (regular expression that has to match the whole module name, format). A module that no
        rule matches is plain.
    """

    method: str = ""
    rules: tuple[tuple[str, WeightFormat], ...] = ()

    def of(self, module: str) -> WeightFormat:
        """Returns the format of a module, by its name in the checkpoint (without ".weight")."""
        for pattern, stored in self.rules:
            if re.fullmatch(pattern, module):
                return stored
        return PLAIN

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        """The quantised formats, each once, in the order of the rules."""
        return tuple(dict.fromkeys(stored for _, stored in self.rules if stored.is_quantised))

    def __str__(self) -> str:
        if not self.formats:
            return "unquantised"
        return f"{self.method} ({', '.join(map(str, self.formats))})"


def quantization_of(config: Facts, modelopt: Facts | None = None) -> Quantization:
    """Returns the quantisation that config.json describes.

    Args:
        config: config.json. modelopt: hf_quant_config.json, which ModelOpt wrote beside a
            config.json without ``quantization_config``; None: there is none.

    Raises:
        ConfigError: the format is not supported; the message names it.
    """
    text = config.get("text_config")
    found = config.get("quantization_config")
    if found is None and isinstance(text, Mapping):
        found = text.get("quantization_config")
    if found is None:
        found = config.get("compression_config") or modelopt
    if not found:
        return Quantization()
    if not isinstance(found, Mapping):
        raise ConfigError("quantization_config in config.json is not a JSON object; download again")
    method = str(found.get("quant_method") or ("modelopt" if "quantization" in found else ""))
    read = _READERS.get(method.lower())
    if read is None:
        raise _unsupported(f"quant_method {method!r}")
    return Quantization(method.lower(), read(found))


Rules = tuple[tuple[str, WeightFormat], ...]
_ALL = ".*"


def _unsupported(what: str) -> ConfigError:
    return ConfigError(
        f"the checkpoint is quantised in a format that is not supported ({what}); use one in "
        f"{SUPPORTED}, or an unquantised one"
    )


def _fp8(facts: Facts) -> Rules:
    """``fp8``: DeepSeek's blocks, or without ``weight_block_size`` one scale per tensor."""
    blocks, kind = facts.get("weight_block_size"), str(facts.get("fmt", "e4m3"))
    if "e4m3" not in kind:
        raise _unsupported(f"fp8 with fmt {kind}")
    if blocks is None:
        stored = WeightFormat(Layout.FP8_TENSOR, scales="weight_scale")
    elif blocks == [FP8_BLOCK_SIZE, FP8_BLOCK_SIZE]:
        stored = WeightFormat(Layout.FP8_BLOCK, scales="weight_scale_inv")
    else:
        raise _unsupported(f"fp8 with weight_block_size {blocks}")
    skipped = _names(facts, "ignored_layers") or _names(facts, "modules_to_not_convert")
    return (*_plain(skipped, _at_end), (_ALL, stored))


def _mxfp4(facts: Facts) -> Rules:
    """``mxfp4`` (gpt-oss): the stacked experts only; every other module is plain."""
    skipped = _names(facts, "modules_to_not_convert")
    stored = WeightFormat(Layout.MXFP4, codes="blocks", scales="scales", group=MX_GROUP)
    return (*_plain(skipped, _at_end), (r".*\.experts\..*", stored))


def _compressed_tensors(facts: Facts) -> Rules:
    groups = facts.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _unsupported("compressed-tensors without config_groups")
    named: list[tuple[str, WeightFormat]] = []
    by_class: list[tuple[str, WeightFormat]] = []
    for group in groups.values():
        targets = _names(group, "targets")
        if len(targets) == 1 and targets[0].endswith("Attention"):
            continue  # scales of the KV cache, no weights
        stored = _compressed_group(group, str(group.get("format") or facts.get("format")))
        for target in targets:
            if target == "Linear":
                by_class.append((_ALL, stored))
            else:
                named.append((_regex_or_name(target), stored))
    return (*_plain(_names(facts, "ignore"), _regex_or_name), *named, *by_class)


def _compressed_group(group: Facts, name: str) -> WeightFormat:
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise _unsupported("a compressed-tensors group without weights")
    kind, bits, strategy = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
    columns = weights.get("group_size")
    if kind == "float" and bits == 8:
        if strategy == "block" and weights.get("block_structure") == [FP8_BLOCK_SIZE] * 2:
            return WeightFormat(Layout.FP8_BLOCK, scales="weight_scale")
        if strategy in ("channel", "tensor"):
            layout = Layout.FP8_CHANNEL if strategy == "channel" else Layout.FP8_TENSOR
            return WeightFormat(layout, scales="weight_scale")
    if kind == "float" and bits == 4 and columns == MX_GROUP and name == "mxfp4-pack-quantized":
        return WeightFormat(Layout.MXFP4, "weight_packed", "weight_scale", group=MX_GROUP)
    if (
        kind == "int"
        and bits == 4
        and name == "pack-quantized"
        and strategy in ("group", "channel")
    ):
        symmetric = bool(weights.get("symmetric", True))
        return WeightFormat(
            Layout.INT4,
            codes="weight_packed",
            scales="weight_scale",
            zeros="" if symmetric else "weight_zero_point",
            order="weight_g_idx" if weights.get("actorder") in ("group", True) else "",
            group=_columns(columns) if strategy == "group" else 0,
            symmetric=symmetric,
        )
    raise _unsupported(
        f"compressed-tensors {name}: {bits} bits, type {kind}, strategy {strategy}, group_size "
        f"{columns}"
    )


_MODELOPT = {
    "FP8": Layout.FP8_TENSOR,
    "FP8_PER_CHANNEL_PER_TOKEN": Layout.FP8_CHANNEL,
    "FP8_PB_WO": Layout.FP8_BLOCK,
}


def _modelopt(facts: Facts) -> Rules:
    """ModelOpt: in config.json, or nested in hf_quant_config.json under ``quantization``."""
    nested = facts.get("quantization")
    inner = nested if isinstance(nested, Mapping) else facts
    algorithm = str(inner.get("quant_algo", "")).upper()
    layout = _MODELOPT.get(algorithm)
    if layout is None:
        raise _unsupported(f"modelopt with quant_algo {algorithm or None}")
    skipped = _names(inner, "exclude_modules" if isinstance(nested, Mapping) else "ignore")
    stored = WeightFormat(layout, scales="weight_scale")
    return (*_plain(skipped, _glob_or_part), (_ALL, stored))


def _quark(facts: Facts) -> Rules:
    per_layer = facts.get("layer_quant_config")
    rules = list(_plain(_names(facts, "exclude"), _regex_or_name))
    for pattern, entry in (per_layer if isinstance(per_layer, Mapping) else {}).items():
        if isinstance(entry, Mapping) and entry.get("weight"):
            rules.append((fnmatch.translate(str(pattern)), _quark_weight(entry)))
    whole = facts.get("global_quant_config")
    if isinstance(whole, Mapping) and whole.get("weight"):
        rules.append((_ALL, _quark_weight(whole)))
    return tuple(rules)


def _quark_weight(entry: Facts) -> WeightFormat:
    weight = entry["weight"]
    if isinstance(weight, Mapping):
        dtype, scheme = weight.get("dtype"), weight.get("qscheme")
        columns, scales = weight.get("group_size"), weight.get("scale_format")
        if (dtype, scheme, columns, scales) == ("fp4", "per_group", MX_GROUP, "e8m0"):
            return WeightFormat(Layout.MXFP4, scales="weight_scale", group=MX_GROUP)
        if dtype in ("fp8_e4m3", "fp8") and scheme in ("per_channel", "per_tensor"):
            layout = Layout.FP8_CHANNEL if scheme == "per_channel" else Layout.FP8_TENSOR
            return WeightFormat(layout, scales="weight_scale")
        raise _unsupported(f"quark with dtype {dtype}, qscheme {scheme}, group_size {columns}")
    raise _unsupported("quark with two formats for one weight")


def _gptq(facts: Facts) -> Rules:
    bits = facts.get("bits")
    if bits != 4:
        raise _unsupported(f"gptq with {bits} bits")
    stored = WeightFormat(
        Layout.GPTQ,
        codes="qweight",
        scales="scales",
        zeros="qzeros",
        # Without desc_act, g_idx may be stored too but says that groups are in order.
        order="g_idx" if facts.get("desc_act") else "",
        group=_columns(facts.get("group_size")),
        symmetric=bool(facts.get("sym", True)),
        zero_offset=0 if facts.get("checkpoint_format") == "gptq_v2" else 1,
    )
    rules: list[tuple[str, WeightFormat]] = []
    dynamic = facts.get("dynamic")
    for pattern, changes in (dynamic if isinstance(dynamic, Mapping) else {}).items():
        if str(pattern).startswith("-:"):
            rules.append((f"(?:{pattern[2:]}).*", PLAIN))
        elif isinstance(changes, Mapping):
            if changes.get("bits", 4) != 4:
                raise _unsupported(f"gptq with {changes['bits']} bits in {pattern}")
            group = _columns(changes.get("group_size", stored.group or -1))
            other = replace(
                stored, group=group, symmetric=bool(changes.get("sym", stored.symmetric))
            )
            rules.append((f"(?:{str(pattern).removeprefix('+:')}).*", other))
    only = _names(facts, "modules_in_block_to_quantize")
    return (*rules, *((_part(name), stored) for name in only)) if only else (*rules, (_ALL, stored))


def _awq(facts: Facts) -> Rules:
    bits = facts.get("bits", facts.get("w_bit"))
    version = str(facts.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm" or not facts.get("zero_point", True):
        raise _unsupported(
            f"awq with {bits} bits, version {version}, zero_point {facts.get('zero_point')}"
        )
    columns = facts.get("group_size", facts.get("q_group_size"))
    stored = WeightFormat(
        Layout.AWQ,
        codes="qweight",
        scales="scales",
        zeros="qzeros",
        group=_columns(columns),
        symmetric=False,
    )
    return (*_plain(_names(facts, "modules_to_not_convert"), _part), (_ALL, stored))


_READERS: dict[str, Callable[[Facts], Rules]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "quark": _quark,
    "gptq": _gptq,
    "awq": _awq,
}


def _names(facts: object, key: str) -> list[str]:
    found = facts.get(key) if isinstance(facts, Mapping) else None
    return [str(name) for name in found] if isinstance(found, list) else []


def _columns(value: object) -> int:
    """Returns a group size, 0 for "all columns" (-1 or null). Raises ConfigError if it is odd."""
    if value in (None, -1):
        return 0
    if isinstance(value, int) and value > 0 and value % INT4_PER_WORD == 0:
        return value
    raise _unsupported(f"groups of {value} columns")


def _plain(names: list[str], pattern: Callable[[str], str]) -> Rules:
    return tuple((pattern(name), PLAIN) for name in names)


def _at_end(name: str) -> str:
    """A module of that path, or one whose path ends so ("lm_head", "gate"), with all below."""
    return rf"(?:.*\.)?{re.escape(name.rstrip('.'))}(?:\..*)?"


def _part(name: str) -> str:
    """Any module whose path contains the text."""
    return f".*{re.escape(name)}.*"


def _regex_or_name(name: str) -> str:
    """compressed-tensors and Quark: "re:EXPRESSION" matches from the start, else the whole path."""
    return f"(?:{name[3:]}).*" if name.startswith("re:") else re.escape(name)


def _glob_or_part(name: str) -> str:
    """ModelOpt: a glob, or text that the path contains."""
    return fnmatch.translate(name) if "*" in name else _part(name)
