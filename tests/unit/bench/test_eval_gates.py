"""Cases, limits, records and pages of `afd eval`."""

from dataclasses import replace
from pathlib import Path

import pytest

from afd.config.deployment import Deployment
from afd.errors import ConfigError
from afd.records import read_records
from afd_bench.eval.cases import REDUCES, WIRES, Case, Target, deployment_file, parse_case, targets
from afd_bench.eval.gates import GATES, KL_GOAL, TOKENS, Reading, breaches, gate_of
from afd_bench.eval.numbers import Cloze, Numbers, Whole, likeliest, perplexity
from afd_bench.eval.report import (
    Origin,
    by_case,
    gate_table,
    insert,
    kl_ratio,
    page,
    reading,
    records,
    table,
    wire_bytes,
)

ROOT = Path(__file__).parents[3]
ORIGIN = Origin("2 cores", "afd eval x.yaml", "2026-01-01")
EXACT = Case("exact", "exact", 3, "1A1F", "bfloat16", "heldout")
FP8 = Case("fp8", "exact", 2, "1A2F", "bfloat16", "heldout-chat")
SAME = Numbers(0.0, 1.0, 0.95, 100, 7.5, 7.5, Cloze(0.8, 0.8, 1.0), Whole(0.0, 1.0))


def test_every_format_of_the_deployment_file_is_run() -> None:
    assert WIRES == ("exact", "fp8", "mxfp4")
    assert REDUCES == ("exact", "int8", "int6", "int4", "fp4")
    for wire in WIRES:
        Deployment.from_plain({"model": "m", "wire": {"format": wire}})
    for reduce in REDUCES:
        Deployment.from_plain({"model": "m", "ffn": {"tp": 2, "reduce": reduce}})


def test_targets_are_every_combination() -> None:
    found = list(targets(1, (1, 2), "float32", ("exact", "fp8")))
    assert [t.name for t in found] == [
        "exact exact 1A1F float32",
        "fp8 exact 1A1F float32",
        "exact exact 1A2F float32",
        "fp8 exact 1A2F float32",
    ]
    ranks = targets(2, (1,), "bfloat16", ("fp8",), (1, 2), ("exact", "int4"))
    assert [t.name for t in ranks] == [
        "fp8 exact 2A1F bfloat16",
        "fp8 exact 2A1F/TP2 bfloat16",
        "fp8 int4 2A1F/TP2 bfloat16",
    ], "one rank adds nothing up, so there is nothing lossy about it"
    with pytest.raises(
        ConfigError, match="wire format 'fp9' is unknown; use exact or fp8 or mxfp4"
    ):
        list(targets(1, (1,), "float32", ("fp9",)))
    with pytest.raises(ConfigError, match="reduce format 'avg' is unknown; use exact or int8"):
        list(targets(1, (1,), "float32", WIRES, (2,), ("avg",)))
    with pytest.raises(ConfigError, match=r"--reduce int8,int6 has no effect on FFN .* add --tp 2"):
        list(targets(1, (1,), "float32", WIRES, (1,), ("int8", "int6")))


def test_case_names_are_read_back() -> None:
    assert FP8.name == "fp8 exact 2 1A2F bfloat16 heldout-chat"
    for case in (EXACT, FP8, replace(FP8, text="a text with spaces")):
        assert parse_case(case.name) == case


def test_a_deployment_over_hosts_runs_on_this_one() -> None:
    base = Deployment.from_plain(
        {
            "model": "m",
            "attention": {"host": "10.0.0.1", "vllm_args": ["--a"], "instances": 2},
            "ffn": {"cpus": [[0]]},
            "transport": {"host": "10.0.0.1", "backend": "tcp"},
            "control": {"keys": "k"},
        }
    )
    file = deployment_file(base, Target("fp8", "exact", 2, 2, "float32"), 2, ["--b"])
    assert Deployment.from_plain(file) == Deployment.from_plain(
        {
            "model": "m",
            "attention": {"vllm_args": ["--a", "--b"], "instances": 2, "dtype": "float32"},
            "ffn": {"instances": 2},
            "pipeline": {"depth": 2},
            "wire": {"format": "fp8"},
            "transport": {"backend": "tcp"},
            "restart": {"standby": False},
        }
    )
    kept = deployment_file(base, Target("exact", "exact", 2, 1, "float32"), 2, [])
    assert Deployment.from_plain(kept).ffn.cpus == ((0,),)
    ranks = deployment_file(base, Target("exact", "int6", 2, 1, "float32", tp=2), 2, [])
    ffn = Deployment.from_plain(ranks).ffn
    assert (ffn.instances, ffn.tp, ffn.reduce, ffn.cpus) == (1, 2, "int6", "auto")


