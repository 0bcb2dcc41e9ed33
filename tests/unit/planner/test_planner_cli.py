"""`afd plan` on the command line: files, a one-sentence error for every mistake, and speed."""

import json
import re
from pathlib import Path

import pytest
from planner_support import is_quick

from afd.config.deployment import load_config
from afd_launch import cli
from afd_planner.cost.shape import Efficiency
from afd_planner.facts.hardware import accelerators
from afd_planner.facts.model_hf import models
from afd_planner.facts.precision import PRECISIONS
from afd_planner.report.presets import FOLDER


def plan(*argv: str) -> int:
    return cli.main(["plan", *argv])


def test_a_plan_with_all_its_files(tmp_path, capsys):
    data, config = tmp_path / "p.json", tmp_path / "d.yaml"
    argv = ["deepseek-v3", "--accelerators", "h800", "--gpus", "64"]
    assert plan(*argv, "--json", str(data), "--emit", str(config)) == 0
    told = capsys.readouterr().out
    assert "DeepSeek-V3 on h800" in told and f"{config} written" in told
    found = json.loads(data.read_text())
    assert found["request"]["gpus"] == 64
    assert load_config(config).pipeline.depth == found["disaggregated"]["unit"]["depth"]
    assert cli.main(["serve", "--check-file", str(config)]) == 0


