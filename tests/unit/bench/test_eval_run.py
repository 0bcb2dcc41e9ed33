"""`afd eval` from command line to exit status, with made-up servers in place of vLLM."""

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml
from eval_fakes import VOCAB, FakeServer, Model, logprobs, served

from afd.errors import AfdError
from afd.records import read_records
from afd.texts import Text
from afd_bench.eval import run
from afd_bench.eval.cases import REDUCES
from afd_bench.eval.numbers import numbers
from afd_bench.eval.scoring import Effort, prepare, score
from afd_bench.servers import Server
from afd_launch.cli import main

EFFORT = Effort(tokens=300, cloze=4, whole=20, window=32, stride=16, top=16)
PASSAGES = [
    " ".join(f"{chr(97 + (i * j) % 26)}{(i + j) % 10}" for j in range(1, 23)) for i in range(8)
]


def test_scores_are_the_models_own_numbers() -> None:
    text = Text("t", ("hello there, this is a document of more than one window", "and another"))
    with served(Model()) as server:
        material = prepare(server, text, EFFORT)
        found = score(server, material, vocabulary=VOCAB)
    tokens = [list(document.encode()) for document in text.documents]
    expected = [logprobs(t[i - 1], 0.0)[t[i]] for t in tokens for i in range(1, len(t))]
    assert [v for window in found.own for v in window] == pytest.approx(expected)
    assert [len(p) for window in found.positions for p in window] == [16] * len(expected)
    assert {len(p) for window in found.whole for p in window} == {VOCAB}
    assert material.cloze == () and found.cloze == []


def test_cloze_options_are_scored_by_their_own_tokens() -> None:
    with served(Model()) as server:
        material = prepare(server, Text("t", tuple(PASSAGES)), EFFORT)
        found = score(server, material)
    assert len(material.cloze) == len(material.answers) == len(found.cloze) == 4
    option = material.cloze[0][2]
    read = [*option.prompt, *option.continuation]
    at = range(len(option.prompt), len(read))
    assert found.cloze[0][2] == pytest.approx(sum(logprobs(read[i - 1], 0.0)[read[i]] for i in at))
    assert found.whole == [], "the whole vocabulary is asked for where it is wanted only"


def test_numbers_grow_with_the_error() -> None:
    text = Text("t", tuple(PASSAGES))
    with served(Model()) as peer, served(Model(0.02)) as close, served(Model(0.4)) as far:
        material = prepare(peer, text, EFFORT)
        base, near, off = (score(s, material, vocabulary=VOCAB) for s in (peer, close, far))
    same = numbers(base, base, material.answers, material.top)
    assert (same.kl, same.top1, same.perplexity) == (0.0, 1.0, same.peer_perplexity)
    assert same.cloze is not None and same.cloze.same == 1.0
    assert same.whole is not None and (same.whole.kl, same.whole.share) == (0.0, 1.0)
    first, second = (numbers(s, base, material.answers, material.top) for s in (near, off))
    assert 0.0 < first.kl < second.kl and second.top1 < 1.0
    assert first.whole is not None and 0.0 < first.whole.share <= 1.0
    assert same.positions == sum(len(window.continuation) for window in material.windows)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    shipped = Path(__file__).parents[3] / "afd_launch/data/demo/afd-tiny-chat"
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(shipped / "config.json", model)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "vocab_size": VOCAB}))
    (model / "heldout-chat.txt").write_text("\n---\n".join(PASSAGES))
    path = tmp_path / "d.yaml"
    path.write_text(yaml.safe_dump({"model": "model", "pipeline": {"depth": 2}}))
    return path


@pytest.fixture
def systems(monkeypatch: pytest.MonkeyPatch) -> dict[str, Model]:
    """Wire format -> the model that its deployments serve; "peer" is colocated vLLM's."""
    models = {"peer": Model(), "exact": Model(), "fp8": Model(0.001), "mxfp4": Model(0.02)}

    @contextlib.contextmanager
    def colocated(*_: object, **__: object) -> Iterator[FakeServer]:
        with served(models["peer"]) as server:
            yield server

    @contextlib.contextmanager
    def disaggregated(file: Mapping[str, Mapping[str, str]], **_: object) -> Iterator[FakeServer]:
        with served(models[file["wire"]["format"]]) as server:
            yield server

    monkeypatch.setattr(run, "colocated", colocated)
    monkeypatch.setattr(run, "disaggregated", disaggregated)
    monkeypatch.setattr(run, "_PROPAGATION_S", 0.0)
    return models


def evaluate(config: Path, *args: str) -> int:
    return main(["eval", str(config), *args])


