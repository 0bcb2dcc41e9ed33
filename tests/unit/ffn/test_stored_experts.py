"""Checkpoints in every format: shards of them equal shards of the decoded checkpoint."""

import json
import logging
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402
from shards import load_shard  # noqa: E402
from test_stored_weights import FORMATS, parts_of, random_parts  # noqa: E402

from afd.errors import ConfigError  # noqa: E402
from afd.models import FAMILIES, MlpNames, MoeModel, read_model  # noqa: E402
from afd.models.family import Family  # noqa: E402
from afd.models.stored_torch import decode  # noqa: E402
from afd.models.weight_format import tensor_name  # noqa: E402
from ffn_worker.experts.build import load_ffn_model  # noqa: E402
from ffn_worker.experts.loader import Checkpoint  # noqa: E402
from ffn_worker.experts.plan import shard_of  # noqa: E402
from ffn_worker.moe.scheme import Scheme  # noqa: E402

HIDDEN, WIDTH, EXPERTS, LAYERS = 256, 384, 4, 2
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "moe_intermediate_size": WIDTH,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "torch_dtype": "float32",
}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
QUARK = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}


def compressed(weights, name):
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"g": group},
        "ignore": ["lm_head"],
    }


QUANTISED = {
    "fp8 block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8 channel": compressed(FP8, "float-quantized"),
    "fp8 tensor": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "quark": {"quant_method": "quark", "global_quant_config": {"weight": QUARK}},
    "int4": compressed(INT4, "pack-quantized"),
    "int4 zeros": compressed({**INT4, "symmetric": False}, "pack-quantized"),
    "gptq": GPTQ,
    "gptq order": {**GPTQ, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True},
}


def write(folder, tensors, config):
    folder.mkdir()
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "m.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A checkpoint per format, and NAME-decoded with the values of each."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("stored")
    for name, quantization in QUANTISED.items():
        stored, plain = {}, {}
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                for projection, (n, k) in {
                    "gate": (WIDTH, HIDDEN),
                    "up": (WIDTH, HIDDEN),
                    "down": (HIDDEN, WIDTH),
                }.items():
                    weight = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
                    tensors = random_parts(FORMATS[name], n, k)
                    stored |= {tensor_name(weight, s): t for s, t in tensors.items()}
                    plain[weight] = decode(FORMATS[name], parts_of(FORMATS[name], tensors))
        write(root / name, stored, CONFIG | {"quantization_config": quantization})
        write(root / f"{name}-decoded", plain, CONFIG)
    return root


@pytest.mark.parametrize(("instances", "tp"), [(1, 1), (2, 1), (1, 3), (2, 5)])
@pytest.mark.parametrize("name", QUANTISED)
def test_shards_equal_those_of_the_decoded_checkpoint(checkpoints, name, instances, tp):
    family, model = read_model(checkpoints / name)
    for index in range(instances):
        for rank in range(tp):
            shard = shard_of(model, instances, index, tp, rank)
            got = load_shard(checkpoints / name, family, model, shard).layers
            want = load_shard(checkpoints / f"{name}-decoded", family, model, shard).layers
            for layer in model.moe_layers:
                assert torch.equal(got[layer].w13.codes, want[layer].w13.codes)
                assert torch.equal(got[layer].w2.codes, want[layer].w2.codes)


