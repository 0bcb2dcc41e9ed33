"""`afd bench stages` on a real deployment writes a table that the simulator can use."""

from pathlib import Path

import pytest
import yaml
from deployments import Models

from afd_bench.stages import main
from afd_planner.cost.measured import load_measured
from afd_planner.simulate.engine import simulate
from afd_planner.simulate.spec import parse_spec

pytestmark = [pytest.mark.serve, pytest.mark.long]


def test_stage_times_of_a_running_deployment(tiny_models: Models, tmp_path: Path) -> None:
    config, out = tmp_path / "deployment.yaml", tmp_path / "stages.json"
    config.write_text(
        yaml.safe_dump(
            {
                "model": str(tiny_models("qwen3_moe")),
                "attention": {"max_model_len": 512, "max_num_seqs": 8, "kv_cache_gib": 0.25},
                "pipeline": {"depth": 2},
            }
        )
    )
    options = ["--batches", "1", "4", "--prefill", "64", "--rounds", "3", "--window", "0.7"]
    assert main([str(config), *options, "--out", str(out)]) == 0
    times = load_measured(out)
    for timed in (times.t_ffn(1), times.t_ffn(4), times.t_ffn(64), times.t_rest(4)):
        assert timed.source == "measured" and 0 < timed.seconds < 1
    assert times.t_attention(2, float(times.attention.keys[0])).source == "interpolated"
    spec = {
        "name": "measured",
        "attention": {"instances": 1},
        "ffn": {"instances": 1},
        "layers": 2,
        "times": {"measured": str(out)},
        "wire": {"out_bytes_per_row": 512, "back_bytes_per_row": 512},
        "constant": {"rows": 4, "context": 32},
    }
    assert 0 < simulate(parse_spec(spec, "spec")).tokens_per_s < 1e6
