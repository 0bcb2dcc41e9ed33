"""/health and /metrics of the deployment, before and after a known amount of work."""

import json
import os
import urllib.request

import pytest
from deployments import Host, Models
from helpers import Running, Scrape, Stream, all_begun, tokens_of, wait_until
from reference import weights_are_apart

from afd_launch.cpus import cpu_plan
from afd_launch.roles_of_host import available_cores

pytestmark = pytest.mark.serve

HIDDEN, TOP_K, MOE_LAYERS, FLOAT32 = 256, 2, 2, 4  # of the tiny Qwen3-MoE


@pytest.fixture(scope="module")
def deployment(host: Host) -> Running:
    return host.serve("openai")


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def test_health_names_the_members(deployment: Running) -> None:
    health = json.loads(fetch(f"{deployment.url}/health"))
    assert health["status"] == "ok"
    states = {member["id"]: (member["state"], member["health"]) for member in health["members"]}
    assert states == {"attention-0": ("ready", "healthy"), "ffn-0": ("ready", None)}


def test_each_side_keeps_to_its_cores(deployment: Running) -> None:
    """All threads of both sides are bound, including those started before a role knew its cores.

    Compute threads that start while the other side lends its cores keep both: two per lent core.
    They have work in such steps only, and the step before this test was of another kind.
    """
    Stream(deployment.url, tokens_of("cores", 5), 4).start().join(60)
    cores = available_cores()
    plan = cpu_plan(cores, attention=1, ffn=1)
    sides = (
        ("attention-0", plan.attention[0], plan.ffn[0]),
        ("ffn-0", plan.ffn[0], plan.attention[0]),
    )
    for member, own, lent in sides:
        pid = deployment.member(member).pid
        bound = [os.sched_getaffinity(int(name)) for name in os.listdir(f"/proc/{pid}/task")]
        assert len(bound) > 1
        others = [found for found in bound if found != set(own)]
        assert all(found == {*own, *lent} for found in others), (member, others)
        assert len(others) <= 2 * len(lent), (member, others)
        assert os.sched_getaffinity(pid) == set(own), member


def test_vllm_metrics_keep_their_names(deployment: Running) -> None:
    """The gateway's page has every vLLM series of the attention instance, plus a label."""
    own = Scrape(fetch(f"{deployment.member('attention-0').api_url}/metrics"))
    merged = deployment.metrics()
    names = {name for name in own.families if name.startswith("vllm:")}
    assert len(names) > 20
    for name in names:
        assert merged.families[name].type == own.families[name].type
        wanted = {tuple(sorted(s.labels.items())) for s in own.families[name].samples}
        found = [dict(s.labels) for s in merged.families[name].samples]
        assert {labels.pop("instance") for labels in found} == {"attention-0"}
        assert wanted <= {tuple(sorted(labels.items())) for labels in found}


def test_the_engine_imports_nothing_again(deployment: Running) -> None:
    assert "EngineCore starts as a fork of its parent" in deployment.server.log.read_text()


def test_counters_grow_by_the_work_done(deployment: Running) -> None:
    """60 prompt tokens and 9 generated ones are 68 rows through every MoE layer."""
    before = deployment.metrics()
    stream = Stream(deployment.url, tokens_of("metrics", 60), 9).start()
    stream.join(60)
    assert len(stream.tokens) == 9
    after = deployment.metrics()

    def moved(name: str, **labels: str) -> float:
        return sum(after.values(name, **labels)) - sum(before.values(name, **labels))

    rows = (60 + 9 - 1) * MOE_LAYERS
    assert moved("afd_rows_per_ffn_call_sum", instance="ffn-0") == rows
    assert moved("afd_wire_bytes_total", direction="a2f") == rows * (
        HIDDEN * FLOAT32 + TOP_K * (4 + 4)
    )
    assert moved("afd_wire_bytes_total", direction="f2a") == rows * HIDDEN * FLOAT32
    # The prompt's step has three micro-batches, but one where the sides lend each other their core.
    # Each of the other eight has a single row.
    split = 1 if len(available_cores()) == 2 else 3
    calls = (split + 8) * MOE_LAYERS
    for instance, stages in (("attention-0", ("attention", "f2a")), ("ffn-0", ("a2f", "ffn"))):
        assert moved("afd_steps_total", instance=instance) == 9
        assert moved("afd_steps_total", instance=instance, depth="1") == (9 if split == 1 else 8)
        assert moved("afd_steps_total", instance=instance, depth="3") == (1 if split == 3 else 0)
        assert moved("afd_bubble_seconds_total", instance=instance) > 0
        for stage in stages:
            count = moved("afd_stage_seconds_count", instance=instance, stage=stage)
            # Leaving a step also sends a message, which may arrive before or after the scrape.
            assert count == calls or (stage == "a2f" and count == calls + 1)
            assert moved("afd_stage_seconds_sum", instance=instance, stage=stage) > 0
    assert moved("vllm:prompt_tokens_total") == 60
    assert moved("vllm:generation_tokens_total") == 9
    assert moved("vllm:request_success_total") == 1
    assert moved("afd_gateway_requests_total", path_template="/v1/completions") == 1


def test_gauges_show_the_state_of_the_deployment(deployment: Running) -> None:
    page = deployment.metrics()
    assert page.total("afd_slots", instance="attention-0") == 3
    assert page.total("afd_slots", instance="ffn-0") == 3 + 1
    assert page.total("afd_slots_in_flight") == 0
    assert page.total("afd_peers_up", instance="attention-0", role="ffn") == 1
    assert page.total("afd_peers_up", instance="ffn-0", role="attention") == 1
    assert page.values("afd_peer_up") == [1, 1]
    assert page.values("afd_gateway_upstream_up") == [1]
    assert page.values("afd_late_peers_total", instance="ffn-0")


def test_each_side_has_its_own_weights_only(deployment: Running, tiny_models: Models) -> None:
    weights_are_apart(deployment.metrics(), tiny_models("qwen3_moe"), ffn_instances=1)


def test_a_disconnected_client_frees_its_work(deployment: Running) -> None:
    """One of two streams disconnects: its work ends on both sides, and the other one finishes."""
    before = deployment.metrics()
    cut = deployment.client().completions.create(
        model="model",
        prompt=list(tokens_of("cut", 20)),
        max_tokens=900,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    chunks = iter(cut)
    for _ in range(5):
        next(chunks)
    stays = Stream(deployment.url, tokens_of("stays", 9), 100).start()
    all_begun([stays])
    cut.close()
    assert len(stays.join(60).tokens) == 100

    def is_still() -> bool:
        first, second = deployment.metrics(), deployment.metrics()
        steps = [
            [page.total("afd_steps_total", instance=i) for i in ("attention-0", "ffn-0")]
            for page in (first, second)
        ]
        return steps[0] == steps[1] and second.total("vllm:num_requests_running") == 0

    wait_until(is_still, 5, "no request runs and no step is made")
    after = deployment.metrics()

    def moved(name: str, **labels: str) -> float:
        return sum(after.values(name, **labels)) - sum(before.values(name, **labels))

    assert moved("vllm:generation_tokens_total") < 900, "the cut request ran to its end"
    assert moved("afd_gateway_requests_total", code="499") == 1
