"""From measurements to findings, records and page; the matrix of cases. No server starts."""

import math
from concurrent.futures import Future
from pathlib import Path

import pytest

from afd.config.deployment import Deployment
from afd.errors import AfdError, ConfigError
from afd.records import Record, read_records
from afd_bench import identity
from afd_bench.cases import KV_BLOCKS, Case, cases, deployment, instances
from afd_bench.differences import KL_TARGET, findings
from afd_bench.identity_report import report
from afd_bench.measure import Counters, Measured, Run, Workload, check_depth, read_counters
from afd_bench.workload import Answer

FLOAT32 = Case("qwen3_moe", "float32", "exact", "1A1F")
BFLOAT16 = Case("qwen3_moe", "bfloat16", "exact", "2A2F")
EVEN = [[{1: math.log(0.5), 2: math.log(0.5)}]]
SKEWED = [[{1: math.log(0.25), 2: math.log(0.75)}]]
ZERO = Counters(0, 0, {})


def run(*tokens: tuple[int, ...], scores: list | None = None) -> Run:
    answers = [Answer(t, (1.0,) * len(t)) for t in tokens]
    given = scores or []
    return Run(answers, answers if given else [], given, given)


def test_float32_differences_are_faults_that_name_the_token() -> None:
    reference = Measured({1: run((1, 2), (3, 4))}, ZERO)
    measured = Measured({1: run((1, 2), (3, 5)), 2: run((1, 2), (3, 4))}, Counters(2, 96, {}))
    found = {(f.case, f.metric): f for f in findings(FLOAT32, measured, reference, None)}
    bad = found["qwen3_moe float32 1A1F depth1", "match"]
    assert bad.value == bad.ratio == 0.5
    assert bad.is_fault
    assert "request 1 differs from token 1 of 2" in bad.details[0]
    good = found["qwen3_moe float32 1A1F depth2", "match"]
    assert good.value == 1.0
    assert not good.is_fault
    assert found["qwen3_moe float32 1A1F", "preemptions"].value == 2
    assert found["qwen3_moe float32 1A1F", "preemptions"].ratio == 1.0


def test_bfloat16_is_held_against_what_rounding_does_to_the_reference() -> None:
    even = run((1,), scores=EVEN)
    reference = Measured({1: even, 2: even}, ZERO, (SKEWED, SKEWED))
    float32 = Measured({1: even}, ZERO, (EVEN, EVEN))
    measured = Measured({1: run((2,), scores=SKEWED)}, ZERO)
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    found = {(f.case, f.metric): f for f in findings(BFLOAT16, measured, reference, float32)}
    kl = found["qwen3_moe bfloat16 exact 2A2F depth1", "kl"]
    assert kl.value == pytest.approx(expected)
    assert kl.peer_value == pytest.approx(expected)  # here the yardstick is as far away
    assert kl.ratio == pytest.approx(1.0)
    assert found["qwen3_moe bfloat16 2A2F depth1", "match"].value == 0.0
    assert not any(f.is_fault for f in found.values())
    alone = findings(BFLOAT16, measured, reference, None)
    assert {f.peer_value for f in alone if f.metric == "kl"} == {KL_TARGET}


def test_a_reference_is_compared_with_itself_and_with_float32() -> None:
    even = run((1,), scores=EVEN)
    reference = Measured({1: even, 2: even}, ZERO, (SKEWED, SKEWED))
    float32 = Measured({1: even}, ZERO, (EVEN, EVEN))
    found = findings(BFLOAT16.reference, reference, reference, float32)
    names = {f.case for f in found if f.metric in ("match", "kl")}
    assert names == {
        "qwen3_moe bfloat16 colocated again",
        "qwen3_moe bfloat16 colocated again one by one",
        "qwen3_moe bfloat16 exact colocated again",
        "qwen3_moe bfloat16 colocated against-float32",
    }


def test_references_come_first_and_fp8_only_in_bfloat16() -> None:
    order = list(cases(["qwen3_moe"], ["float32", "bfloat16"], ["1A1F", "3A2F"], ["exact", "fp8"]))
    assert [case.name for case in order] == [
        "qwen3_moe float32 colocated",
        "qwen3_moe float32 1A1F",
        "qwen3_moe float32 3A2F",
        "qwen3_moe bfloat16 colocated",
        "qwen3_moe bfloat16 1A1F",
        "qwen3_moe bfloat16 fp8 1A1F",
    ]
    for case in order:
        assert order.index(case.reference) <= order.index(case)


def test_a_backend_is_part_of_the_name(tmp_path: Path) -> None:
    overs = ["auto", "tcp", "verbs"]
    names = [c.name for c in cases(["step3"], ["float32"], ["2A2F"], ["exact"], overs)]
    served = ("", " over tcp", " over verbs")
    assert names[1:] == [f"step3 float32 2A2F{over}" for over in served]
    case = Case("step3", "float32", "exact", "2A2F", "verbs")
    plain = deployment(case, tmp_path, 3, tmp_path / "nic.so")
    transport = Deployment.from_plain({**plain, "served_model_name": "m"}).transport
    verbs = transport.verbs_keywords("ffn")
    assert verbs is not None and verbs["ports"] == ["fake0:1", "fake1:1"]
    assert (transport.backend, verbs["library"]) == ("verbs", str(tmp_path / "nic.so"))


