"""`afd bench gpu`: slices, checkpoints, targets and commands, without servers."""

import contextlib
import json
from pathlib import Path

import pytest
import torch

from afd.config.deployment import Deployment
from afd.config.resolve import replays
from afd.errors import AfdError, ConfigError
from afd.models import qwen3_moe, read_model
from afd.models.checkpoint import tensor_table
from afd.records import read_records
from afd_bench.gpu import (
    COMMANDS,
    main,
    serving,
)
from afd_bench.gpu.checkpoint import listing, make
from afd_bench.gpu.common import Budget, Report
from afd_bench.gpu.kv import kv_bytes
from afd_bench.gpu.predict import predict
from afd_bench.gpu.slices import SLICES, find
from afd_bench.gpu.targets import (
    Afd,
    Colocated,
    Sizes,
    best_for,
    compilation,
    deployment,
    graph_args,
    parse,
    settings_of,
    vllm_args,
)
from afd_planner.facts.hardware import load_accelerator
from afd_planner.facts.model_hf import from_config, load_model

SIZES = Sizes(64, 1624, 2.0)


def spec(name):
    return from_config(listing(SLICES[name])[0], name)


@pytest.mark.parametrize("name", [name for name, piece in SLICES.items() if piece.of])
def test_a_slice_has_the_widths_of_its_model(name):
    piece = SLICES[name]
    ours, theirs = spec(name), load_model(piece.of)
    assert (ours.hidden, ours.vocab, ours.architecture) == (
        theirs.hidden,
        theirs.vocab,
        theirs.architecture,
    )
    assert piece.full_layers == theirs.num_layers
    kinds = {(group.attention, group.ffn) for group in theirs.groups}
    assert {(group.attention, group.ffn) for group in ours.groups} <= kinds


def test_coarse_slices_have_the_parameters_of_the_fine_one():
    fine, coarse = spec("qwen3-30b"), spec("qwen3-30b-coarse")
    assert abs(fine.parameters / coarse.parameters - 1) < 0.01
    assert abs(fine.activated_parameters / coarse.activated_parameters - 1) < 0.01


@pytest.mark.parametrize("name", ["tiny", "tiny-deepseek", "tiny-step3"])
def test_a_checkpoint_is_written_once_and_read_by_its_family(name, tmp_path):
    piece = find(name, 3)
    path = make(name, piece, tmp_path)
    _, model = read_model(path)
    assert (model.num_layers, model.hidden) == (3, piece.sizes.hidden)
    wanted = {tensor.name: tensor for tensor in listing(piece)[1]}
    table = tensor_table(path)
    assert set(table) == set(wanted)
    assert all(info.shape == wanted[n].shape for n, info in table.items())
    written = (path / "outside.safetensors").stat().st_mtime_ns
    assert make(name, piece, tmp_path) == path
    assert (path / "outside.safetensors").stat().st_mtime_ns == written
    words = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(words) == piece.sizes.vocab


def test_a_checkpoint_for_random_experts_has_holes_in_their_place(tmp_path):
    piece = find("tiny-deepseek", 2)
    whole = make("t", piece, tmp_path)
    holes = make("t", piece, tmp_path, experts=False)
    is_expert = read_model(holes)[0].is_expert_weight
    for path in whole.glob("*.safetensors"):
        other = holes / path.name
        assert other.stat().st_size == path.stat().st_size
    spared = sum(t.nbytes for t in listing(piece)[1] if is_expert(t.name))
    full, rest = (
        sum(512 * file.stat().st_blocks for file in folder.glob("*.safetensors"))
        for folder in (whole, holes)
    )
    assert full - rest > 0.9 * spared > 1e6
    assert tensor_table(holes).keys() == tensor_table(whole).keys()
    assert (holes / "config.json").read_text() == (whole / "config.json").read_text()


