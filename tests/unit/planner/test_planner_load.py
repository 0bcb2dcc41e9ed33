"""Loads of requests: the scheduler against a plain one, queueing theory, the command line."""

import json
import math
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from afd.errors import ConfigError
from afd_launch.cli import main
from afd_planner.simulate.batching import Batches
from afd_planner.simulate.engine import simulate
from afd_planner.simulate.spec import Requests, Spec, parse_spec
from afd_planner.simulate.workload import Workload, make_workload

STEP_S = 0.01


def fixed_step(**requests: object) -> Spec:
    """Returns the spec of a 1A1F whose step takes STEP_S, whatever it holds, under a load."""
    return parse_spec(
        {
            "name": "fixed",
            "attention": {"instances": 1},
            "ffn": {"instances": 1},
            "layers": 1,
            "depth": 1,
            "times": {"attention": {"fixed_us": 4000}, "ffn": {"fixed_us": 6000}},
            "requests": {"prompt": {"tokens": 1}, "output": {"tokens": 1}, **requests},
        },
        "fixed",
    )


# -- the scheduler


def plain_schedule(given: Requests, load: Workload) -> tuple[list[tuple[int, int]], list[int]]:
    """vLLM's scheduler, request by request and token by token, on one instance.

    Step n begins at n + 1. Returns (decode rows, prompt rows) of each step, and the step in which
    each request finished.
    """
    kv = given.kv_tokens or math.inf
    count = load.arrival.size
    made, computed, finished = [0] * count, [0] * count, [-1] * count
    target = [int(p) for p in load.prompt]  # tokens to compute before the next token
    running: list[int] = []
    waiting: deque[int] = deque()
    pending = deque(range(count))
    steps: list[tuple[int, int]] = []
    while pending or waiting or running:
        while pending and load.arrival[pending[0]] <= len(steps) + 1:
            waiting.append(pending.popleft())

        def held() -> int:
            return sum(target[r] if computed[r] < target[r] else target[r] + 1 for r in running)

        preempted = False
        while held() > kv:
            victim = running.pop()
            target[victim] = int(load.prompt[victim]) + made[victim]
            computed[victim] = 0
            waiting.appendleft(victim)
            preempted = True
        while waiting and not preempted and len(running) < given.max_batch:
            if held() + target[waiting[0]] > kv:
                break
            running.append(waiting.popleft())
        decoding = [r for r in running if computed[r] >= target[r]]
        budget = given.max_tokens - len(decoding)
        prompts = 0
        for r in running:
            if r in decoding:
                target[r] += 1
                computed[r] = target[r]
                made[r] += 1
                continue
            chunk = min(budget, target[r] - computed[r])
            computed[r] += chunk
            budget -= chunk
            prompts += chunk
            if computed[r] < target[r]:
                break
            made[r] += 1
        for r in [r for r in running if made[r] == load.output[r]]:
            finished[r] = len(steps)
            running.remove(r)
        steps.append((len(decoding), prompts))
    return steps, finished


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 25), st.integers(1, 12)),
        min_size=1,
        max_size=14,
    ),
    st.integers(1, 6),
    st.integers(6, 30),
    st.sampled_from([None, 37, 50, 80]),
)
def test_batches_equal_a_plain_scheduler(requests, max_batch, max_tokens, kv_tokens):
    requests.sort(key=lambda request: request[0])
    arrival, prompt, output = (np.array(column) for column in zip(*requests, strict=True))
    load = Workload(arrival.astype(float), prompt, output)
    given = Requests.model_validate(
        {
            "arrivals": {"kind": "together"},
            "count": len(requests),
            "prompt": {"tokens": 1},
            "output": {"tokens": 1},
            "max_batch": max_batch,
            "max_tokens": max_tokens,
            "kv_tokens": kv_tokens,
        }
    )
    expected, finished = plain_schedule(given, load)
    batches = Batches(given, load, 1)
    pending, alive = deque(range(len(requests))), np.array([True])
    for step, (decode, prompts) in enumerate(expected):
        now = np.array([step + 1.0])
        while pending and arrival[pending[0]] <= now[0]:
            batches.assign([pending.popleft()], alive)
        if not batches.outstanding[0]:
            assert (decode, prompts) == (0, 0)
            continue
        work = batches.begin_step(step, now)
        assert (work.decode[0], work.prefill[0]) == (decode, prompts), step
        batches.end_step(step, now + 1)
    assert batches.outstanding[0] == 0
    assert batches.finish - 2 == pytest.approx(np.array(finished))
    assert batches._cached[0] == batches._reserved[0] == 0


