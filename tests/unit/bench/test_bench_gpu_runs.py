"""`afd bench gpu` identity, profile and peer: what they would run, and what they count."""

import pytest

from afd.config.deployment import Deployment
from afd.errors import AfdError, ConfigError
from afd_bench.gpu import identity, peer, profile
from afd_bench.gpu.targets import Afd, Sizes, deployment


def test_identity_runs_every_topology_that_fits(monkeypatch):
    monkeypatch.setattr(identity, "usable_gpus", lambda: 3)
    args = identity._arguments(["--wires", "exact", "fp8"])
    labels = [target.label for target in identity.variants(args)]
    assert labels == [
        "1A1F exact", "1A1F exact lookahead", "1A1F exact eager", "1A1F fp8",
        "2A1F exact", "2A1F fp8", "1A2F exact", "1A2F fp8",
    ]  # fmt: skip
    args = identity._arguments(["--targets", "TP2"])
    with pytest.raises(ConfigError, match="TP2 is not a topology"):
        identity.variants(args)


def test_identity_names_a_backend_that_is_not_the_default(monkeypatch, tmp_path):
    monkeypatch.setattr(identity, "usable_gpus", lambda: 2)
    argv = ["--targets", "1A1F", "--lookahead", "--eager"]
    for more, backend, label in (
        ([], "auto", "1A1F exact"),
        (["--backend", "auto"], "auto", "1A1F exact"),
        (["--backend", "vllm_cuda"], "vllm_cuda", "1A1F exact backend vllm_cuda"),
    ):
        (target,) = identity.variants(identity._arguments([*argv, *more]))
        assert isinstance(target, Afd) and target.label == label
        config = deployment(target, tmp_path, Sizes(4, 64, 1.0), "cuda", [])
        assert Deployment.from_plain(config).ffn.backend == backend


def test_identity_runs_over_every_transport(monkeypatch, tmp_path):
    nic = tmp_path / "nic.so"
    monkeypatch.setattr(identity, "usable_gpus", lambda: 1)
    monkeypatch.setattr(identity.stand_in_nic, "build", lambda _folder: nic)
    argv = ["--targets", "2A2F", "--over", "ipc", "tcp", "verbs", "--shared-gpus"]
    found = identity.variants(identity._arguments(argv))
    label = "2A2F exact on 1 GPUs over"
    assert [t.label for t in found] == [f"{label} {over}" for over in ("ipc", "tcp", "verbs")]
    for target in found:
        config = deployment(target, tmp_path, Sizes(4, 64, 1.0), "cuda", [])
        transport = Deployment.from_plain(config).transport
        assert transport.backend == target.over
        verbs = transport.verbs_keywords("attention")
        assert (verbs and verbs["library"]) == (str(nic) if target.over == "verbs" else None)


def test_identity_refuses_an_unknown_backend(capsys):
    with pytest.raises(SystemExit):
        identity._arguments(["--backend", "nonsense"])
    assert "argument --backend: invalid choice: 'nonsense'" in capsys.readouterr().err


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
    monkeypatch.setattr(peer, "usable_gpus", lambda: 2)
    for argv, words in (
        (["--target", "TP2"], "TP2 is not a topology"),
        (["--device", "cpu"], "the peer needs GPUs; use --dry-run"),
        (["--recipes", "dp1tp1"], "needs 4 GPUs and may use 2; use --recipes dp1tp1"),
    ):
        with pytest.raises(ConfigError, match=words):
            peer.main(["--peer-checkout", str(tmp_path), *argv])