def test_every_case_is_run_written_and_judged(
    config: Path, systems: dict[str, Model], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    page = tmp_path / "page.md"
    page.write_text("<!-- afd eval: begin --><!-- afd eval: end -->")
    assert evaluate(config, "--out", str(out), "--page", str(page), "--at-once", "3") == 0
    found = read_records(out / "eval.json")
    assert {r.case for r in found if r.metric == "kl"} == {
        f"{wire} exact {depth} 1A1F bfloat16 heldout-chat"
        for wire in ("exact", "fp8", "mxfp4")
        for depth in (1, 2)
    }
    assert {r.command for r in found} == {f"afd eval {config}"}
    whole = [r.case for r in found if r.metric == "kl_whole_vocabulary"]
    assert all(" 2 " in case for case in whole) and whole, "what takes long is done once"
    assert "| exact | exact | 1, 2 | 1A1F |" in page.read_text()
    assert "Every case is within its limits." in (out / "eval.md").read_text()
    assert capsys.readouterr().out.count("within limits") == 6


def test_ranks_are_run_with_every_reduce_format(
    config: Path, systems: dict[str, Model], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    evaluate(config, "--tp", "2", "--wire", "fp8", "--quick", "--out", str(out))
    found = read_records(out / "eval.json")
    assert {r.case for r in found} == {
        f"fp8 {reduce} 2 1A1F/TP2 bfloat16 heldout-chat" for reduce in REDUCES
    }
    assert {r.command for r in found} == {f"afd eval {config} --wire fp8 --tp 2 --quick"}


def test_a_limit_that_is_not_kept_is_told_and_exits_with_1(
    config: Path, systems: dict[str, Model], capsys: pytest.CaptureFixture[str]
) -> None:
    systems["exact"].error = 0.01
    assert evaluate(config, "--wire", "exact", "--quick") == 1
    out = capsys.readouterr().out
    assert "afd eval: exact exact 2 1A1F bfloat16 heldout-chat: KL is" in out
    assert " exact 1 " not in out, "quick runs the deepest depth only"


def test_a_depth_that_did_not_run_is_an_error(
    config: Path, systems: dict[str, Model], capsys: pytest.CaptureFixture[str]
) -> None:
    systems["fp8"].stuck = True
    assert evaluate(config, "--wire", "fp8", "--depth", "2") == 2
    assert "depth 2 was set, but the steps by depth are {1: " in capsys.readouterr().err


def test_a_prefix_cache_that_hides_positions_is_an_error(
    config: Path, systems: dict[str, Model], capsys: pytest.CaptureFixture[str]
) -> None:
    class Caching(Model):
        def metrics(self) -> str:
            self.prefix_hits += 16
            return super().metrics()

    systems["exact"] = Caching()
    assert evaluate(config, "--wire", "exact", "--quick") == 2
    assert "read 16 prompt tokens from its prefix cache" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--wire", "fp9"], "wire format 'fp9' is unknown; use exact or fp8 or mxfp4"),
        (["--depth", "4"], "--depth 4 is out of range; use 1 to 3"),
        (["--depth", "x"], "--depth x is not a list of whole numbers"),
        (["--tp", "0"], "--tp 0 is not a number of ranks"),
        (["--reduce", "int8"], "on FFN instances of one rank; add --tp 2"),
        (["--reduce", "avg", "--tp", "2"], "reduce format 'avg' is unknown; use exact or int8"),
        (["--ffn", "0"], "--ffn 0 is not a number of FFN instances"),
        (["--dtype", "int3"], "dtype 'int3' is unknown"),
        (["--page", "x.md"], "--page needs the results in --out DIR; add --out"),
        (["--page", "x.md", "--out", "."], "cannot read the page x.md: No such file"),
        (["--at-once", "0"], "--at-once 0 is not a number of servers"),
        (["--text", "missing.txt"], "cannot read the text missing.txt"),
        (["--set", "ffn.device=cuda", "--set", "attention.device=cuda"], "on CPU only"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    config: Path, args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(config, *args) == 2
    assert words in capsys.readouterr().err


def test_servers_that_started_are_stopped_when_another_one_does_not_start() -> None:
    events: list[str] = []

    @contextlib.contextmanager
    def good() -> Iterator[Server]:
        events.append("up")
        try:
            yield Server("", "", Path("none"), "", 0)
        finally:
            events.append("down")

    @contextlib.contextmanager
    def bad() -> Iterator[Server]:
        raise AfdError("it did not start")
        yield

    with pytest.raises(AfdError, match="it did not start"), run.opened([good, bad, good]):
        pytest.fail("one of them did not start")
    assert sorted(events) == ["down", "down", "up", "up"]
