"""Decoders of stored weights against the quantisers' own, and slices against whole weights."""

import random
import re

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from afd.errors import ConfigError  # noqa: E402
from afd.models.checkpoint import tensor_table  # noqa: E402
from afd.models.quantization import quantization_of  # noqa: E402
from afd.models.stored_torch import StoredParts, decode  # noqa: E402
from afd.models.weight_format import Layout, WeightFormat, tensor_name  # noqa: E402
from afd.wire.layout import Tag  # noqa: E402
from ffn_worker.experts.stored_weight import StoredWeight, stored_format  # noqa: E402
from ffn_worker.experts.tensor_files import TensorFiles  # noqa: E402
from ffn_worker.moe.quantise import Weight, dequantise_weight, in_scheme  # noqa: E402
from ffn_worker.moe.scheme import Scheme  # noqa: E402
from ffn_worker.moe.stored import as_weight, held_as  # noqa: E402

N, K, GROUP = 384, 256, 32

FORMATS = {
    "plain": WeightFormat(),
    "fp8 block": WeightFormat(Layout.FP8_BLOCK, scales="weight_scale_inv"),
    "fp8 channel": WeightFormat(Layout.FP8_CHANNEL, scales="weight_scale"),
    "fp8 tensor": WeightFormat(Layout.FP8_TENSOR, scales="weight_scale"),
    "gpt-oss": WeightFormat(Layout.MXFP4, "blocks", "scales", group=32),
    "quark": WeightFormat(Layout.MXFP4, scales="weight_scale", group=32),
    "int4": WeightFormat(Layout.INT4, "weight_packed", "weight_scale", group=GROUP),
    "int4 rows": WeightFormat(Layout.INT4, "weight_packed", "weight_scale"),
    "int4 zeros": WeightFormat(
        Layout.INT4, "weight_packed", "weight_scale", "weight_zero_point", "", GROUP, False
    ),
    "gptq": WeightFormat(
        Layout.GPTQ, "qweight", "scales", "qzeros", "", GROUP, True, zero_offset=1
    ),
    "gptq order": WeightFormat(
        Layout.GPTQ, "qweight", "scales", "qzeros", "g_idx", GROUP, True, zero_offset=1
    ),
    "awq": WeightFormat(Layout.AWQ, "qweight", "scales", "qzeros", "", GROUP, False),
}


def random_parts(stored, n=N, k=K):
    """Random bits of every tensor, in the first dtype and shape that the format allows."""
    tensors = {}
    for suffix, part in stored.parts(n, k).items():
        shape = part.shapes[-1] if stored.codes == "blocks" else part.shapes[0]
        if suffix == stored.order:
            tensors[suffix] = torch.randint(0, k // GROUP, shape, dtype=torch.int32)
        elif part.dtypes[0] == "I32":
            tensors[suffix] = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)
        elif part.dtypes[0] == "F8_E4M3":
            tensors[suffix] = torch.randn(shape).to(torch.float8_e4m3fn)
        elif part.dtypes[0] == "U8":
            low, high = (100, 140) if suffix == stored.scales else (0, 256)
            tensors[suffix] = torch.randint(low, high, shape, dtype=torch.uint8)
        else:
            tensors[suffix] = torch.rand(shape) + 0.5
    return tensors


def parts_of(stored, tensors):
    suffixes = (stored.codes, stored.scales, stored.zeros, stored.order)
    return StoredParts(*(tensors.get(suffix) for suffix in suffixes))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    random.seed(0)
    torch.set_num_threads(1)


def test_int4_against_compressed_tensors():
    packed = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    for name in ("int4", "int4 rows", "int4 zeros"):
        stored = FORMATS[name]
        args = QuantizationArgs(
            num_bits=4,
            type="int",
            strategy="group" if stored.group else "channel",
            group_size=stored.group or None,
            symmetric=stored.symmetric,
        )
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        groups = K // GROUP if stored.group else 1
        state = {"weight": torch.randn(N, K), "weight_scale": torch.rand(N, groups) / 4 + 0.1}
        if not stored.symmetric:
            state["weight_zero_point"] = torch.randint(-8, 8, (N, groups), dtype=torch.int8)
        compressor = packed.PackedQuantizationCompressor
        written = compressor.compress(state, scheme)
        want = compressor.decompress(dict(written), scheme)["weight"]
        assert torch.equal(decode(stored, parts_of(stored, written)), want.float()), name


