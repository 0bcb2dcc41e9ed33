"""The accuracy gate on the trained model: `afd eval --quick`, as CI runs it.

Three servers run at once: colocated vLLM and one deployment per wire format. The dtype is float32,
so that results do not depend on the processor's bfloat16 instructions.
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


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    config = ROOT / "afd_launch/data/demo/demo.yaml"
    args = ["--quick", "--dtype", "float32", "--at-once", "3", "--out", str(folder)]
    assert main(["eval", str(config), *args]) == 0, "a limit of afd_bench/eval/gates.py is exceeded"
    return folder


@pytest.fixture(scope="module")
def found(out: Path) -> dict[tuple[str, str], Record]:
    return {(r.case, r.metric): r for r in read_records(out / "eval.json")}


def test_every_wire_format_is_measured_on_every_text(
    found: dict[tuple[str, str], Record],
) -> None:
    cases = {f"{wire} exact 3 1A1F float32 {text}" for wire in WIRES for text in TEXTS}
    assert {case for case, _ in found} == cases
    for case in cases:
        tokens = found[case, "positions"].value
        assert 0.8 * QUICK.tokens < tokens < 1.2 * QUICK.tokens


@pytest.mark.parametrize("text", TEXTS)
def test_the_exact_wire_equals_colocated_vllm(
    found: dict[tuple[str, str], Record], text: str
) -> None:
    case = f"exact exact 3 1A1F float32 {text}"
    assert found[case, "kl"].value == 0.0
    assert found[case, "top1"].value == found[case, "cloze_same"].value == 1.0
    assert found[case, "perplexity"].value == found[case, "perplexity"].peer_value


def test_the_model_predicts_far_better_than_chance(found: dict[tuple[str, str], Record]) -> None:
    """Otherwise agreement would prove nothing. Chance: perplexity 8192, and 1 in 4 for cloze."""
    for text, perplexity in (("heldout-chat", 2.0), ("heldout", 100.0)):
        case = f"exact exact 3 1A1F float32 {text}"
        assert found[case, "perplexity"].value < perplexity
        assert found[case, "cloze"].value > 0.5


def test_fp8_differs_measurably_from_exact(found: dict[tuple[str, str], Record]) -> None:
    """A comparison that cannot detect rounding would pass every wire format."""
    for text in TEXTS:
        assert found[f"fp8 exact 3 1A1F float32 {text}", "kl"].value > 1e-5


def test_the_page_is_written(out: Path) -> None:
    assert "Every case is within its limits." in (out / "eval.md").read_text()