@pytest.mark.parametrize("name", QUANTISED)
def test_experts_compute_the_values_of_the_checkpoint(checkpoints, name, caplog):
    """As stored where a backend is asked for that takes the format; decoded otherwise."""
    path = checkpoints / name
    family, model = read_model(path)
    x = torch.randn(5, HIDDEN)
    ids = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(5)]).int()
    scale = torch.rand(5, 2)

    def run(folder, tp=1, **options):
        ranks = [
            load_ffn_model(folder, family, model, instances=1, index=0, tp=tp, rank=r, **options)
            for r in range(tp)
        ]
        return ranks[0], sum(rank.forward(1, x, ids, scale) for rank in ranks)

    _, want = run(checkpoints / f"{name}-decoded", backend="reference")
    held = Checkpoint(path, family, model).scheme()
    with caplog.at_level(logging.INFO, "afd.ffn"):
        ffn, got = run(path, backend="reference")
        assert ffn.banks.scheme is held and torch.equal(got, want)
        ffn, got = run(path)  # CPU: decoded once, for the kernels of plain weights
        assert ffn.banks.scheme is Scheme.PLAIN
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    as_stored, decoded = caplog.messages
    assert ("as stored" in as_stored) is (held is not Scheme.PLAIN)
    assert "converted at load to float32 for backend" in decoded and "GB" in decoded
    ffn, got = run(path, tp=3, backend="torch")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_slices_of_quantised_weights_end_between_blocks(checkpoints):
    path = checkpoints / "fp8 block"
    family, model = read_model(path)
    options = {"instances": 1, "index": 0, "rank": 0}
    ffn = load_ffn_model(path, family, model, tp=3, backend="torch", **options)
    assert ffn.shard.width == (0, 128) and ffn.banks.scheme is Scheme.FP8_BLOCK
    with pytest.raises(ConfigError, match=r"width 384 cannot be cut for 4 ranks .* of 128"):
        load_ffn_model(path, family, model, tp=4, backend="torch", **options)
    decoded = load_ffn_model(path, family, model, tp=4, weights="plain", **options)
    assert decoded.shard.width == (0, 64 * (6 // 4))


GPT_OSS = Family(
    name="gpt_oss",
    vllm_class={},
    parse=FAMILIES[0].parse,
    gate="mlp.router",
    experts="mlp.experts",
    routed_names=(
        MlpNames(
            ("model.layers.{layer}.mlp.experts.gate_up_proj",),
            "model.layers.{layer}.mlp.experts.down_proj",
            interleaved=True,
            transposed=True,
        ),
    ),
)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """One layer of gpt-oss with experts in MXFP4, the same in float32, and its tensors."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("gpt-oss")
    prefix, hidden, width = "model.layers.0.mlp.experts.", 64, 96
    stored, plain = {}, {}
    for name, n, k in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
        each = [random_parts(FORMATS["gpt-oss"], n, k) for _ in range(EXPERTS)]
        for tensors in each:  # values as large as those of trained weights
            tensors["scales"].clamp_(118, 122)
        for suffix in each[0]:
            stored[f"{prefix}{name}_{suffix}"] = torch.stack([e[suffix] for e in each])
        values = [decode(FORMATS["gpt-oss"], parts_of(FORMATS["gpt-oss"], e)) for e in each]
        plain[prefix + name] = torch.stack([value.T for value in values])  # [E, in, out]
        bias = torch.randn(EXPERTS, n) / 4
        stored[f"{prefix}{name}_bias"] = plain[f"{prefix}{name}_bias"] = bias
    config = {"architectures": ["A"], "quantization_config": {"quant_method": "mxfp4"}}
    write(root / "mxfp4", stored, config)
    write(root / "plain", plain, {"architectures": ["A"]})
    model = MoeModel(
        family="gpt_oss",
        architecture="GptOssForCausalLM",
        num_layers=1,
        moe_layers=(0,),
        hidden=hidden,
        moe_intermediate=width,
        num_experts=EXPERTS,
        top_k=2,
        shared_intermediate=0,
        routed_scaling=1.0,
        dtype="float32",
        activation="swiglu_oai",
        expert_bias=True,
    )
    return root, model, plain


@pytest.mark.parametrize("kind", ["mxfp4", "plain"])
@pytest.mark.parametrize(("instances", "tp"), [(1, 1), (2, 1), (1, 3)])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_experts_of_gpt_oss_against_transformers(gpt_oss, kind, instances, tp, backend):
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    from transformers import GptOssConfig

    root, model, plain = gpt_oss
    config = GptOssConfig(
        hidden_size=model.hidden,
        intermediate_size=model.moe_intermediate,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        experts_implementation="eager",
    )
    experts = modeling.GptOssExperts(config)
    prefix = "model.layers.0.mlp.experts."
    experts.load_state_dict({name.removeprefix(prefix): t for name, t in plain.items()})
    x = torch.randn(7, model.hidden)
    ids = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(7)])
    scale = torch.rand(7, 2)
    with torch.no_grad():
        want = experts(x, ids, scale)
    got = sum(
        load_ffn_model(
            root / kind,
            GPT_OSS,
            model,
            instances=instances,
            index=index,
            tp=tp,
            rank=rank,
            backend=backend,
        ).forward(0, x, ids.int(), scale)
        for index in range(instances)
        for rank in range(tp)
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_biases_need_a_backend_that_adds_them(gpt_oss):
    root, model, _ = gpt_oss
    options = {"instances": 1, "index": 0}
    ffn = load_ffn_model(root / "mxfp4", GPT_OSS, model, **options)
    assert ffn.backend_name == "torch" and ffn.banks.scheme is Scheme.PLAIN
    with pytest.raises(ConfigError, match="vllm_cpu cannot run: it computes silu without biases"):
        load_ffn_model(root / "mxfp4", GPT_OSS, model, backend="vllm_cpu", **options)
    dummy = load_ffn_model(root / "mxfp4", GPT_OSS, model, dummy=True, **options)
    assert (
        dummy.forward(0, torch.randn(2, 64), torch.zeros(2, 2).int(), torch.ones(2, 2))
        .isfinite()
        .all()
    )
    bare = replace(model, expert_bias=False)
    assert load_ffn_model(root / "plain", GPT_OSS, bare, **options).backend_name == "torch"
