"""Steps of two roles on one clock, and the Step-3 slice's processes as a dry run."""

import json
import os
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afd.metrics.role import RoleMetrics, Stage
from afd.metrics.server import serve_metrics
from afd.metrics.step_trace import KEPT, Span, StepTrace
from afd_bench.gpu import clocks, timeline
from afd_bench.step3 import command as step3
from afd_bench.step3.load import PAPER, TINY, lower_bound
from afd_planner.facts.hardware import load_accelerator

US = 1_000


def pipeline(layers, depth, attention_us, ffn_us, wire_us, ahead_ns=0, began_ns=0):
    """A step of both sides; the FFN instance's clock is ahead."""
    free = {"attention": 0, "ffn": 0}
    back = [0] * depth
    mine, theirs = [], []
    for layer in range(layers):
        for mb in range(depth):
            start = max(free["attention"], back[mb])
            done = free["attention"] = start + attention_us * US
            mine.append(Span(layer, mb, 8, start, done, done + wire_us * US))
            start = max(free["ffn"], done + wire_us * US)
            end = free["ffn"] = start + ffn_us * US
            back[mb] = end + wire_us * US
            theirs.append(Span(layer, mb, 8, start, end, back[mb]))

    def step(spans, shift, end):
        moved = tuple(
            Span(s.layer, s.micro_batch, s.rows, *(t + shift + began_ns for t in times))
            for s in spans
            for times in [(s.started_ns, s.done_ns, s.copied_ns)]
        )
        return StepTrace(began_ns + shift, end + shift + began_ns, True, moved)

    end = max(back)
    return step(mine, 0, end), step(theirs, ahead_ns, end)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), min_size=1, max_size=9))
def test_time_that_several_spans_share_is_worked_once(times):
    spans = tuple(Span(0, 0, 1, t, t + n, t + n) for t, n in times)
    step = StepTrace(0, 100, True, spans)
    ticks = {tick for t, n in times for tick in range(t, t + n)}
    assert step.busy_ns == len(ticks) and min(step.worked_ns) >= 0
    whole = max(t + n for t, n in times) - min(t for t, _ in times)
    assert step.waited_ns == whole - len(ticks)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_clocks_of_two_sides_are_brought_together(depth):
    mine, theirs = pipeline(6, depth, 100, 90, 20, ahead_ns=123_456)
    offset, error = timeline.clock_offset(mine, theirs)
    assert abs(offset + 123_456) <= max(error, 1)
    assert error < 40 * US


def test_a_full_pipeline_keeps_its_busier_side_busy():
    found = {}
    for depth in (1, 3):
        mine, theirs = pipeline(40, depth, 100, 90, 10)
        joined = timeline.join({"attention-0": [mine], "ffn-0": [theirs]}, "attention-0", depth)
        found[depth] = timeline.summary(joined)
    assert found[1].efficiency == pytest.approx(100 / 210, rel=0.02)
    assert found[3].efficiency > 0.98
    assert found[3].in_layers == 1.0 and 0.98 < found[3].efficiency < 1.0
    assert found[1].in_layers == pytest.approx(40 * 100 / (40 * 100 + 39 * 110))
    one = found[3]
    assert (one.attention_us, one.ffn_us, one.to_ffn_us) == (100, 90, 10)
    assert one.busy["ffn-0"] == pytest.approx(0.9 * one.busy["attention"], rel=0.01)


def test_steps_are_joined_by_the_time_at_which_their_hosts_began_them():
    steps = [pipeline(4, 2, 50, 40, 5, began_ns=n * 2_000_000) for n in range(5)]
    ffn = [theirs for _, theirs in steps]
    found = timeline.join(
        {"attention-0": [mine for mine, _ in steps[1:]], "ffn-0": ffn}, "attention-0", 2
    )
    assert [step.ffn["ffn-0"] for step in found] == ffn[1:]
    assert timeline.join({"attention-0": [steps[0][0]], "ffn-0": ffn[3:]}, "attention-0", 2) == []
    assert timeline.join({"attention-0": [steps[0][0]], "ffn-0": ffn}, "attention-0", 3) == []


def test_a_trace_shows_both_sides_on_the_attention_side_s_clock():
    mine, theirs = pipeline(3, 1, 100, 90, 20, ahead_ns=5_000_000, began_ns=7_000_000)
    (step,) = timeline.join({"attention-0": [mine], "ffn-0": [theirs]}, "attention-0", 1) or [
        timeline.Step(mine, {"ffn-0": theirs}, *_clocks(mine, theirs))
    ]
    events = timeline.chrome(step, "attention-0")["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        "attention-0",
        "ffn-0",
    ]
    work = [e for e in events if e["ph"] == "X" and e["tid"] == 1]
    ordered = sorted(work, key=lambda e: e["ts"])
    assert [e["pid"] for e in ordered] == [1, 2] * 3
    assert ordered[0]["ts"] == 0 and ordered[0]["dur"] == 100


def _clocks(mine, theirs):
    offset, error = timeline.clock_offset(mine, theirs)
    return {"ffn-0": offset}, {"ffn-0": error}


