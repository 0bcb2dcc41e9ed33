"""Shards of the tiny checkpoints: they recombine to the checkpoint and read only expert bytes."""

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402
from shards import load_shard  # noqa: E402

from afd.errors import ConfigError  # noqa: E402
from afd.models import read_model  # noqa: E402
from afd.models.checkpoint import tensor_table  # noqa: E402
from afd_demo.make_model import make_model  # noqa: E402
from afd_demo.sizes import resolve  # noqa: E402
from ffn_worker.experts.build import build_ffn_model, load_ffn_model  # noqa: E402
from ffn_worker.experts.plan import shard_of  # noqa: E402
from ffn_worker.experts.tensor_files import TensorFiles  # noqa: E402

FAMILIES = ("qwen3_moe", "deepseek_v2", "deepseek_v3", "step3")
SMALL = {"hidden": 64, "layers": 3, "experts": 6, "intermediate": 128, "vocab": 512}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        make_model(family, root / family, resolve(family, "tiny", **SMALL), seed=3)
    return root


SPLITS = [(1, 1), (2, 1), (3, 1), (1, 2), (2, 3)]
"""(FFN instances, ranks per instance)."""


def load(path, instances, index, tp=1, rank=0, **options):
    family, model = read_model(path)
    shard = shard_of(model, instances, index, tp, rank)
    return load_shard(path, family, model, shard, **options)


def whole(parts, tp, dim):
    """Returns the experts of all instances, joined from the slices of their ranks."""
    instances = [parts[i : i + tp] for i in range(0, len(parts), tp)]
    return torch.cat([torch.cat(slices, dim=dim) for slices in instances])


@pytest.mark.parametrize(("instances", "tp"), SPLITS)
@pytest.mark.parametrize("name", FAMILIES)
def test_shards_recombine_to_the_checkpoint(checkpoints, name, instances, tp):
    path = checkpoints / name
    family, model = read_model(path)
    stored = load_file(path / "model.safetensors")
    shards = [load(path, instances, j, tp, r) for j in range(instances) for r in range(tp)]
    for layer in model.moe_layers:
        parts = [shard.layers[layer] for shard in shards]
        halves = [part.w13.codes.chunk(2, dim=1) for part in parts]
        gates, ups = (whole([half[i] for half in halves], tp, dim=1) for i in (0, 1))
        w13 = torch.cat([gates, ups], dim=1)
        w2 = whole([part.w2.codes for part in parts], tp, dim=2)
        routed = family.routed_names[0]
        for expert in range(model.num_experts):
            names = routed.for_layer(layer, expert)
            wanted = [stored[n] for n in names.templates]
            if not routed.per_expert:
                wanted = [tensor[expert] for tensor in wanted]
            gate, up, down = wanted
            assert torch.equal(w13[expert], torch.cat([gate, up]))
            assert torch.equal(w2[expert], down)
        if family.shared_names is None:
            assert all(p.shared_gate_up is None and p.shared_down is None for p in parts)
            continue
        gate, up, down = (stored[n] for n in family.shared_names.for_layer(layer).templates)
        halves = [part.shared_gate_up.codes.chunk(2) for part in parts]
        assert torch.equal(torch.cat([half[0] for half in halves]), gate)
        assert torch.equal(torch.cat([half[1] for half in halves]), up)
        assert torch.equal(torch.cat([part.shared_down.codes for part in parts], dim=1), down)


