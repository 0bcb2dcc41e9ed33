"""Prefill/decode disaggregation with real servers and NIXL: tokens equal colocated vLLM, and killed
instances lose no request.

    ./run test -m long tests/integration/test_prefill_decode.py
"""

import importlib.util
import itertools
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from deployments import BLOCK, SETTINGS, Models
from helpers import VOCAB, Scrape, wait_until
from reference import REQUESTS, References

from afd_bench.faults.subject import Subject
from afd_bench.faults.traffic import Traffic, answered, jobs
from afd_bench.servers import Server, disaggregated
from afd_bench.workload import run

pytestmark = [
    pytest.mark.serve,
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("nixl") is None, reason="needs nixl: pip install nixl"
    ),
]

CASES = {
    "1P1A1F": ({"instances": 1, "kv_cache_gib": 0.25, "port": 0}, 1),
    "1P2A1F": ({"instances": 1, "kv_cache_gib": 0.25, "port": 0}, 2),
    "1P1A1F by afd": ({"instances": 1, "by": "afd"}, 2),
}


def settings(model: Path, case: str, **attention: object) -> dict[str, object]:
    prefill, instances = CASES[case]
    common = {**SETTINGS, "max_num_batched_tokens": 128, "vllm_args": [BLOCK]}
    return {
        "model": str(model),
        "prefill": {**prefill, "lease_s": 12},
        "attention": {**common, "instances": instances, **attention},
        "pipeline": {"depth": 3, "min_rows": 1},
        "restart": {"max_restarts": 10},
        "deadlines": {"drain_s": 20},
    }


@pytest.fixture(params=CASES)
def served(
    request: pytest.FixtureRequest, tiny_models: Models
) -> Iterator[tuple[Server, tuple[str, ...]]]:
    """A deployment, and its attention instances that generate."""
    generating = 2 if "2A" in request.param else 1
    with disaggregated(settings(tiny_models("qwen3_moe"), request.param)) as server:
        yield server, tuple(f"attention-{i}" for i in range(generating))


def prefills(server: Server) -> dict[str, float]:
    page = Scrape(server.metrics())
    results = ("moved", "failed", "local")
    return {r: page.total("afd_gateway_prefills_total", result=r) for r in results}


def test_tokens_equal_colocated(
    served: tuple[Server, tuple[str, ...]], references: References
) -> None:
    server, generating = served
    found = run(server.url, server.model, REQUESTS, salt="moved")
    expected = references("qwen3_moe").answers
    assert [a.tokens for a in found] == [a.tokens for a in expected]
    assert prefills(server) == {"moved": len(REQUESTS), "failed": 0, "local": 0}
    page = Scrape(server.metrics())
    tokens = {
        source: sum(
            page.total("vllm:prompt_tokens_by_source_total", source=source, instance=instance)
            for instance in generating
        )
        for source in ("external_kv_transfer", "local_cache_hit", "local_compute")
    }
    print(f"prompt tokens of attention instances: {tokens}")
    assert tokens["local_compute"] == 0 < tokens["external_kv_transfer"]
    for depth in (3, 1):  # fetched KV caches are read in split steps
        assert page.total("afd_steps_total", instance="ffn-0", depth=str(depth)) > 0


def engines(server: Server, role: str) -> list[psutil.Process]:
    """The processes of vLLM servers with this role of KV transfer."""
    found = []
    for process in psutil.Process(server.pid).children(recursive=True):
        words = " ".join(process.cmdline())
        if role in words and "vllm" in words:
            found.append(process)
    return found


def held(server: Server, salt: str) -> float:
    """Serves one request; returns the share of the prefill instance's KV cache in use then."""
    run(server.url, server.model, REQUESTS[:1], salt=salt)
    return Scrape(server.metrics()).total("vllm:kv_cache_usage_perc", instance="prefill-0")


@pytest.mark.timeout(580)  # two restarts of vLLM on shared cores
@pytest.mark.parametrize("victim", ["kv_producer", "kv_consumer"])
def test_a_killed_instance_loses_no_request(tiny_models: Models, victim: str) -> None:
    config = settings(tiny_models("qwen3_moe"), "1P2A1F", enable_prefix_caching=False)
    with disaggregated(config) as server:
        quiet = held(server, "quiet")
        asked = answered(server.url, server.model, jobs(5, 12, vocab=VOCAB, new_tokens=(20, 60)))
        with Traffic(server.url, server.model, asked, clients=6, seed=5) as traffic:
            for _ in range(2):
                time.sleep(2.0)
                killed = engines(server, victim)[0]
                killed.send_signal(signal.SIGKILL)
                time.sleep(4.0)
                wait_until(Subject(server).is_whole, 120.0, "the deployment is whole again")
            time.sleep(2.0)
            traffic.finish()
            counts = traffic.read()
        print(f"{victim}: {counts}; prompts: {prefills(server)}")
        assert counts.done > 20
        assert (counts.failed, counts.refused, counts.wrong) == (0, 0, 0)
        now = prefills(server)["moved"]
        run(server.url, server.model, REQUESTS[:2], salt="after")
        assert prefills(server)["moved"] == now + 2
        # What dead instances did not fetch is freed when its lease ends.
        salts = itertools.count()
        wait_until(lambda: held(server, f"{next(salts)}") <= quiet, 40.0, "the leases have ended")
