"""`afd bench gpu`: targets, checkpoints, loads and tables. The runs themselves need GPUs, or a
dry run of minutes (--device cpu)."""

import asyncio
import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from afd.bench import stages
from afd.bench.gpu import (
    COMMANDS,
    decode,
    identity,
    jitter,
    load,
    main,
    peer,
    profile,
    targets,
)
from afd.bench.gpu.checkpoint import listing, make
from afd.bench.gpu.common import Budget, Report
from afd.bench.gpu.decode import Cell, Plan, best, table
from afd.bench.gpu.kv import kv_bytes
from afd.bench.gpu.load import Load, Steady, rate
from afd.bench.gpu.predict import Prediction, predict
from afd.bench.gpu.slices import SLICES, find
from afd.bench.gpu.targets import (
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
from afd.bench.records import read_records
from afd.bench.servers import Server
from afd.bench.stages import Totals
from afd.checkpoint import tensor_table
from afd.config import Deployment
from afd.errors import AfdError, ConfigError
from afd.models import read_model
from afd.planner.facts.hardware import load_accelerator
from afd.planner.facts.model_hf import from_config, load_model
from afd.resolve import replays

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
    with pytest.raises(ConfigError, match=r"'4A' is no target; write 2A2F"):
        parse("4A")


@pytest.mark.parametrize("graphs", [True, False])
def test_what_is_deployed_is_a_valid_deployment(graphs):
    target = Afd(2, 1, "fp8", graphs, stage_every=4)
    config = Deployment.from_plain(deployment(target, Path("m"), SIZES, "cuda", ["--x=1"]))
    assert replays(config) is graphs and config.wire.format == "fp8"
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
    assert graph_args(Afd(2, 2), sizes)[1:] == ["32", "40", "512", "576"]
    assert graph_args(Afd(2, 2), SIZES) == []


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


def totals(moment_s, running, generated):
    return Totals(round(moment_s * 1e9), running, generated)


def test_a_window_counts_only_where_all_requests_ran():
    assert rate(totals(1.0, 4, 100), totals(3.0, 4, 300), 4) == Steady(100.0, 0.04, 2.0)
    first, last = Totals(0, 4, 0.0, 10.0, 1.0), Totals(10**9, 4, 8.0, 14.0, 1.2)
    assert rate(first, last, 4).device_s == pytest.approx(0.05)
    lines = [
        f'afd_graph_step{what}_total{{depth="{depth}"}} {value}'
        for depth, count, seconds in ((1, 8, 2.0), (3, 4, 0.2))
        for what, value in (("s", count), ("_seconds", seconds))
    ]
    text = "\n".join(["vllm:num_requests_running 4", *lines, ""])
    found = [stages.totals(text, 0, depth) for depth in (None, 3, 2)]
    assert [(t.running, t.replayed, t.replayed_s) for t in found] == [
        (4, 12, 2.2), (4, 4, 0.2), (4, 0, 0)
    ]  # fmt: skip
    with pytest.raises(AfdError, match="3 of 4 requests were left"):
        rate(totals(1.0, 4, 100), totals(3.0, 3, 300), 4)
    with pytest.raises(AfdError, match="no token"):
        rate(totals(1.0, 4, 100), totals(3.0, 4, 100), 4)


class FakeServer:
    """Each request decodes a token every 2 ms until it is given up."""

    url, model = "http://nowhere", "m"

    def __init__(self):
        self.started = {}
        self.done = 0.0

    async def complete(self, session, server, body, index):
        key = object()
        self.started[key] = time.monotonic()
        try:
            await asyncio.sleep(60)
        finally:
            self.done += (time.monotonic() - self.started.pop(key)) / 0.002

    def metrics(self):
        now = time.monotonic()
        going = sum((now - begun) / 0.002 for begun in list(self.started.values()))
        return (
            "# TYPE vllm:num_requests_running gauge\n"
            f"vllm:num_requests_running {len(self.started)}\n"
            "# TYPE vllm:generation_tokens counter\n"
            f"vllm:generation_tokens_total {self.done + going}\n"
        )


def test_a_load_is_held_measured_and_given_up(monkeypatch):
    server = FakeServer()
    monkeypatch.setattr(load, "complete", server.complete)
    found = load.steady(server, Load(5, 8, 100, 2000), 0.3)
    assert found.tpot_s == pytest.approx(0.002, rel=0.2)
    assert found.tokens_per_s == pytest.approx(5 / found.tpot_s)
    assert not server.started


def test_a_server_that_is_gone_is_an_error_of_its_own_cell():
    gone = Server("http://127.0.0.1:9", "m", Path("serve.log"), "", 0)
    with pytest.raises(AfdError, match=r"127\.0\.0\.1:9 gives no metrics .* see serve\.log"):
        load.steady(gone, Load(1, 8, 100, 2000), 0.1)

    async def ask():
        async with load.client() as session:
            await load.complete(session, gone, {}, 0)

    with pytest.raises(AfdError, match="dropped a request"):
        asyncio.run(ask())


def test_requests_are_the_same_for_every_server():
    server = FakeServer()
    bodies = [Load(2, 16, 100, 2000).body(server, index) for index in (0, 0, 1)]
    assert bodies[0]["prompt"] == bodies[1]["prompt"] != bodies[2]["prompt"]
    assert bodies[0]["max_tokens"] == 83 and bodies[0]["cache_salt"] != bodies[1]["cache_salt"]


def cell(target, requests, tpot_s, depth=0, context=1024):
    return Cell(target, depth, requests, context, tpot_s, Prediction(tpot_s, 0.0, 1.0, ""))


PLAN = Plan((64,), (1024,), (3,), (0.05, 0.1), 1.0, stretch=4.0, kv_bytes=1e9)


def test_the_best_cell_keeps_to_the_time_per_token_of_the_whole_model():
    cells = [
        cell(Afd(2, 2), 64, 0.010, 3),
        cell(Afd(2, 2), 256, 0.020, 2),
        cell(Colocated(4), 64, 0.009),
        cell(Colocated(4), 512, 0.026),
    ]
    assert best(cells, 1024, 0.05, 4.0, ours=True) is cells[0]  # 4 * 20 ms is over 50 ms
    assert best(cells, 1024, 0.1, 4.0, ours=True) is cells[1]
    assert best(cells, 1024, 0.1, 4.0, ours=False) is cells[2]  # 4 * 26 ms is over 100 ms
    with_rest = Cell(Afd(1, 1), 1, 1, 1, 0.01, Prediction(0.0, 0.004, 1, ""))
    assert with_rest.whole_s(3) == pytest.approx(0.022)
    hosted = replace(with_rest, device_s=0.007)  # 3 ms of the host, once per step
    assert hosted.whole_s(3) == pytest.approx(0.004 + 3 * 0.003 + 0.003)
    text = table(cells, PLAN)
    assert "| 1024 | 50 ms | 2A2F exact depth 3 batch 64 | 1600 |" in text
    assert f"{1600 / (64 / 0.009 / 4):.2f}" in text
    assert "none" in table(cells[:2], PLAN)


def test_a_record_has_the_best_peer_of_its_batch(tmp_path):
    out = Report("gpu", tmp_path / "r.json", "c", machine="m")
    cells = []
    for one in (
        cell(Afd(1, 1), 64, 0.010, 3),
        cell(Colocated(2), 64, 0.012),
        cell(Colocated(1, 2), 64, 0.008),
    ):
        cells.append(one)
        decode._record(one, cells, "qwen3-30b", out)
    (record,) = read_records(tmp_path / "r.json")
    assert record.case == "qwen3-30b 1A1F exact depth 3 batch 64 context 1024"
    assert record.ratio == pytest.approx(0.8)


def test_a_record_of_a_kernel_has_the_same_deployment_with_vllms(tmp_path):
    out = Report("gpu", tmp_path / "r.json", "c", machine="m")
    cells = []
    for one in (
        cell(Afd(1, 1, kernel="mqa"), 64, 0.010, 2),
        cell(Afd(1, 1), 64, 0.011, 1),
        cell(Afd(1, 1), 64, 0.015, 2),
    ):
        cells.append(one)
        decode._record(one, cells, "step-3", out)
    (record,) = read_records(tmp_path / "r.json")
    assert record.case == "step-3 1A1F exact mqa depth 2 batch 64 context 1024"
    assert (record.peer, record.ratio) == ("attention.kernel vllm", pytest.approx(1.5))


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


def test_jitter_with_and_without_drift():
    steps = [0.004 + 1e-6 * i for i in range(4000)]
    found = jitter.summary(steps)
    assert found.steps == 4000 and found.p50 == pytest.approx(6.0, rel=0.01)
    assert found.ratio > 1.3 and found.steady < 1.1
    assert found.longest == pytest.approx(8.0, rel=0.01)
    steps[1000] += 0.05
    steps[1001] -= 0.003
    first, second, *_ = jitter.summary(steps).slowest
    assert (first.step, first.ms, first.next_ms) == (1000, pytest.approx(55), pytest.approx(2.001))
    assert first.at_s == pytest.approx(sum(steps[:1001]), abs=1e-4)
    assert (second.step, second.next_ms) == (3999, 0.0)


def jitter_runs(monkeypatch, tmp_path, *argv, others=3, pieces=200):
    """`afd bench gpu jitter` on a server that does not exist; its records."""
    reads = [Totals(0, 3, 0.0, 10.0, 1.0), Totals(10**9, others, 8.0, 14.0, 1.02)]

    @contextlib.contextmanager
    def running(asked, *rest):
        yield {target: SimpleNamespace(model="m", set_depth=lambda depth: None) for target in asked}

    @contextlib.asynccontextmanager
    async def held(server, load):
        assert load.requests == 3
        yield

    async def read(server):
        reads.append(reads.pop(0))
        return reads[-1]

    async def moments(session, server, body, index):
        assert body["max_tokens"] == 233
        return [0.005 * n for n in range(33 + pieces)]

    for name, fake in (("running", running), ("held", held), ("read", read), ("moments", moments)):
        monkeypatch.setattr(jitter, name, fake)
    places = ["--models", str(tmp_path), "--logs", str(tmp_path), "--out", str(tmp_path / "r.json")]
    sizes = ["--model", "tiny", "--layers", "2", "--batch", "4", "--steps", "200"]
    status = jitter.main([*sizes, *places, *argv])
    return status, {(r.metric, r.peer): r for r in read_records(tmp_path / "r.json")}


def test_jitter_of_ours_alone_is_compared_with_limits(monkeypatch, tmp_path, capsys):
    alone = ["--targets", "1A1F", "--dummy-experts", "--context", "64"]
    status, records = jitter_runs(monkeypatch, tmp_path, *alone)
    assert status == 0 and {peer for _, peer in records} == {
        "aim", "its own p50", "step on the device"
    }  # fmt: skip
    aim = records["tpot_p99_over_p50", "aim"]
    assert aim.case == "tiny 2 layers 1A1F exact dummy experts depth 3 batch 4 context 64"
    assert aim.value == pytest.approx(1.0) and aim.peer_value == 1.02
    assert records["tpot_p50", "step on the device"].peer_value == pytest.approx(5.0)
    raw = json.loads((tmp_path / "jitter-1A1F-exact-dummy-experts.json").read_text())
    assert len(raw["ms"]) == 200 and len(raw["slowest"]) == 20
    assert "GiB of KV cache per GPU that has one" in capsys.readouterr().out


def test_jitter_beside_a_peer_has_its_records_too(monkeypatch, tmp_path):
    _, records = jitter_runs(monkeypatch, tmp_path, "--targets", "1A1F", "1A1F", "TP1")
    assert len([metric for metric, peer in records if peer == "vllm colocated"]) == 5
    assert records["tpot_max", "vllm colocated"].ratio == pytest.approx(1.0)


def test_jitter_tells_what_it_cannot_measure(monkeypatch, tmp_path, capsys):
    for argv, words in (
        (["--steps", "99"], "--steps 99 have no 99th percentile"),
        (["--dummy-experts"], "for ours alone"),
        (["--context", "40500"], "over the 40960 of tiny; lower the context"),
    ):
        with pytest.raises(ConfigError, match=words):
            jitter_runs(monkeypatch, tmp_path, *argv)
    with pytest.raises(SystemExit):
        jitter_runs(monkeypatch, tmp_path, "--batch", "0")
    assert "argument --batch: 0 is no whole number above 0" in capsys.readouterr().err
    for faults, words in (({"others": 2}, "2 of the 3 other"), ({"pieces": 90}, "90 pieces")):
        assert jitter_runs(monkeypatch, tmp_path, "--targets", "1A1F", **faults)[0] == 1
        assert words in capsys.readouterr().out


def test_identity_runs_every_topology_that_fits(monkeypatch):
    monkeypatch.setattr(identity, "gpu_names", lambda: ["H200"] * 3)
    args = identity._arguments(["--wires", "exact", "fp8"])
    labels = [target.label for target in identity.variants(args)]
    assert labels == [
        "1A1F exact", "1A1F exact lookahead", "1A1F exact eager", "1A1F fp8",
        "2A1F exact", "2A1F fp8", "1A2F exact", "1A2F fp8",
    ]  # fmt: skip
    args = identity._arguments(["--targets", "TP2"])
    with pytest.raises(ConfigError, match="TP2 is no topology"):
        identity.variants(args)


def event(name, cat="cuda_runtime"):
    return {"ph": "X", "cat": cat, "name": name}


def test_waits_and_copies_of_a_trace_are_counted_per_graph_launch():
    events = [event("cudaGraphLaunch")] * 4 + [event("cudaEventSynchronize")] * 8
    events += [event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy")] * 4
    events += [event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy"), event("cudaLaunchKernel")]
    events += [event("cudaStreamSynchronize", "cpu_op"), {"ph": "M", "name": "cudaGraphLaunch"}]
    found = profile.calls({"traceEvents": events})
    assert found.per_step() == (2.0, 1.0) and found.waits == {"cudaEventSynchronize": 8}
    with pytest.raises(AfdError, match="no graph was launched"):
        profile.calls({"traceEvents": []}).per_step()


def test_the_peer_runs_its_recipe(tmp_path, capsys, monkeypatch):
    with pytest.raises(ConfigError, match=r"has no afd_plugin/__init__\.py"):
        peer.main(["--peer-checkout", str(tmp_path)])
    (tmp_path / "afd_plugin").mkdir()
    (tmp_path / "afd_plugin" / "__init__.py").touch()
    assert peer.main(["--peer-checkout", str(tmp_path), "--dry-run", "--recipes", "dp2tp1"]) == 0
    ffn, attention = capsys.readouterr().out.splitlines()
    assert '"role": "ffn"' in ffn and "DecodeBenchConnector" not in ffn
    assert '"role": "attention"' in attention and "DecodeBenchConnector" in attention
    for line in (ffn, attention):
        assert "--data-parallel-size=2" in line and "--enable-dbo" in line
        assert '"cudagraph_capture_sizes": [32, 64, 128]' in line
    there = peer._environment(tmp_path, tmp_path)
    assert there["VLLM_PLUGINS"] == "afd_plugin_checkout"
    assert "afd_plugin:register_afd" in next(tmp_path.rglob("entry_points.txt")).read_text()
    assert "fuse_allreduce_rms" not in ffn + attention
    monkeypatch.setattr(peer, "gpu_names", lambda: ["H200"] * 2)
    for argv, words in (
        (["--target", "TP2"], "TP2 is no topology"),
        (["--device", "cpu"], "the peer runs on GPUs; --dry-run"),
        (["--recipes", "dp1tp1"], "takes 4 GPUs and the host has 2; --recipes dp1tp1 --target"),
    ):
        with pytest.raises(ConfigError, match=words):
            peer.main(["--peer-checkout", str(tmp_path), *argv])


def test_a_request_names_its_rank_where_vllm_would_deal_unevenly():
    asked = []

    class Session:
        @contextlib.asynccontextmanager
        async def post(self, url, json, headers):
            asked.append(headers)
            yield SimpleNamespace(status=200, read=lambda: asyncio.sleep(0))

    async def ask(ranks):
        server = Server("http://x", "m", Path("serve.log"), "", 0, ranks)
        for index in range(3):
            await load.complete(Session(), server, {}, index)

    asyncio.run(ask(2))
    assert asked == [{"X-data-parallel-rank": rank} for rank in "010"]
    asked.clear()
    asyncio.run(ask(0))
    assert asked == [{}] * 3


def test_colocated_vllm_captures_decode_steps_and_has_no_kernels_built():
    assert compilation(Colocated(1, 4)) == {"cudagraph_mode": "FULL_DECODE_ONLY"}
    assert compilation(Colocated(4))["pass_config"] == {"fuse_allreduce_rms": False}
    assert compilation(Colocated(4, mode="graphs"))["mode"] == 0


def test_servers_start_together_and_one_that_does_not_is_named(monkeypatch, tmp_path, capsys):
    tries = []

    @contextlib.contextmanager
    def serve(target, *rest):
        tries.append(target)
        if target == Colocated(4):
            raise AfdError("the server exited with status 1")
        if target == Afd(1, 1) and tries.count(target) == 1:
            raise AfdError("port 1234 is in use")
        yield target.label

    monkeypatch.setattr(targets, "serve", serve)
    asked = [Afd(1, 1), Colocated(4), Colocated(2)]
    with targets.running(asked, Path("m"), SIZES, "cuda", [], tmp_path) as up:
        assert up == {Afd(1, 1): "1A1F exact", Colocated(2): "TP2"}
    assert "TP4: FAILED: the server exited with status 1" in capsys.readouterr().out
    assert tries.count(Afd(1, 1)) == 2 and tries.count(Colocated(4)) == 1
    with (
        pytest.raises(AfdError, match="no server started"),
        targets.running([Colocated(4)], Path("m"), SIZES, "cuda", [], tmp_path),
    ):
        pass