@pytest.mark.parametrize("wrong", ["1A", "A1F", "0A1F", "11A1F", "4A1F", "1a1f"])
def test_a_wrong_topology_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError):
        instances(wrong)


def test_the_deployment_file_is_one_that_afd_serve_takes(tmp_path: Path) -> None:
    plain = deployment(Case("step3", "bfloat16", "fp8", "3A2F"), tmp_path, 3)
    parsed = Deployment.from_plain({**plain, "served_model_name": "m"})
    assert (parsed.attention.instances, parsed.ffn.instances) == (3, 2)
    assert (parsed.pipeline.depth, parsed.pipeline.min_rows, parsed.wire.format) == (3, 1, "fp8")
    assert f"--num-gpu-blocks-override={KV_BLOCKS[3]}" in parsed.attention.vllm_args


EXPOSITION = """\
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{instance="attention-0"} 3
vllm:num_preemptions_total{instance="attention-1"} 4
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{instance="attention-0"} 96
# TYPE afd_steps counter
afd_steps_total{instance="attention-0",depth="1"} 5
afd_steps_total{instance="attention-1",depth="1"} 6
afd_steps_total{instance="attention-1",depth="3"} 7
afd_steps_total{instance="ffn-0",depth="3"} 100
"""


def test_counters_are_summed_over_attention_instances() -> None:
    assert read_counters(EXPOSITION) == Counters(7, 96, {1: 11, 3: 7})


def test_a_depth_that_did_not_take_effect_is_an_error() -> None:
    check_depth({1: 5, 2: 0, 3: 0}, {1: 9, 2: 3, 3: 0}, 2)
    with pytest.raises(AfdError, match="depth 2 was set"):
        check_depth({1: 5, 2: 1, 3: 0}, {1: 9, 2: 1, 3: 0}, 2)
    with pytest.raises(AfdError, match="depth 2 was set"):
        check_depth({1: 5, 2: 1, 3: 0}, {1: 9, 2: 2, 3: 1}, 2)


def test_page_has_a_row_per_case_with_its_servers_counters() -> None:
    def record(case: str, metric: str, value: float) -> Record:
        return Record(
            "identity", case, metric, value, "", "p", 1.0, 1.0, "m", "afd bench identity", "d"
        )

    page = report(
        [
            record("step3 bfloat16 1A1F depth1", "match", 0.5),
            record("step3 bfloat16 1A1F depth1 one by one", "match", 1.0),
            record("step3 bfloat16 exact 1A1F depth1", "kl", 0.0012),
            record("step3 bfloat16 1A1F", "preemptions", 7),
            record("step3 float32 1A1F depth1", "match", 1.0),
        ],
        {FLOAT32: "did not\nstart"},
    )
    assert "| step3 bfloat16 1A1F depth1 | 0.500 | 1.000 | 1.2e-03 |  |  | 7 |  |" in page
    assert "- float32 1A1F: 1 of 1 rows have every token equal, the lowest" in page
    assert "- bfloat16 1A1F: 1 of 2 rows have every token equal, the lowest match is 0.500" in page
    assert "- qwen3_moe float32 1A1F: did not start" in page


def test_a_failed_case_is_reported_and_the_others_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Measured({1: run((1,)), 2: run((1,))}, Counters(1, 32, {}))

    def measured(case: Case, *_: object) -> Measured:
        if case.topology == "2A1F":
            raise AfdError("it did not start")
        return good

    monkeypatch.setattr(identity, "measure", measured)
    monkeypatch.setattr(identity, "measure_reference", measured)
    monkeypatch.setattr(identity, "tiny_model", lambda folder, family: folder)
    out = tmp_path / "r.json"
    argv = ["--families", "step3", "--dtypes", "float32", "--topologies", "1A1F", "2A1F"]
    assert identity.main([*argv, "--out", str(out)]) == 1
    cases_written = {record.case for record in read_records(out)}
    assert "step3 float32 1A1F depth2" in cases_written
    assert not any("2A1F" in case for case in cases_written)
    assert "step3 float32 2A1F: it did not start" in out.with_suffix(".md").read_text()
    assert "[3/3] step3 float32 2A1F: FAILED: it did not start" in capsys.readouterr().out


def test_futures_of_references_are_waited_for_in_running_order() -> None:
    """A pool of one worker must not deadlock: every case waits only for one before it."""
    order = list(cases(["step3"], ["float32", "bfloat16"], ["1A1F"], ["exact", "fp8"]))
    running: dict[Case, Future[Measured]] = {}
    for case in order:
        identity._job(
            case, Path("unused"), Workload((), ()), [1], running
        )  # looks its reference up
        running[case] = Future()