# -- queueing theory


def test_one_request_at_a_time_is_the_md1_queue():
    """Waits equal Lindley's recursion on the same arrivals; their mean is Pollaczek-Khinchine's:
    with a constant service time S at utilisation rho, rho * S / (2 * (1 - rho))."""
    spec = fixed_step(arrivals={"kind": "poisson", "per_s": 0.5 / STEP_S}, count=3000, max_batch=1)
    result = simulate(spec)
    assert spec.requests is not None
    arrival = make_workload(spec.requests, np.random.default_rng(0)).arrival
    waits = [0.0]
    for gap in np.diff(arrival):
        waits.append(max(0.0, waits[-1] + STEP_S - gap))
    assert result.queued.mean == pytest.approx(np.mean(waits))
    assert result.queued.most == pytest.approx(np.max(waits))
    assert result.ttft.mean == pytest.approx(np.mean(waits) + STEP_S)
    assert np.mean(waits) == pytest.approx(STEP_S / 2, rel=0.1)


def test_the_mean_batch_follows_littles_law():
    result = simulate(
        fixed_step(arrivals={"kind": "poisson", "per_s": 40}, count=800, output={"tokens": 50})
    )
    stay = result.e2el.mean - result.queued.mean
    per_s = result.requests.finished / result.elapsed_s
    assert result.running.mean == pytest.approx(per_s * stay, rel=0.01)
    assert result.waiting.most <= result.running.most


def test_requests_that_arrive_in_an_outage_are_counted_in_the_queue():
    load = {"arrivals": {"kind": "steady", "per_s": 10}, "count": 60}
    spec = fixed_step(**load).model_dump(mode="json")
    spec["failures"] = [{"ffn": 0, "at_s": 2.001, "back_after_s": 2.0}]
    result = simulate(parse_spec(spec, "outage"))
    assert result.waiting.most == pytest.approx(20, abs=1)
    assert result.ttft.most == pytest.approx(2.0, abs=0.15)


def test_a_saturated_load_equals_the_constant_one():
    """A batch that is always full takes the steps of the constant load of the same size."""
    load = {
        "arrivals": {"kind": "together"},
        "count": 64,
        "prompt": {"tokens": 1000},
        "output": {"tokens": 100},
        "prefill": "elsewhere",
        "max_batch": 16,
    }
    times = {
        "attention": {"fixed_us": 50, "per_row_us": 1, "per_row_ktoken_us": 2},
        "ffn": {"fixed_us": 90, "per_row_us": 1},
        "rest": {"fixed_us": 300},
    }
    base = {
        "name": "saturated",
        "attention": {"instances": 2},
        "ffn": {"instances": 2},
        "layers": 6,
        "times": times,
    }
    served = simulate(parse_spec({**base, "requests": load}, "served"))
    constant = {"rows": 16, "context": 1049.5, "steps": 3}
    steady = simulate(parse_spec({**base, "constant": constant}, "steady"))
    assert served.itl.mean == pytest.approx(steady.itl.mean, rel=2e-3)
    assert served.tokens_per_s == pytest.approx(steady.tokens_per_s, rel=2e-3)