def test_a_report(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra plan is not installed")
    path = tmp_path / "r.png"
    assert plan("qwen3-30b-a3b", "--accelerators", "h800", "--report", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_mixed_pools_and_distributions(capsys):
    argv = ["qwen3-235b-a22b", "--accelerators", "h800,h20", "--context", "4k:0.8,16k:0.2"]
    assert plan(*argv) == 0
    assert "h800/h20, mean 6554, longest 16384 tokens" in capsys.readouterr().out
    assert plan("step-3", "--attention", "h20", "--ffn", "h800") == 0
    assert "h20 (attention) and h800 (FFN)" in capsys.readouterr().out


def test_partitions_carry_their_warning(capsys):
    assert plan("qwen3-30b-a3b", "--accelerators", "mi300x/cpx-nps4", "--gpus", "64") == 0
    assert "note: mi300x/cpx-nps4 counts partitions;" in capsys.readouterr().out


def test_speculation_and_fixed_choices(capsys):
    argv = ["step-3", "--accelerators", "h800", "--accepted", "1.8", "--depth", "3"]
    assert plan(*argv, "--wire", "exact", "--routing", "even", "--precision", "bf16") == 0
    told = capsys.readouterr().out
    assert "1.8 of 2 tokens accepted per step" in told
    assert "depth 3, exact wire" in told and "expert load: even" in told


def test_any_checkpoint_folder_can_be_planned(tmp_path, capsys):
    from afd_planner.report.presets import config_text

    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(config_text("qwen3-30b-a3b"))
    emitted = tmp_path / "d.yaml"
    assert plan(str(folder), "--accelerators", "h200", "--gpus", "8", "--emit", str(emitted)) == 0
    assert load_config(emitted).model == folder
    assert "mine on h200" in capsys.readouterr().out


def test_the_output_names_measured_and_modelled_stages(tmp_path, capsys):
    path = tmp_path / "times.json"
    points = [{"rows": n, "us": 100 + n / 20} for n in (1, 1024, 8192)]
    about = {"format": "afd-stage-times-1", "machine": "two cores"}
    path.write_text(json.dumps({**about, "ffn": points}))
    assert plan("qwen3-30b-a3b", "--accelerators", "h800", "--measured", str(path)) == 0
    told = capsys.readouterr().out
    assert "measured: ffn (two cores)" in told and "modelled: attention, wire, rest" in told


def test_stated_layouts(capsys):
    argv = ["step-3", "--accelerators", "h800", "--precision", "all-fp8", "--batch", "6144"]
    assert plan(*argv, "--layout", "2A2F", "--layout", "DP32+EP", "--depth", "3") == 0
    told = capsys.readouterr().out
    assert "2A2F, instances of 8 h800" in told and "attention DP32, FFN EP32" in told
    assert "2048" in told  # rows per micro-batch


def test_more_experts_per_token_than_experts_are_one_sentence(tmp_path, capsys):
    from afd_planner.report.presets import config_text

    config = config_text("qwen3-30b-a3b").replace('_per_tok": 8', '_per_tok": 200')
    (tmp_path / "config.json").write_text(config)
    assert plan(str(tmp_path), "--accelerators", "h200") == 2
    assert "a row cannot use 200 of 128 experts" in capsys.readouterr().err


def test_the_list_names_all_models_accelerators_and_settings(capsys):
    assert plan("--list") == 0
    told = " ".join(capsys.readouterr().out.split())
    for name in (*models(), *accelerators(), *PRECISIONS, *vars(Efficiency()), "mi300x/cpx-nps4"):
        assert name in told
    assert f"presets {FOLDER} " in told and "simulations" in told


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["deepseek-v9", "--accelerators", "h800"], "did you mean deepseek-v3"),
        (["step-3", "--accelerators", "h80"], "did you mean h800"),
        (["step-3"], "needs --accelerators A[,B]"),
        ([], "afd plan needs a model"),
        (["step-3", "--accelerators", "h800", "--ffn", "h20"], "give either --accelerators"),
        (["step-3", "--accelerators", "h800", "--tpot", "3"], "smallest feasible one is"),
        (["step-3", "--accelerators", "h800", "--gpus", "1"], "it needs at least"),
        (["step-3", "--accelerators", "h800", "--context", "x"], "is not a context length"),
        (["step-3", "--accelerators", "h800", "--context", "1000k"], "reads at most 65536"),
        (["step-3", "--accelerators", "h800", "--precision", "fp7"], "precision 'fp7' is unknown"),
        (["step-3", "--accelerators", "h800", "--efficiency", "netwrk=1"], "did you mean network"),
        (["step-3", "--accelerators", "h800", "--efficiency", "network=x"], "KEY=NUMBER"),
        (["step-3", "--accelerators", "h800", "--routing", "gone.json"], "cannot read routing"),
        (["step-3", "--accelerators", "h800", "--tokens-per-s", "inf"], "inf tokens/s is invalid"),
        (["step-3", "--accelerators", "h800", "--tokens-per-s", "nan"], "nan tokens/s is invalid"),
        (["step-3", "--accelerators", "h800", "--accepted", "nan"], "--accepted nan is out of"),
        (["step-3", "--accelerators", "h800", "--accepted", "inf"], "--accepted inf is out of"),
        (["step-3", "--accelerators", "h800", "--tpot", "nan"], "a TPOT of nan ms is out of"),
        (
            ["step-3", "--accelerators", "h800", "--efficiency", "wire_latency_s=nan"],
            "wire_latency_s is nan; give seconds",
        ),
        (
            ["step-3", "--accelerators", "h800", "--efficiency", "wire_latency_s=-1"],
            "wire_latency_s is -1.0; give seconds",
        ),
        (["step-3", "--accelerators", "h800", "--efficiency", "memory=nan"], "memory is nan"),
        (["step-3", "--accelerators", "h800", "--layout", "2A"], "--layout 2A is not a layout"),
        (["step-3", "--accelerators", "h800", "--batch", "8"], "--batch needs a --layout"),
        (["step-3", "--accelerators", "h800", "--layout", "1A1Fx1"], "--layout 1A1Fx1 does not"),
        (["step-3", "--accelerators", "h800", "--measured", "gone.json"], "cannot read"),
        (["step-3", "--accelerators", "h800", "--report", "x.pdf"], "must end in .html or .png"),
    ],
)
def test_mistakes_are_one_sentence(argv, message, capsys):
    assert plan(*argv) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1 and told.startswith("afd: error: ")


def test_the_examples_in_the_docs_equal_the_output(capsys):
    """If this fails after a change of the planner, paste the new output into docs/planner.md."""
    page = (Path(__file__).parents[3] / "docs" / "planner.md").read_text()
    examples = re.findall(r"^```\n\$ afd plan (.+)\n((?:.|\n)+?)^```", page, re.M)
    assert len(examples) == 2
    for argv, shown in examples:
        assert plan(*argv.split()) == 0
        assert capsys.readouterr().out == shown


@pytest.mark.parametrize("name", models())
def test_every_known_model_is_planned_in_time(name, capsys):
    def planned() -> None:
        assert plan(name, "--accelerators", "h200", "--gpus", "64") == 0
        told = capsys.readouterr().out
        assert "isaggregate" in told or "Undecided" in told

    assert is_quick(planned)