@pytest.mark.parametrize(("instances", "tp"), SPLITS)
@pytest.mark.parametrize("name", FAMILIES)
def test_bytes_read_are_exactly_the_expert_bytes(checkpoints, name, instances, tp):
    path = checkpoints / name
    family, _ = read_model(path)
    table = tensor_table(path)
    expert_bytes = sum(t.nbytes for n, t in table.items() if family.is_expert_weight(n))
    read = [load(path, instances, j, tp, r).bytes_read for j in range(instances) for r in range(tp)]
    assert sum(read) == expert_bytes
    assert max(read) <= -(-expert_bytes // (instances * tp)) * 1.5
    assert expert_bytes < sum(t.nbytes for t in table.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_only_expert_tensors_are_read(checkpoints, name, monkeypatch):
    names = []
    original = TensorFiles._fill

    def spy(self, out, info, tensor, *how):
        names.append(tensor)
        return original(self, out, info, tensor, *how)

    monkeypatch.setattr(TensorFiles, "_fill", spy)
    path = checkpoints / name
    family, model = read_model(path)
    load(path, 2, 1)
    assert names and all(family.is_expert_weight(n) for n in names)
    if family.routed_names[0].per_expert:
        first = shard_of(model, 2, 1).experts[model.moe_layers[0]][0]
        assert not any(f".experts.{first - 1}." in n for n in names)


def test_progress_and_threads(checkpoints):
    seen = []
    one = load(checkpoints / "step3", 1, 0, threads=1, progress=lambda *now: seen.append(now))
    assert [(done, total) for done, total, _ in seen] == [(1, 2), (2, 2)]
    assert seen[-1][2] == one.bytes_read
    many = load(checkpoints / "step3", 1, 0, threads=3)
    assert all(torch.equal(one.layers[i].w13.codes, many.layers[i].w13.codes) for i in one.layers)


def test_cast_to_the_serving_dtype(checkpoints):
    path = checkpoints / "deepseek_v3"
    family, model = read_model(path)
    model = family.serve_as(model, "float32")
    loaded = load_shard(path, family, model, shard_of(model, 1, 0))
    tensors = [t for w in loaded.layers.values() for t in vars(w).values() if t is not None]
    assert {t.codes.dtype for t in tensors} == {torch.float32}
    assert loaded.bytes_read * 2 == sum(t.nbytes for t in tensors)


def test_fused_layout_of_transformers_5(checkpoints, tmp_path):
    source = checkpoints / "qwen3_moe"
    stored = load_file(source / "model.safetensors")
    _, model = read_model(source)
    kept = {n: t for n, t in stored.items() if ".experts." not in n}
    for layer in model.moe_layers:
        prefix = f"model.layers.{layer}.mlp.experts."
        each = range(model.num_experts)
        gate, up, down = (
            torch.stack([stored[f"{prefix}{e}.{p}_proj.weight"] for e in each])
            for p in ("gate", "up", "down")
        )
        kept[f"{prefix}gate_up_proj"] = torch.cat([gate, up], dim=1)
        kept[f"{prefix}down_proj"] = down
    save_file(kept, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    for index in range(2):
        fused, split = load(tmp_path, 2, index), load(source, 2, index)
        assert fused.bytes_read == split.bytes_read
        for layer in model.moe_layers:
            assert torch.equal(fused.layers[layer].w13.codes, split.layers[layer].w13.codes)
            assert torch.equal(fused.layers[layer].w2.codes, split.layers[layer].w2.codes)


def rewrite(source, target, change):
    stored = load_file(source / "model.safetensors")
    change(stored)
    save_file(stored, target / "model.safetensors")
    (target / "config.json").write_text((source / "config.json").read_text())


def test_errors_name_missing_tensors(checkpoints, tmp_path):
    gone = "model.layers.2.mlp.experts.4.up_proj.weight"
    rewrite(checkpoints / "qwen3_moe", tmp_path, lambda tensors: tensors.pop(gone))
    with pytest.raises(ConfigError, match=f"no tensor {gone}"):
        load(tmp_path, 1, 0)
    # An instance that does not hold the expert does not need it.
    assert load(tmp_path, 3, 0).bytes_read > 0
    rewrite(checkpoints / "step3", tmp_path, lambda tensors: tensors.clear())
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.1\.moe\.down_proj\.weight"):
        load(tmp_path, 1, 0)


def test_errors_name_tensors_of_wrong_shape_or_dtype(checkpoints, tmp_path):
    name = "model.layers.1.mlp.shared_experts.down_proj.weight"

    def narrow(tensors):
        tensors[name] = tensors[name][:, :64].contiguous()

    rewrite(checkpoints / "deepseek_v2", tmp_path, narrow)
    with pytest.raises(ConfigError, match=rf"{name} .*\[64, 64\].*\[64, 128\]"):
        load(tmp_path, 1, 0)

    def quantise(tensors):
        tensors[name] = tensors[name].to(torch.int8)

    rewrite(checkpoints / "deepseek_v2", tmp_path, quantise)
    with pytest.raises(ConfigError, match=f"{name} .*stored as I8"):
        load(tmp_path, 1, 0)


def test_more_instances_than_experts(checkpoints):
    _, model = read_model(checkpoints / "qwen3_moe")
    with pytest.raises(ConfigError, match=r"7 FFN instances .* 6 routed experts"):
        shard_of(model, 7, 0)


def dense_reference(path, model, family, layer, x, ids, scale):
    """Returns the float64 output of one layer, computed from the stored tensors."""
    stored = load_file(path / "model.safetensors")

    def mlp(gate, up, down):
        g, u = x.double() @ gate.double().T, x.double() @ up.double().T
        return (torch.nn.functional.silu(g) * u) @ down.double().T

    routed = family.routed_names[0]
    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(model.num_experts):
        tensors = [stored[n] for n in routed.for_layer(layer, expert).templates]
        if not routed.per_expert:
            tensors = [t[expert] for t in tensors]
        weight = torch.where(ids == expert, scale, 0.0).sum(dim=1, keepdim=True)
        out += weight * mlp(*tensors)
    out *= model.routed_scaling
    if family.shared_names:
        out += mlp(*(stored[n] for n in family.shared_names.for_layer(layer).templates))
    return out


@pytest.mark.parametrize("backend", ["reference", "torch", "auto"])
@pytest.mark.parametrize(("instances", "tp"), [(1, 1), (3, 1), (2, 3)])
@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_of_ffn_instances_add_up(checkpoints, name, instances, tp, backend):
    torch.manual_seed(1)
    path = checkpoints / name
    family, model = read_model(path)
    model = family.serve_as(model, "float32")
    x = torch.randn(11, model.hidden)
    ids = torch.stack([torch.randperm(6)[: model.top_k] for _ in range(11)]).to(torch.int32)
    scale = torch.rand(11, model.top_k)
    total, held = torch.zeros_like(x), 0
    for number in range(instances * tp):
        index, rank = divmod(number, tp)
        part = load_ffn_model(
            path,
            family,
            model,
            instances=instances,
            index=index,
            tp=tp,
            rank=rank,
            backend=backend,
        )
        total += part.forward(2, x, ids, scale)
        held += part.weight_bytes
    expected = dense_reference(path, model, family, 2, x, ids, scale)
    assert (total - expected).abs().max() <= 5e-6 * expected.abs().max()
    table = tensor_table(path)
    stored = sum(t.nbytes for n, t in table.items() if family.is_expert_weight(n))
    assert held == 2 * stored  # bfloat16 on disk, float32 in memory


def test_ffn_model_takes_over_the_layers_and_needs_all(checkpoints):
    path = checkpoints / "qwen3_moe"
    family, model = read_model(path)
    shard = shard_of(model, 1, 0)
    layers = iter(load_shard(path, family, model, shard).layers.items())
    ffn = build_ffn_model(model, shard, layers, backend="torch")
    assert not list(layers) and ffn.backend_name == "torch"
    with pytest.raises(ConfigError, match="layer 0"):
        build_ffn_model(model, shard, layers, backend="torch")
    deeper = replace(model, moe_layers=(0, 9))
    with pytest.raises(ConfigError, match=r"layers\.9\."):
        load_shard(path, family, deeper, shard_of(deeper, 1, 0))


def test_sharded_checkpoint(checkpoints, tmp_path):
    source = checkpoints / "step3"
    stored = load_file(source / "model.safetensors")
    weight_map = {}
    for i, name in enumerate(sorted(stored)):
        weight_map[name] = f"model-{i % 3}.safetensors"
    for file in set(weight_map.values()):
        part = {n: t for n, t in stored.items() if weight_map[n] == file}
        save_file(part, tmp_path / file)
    index = {"weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    split, whole = load(tmp_path, 2, 0), load(source, 2, 0)
    assert split.bytes_read == whole.bytes_read
    assert all(
        torch.equal(split.layers[i].w2.codes, whole.layers[i].w2.codes) for i in whole.layers
    )