def test_gaps_of_a_gamma_distribution_have_the_stated_mean_and_spread():
    for burstiness in (0.25, 1.0, 4.0):
        load = Requests.model_validate(
            {
                "arrivals": {"kind": "gamma", "per_s": 5.0, "burstiness": burstiness},
                "count": 40_000,
                "prompt": {"tokens": 1},
                "output": {"tokens": 1},
            }
        )
        gaps = np.diff(make_workload(load, np.random.default_rng(1)).arrival)
        assert gaps.mean() == pytest.approx(0.2, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


# -- what the load does


def test_prompts_lengthen_the_steps_of_requests_that_decode():
    changes = {"arrivals": {"kind": "poisson", "per_s": 3}, "count": 60, "output": {"tokens": 60}}
    spec = fixed_step(**changes, prompt={"tokens": 2000}, max_tokens=512).model_dump(mode="json")
    spec["times"]["prefill"] = {"fixed_us": 4000, "per_row_us": 20}
    here = simulate(parse_spec(spec, "here"))
    spec["requests"]["prefill"] = "elsewhere"
    elsewhere = simulate(parse_spec(spec, "elsewhere"))
    assert elsewhere.itl.p99 == pytest.approx(STEP_S)
    assert here.itl.p99 == pytest.approx(STEP_S + 512 * 20e-6, rel=0.02)  # a whole chunk
    assert here.ttft.p50 > 4 * elsewhere.ttft.p50  # four chunks


def test_a_step_with_prompts_and_answers_pays_its_fixed_time_once():
    """Two requests: the second one's prompt joins the first one's decode."""
    spec = fixed_step(
        arrivals={"kind": "steady", "per_s": 50}, count=2, output={"tokens": 9}
    ).model_dump(mode="json")
    spec["times"]["prefill"] = {"fixed_us": 4000}
    assert simulate(parse_spec(spec, "mixed")).step.most == pytest.approx(STEP_S)


def test_prompt_rows_attend_to_the_tokens_before_them():
    spec = fixed_step(
        arrivals={"kind": "together"}, count=1, prompt={"tokens": 3000}, max_tokens=1000
    ).model_dump(mode="json")
    spec["times"]["prefill"] = {"per_row_ktoken_us": 1}
    result = simulate(parse_spec(spec, "chunks"))
    pairs = 3000 * 3001 / 2  # of a row and a token before it or itself
    assert result.ttft.mean == pytest.approx(3 * 6e-3 + pairs * 1e-3 * 1e-6)


def test_a_full_kv_cache_preempts_and_loses_no_token():
    load = {"arrivals": {"kind": "together"}, "count": 8, "output": {"tokens": 30}}
    whole = simulate(fixed_step(**load, prompt={"tokens": 20}))
    tight = simulate(fixed_step(**load, prompt={"tokens": 20}, kv_tokens=120))
    assert whole.requests.preemptions == 0 and tight.requests.preemptions > 0
    assert tight.tokens == whole.tokens and tight.requests.finished == 8
    assert tight.elapsed_s > whole.elapsed_s and tight.itl.most > 5 * whole.itl.most


def test_a_client_with_limited_concurrency_waits_for_an_answer():
    load = {"arrivals": {"kind": "together"}, "count": 12, "output": {"tokens": 10}}
    limited = simulate(fixed_step(**load, max_concurrency=3))
    assert limited.running.most == 3 and limited.waiting.most == 0
    assert limited.queued.most == pytest.approx(0.0, abs=1e-9)
    assert limited.elapsed_s == pytest.approx(4 * 10 * STEP_S)
    assert limited.running.mean == pytest.approx(3.0, rel=1e-3)
    refusing = simulate(fixed_step(**load, max_concurrency=3, kv_tokens=5))
    assert refusing.requests.refused == 12 and refusing.waiting.most == 0
    none = {"arrivals": {"kind": "together"}, "count": 9, "max_steps": 1}
    assert simulate(fixed_step(**none, max_batch=2)).waiting.most == 7


def test_time_outside_the_scheduler_is_part_of_the_first_token():
    load = {"arrivals": {"kind": "steady", "per_s": 2}, "count": 5}
    assert simulate(fixed_step(**load, client_ms=30)).ttft.p50 == pytest.approx(0.03 + STEP_S)


# -- the command line


@pytest.fixture
def constant_file(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    times = {"attention": {"fixed_us": 50, "per_row_us": 1}, "ffn": {"fixed_us": 100}}
    data = {
        "name": "constant",
        "attention": {"instances": 2},
        "ffn": {"instances": 1},
        "layers": 4,
        "times": times,
        "constant": {"rows": 24, "context": 100},
    }
    path.write_text(yaml.safe_dump(data))
    return path


def test_arguments_of_vllm_bench_serve_replace_the_load(constant_file, tmp_path, capsys):
    out = tmp_path / "out.json"
    argv = ["simulate", str(constant_file), "--json", str(out), "--request-rate", "200"]
    argv += ["--burstiness", "0.5", "--num-prompts", "80", "--input-len", "40", "--output-len", "9"]
    assert main([*argv, "--range-ratio", "0.5", "--max-num-seqs", "4"]) == 0
    printed = capsys.readouterr().out
    for word in ("TTFT", "TPOT", "ITL", "E2EL", "queue length", "per accelerator", "preempted"):
        assert word in printed
    found = json.loads(out.read_text())
    assert found["requests"]["finished"] == 80 and found["running"]["most"] <= 8
    assert found["ttft"]["p50"] <= found["ttft"]["p90"] <= found["ttft"]["p99"]
    assert 80 * 5 <= found["tokens"] <= 80 * 14
    assert main(["simulate", str(constant_file), "--num-prompts", "60", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["running"]["most"] == 48  # the file's batch, twice


def test_a_trace_of_arrivals_from_the_command_line(constant_file, tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt,output,ttft_s\n0.0,20,2,9\n0.5,10,3,9\n")
    assert main(["simulate", str(constant_file), "--arrivals", str(trace)]) == 0
    assert "2: 2 finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--request-rate", "nan"], "--request-rate is nan; give a number above 0 or inf"),
        (["--request-rate", "0"], "--request-rate is 0"),
        (["--request-rate", "-3"], "--request-rate is -3"),
        (["--input-len", "inf"], "--input-len is inf"),
        (["--output-len", "0"], "--output-len is 0"),
        (["--num-prompts", "-1"], "--num-prompts is -1"),
        (["--range-ratio", "1"], "--range-ratio is 1; give a number of at least 0 and below 1"),
        (["--range-ratio", "nan"], "--range-ratio is nan"),
        (["--burstiness", "2"], "--burstiness needs --request-rate"),
        (["--request-rate", "2", "--burstiness", "nan"], "--burstiness is nan"),
        (["--max-num-seqs", "0"], "--max-num-seqs is 0"),
        (["--max-num-seqs", "9", "--max-num-batched-tokens", "8"], "max_tokens is below max_batch"),
        (["--arrivals", "none.csv"], "cannot read the trace"),
        (["--arrivals", "none.csv", "--input-len", "3"], "leave out --input-len"),
    ],
)
def test_bad_loads_are_named(constant_file, arguments, message, capsys):
    assert main(["simulate", str(constant_file), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_result_covers_the_measured_time_only():
    load = {"arrivals": {"kind": "steady", "per_s": 10}, "count": 100, "output": {"tokens": 20}}
    whole = simulate(fixed_step(**load))
    part = simulate(fixed_step(**load, measure_from_s=2.0, measure_until_s=4.0))
    assert part.elapsed_s == pytest.approx(2.0, abs=2 * STEP_S)
    assert part.tokens_per_s == pytest.approx(200, rel=0.03)
    assert part.tokens < 0.3 * whole.tokens
    assert part.requests == whole.requests
    with pytest.raises(ConfigError, match="measure_until_s must be above"):
        fixed_step(**load, measure_from_s=2.0, measure_until_s=1.0)