def test_mxfp4_against_compressed_tensors_and_transformers():
    gpt_oss = pytest.importorskip("transformers.integrations.mxfp4")
    tensors = random_parts(FORMATS["gpt-oss"])
    got = decode(FORMATS["gpt-oss"], parts_of(FORMATS["gpt-oss"], tensors))
    blocks, scales = tensors["blocks"][None], tensors["scales"][None]
    want = gpt_oss.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(got, want[0].T)  # Transformers keeps [in, out]
    mx = pytest.importorskip("compressed_tensors.compressors.mxfp4.base")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32)
    state = {
        "weight_packed": tensors["blocks"].view(N, K // 2),
        "weight_scale": tensors["scales"],
    }
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    quark = parts_of(FORMATS["quark"], {"weight": state["weight_packed"], **state})
    unpacked = mx.MXFP4PackedCompressor.decompress(dict(state), scheme)["weight"]
    assert torch.equal(decode(FORMATS["quark"], quark), unpacked.float())


def test_gptq_awq_and_fp8_against_vllm():
    utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.quant_utils")
    from vllm.scalar_type import scalar_types

    plain = torch.randn(K, N)  # vLLM's helpers take [in, out]
    want, codes, scales, _ = utils.quantize_weights(plain, scalar_types.uint4b8, GROUP)
    seven = torch.full((K // GROUP, N), 7, dtype=torch.int32)  # 8, stored minus one
    gptq = StoredParts(
        utils.gptq_pack(codes, 4, K, N), scales, utils.pack_cols(seven, 4, K // GROUP, N)
    )
    assert torch.equal(decode(FORMATS["gptq"], gptq), want.T)
    shuffled = torch.arange(K, dtype=torch.int32)[torch.randperm(K)] // GROUP
    ordered = StoredParts(gptq.codes, gptq.scales, gptq.zeros, shuffled)
    values = (codes - 8) * scales[shuffled.long()]
    assert torch.equal(decode(FORMATS["gptq order"], ordered), values.T)

    want, codes, scales, zeros = utils.quantize_weights(
        plain, scalar_types.uint4, GROUP, zero_points=True
    )
    awq = StoredParts(
        utils.awq_pack(codes, 4, K, N),
        scales,
        utils.awq_pack(zeros.view(K // GROUP, N), 4, K // GROUP, N),
    )
    assert torch.equal(decode(FORMATS["awq"], awq), want.T)

    for name, shape in (("block", (128, 128)), ("channel", (1, K)), ("tensor", (N, K))):
        stored = FORMATS[f"fp8 {name}"]
        tensors = random_parts(stored)
        parts = parts_of(stored, tensors)
        group = utils.GroupShape(*shape)
        scales = parts.scales.view(N // shape[0], K // shape[1])
        want = utils.scaled_dequantize(parts.codes, scales, group)
        assert torch.equal(decode(stored, parts), want), name


def test_modules_left_out_against_vllm():
    compressed = pytest.importorskip(
        "vllm.model_executor.layers.quantization.compressed_tensors.utils"
    )
    from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    modules = [
        f"model.layers.{layer}.{module}"
        for layer in (0, 3, 13)
        for module in ("self_attn.q_proj", "mlp.gate", "mlp.up_proj", "mlp.experts.2.up_proj")
    ] + ["lm_head"]
    ignore = ["lm_head", "re:.*self_attn.*", "model.layers.3.mlp.gate", r"re:.*\.0\.mlp\..*_proj"]
    group = {"targets": ["Linear"], "weights": weights}
    ours = quantization_of(
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {"group_0": group},
                "ignore": ignore,
            }
        }
    )
    opted = ["lm_head", "model.layers.1*", "*.self_attn.*"]
    theirs = ModelOptFp8Config("FP8", False, None, opted)
    modelopt = quantization_of(
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": opted}}
    )
    skipped = ["lm_head", "model.layers.3.self_attn.q_proj"]
    fp8 = quantization_of(
        {
            "quantization_config": {
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": skipped,
            }
        }
    )
    for module in modules:
        left_out = compressed.should_ignore_layer(module, ignore)
        assert ours.of(module).is_quantised is not left_out, module
        assert modelopt.of(module).is_quantised is not theirs.is_layer_excluded(module), module
        assert fp8.of(module).is_quantised is not is_layer_skipped(module, skipped), module


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """One file with a weight and a stack of three weights in every format."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("stored")
    tensors = {}
    for name, stored in FORMATS.items():
        kind = name.replace(" ", "_")
        for suffix, tensor in random_parts(stored).items():
            tensors[tensor_name(f"{kind}.weight", suffix)] = tensor
        each = [random_parts(stored) for _ in range(3)]
        for suffix in each[0]:
            stack = torch.stack([tensors[suffix] for tensors in each])
            tensors[tensor_name(f"{kind}.stack", suffix)] = stack
    save_file(tensors, folder / "model.safetensors")
    return tensors, tensor_table(folder), folder


def stored_weights(files, name):
    """Yields (weight, expert, its whole values): one alone, and two of a stack."""
    tensors, table, folder = files
    kind, stored = name.replace(" ", "_"), FORMATS[name]
    for expert, weight in (
        (0, StoredWeight(f"{kind}.weight", N, K, stored)),
        (0, StoredWeight(f"{kind}.stack", N, K, stored, stacked=3)),
        (2, StoredWeight(f"{kind}.stack", N, K, stored, stacked=3)),
    ):
        weight.check(table, folder)
        found = {suffix: tensors[tensor_name(weight.name, suffix)] for suffix in stored.parts(N, K)}
        if weight.stacked:
            found = {suffix: tensor[expert] for suffix, tensor in found.items()}
        yield weight, expert, decode(stored, parts_of(stored, found))


def empty(scheme, n, k):
    zeros = Weight.of(torch.zeros(n, k))
    return in_scheme(zeros, scheme, Tag.E4M3FN, torch.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_any_slice_equals_the_slice_of_the_whole(files, name):
    """Slices that end in the middle of blocks, groups and words are read wider and decoded."""
    for weight, expert, whole in stored_weights(files, name):
        cuts = [((0, N), (0, K)), ((128, 384), (0, K)), ((0, N), (128, 256)), ((0, N), (32, 96))]
        for _ in range(4):
            cuts.append(tuple(tuple(sorted(random.sample(range(size + 1), 2))) for size in (N, K)))
        for rows, columns in cuts:
            out = empty(Scheme.PLAIN, rows[1] - rows[0], columns[1] - columns[0])
            with TensorFiles(files[1]) as opened:
                weight.read_into(opened, out, rows, columns, expert=expert)
            assert torch.equal(out.codes, whole[slice(*rows), slice(*columns)]), (rows, columns)
            scheme = weight.held_as(rows, columns)
            if scheme is Scheme.PLAIN:
                continue
            held = empty(scheme, *out.shape)
            with TensorFiles(files[1]) as opened:
                weight.read_into(opened, held, rows, columns, expert=expert)
            assert torch.equal(dequantise_weight(held), out.codes), (rows, columns, scheme)


@pytest.mark.parametrize("name", FORMATS)
def test_gate_and_up_rows_in_turns(files, name):
    (weight, _, whole), *_ = stored_weights(files, name)
    rows = (64, 320)
    schemes = {Scheme.PLAIN, weight.held_as(rows, (0, K))} - {Scheme.FP8_BLOCK}
    for scheme in schemes:
        out = empty(scheme, 256, K)
        with TensorFiles(files[1]) as opened:
            weight.read_into(opened, out, rows, (0, K), interleaved=True)
        cut = whole[slice(*rows)]
        want = torch.cat([cut[0::2], cut[1::2]])
        assert torch.equal(dequantise_weight(out), want), scheme


def test_what_is_held_as_stored(files):
    held = {name: held_as(stored, N, K) for name, stored in FORMATS.items()}
    assert {name for name, scheme in held.items() if scheme is Scheme.FP8_BLOCK} == {
        "fp8 block",
        "fp8 tensor",
    }
    assert held["gpt-oss"] is held["quark"] is Scheme.MXFP4 and held["int4"] is Scheme.PLAIN
    assert held_as(FORMATS["fp8 block"], 96, 128) is Scheme.PLAIN
    for name in FORMATS:
        for weight, expert, whole in stored_weights(files, name):
            with TensorFiles(files[1]) as opened:
                parts = weight._read(opened, (0, N), (0, K), expert, torch.device("cpu"))
            assert torch.equal(dequantise_weight(as_weight(weight.stored, parts)), whole)


def test_blocks_at_the_edge_may_be_smaller():
    stored = FORMATS["fp8 block"]
    parts = stored.parts(200, 130)
    assert parts["weight_scale_inv"].shapes[0] == (2, 2)
    codes, scales = torch.randn(200, 130).to(torch.float8_e4m3fn), torch.rand(2, 2) + 0.5
    got = decode(stored, StoredParts(codes, scales))
    assert torch.equal(got[130:, 128:], codes.float()[130:, 128:] * scales[1, 1])
    assert torch.equal(got[:128, :128], codes.float()[:128, :128] * scales[0, 0])


@pytest.mark.parametrize("shape", [(3, 2), (3, 1, 2, 1)])
def test_scales_of_other_dtypes_and_shapes(tmp_path, shape):
    """Qwen3-FP8 stores scales in bfloat16, ModelOpt with dimensions of size 1."""
    stored = FORMATS["fp8 block"]
    codes = torch.randn(N, K).to(torch.float8_e4m3fn)
    scales = (torch.rand(3, 2) + 0.5).bfloat16()
    tensors = {"a.weight": codes, "a.weight_scale_inv": scales.view(shape).contiguous()}
    save_file(tensors, tmp_path / "model.safetensors")
    table = tensor_table(tmp_path)
    weight = StoredWeight("a.weight", N, K, stored)
    weight.check(table, tmp_path)
    want = decode(stored, StoredParts(codes, scales))
    for scheme in (Scheme.PLAIN, Scheme.FP8_BLOCK):
        out = empty(scheme, 256, 128)
        with TensorFiles(table) as opened:
            weight.read_into(opened, out, (128, 384), (128, 256))
        assert torch.equal(dequantise_weight(out), want[128:, 128:])


def test_transposed_stacks(tmp_path):
    tensor = torch.randn(2, K, N)
    save_file({"experts.gate_up_proj": tensor}, tmp_path / "model.safetensors")
    table = tensor_table(tmp_path)
    weight = StoredWeight("experts.gate_up_proj", N, K, WeightFormat(), 2, transposed=True)
    weight.check(table, tmp_path)
    out = empty(Scheme.PLAIN, 100, 60)
    with TensorFiles(table) as opened:
        weight.read_into(opened, out, (20, 120), (40, 100), expert=1)
    assert torch.equal(out.codes, tensor[1].T[20:120, 40:100])


def test_errors_name_the_tensor_and_its_file(files, tmp_path):
    _, table, folder = files
    fp8 = FORMATS["fp8 block"]
    file = re.escape(str(folder / "model.safetensors"))
    with pytest.raises(ConfigError, match=rf"{re.escape(str(folder))} has no tensor gone\.weight;"):
        StoredWeight("gone.weight", N, K, fp8).check(table, folder)
    with pytest.raises(ConfigError, match=rf"fp8_block\.weight in {file} has shape \[384, 256\]"):
        StoredWeight("fp8_block.weight", K, K, fp8).check(table, folder)
    with pytest.raises(ConfigError, match=rf"plain\.weight in {file} is stored as F32, but"):
        StoredWeight("plain.weight", N, K, fp8).check(table, folder)
    quantization = quantization_of(
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    )
    assert stored_format(quantization, table, "fp8_block.weight") == fp8
    assert not stored_format(quantization, table, "plain.weight").is_quantised


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1000)}, file)
    table = tensor_table(tmp_path)
    file.write_bytes(file.read_bytes()[:2000])
    with TensorFiles(table) as opened, pytest.raises(ConfigError) as error:
        opened.read("a")
    assert str(file) in str(error.value) and "download it again" in str(error.value)
    file.unlink()
    with TensorFiles(table) as opened, pytest.raises(ConfigError, match="cannot be read"):
        opened.read("a")
