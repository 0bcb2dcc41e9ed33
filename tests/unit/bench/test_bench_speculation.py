"""`afd bench speculation`: arguments, files, prompts, counts and records. No server starts."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from afd.config.deployment import Deployment
from afd.config.resolve import resolve
from afd.errors import AfdError
from afd_bench import speculation
from afd_bench.speculation import METHODS, OURS, PEER, WITHOUT, Found
from afd_bench.workload import FIRST_TOKEN
from afd_demo.sizes import PRESETS, Sizes

SIZES = Sizes(hidden=64, layers=4, experts=4, intermediate=32, dense_intermediate=64, heads=4)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "bench", SIZES)


def found(answers: list[list[int]], rates: list[float], drafted: int, accepted: int) -> Found:
    return Found(answers, rates, drafted, accepted)


FOUND = {
    OURS: found([[1, 2], [3, 4], [5, 6], [7, 8]], [30.0, 90.0, 60.0], 200, 50),
    WITHOUT: found([[1, 2], [3, 9], [5, 6], [7, 8]], [40.0, 40.0, 41.0], 0, 0),
    PEER: found([[1, 2], [3, 4], [5, 6], [7, 8]], [100.0, 120.0, 140.0], 100, 40),
}


def test_records_are_of_medians_and_shares() -> None:
    args = speculation._arguments(["--drafts", "2", "--requests", "4"])
    first, second, accepted, match = speculation._records(FOUND, args, "ngram", "afd bench x")
    assert {r.bench for r in (first, second, accepted, match)} == {"speculation"}
    assert {r.case for r in (first, second, accepted, match)} == {
        "ngram, 2 drafts, 4 requests, cpu float32"
    }
    assert (first.metric, first.value, first.peer, first.peer_value) == (
        "tokens_per_s",
        60.0,
        WITHOUT,
        40.0,
    )
    assert first.ratio == 1.5
    assert (second.peer, second.peer_value, second.ratio) == (PEER, 120.0, 0.5)
    assert (accepted.metric, accepted.value, accepted.peer_value) == ("accepted", 0.25, 0.4)
    assert (accepted.peer, accepted.ratio) == (PEER, 0.625)
    assert (match.metric, match.value, match.peer, match.peer_value) == ("match", 0.75, WITHOUT, 1)


def test_a_peer_that_drafted_nothing_has_no_ratio() -> None:
    args = speculation._arguments([])
    idle = {**FOUND, PEER: found(FOUND[PEER].answers, [1.0], 0, 0)}
    accepted = speculation._records(idle, args, "mtp", "")[2]
    assert (accepted.value, accepted.peer_value, accepted.ratio) == (0.25, 0.0, 0.0)


def test_a_gpu_is_named_in_the_case() -> None:
    args = speculation._arguments(["--device", "cuda"])
    record = speculation._records(FOUND, args, "mtp", "")[0]
    assert record.case == "mtp, 3 drafts, 8 requests, cuda bfloat16, graphs"


def test_counts_of_all_instances_are_added() -> None:
    def page() -> str:
        lines = ["# TYPE vllm:spec_decode_num_draft_tokens counter"]
        lines += [f'vllm:spec_decode_num_draft_tokens_total{{i="{i}"}} {9 + i}' for i in (0, 1)]
        lines += ["# TYPE vllm:spec_decode_num_accepted_tokens counter"]
        lines += ["vllm:spec_decode_num_accepted_tokens_total 7"]
        lines += ["# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter"]
        lines += ['vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 5', ""]
        return "\n".join(lines)

    assert speculation._drafts(SimpleNamespace(metrics=page)) == (19.0, 7.0)
    assert speculation._drafts(SimpleNamespace(metrics=lambda: "")) == (0.0, 0.0)


@pytest.mark.parametrize("argument", ["--methods=medusa", "--depth=4", "--device=tpu"])
def test_wrong_arguments_are_refused(argument: str) -> None:
    with pytest.raises(SystemExit) as ended:
        speculation._arguments([argument])
    assert ended.value.code == 2


def test_all_methods_are_run_by_default() -> None:
    args = speculation._arguments([])
    assert args.methods == list(METHODS) and args.out is None and args.depth == 3


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_deployments_can_be_served(tmp_path: Path, method: str, device: str) -> None:
    """Checkpoint and head are made once, and every key is one of the deployment file."""
    args = speculation._arguments(["--device", device, "--models", str(tmp_path), "--drafts=2"])
    model = speculation._checkpoint(args.models, METHODS[method])
    made = (model / "config.json").stat().st_mtime_ns
    assert speculation._checkpoint(args.models, METHODS[method]) == model
    assert (model / "config.json").stat().st_mtime_ns == made
    drafts = {**METHODS[method].speculation, "num_speculative_tokens": 2}
    if method == "eagle3":
        drafts["model"] = str(speculation._head(model))
        assert json.loads((Path(drafts["model"]) / "config.json").read_text())
    for asked in (drafts, None):
        config = speculation._config(args, model, asked)
        deployment = Deployment.from_plain(config)
        resolved = resolve(deployment)
        assert deployment.attention.decode_rows == (3 if asked else 1)
        assert bool(resolved.model.draft_layers) is (asked is not None and method == "mtp")
        assert resolved.model.dtype == ("float32" if device == "cpu" else "bfloat16")


def test_prompts_are_the_same_in_every_run() -> None:
    args = speculation._arguments(["--requests", "5"])
    for method in METHODS.values():
        prompts = speculation._prompts(args, method)
        assert prompts == speculation._prompts(args, method)
        assert len(prompts) == len({str(prompt) for prompt in prompts}) == 5
    for text in speculation._prompts(args, METHODS["ngram"]):
        assert isinstance(text, str)
        first, *others = text.splitlines()
        assert others == [first] * 3
    for tokens in speculation._prompts(args, METHODS["mtp"]):
        assert all(FIRST_TOKEN <= token < PRESETS["bench"].vocab for token in tokens)


def test_a_method_that_does_not_start_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextlib.contextmanager
    def servers(args, name, method):
        if name == "ngram":
            raise AfdError("1A1F: no memory")
        yield {}

    async def measure(servers, prompts, args):
        return FOUND

    monkeypatch.setattr(speculation, "_servers", servers)
    monkeypatch.setattr(speculation, "_measure", measure)
    out = tmp_path / "speculation.json"
    assert speculation.main(["--methods", "ngram", "mtp", "--out", str(out)]) == 1
    assert "ngram: FAILED: 1A1F: no memory" in capsys.readouterr().out
    records = json.loads(out.read_text())
    assert {record["case"].partition(",")[0] for record in records} == {"mtp"}
    assert [record["metric"] for record in records] == [
        "tokens_per_s",
        "tokens_per_s",
        "accepted",
        "match",
    ]
