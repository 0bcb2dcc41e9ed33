"""The accuracy gate on the trained model: `afd eval --quick`, as CI runs it.

CI measures the FP8 wire; the long tests every wire format. All servers run at once: colocated vLLM
and one deployment per wire format. The dtype is float32, so that results do not depend on the
processor's bfloat16 instructions.
"""

from pathlib import Path

import pytest

from afd.records import Record, read_records
from afd_bench.eval.cases import WIRES
from afd_bench.eval.options import QUICK
from afd_launch.cli import main

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.serve
TEXTS = ("heldout-chat", "heldout")
Found = dict[tuple[str, str], Record]


def evaluated(folder: Path, *wires: str) -> Path:
    config = ROOT / "afd_launch/data/demo/demo.yaml"
    args = ["--quick", "--dtype", "float32", "--at-once", "3", "--out", str(folder)]
    status = main(["eval", str(config), "--wire", ",".join(wires), *args])
    assert status == 0, "a limit of afd_bench/eval/gates.py is exceeded"
    return folder


def records(folder: Path) -> Found:
    return {(r.case, r.metric): r for r in read_records(folder / "eval.json")}


def check_cases(found: Found, *wires: str) -> None:
    cases = {f"{wire} exact 3 1A1F float32 {text}" for wire in wires for text in TEXTS}
    assert {case for case, _ in found} == cases
    for case in cases:
        tokens = found[case, "positions"].value
        assert 0.8 * QUICK.tokens < tokens < 1.2 * QUICK.tokens


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return evaluated(tmp_path_factory.mktemp("eval"), "fp8")


def test_the_wire_is_measured_on_every_text(out: Path) -> None:
    check_cases(records(out), "fp8")


def test_the_model_predicts_far_better_than_chance(out: Path) -> None:
    """Otherwise agreement would prove nothing. Chance: perplexity 8192, and 1 in 4 for cloze."""
    found = records(out)
    for text, perplexity in (("heldout-chat", 2.0), ("heldout", 100.0)):
        case = f"fp8 exact 3 1A1F float32 {text}"
        assert (found[case, "perplexity"].peer_value or perplexity) < perplexity
        assert found[case, "cloze"].value > 0.5


def test_fp8_differs_measurably_from_exact(out: Path) -> None:
    """A comparison that cannot detect rounding would pass every wire format."""
    for text in TEXTS:
        assert records(out)[f"fp8 exact 3 1A1F float32 {text}", "kl"].value > 1e-5


def test_the_page_is_written(out: Path) -> None:
    assert "Every case is within its limits." in (out / "eval.md").read_text()


@pytest.mark.long
def test_the_exact_wire_equals_colocated_vllm(tmp_path: Path) -> None:
    found = records(evaluated(tmp_path, *WIRES))
    check_cases(found, *WIRES)
    for text in TEXTS:
        case = f"exact exact 3 1A1F float32 {text}"
        assert found[case, "kl"].value == 0.0
        assert found[case, "top1"].value == found[case, "cloze_same"].value == 1.0
        assert found[case, "perplexity"].value == found[case, "perplexity"].peer_value