def test_the_first_matching_gate_holds() -> None:
    exact = gate_of(EXACT)
    assert exact is not None and (exact.kl, exact.perplexity, exact.top1) == (0.0, 0.0, 1.0)
    two = gate_of(replace(EXACT, topology="2A2F", text="heldout-chat"))
    assert two is not None and 0.0 < two.kl <= KL_GOAL
    narrow = gate_of(replace(EXACT, topology="1A2F", dtype="float32"))
    assert narrow is not None and narrow.kl <= 1e-5
    goal = gate_of(replace(FP8, text="another"))
    assert goal is not None and (goal.kl, goal.perplexity) == (1e-3, 1e-3)
    assert gate_of(replace(FP8, wire="new")) is None
    assert list(breaches(replace(FP8, wire="new"), Reading(9.0, 1.0, 9.0, 0.0, 0.0, TOKENS))) == []


def test_identical_numbers_keep_every_limit() -> None:
    for gate in GATES:
        topology = "1A1F" if gate.ffn != ">1F" else "1A2F"
        case = Case(gate.wire, gate.reduce, 1, topology, gate.dtype, gate.text)
        assert gate_of(case) is gate
        assert list(breaches(case, Reading(0.0, 5.0, 5.0, 1.0, 1.0, TOKENS))) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kl": 1e-9}, "KL is 1.00e-09 nats, above the limit 0 "),
        (
            {"perplexity": 7.5001},
            "perplexity 7.5001 differs by 0.001% from colocated vLLM's 7.5000",
        ),
        ({"perplexity": 7.4}, "the limit for 6144 tokens is 0.000%"),
        ({"top1": 0.99}, "0.9900 of the most likely tokens are equal, below the limit 1 "),
        ({"cloze_same": 0.9}, "0.900 of the cloze choices are equal, below the limit 1 "),
    ],
)
def test_each_limit_is_told_in_a_sentence(change: dict[str, float], words: str) -> None:
    good = Reading(0.0, 7.5, 7.5, 1.0, 1.0, TOKENS)
    (line,) = breaches(EXACT, replace(good, **change))
    assert line.startswith("exact exact 3 1A1F bfloat16 heldout: ") and words in line
    assert list(breaches(EXACT, replace(good, cloze_same=None))) == []


