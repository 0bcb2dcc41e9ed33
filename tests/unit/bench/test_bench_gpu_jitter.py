"""`afd bench gpu jitter`: statistics, records and refusals, without servers."""

import contextlib
import json
from types import SimpleNamespace

import pytest

from afd.errors import ConfigError
from afd.records import read_records
from afd_bench.gpu import jitter
from afd_bench.stages import Totals


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


def jitter_runs(monkeypatch, tmp_path, *argv, others=3, chunks=200):
    """Exit status and records of `afd bench gpu jitter` with a fake server."""
    reads = [Totals(0, 3, 0.0, 10.0, 1.0), Totals(10**9, others, 8.0, 14.0, 1.02)]

    @contextlib.contextmanager
    def running(asked, _setup):
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
        return [0.005 * n for n in range(33 + chunks)]

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
    assert "GiB of KV cache per GPU with a cache" in capsys.readouterr().out


def test_jitter_is_compared_with_a_peer_too(monkeypatch, tmp_path):
    _, records = jitter_runs(monkeypatch, tmp_path, "--targets", "1A1F", "1A1F", "TP1")
    assert len([metric for metric, peer in records if peer == "vllm colocated"]) == 5
    assert records["tpot_max", "vllm colocated"].ratio == pytest.approx(1.0)


def test_jitter_refuses_what_it_cannot_measure(monkeypatch, tmp_path, capsys):
    for argv, words in (
        (["--steps", "99"], "--steps 99 is too few for a p99"),
        (["--dummy-experts"], "does not work with vLLM targets"),
        (["--context", "40500"], "exceed the 40960 positions of tiny; lower the context"),
    ):
        with pytest.raises(ConfigError, match=words):
            jitter_runs(monkeypatch, tmp_path, *argv)
    with pytest.raises(SystemExit):
        jitter_runs(monkeypatch, tmp_path, "--batch", "0")
    assert "argument --batch: 0 is not a whole number above 0" in capsys.readouterr().err
    for faults, words in (({"others": 2}, "2 of the 3 other"), ({"chunks": 90}, "90 chunks")):
        assert jitter_runs(monkeypatch, tmp_path, "--targets", "1A1F", **faults)[0] == 1
        assert words in capsys.readouterr().out