def test_a_step_trace_survives_json():
    mine, _ = pipeline(2, 2, 10, 10, 1)
    assert StepTrace.from_plain(json.loads(json.dumps(mine.plain()))) == mine
    assert (mine.depth, mine.rows) == (2, 16)


def test_the_load_is_that_of_the_paper():
    # Step-3 report, table 8 and section 7: 50 ms over 61 layers and 3 micro-batches
    assert PAPER.tokens_per_s_per_gpu(272) == pytest.approx(3857, abs=1)
    assert PAPER.ffn_rows == PAPER.rows * 8 * PAPER.attention_instances
    assert PAPER.kv_bytes == 128 * 4096 * 512
    least = lower_bound(PAPER, load_accelerator("h200"))
    assert 80 < least.attention_us < 100 and 60 < least.ffn_us < 80


def test_clocks_of_a_window_are_summarised_by_gpu():
    line = "2026/08/08 12:00:0{}.000, {}, {}, {}, 0x{:016x}"
    text = "\n".join(
        [
            line.format(0, 0, 1200, 700.0, 0x8),  # before the window
            line.format(1, 0, 1980, 512.5, 0),
            line.format(2, 0, 1500, 699.0, 0x24),
            line.format(2, 1, 1980, 300.0, 1),
            line.format(2, 1, "[N/A]", 300.0, 1),
            "2026/08/08 12:00:03.0",
        ]
    )
    samples = clocks.parse(text)
    begin = samples[0].at_s
    assert [sample.at_s - begin for sample in samples] == [0, 1, 2, 2]
    assert clocks.summary_text(samples, begin + 0.5, begin + 3).splitlines() == [
        "GPU 0: clock 1740 MHz, min 1500; power at most 699 W; limits: power cap, software thermal"
        " (2 samples)",
        "GPU 1: clock 1980 MHz, min 1980; power at most 300 W; limits: none (1 samples)",
    ]
    assert "no clocks were sampled" in clocks.summary_text(samples, begin + 5, begin + 6)
    assert clocks.parse('Field "clocks_event_reasons.active" is not a valid field to query.') == []


@pytest.mark.long
def test_the_step3_slice_runs_without_a_gpu(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("afd_comm")
    out, trace = tmp_path / "r.json", tmp_path / "t.json"
    argv = ["--device", "cpu", "--layers", "2", "--steps", "3", "--distinct", "1"]
    argv += ["--logs", str(tmp_path)]
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(
        "#!/bin/sh\nwhile :; do echo \"$(date '+%Y/%m/%d %H:%M:%S.%3N'), 0, 1980, 512.5,"
        ' 0x0000000000000004"; sleep 0.5; done\n'
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(smi.parent), prepend=os.pathsep)
    assert step3.main([*argv, "--out", str(out), "--trace", str(trace)]) == 0
    assert "step3-clocks.csv written" in capsys.readouterr().out
    sample = clocks.parse((tmp_path / "step3-clocks.csv").read_text())[0]
    assert (sample.gpu, sample.sm_mhz, sample.watts, sample.reasons) == (0, 1980, 512.5, 4)
    assert abs(sample.at_s - time.time()) < 600
    records = {r["metric"]: r for r in json.loads(out.read_text())}
    assert records["us_per_layer_microbatch"]["bench"] == "step3"
    assert records["us_per_layer_microbatch"]["peer_value"] == 272
    assert 0 < records["efficiency"]["value"] <= 1
    spans = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == 2 * 2 * 2 * TINY.depth


def test_a_role_serves_its_last_steps_and_counts_their_stages(monkeypatch):
    mine, theirs = pipeline(3, 2, 100, 90, 20)
    pages = {}
    for role, step in (("attention", mine), ("ffn", theirs)):
        metrics = RoleMetrics(role)
        for _ in range(KEPT + 1):
            metrics.note_replay(step)
        pages[role] = serve_metrics(metrics)
    try:
        members = [
            SimpleNamespace(id=f"{role}-0", role=role, metrics_url=page.url)
            for role, page in pages.items()
        ]
        members.append(SimpleNamespace(id="gateway-0", role="gateway", metrics_url="http://x"))
        seen = SimpleNamespace(members=members)
        monkeypatch.setattr(timeline.operator, "status", lambda address: seen)
        found = timeline.fetch(SimpleNamespace(control="tcp://nowhere"))
        assert found == {"attention-0": [mine] * KEPT, "ffn-0": [theirs] * KEPT}
    finally:
        for page in pages.values():
            page.close()
    stages = {stage: snap for stage, snap in metrics.exported_stages() if snap.count}
    assert set(stages) == {Stage.FFN, Stage.F2A}
    assert stages[Stage.FFN].total == pytest.approx((KEPT + 1) * 6 * 90e-6)
    assert stages[Stage.F2A].count == (KEPT + 1) * 6
    assert metrics.bubble_seconds == pytest.approx((KEPT + 1) * theirs.waited_ns / 1e9)