def test_weights_look_like_weights(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    path = make("tiny", find("tiny", 1), tmp_path)
    with safetensors.safe_open(path / "layer-000.safetensors", framework="pt") as file:
        up, norm = (
            file.get_tensor(f"model.layers.0.{name}.weight").float()
            for name in ("mlp.experts.0.up_proj", "input_layernorm")
        )
        other = file.get_tensor("model.layers.0.mlp.experts.1.up_proj.weight").float()
    assert 0.07 < float(up.std()) < 0.09 and abs(float(norm.mean()) - 1) < 0.05
    assert not bool((up == other).all())


def test_targets_by_name():
    assert parse("2A2F", "fp8") == Afd(2, 2, "fp8")
    ranks = parse("1A1F-tp2")
    assert ranks == Afd(1, 1, tp=2) and (ranks.gpus, ranks.label) == (3, "1A1F-tp2 exact")
    assert (parse("TP4"), parse("DP4+EP"), parse("TP2xDP2")) == (
        Colocated(4),
        Colocated(1, 4),
        Colocated(2, 2),
    )
    assert [target.name for target in best_for(4)] == [
        "2A2F", "3A1F", "1A3F", "TP4", "DP4+EP", "TP2xDP2",
    ]  # fmt: skip
    assert [target.name for target in best_for(2)] == ["1A1F", "TP2", "DP2+EP"]
    assert {target.gpus for target in best_for(4)} == {4}
    with pytest.raises(ConfigError, match=r"'4A' is not a target; use 2A2F"):
        parse("4A")


@pytest.mark.parametrize("graphs", [True, False])
def test_what_is_deployed_is_a_valid_deployment(graphs):
    target = Afd(2, 1, "fp8", graphs, stage_every=4)
    config = Deployment.from_plain(deployment(target, Path("m"), SIZES, "cuda", ["--x=1"]))
    assert replays(config, qwen3_moe.FAMILY) is graphs and config.wire.format == "fp8"
    assert config.attention.instances == 2 and config.attention.max_num_seqs == 40
    assert config.metrics.stage_every == 4 and config.attention.vllm_args == ("--x=1",)
    assert settings_of(Colocated(2, 2), SIZES)["max_num_seqs"] == 40
    assert settings_of(Colocated(4), SIZES)["max_num_seqs"] == 64
    # the same cache in all: two attention GPUs of three, two replicas of two GPUs, one of four
    caches = [settings_of(t, SIZES)["kv_cache_gib"] for t in (target, Colocated(2, 2), Afd(1, 3))]
    assert caches == [3.0, 2.0, 8.0]


def test_graphs_are_captured_for_the_batches_of_a_run():
    sizes = Sizes(1024, 1624, 2.0, batches=(64, 1024))
    assert graph_args(Colocated(4), sizes) == ["--cudagraph-capture-sizes", "64", "1024"]
    # evenly dealt, and as unevenly as there is room for
    assert graph_args(Colocated(2, 2), sizes)[1:] == ["32", "40", "512", "576"]
    assert graph_args(Colocated(4), SIZES) == []


def test_unknown_commands_and_helps(capsys):
    with pytest.raises(ConfigError, match="no 'speed'; use one of identity"):
        main(["speed"])
    for name in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0 and "--device" in capsys.readouterr().out


def test_a_budget_stops_new_cells(capsys):
    now = [0.0]
    budget = Budget(10.0, clock=lambda: now[0])
    assert budget.allows("a cell", 5.0)
    now[0] = 6.0
    assert not budget.allows("batch 64", 5.0)
    assert "no time left for batch 64" in capsys.readouterr().out


def test_records_are_in_the_file_at_once(tmp_path):
    out = Report("gpu", tmp_path / "r.json", "afd bench gpu x", machine="m")
    out.add("a", "tpot_p50", 2.0, "ms", "p", 4.0, more_is_better=False)
    out.add("b", "kl", 0.0, "nats", "p", 0.0, more_is_better=False)
    assert [(r.case, r.ratio) for r in read_records(tmp_path / "r.json")] == [("a", 2.0), ("b", 1)]


def test_predictions_count_all_gpus():
    model, h200 = spec("qwen3-30b"), load_accelerator("h200")
    for target in best_for(4):
        said = predict(target, 2 if isinstance(target, Afd) else 1, 256, 1024, model, h200)
        assert said.tokens_per_s_per_gpu == pytest.approx(256 / said.tpot_s / 4)
        assert " us (" in said.words


def test_the_cache_of_a_target():
    model = spec("qwen3-30b")
    whole = kv_bytes(Afd(1, 3), 64, 1000, model)
    assert whole == 64 * 1000 * 12 * 2 * 4 * 128 * 2
    assert kv_bytes(Afd(2, 2), 64, 1000, model) == whole / 2
    assert kv_bytes(Colocated(4), 64, 1000, model) == whole / 4
    assert kv_bytes(Colocated(2, 2), 64, 1000, model) == whole / 4
    assert kv_bytes(Afd(1, 3), 64, 1000, model, "fp8") == whole / 2


def test_an_fp8_cache_is_filled_with_ones_and_predicted_to_be_read_sooner():
    model, h200 = spec("qwen3-30b"), load_accelerator("h200")
    flag, connector, *_ = vllm_args("cpu", True, "fp8")
    assert flag == "--kv-cache-dtype=fp8"
    filled = json.loads(connector.partition("=")[2])["kv_connector_extra_config"]
    byte = torch.tensor([filled["fill_mean"]], dtype=torch.uint8)
    assert filled.keys() == {"fill_mean"} and byte.view(torch.float8_e4m3fn).item() == 1.0
    for target in (Afd(1, 1), Colocated(2)):
        exact, fp8 = (
            predict(target, 1, 64, 32_768, model, h200, kv=kv) for kv in ("bfloat16", "fp8")
        )
        assert fp8.tpot_s < 0.75 * exact.tpot_s


def test_colocated_vllm_captures_decode_steps_and_has_no_kernels_built():
    assert compilation(Colocated(1, 4)) == {"cudagraph_mode": "FULL_DECODE_ONLY"}
    assert compilation(Colocated(4))["pass_config"] == {"fuse_allreduce_rms": False}
    assert compilation(Colocated(4, mode="graphs"))["mode"] == 0


def test_servers_start_together_and_one_that_does_not_is_named(monkeypatch, tmp_path, capsys):
    tries = []

    @contextlib.contextmanager
    def serve(target, _setup):
        tries.append(target)
        if target == Colocated(4):
            raise AfdError("the server exited with status 1")
        if target == Afd(1, 1) and tries.count(target) == 1:
            raise AfdError("port 1234 is in use")
        yield target.label

    monkeypatch.setattr(serving, "serve", serve)
    setup = serving.Setup(Path("m"), SIZES, "cuda", [], tmp_path)
    asked = [Afd(1, 1), Colocated(4), Colocated(2)]
    with serving.running(asked, setup) as up:
        assert up == {Afd(1, 1): "1A1F exact", Colocated(2): "TP2"}
    assert "TP4: FAILED: the server exited with status 1" in capsys.readouterr().out
    assert tries.count(Afd(1, 1)) == 2 and tries.count(Colocated(4)) == 1
    with (
        pytest.raises(AfdError, match="no server started"),
        serving.running([Colocated(4)], setup),
    ):
        pass
