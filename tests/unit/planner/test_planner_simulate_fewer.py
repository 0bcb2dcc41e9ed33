"""Stage times of steps in which only some attention instances have requests."""

import json
from pathlib import Path

import pytest

from afd.errors import ConfigError
from afd_planner.cost.measured import FORMAT
from afd_planner.simulate.engine import simulate
from afd_planner.simulate.spec import load_spec, parse_spec

SPEC = {
    "name": "test",
    "attention": {"instances": 2},
    "ffn": {"instances": 2},
    "layers": 6,
    "depth": 2,
    "wire": {"out_bytes_per_row": 1024, "back_bytes_per_row": 1024},
}
LOAD = {
    "arrivals": {"kind": "poisson", "per_s": 400},
    "count": 60,
    "prompt": {"tokens": 40},
    "output": {"tokens": 12},
    "max_batch": 16,
    "max_tokens": 128,
}


def _measured(path: Path, us: float) -> str:
    stages = {
        "attention": [{"rows": 1, "context": 1, "us": us}],
        "ffn": [{"rows": 1, "us": 2 * us}],
        "rest": [{"rows": 1, "us": 3 * us}],
        "wire": [{"bytes": 1000, "us": 1.0}],
    }
    path.write_text(json.dumps({"format": FORMAT, **stages}))
    return str(path)


def test_steps_of_fewer_instances_have_their_own_times(tmp_path):
    all_, alone = _measured(tmp_path / "all.json", 80.0), _measured(tmp_path / "alone.json", 30.0)
    one_at_a_time = {"count": 6, "max_concurrency": 1}
    both = {"arrivals": {"kind": "together"}, "count": 2, "output": {"tokens": 9}}

    def step(times: dict[str, object], requests: dict[str, object]) -> float:
        return simulate(
            parse_spec({**SPEC, "times": times, "requests": {**LOAD, **requests}}, "test")
        ).step.p50

    split = {"measured": all_, "fewer": [{"active": 1, "measured": alone}]}
    for requests, file in ((one_at_a_time, alone), (both, all_)):
        assert step(split, requests) == pytest.approx(step({"measured": file}, requests))
    scale = {"attention": 2, "ffn": 2, "prefill": 2, "ffn_prefill": 2, "rest": 2}
    slower = {"active": 1, "measured": alone, "scale": scale}
    twice = step({"measured": all_, "fewer": [slower]}, one_at_a_time)
    assert twice == pytest.approx(2 * step(split, one_at_a_time), rel=0.02)  # but for the wire


def test_numbers_of_active_instances_must_be_possible(tmp_path):
    file = _measured(tmp_path / "all.json", 80.0)
    for numbers in ([2], [1, 1]):
        fewer = [{"active": number, "measured": file} for number in numbers]
        with pytest.raises(ConfigError, match="different numbers of active instances below 2"):
            parse_spec(
                {**SPEC, "times": {"measured": file, "fewer": fewer}, "requests": LOAD}, "test"
            )


def test_paths_of_fewer_instances_are_relative_to_the_file(tmp_path):
    _measured(tmp_path / "all.json", 80.0)
    text = (
        "{name: x, attention: {instances: 2}, ffn: {instances: 1}, layers: 1, constant: {rows: 1},"
    )
    text += " times: {measured: all.json, fewer: [{active: 1, measured: all.json}]}}"
    (tmp_path / "spec.yaml").write_text(text)
    (fewer,) = load_spec(tmp_path / "spec.yaml").times.fewer
    assert fewer.measured == (tmp_path / "all.json").resolve()