def test_the_perplexity_of_fewer_tokens_may_change_more() -> None:
    """0.1 % on 6,144 tokens is 0.2 % on a quarter of them, and stays 0.1 % on more."""
    half_more = Reading(0.0, 1.0015, 1.0, 1.0, 1.0, TOKENS // 4)
    assert list(breaches(FP8, half_more)) == []
    for positions in (TOKENS, 4 * TOKENS):
        (line,) = breaches(FP8, replace(half_more, positions=positions))
        assert f"the limit for {positions} tokens is 0.100%" in line
    (line,) = breaches(FP8, replace(half_more, perplexity=1.0025))
    assert "the limit for 1536 tokens is 0.200%" in line
    assert list(breaches(EXACT, half_more)), "nothing at all stays nothing"


def test_perplexity_is_of_tokens_not_of_windows() -> None:
    assert perplexity([[-1.0], [-2.0, -3.0]]) == pytest.approx(7.38905609893)


def test_likeliest_cuts_as_a_server_would() -> None:
    assert likeliest({5: -1.0, 3: -1.0, 9: -0.5}, 2) == {9: -0.5, 3: -1.0}


def test_wire_bytes_count_both_ways() -> None:
    """hidden 256, 4 experts: ids and weights are 8 bytes per expert."""
    assert wire_bytes("exact", "bfloat16", 256, 4).ours == 512 + 32 + 512
    size = wire_bytes("fp8", "float32", 256, 4)
    assert (size.ours, size.peer) == (256 + 8 + 32 + 512, 1024 + 32 + 1024)


def test_records_say_more_is_better() -> None:
    size = wire_bytes("fp8", "bfloat16", 256, 4)
    lossy = replace(SAME, kl=2e-3, perplexity=8.0, top1=0.9, cloze=Cloze(0.6, 0.8, 0.7))
    found = {r.metric: r for r in records(FP8, lossy, size, ORIGIN)}
    assert {r.bench for r in found.values()} == {"eval"}
    assert {r.peer for r in found.values()} == {"vllm colocated"}
    ratios = {metric: r.ratio for metric, r in found.items()}
    assert ratios["kl"] == pytest.approx(0.5)
    assert ratios["perplexity"] == pytest.approx(7.5 / 8.0)
    assert ratios["top1"] == 0.9
    assert ratios["cloze"] == pytest.approx(0.75)
    assert ratios["cloze_same"] == 0.7
    assert ratios["wire_bytes"] == pytest.approx(size.peer / size.ours)
    assert found["perplexity"].peer_value == 7.5
    bare = records(EXACT, replace(SAME, cloze=None, whole=None), size, ORIGIN)
    assert {"cloze", "kl_whole_vocabulary"}.isdisjoint(r.metric for r in bare)
    assert reading({r.metric: r for r in bare}).cloze_same is None


def test_no_cloze_right_on_either_side_is_no_loss() -> None:
    none = replace(SAME, cloze=Cloze(0.0, 0.0, 1.0))
    size = wire_bytes("exact", "bfloat16", 256, 4)
    assert {r.metric: r.ratio for r in records(EXACT, none, size, ORIGIN)}["cloze"] == 1.0


def test_kl_ratio_is_finite_and_one_where_nothing_is_lost() -> None:
    assert kl_ratio(EXACT, 0.0) == 1.0
    assert kl_ratio(EXACT, 1e-4) == pytest.approx(0.01)
    assert kl_ratio(FP8, 0.0) == pytest.approx(1000.0)
    assert kl_ratio(FP8, 1e-2) == pytest.approx(0.1)
    wide = replace(FP8, wire="mxfp4", text="heldout")
    assert kl_ratio(wide, 5e-3) == pytest.approx(0.2), "held to the goal"


def rows_of(*cases: tuple[Case, Numbers]) -> list[str]:
    size = wire_bytes("exact", "bfloat16", 256, 4)
    return table([r for case, found in cases for r in records(case, found, size, ORIGIN)])


def test_depths_with_the_same_numbers_share_a_row() -> None:
    first = replace(SAME, whole=None)
    rows = rows_of((replace(EXACT, depth=1), first), (replace(EXACT, depth=3), SAME))
    assert rows[2:] == [
        "| exact | exact | 1, 3 | 1A1F | bfloat16 | heldout | 0 | 0 | 7.5000 | 7.5000 | +0.000% "
        "| 1.0000 | 0.800 | 0.800 | 1.000 |"
    ]
    noise = replace(first, kl=-3e-9)
    assert "| heldout | < 1e-06 |" in rows_of((EXACT, noise))[2]
    other = replace(first, kl=2e-5, cloze=None)
    rows = rows_of((replace(EXACT, depth=1), first), (replace(EXACT, depth=2), other))
    assert len(rows) == 4
    assert rows[3].endswith("| 2.0e-05 |  | 7.5000 | 7.5000 | +0.000% | 1.0000 |  |  |  |")


def test_the_page_names_what_is_beyond_its_limits() -> None:
    size = wire_bytes("exact", "bfloat16", 256, 4)
    good = records(EXACT, SAME, size, ORIGIN)
    assert "Every case is within its limits." in page(good)
    assert "above the goal" not in page(good)
    wide = replace(FP8, wire="mxfp4", text="heldout")
    missed = page(records(wide, replace(SAME, kl=5e-3), size, ORIGIN))
    assert "Every case is within its limits." in missed
    assert f"## KL above the goal of 0.001 nats\n\n- {wide.name}: 5.0e-03\n" in missed
    bad = records(FP8, replace(SAME, kl=0.5), size, ORIGIN)
    text = page([*good, *bad])
    assert "## Exceeded limits" in text
    assert f"- {FP8.name}: KL is 5.00e-01 nats" in text
    assert "`heldout`: 100 scored tokens; the compared tokens cover 95.0%" in text
    assert "`afd eval x.yaml`, 2 cores, 2026-01-01." in text


def test_a_table_is_put_between_its_markers() -> None:
    begin, end = "<!-- afd eval: begin -->", "<!-- afd eval: end -->"
    page_text = f"a\n{begin}\nold\n{end}\nb\n"
    once = insert(page_text, ["new"], "p.md")
    assert once == f"a\n{begin}\n\nnew\n\n{end}\nb\n"
    assert insert(once, ["new"], "p.md") == once
    with pytest.raises(ConfigError, match=r"p\.md has no lines"):
        insert("a", ["new"], "p.md")


def test_the_formats_page_holds_the_results_and_the_limits() -> None:
    found = read_records(ROOT / "docs" / "results" / "eval.json")
    content = (ROOT / "docs" / "formats.md").read_text()
    assert found and insert(content, table(found), "formats.md") == content
    assert "\n".join(gate_table()) in content
    assert {"exact", "fp8"} <= {case.wire for case in by_case(found)} <= set(WIRES)
    assert (ROOT / "docs" / "results" / "eval.md").read_text() == page(found)
