"""The deployment file of a plan: `afd serve` accepts it, and it matches the plan."""

from dataclasses import replace
from itertools import chain

import pytest
import yaml
from planner_support import request

from afd.config.deployment import load_config
from afd.config.resolve import check_model
from afd.errors import ConfigError
from afd_planner.cost.stages import step_seconds
from afd_planner.facts.precision import PRECISIONS
from afd_planner.report.emit import (
    CACHE_HEADROOM,
    deployment_data,
    deployment_yaml,
    free_for_cache,
    split_from_rows,
)
from afd_planner.report.presets import FOLDER
from afd_planner.sizing.decide import make_plan
from afd_planner.sizing.unit_cost import afd_point


@pytest.fixture(scope="module")
def plan():
    return make_plan(request("deepseek-v3", "h200", context=8192, gpus=128))


def test_afd_serve_accepts_the_file(plan, tmp_path):
    path = tmp_path / "d.yaml"
    path.write_text(deployment_yaml(plan, str(FOLDER / "deepseek-v3")))
    deployment = load_config(path)
    check_model(deployment)
    shape = plan.afd.shape
    assert deployment.attention.instances == shape.attention.groups
    assert deployment.ffn.instances == shape.ffn.groups
    assert deployment.pipeline.depth == shape.depth
    assert deployment.wire.format == shape.precision.wire
    attention = deployment.attention
    assert attention.max_num_seqs * attention.instances >= shape.batch
    assert attention.max_num_batched_tokens >= attention.max_num_seqs
    assert attention.max_model_len >= 2 * 8192


def test_the_cache_holds_the_planned_rows_or_fills_the_gpu(plan):
    data = deployment_data(plan.afd, plan.request, "m")
    rows = data["attention"]["max_num_seqs"]
    needed = rows * plan.request.model.kv_stored_bytes(8192, "fp8") * CACHE_HEADROOM
    free = free_for_cache(plan.afd.shape, plan.request, data["attention"]["max_num_batched_tokens"])
    cache = data["attention"]["kv_cache_gib"] * 2**30
    assert min(needed, free) - 2**30 / 10 <= cache <= min(needed, free)
    assert data["attention"]["vllm_args"] == ["--kv-cache-dtype", "fp8"]


def test_hosts_are_the_servers_of_the_plan(plan):
    shape, data = plan.afd.shape, deployment_data(plan.afd, plan.request, "m")
    attention = [host["attention"] for host in data["hosts"] if host["attention"]]
    ffn = [host["ffn"] for host in data["hosts"] if host["ffn"]]
    assert (len(attention), len(ffn)) == (shape.attention.instances, shape.ffn.instances)
    assert list(chain(*attention)) == list(range(shape.attention.groups))
    assert list(chain(*ffn)) == list(range(shape.ffn.groups))
    assert data["ffn"]["weights"] == "fp8_block" and data["control"]["keys"] == "control.keys"


def test_the_comment_has_the_plan_and_what_no_key_can_express(plan):
    comment = [line for line in deployment_yaml(plan, "m").splitlines() if line.startswith("#")]
    text = "\n".join(comment)
    shape = plan.afd.shape
    assert f"plan: {shape.attention.instances}A{shape.ffn.instances}F" in text
    assert f"undecided, within the model's error: {plan.verdict.ratio:.2f} times" in text
    assert f"{shape.attention.groups} + {shape.ffn.groups}" in text
    assert "hosts: set their addresses, then run `afd serve FILE --host NAME`" in text
    assert "attention weights" not in text
    published = replace(plan, request=replace(plan.request, precision=PRECISIONS["all-fp8"]))
    text = deployment_yaml(published, "m")
    assert "planned with fp8 attention weights: serve a checkpoint" in text


def test_a_plan_that_loses_says_so_in_its_file():
    plan = make_plan(request("deepseek-v3", "h200", context=1024, gpus=8))
    assert "# NOT recommended: " in deployment_yaml(plan, "m")
    with pytest.raises(ConfigError, match="no xAyF plan to emit"):
        deployment_yaml(replace(plan, afd=None), "m")
    with pytest.raises(ConfigError, match="serve it with plain vLLM"):
        deployment_data(plan.colocated, plan.request, "m")


def test_depth_pays_off_from_min_rows_on(plan):
    shape = plan.afd.shape
    rows = split_from_rows(plan.afd, plan.request)
    assert 1 <= rows <= shape.rows / shape.attention.groups

    def step(depth, each):
        whole = each * shape.attention.groups
        _, stages, _ = afd_point(
            plan.request, shape.attention, shape.ffn, depth, whole, shape.precision.wire
        )
        return step_seconds(stages, depth)

    assert step(shape.depth, rows) <= step(1, rows * shape.depth)


def test_the_file_is_readable_yaml(plan):
    text = deployment_yaml(plan, "m")
    assert yaml.safe_load(text)["ffn"]["device"] == "cuda"
    assert max(len(line) for line in text.splitlines()) <= 120
