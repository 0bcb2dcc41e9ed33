"""The decode load of `afd bench gpu`: windows, requests and lost servers."""

import asyncio
import contextlib
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from afd.errors import AfdError
from afd_bench import stages
from afd_bench.gpu import load
from afd_bench.gpu.load import Load, Steady, rate
from afd_bench.servers import Server
from afd_bench.stages import Totals


def totals(moment_s, running, generated):
    return Totals(round(moment_s * 1e9), running, generated)


def test_a_window_counts_only_where_all_requests_ran():
    before = totals(0.0, 0, 40)
    found = rate(before, totals(1.0, 4, 100), totals(3.0, 4, 300), 4)
    assert found == Steady(100.0, 0.04, 2.0, answered=(200 - 40) / 4)
    first, last = Totals(0, 4, 0.0, 10.0, 1.0), Totals(10**9, 4, 8.0, 14.0, 1.2)
    assert rate(before, first, last, 4).device_s == pytest.approx(0.05)
    lines = [
        f'afd_graph_step{what}_total{{depth="{depth}"}} {value}'
        for depth, count, seconds in ((1, 8, 2.0), (3, 4, 0.2))
        for what, value in (("s", count), ("_seconds", seconds))
    ]
    text = "\n".join(["vllm:num_requests_running 4", *lines, ""])
    found = [stages.totals(text, 0, depth) for depth in (None, 3, 2)]
    assert [(t.running, t.replayed, t.replayed_s) for t in found] == [
        (4, 12, 2.2), (4, 4, 0.2), (4, 0, 0)
    ]  # fmt: skip
    with pytest.raises(AfdError, match="3 of 4 requests ran until the end"):
        rate(before, totals(1.0, 4, 100), totals(3.0, 3, 300), 4)
    with pytest.raises(AfdError, match="no token"):
        rate(before, totals(1.0, 4, 100), totals(3.0, 4, 100), 4)


class FakeServer:
    """Each request decodes a token every 2 ms until it is cancelled."""

    url, model = "http://nowhere", "m"

    def __init__(self):
        self.started = {}
        self.done = 0.0

    async def complete(self, session, server, body, index):
        key = object()
        self.started[key] = time.monotonic()
        try:
            await asyncio.sleep(60)
        finally:
            self.done += (time.monotonic() - self.started.pop(key)) / 0.002

    def metrics(self):
        now = time.monotonic()
        going = sum((now - begun) / 0.002 for begun in list(self.started.values()))
        return (
            "# TYPE vllm:num_requests_running gauge\n"
            f"vllm:num_requests_running {len(self.started)}\n"
            "# TYPE vllm:generation_tokens counter\n"
            f"vllm:generation_tokens_total {self.done + going}\n"
        )


def test_a_load_is_held_measured_and_given_up(monkeypatch):
    server = FakeServer()
    monkeypatch.setattr(load, "complete", server.complete)
    found = load.steady(server, Load(5, 8, 100, 2000), 0.3)
    assert found.tpot_s == pytest.approx(0.002, rel=0.2)
    assert found.tokens_per_s == pytest.approx(5 / found.tpot_s)
    assert not server.started


def test_a_server_that_is_gone_is_an_error_of_its_own_cell():
    gone = Server("http://127.0.0.1:9", "m", Path("serve.log"), "", 0)
    with pytest.raises(AfdError, match=r"127\.0\.0\.1:9 serves no metrics .* see serve\.log"):
        load.steady(gone, Load(1, 8, 100, 2000), 0.1)

    async def ask():
        async with load.client() as session:
            await load.complete(session, gone, {}, 0)

    with pytest.raises(AfdError, match="dropped a request"):
        asyncio.run(ask())


def test_requests_are_the_same_for_every_server():
    server = FakeServer()
    bodies = [Load(2, 16, 100, 2000).body(server, index) for index in (0, 0, 1)]
    assert bodies[0]["prompt"] == bodies[1]["prompt"] != bodies[2]["prompt"]
    assert bodies[0]["max_tokens"] == 83 and bodies[0]["cache_salt"] != bodies[1]["cache_salt"]


def test_a_request_names_its_rank_where_vllm_would_deal_unevenly():
    asked = []

    class Session:
        @contextlib.asynccontextmanager
        async def post(self, url, json, headers):
            asked.append(headers)
            yield SimpleNamespace(status=200, read=lambda: asyncio.sleep(0))

    async def ask(ranks):
        server = Server("http://x", "m", Path("serve.log"), "", 0, ranks)
        for index in range(3):
            await load.complete(Session(), server, {}, index)

    asyncio.run(ask(2))
    assert asked == [{"X-data-parallel-rank": rank} for rank in "010"]
    asked.clear()
    asyncio.run(ask(0))
    assert asked == [{}] * 3


def test_mixed_lengths_are_around_the_mean_and_the_same_for_every_server():
    load = Load(400, 1000, 3000, 2000, mixed=True)
    lengths = [load.prompt_tokens(index) for index in range(400)]
    assert min(lengths) >= 500 and max(lengths) <= 1500 and abs(sum(lengths) / 400 - 1000) < 40
    body = load.body(FakeServer(), 7)
    assert len(body["prompt"]) == lengths[7] and body["max_tokens"] == 3000 - lengths[7] - 1
