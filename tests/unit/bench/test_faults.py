"""`afd bench faults` without a deployment: its records and its shapes."""

import argparse
import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from afd_bench.faults.command import _shape
from afd_bench.faults.faults import FAULTS
from afd_bench.faults.measure import Cell, records
from afd_bench.faults.soak import KILLS, Size, grown
from afd_bench.faults.traffic import Counts, Job, Traffic


def test_refused_requests_count_as_failed_and_the_worst_times_are_kept() -> None:
    fault = FAULTS["kill -9 attention engine"]
    cells = [
        Cell(fault.name, Counts(done=9, refused=1, longest_s=2.0), 12.0),
        Cell(fault.name, Counts(done=9, failed=1, wrong=1, longest_s=20.0), 3.0),
    ]
    found = list(records(cells, tuple(FAULTS.values()), "2A1F", "m", "c", "2026-11-25"))
    assert {r.case for r in found} == {"2A1F, kill -9 attention engine, 2 times"}
    values = {r.metric: (r.value, r.peer_value) for r in found}
    assert values == {
        "failed": (2, 0), "wrong": (1, 0), "max_stall_s": (20, 15), "recovery_s": (12, 15),
    }  # fmt: skip


def test_shapes() -> None:
    assert _shape("12A3F") == (12, 3)
    with pytest.raises(argparse.ArgumentTypeError, match="write one as 2A1F"):
        _shape("2A")


def test_the_kills_of_the_soak_exist() -> None:
    assert set(KILLS) <= set(FAULTS)


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_client_that_comes_back_gets_each_token_once(comes_back: bool) -> None:
    """The first connection of each request breaks behind the number of the second event."""
    names: list[str] = []

    async def complete(request: web.Request) -> web.StreamResponse:
        name, had = (request.headers.get(h, "") for h in ("X-Request-Id", "Last-Event-ID"))
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(int(had or 0) + 1, 4):
            await response.write(b"id: %d\n" % number if had else b"")
            if number == 2 and name not in names:
                names.append(name)
                assert request.transport is not None
                request.transport.abort()
                return response
            await response.write(b'data: {"choices": [{"token_ids": [%d]}]}\n\n' % number)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def work() -> Counts:
        app = web.Application()
        app.router.add_post("/v1/completions", complete)
        async with TestServer(app) as server:
            job = Job((7,), 3, (1, 2, 3))
            url = str(server.make_url("")).rstrip("/")
            traffic = Traffic(url, "m", [job], clients=1, seed=1, limit=2, comes_back=comes_back)
            with traffic:
                while not traffic.ended:
                    await asyncio.sleep(0.01)
            return traffic.read()

    counts = asyncio.run(work())
    found = (counts.done, counts.failed, counts.wrong, counts.cut)
    assert found == ((2, 0, 0, 2) if comes_back else (1, 1, 0, 0))


def test_growth_compares_medians_of_the_second_and_the_last_tenth() -> None:
    looks = [
        (0.01, {"supervisor": Size(50, 5, 1)}),  # warms up: does not count
        (0.12, {"supervisor": Size(100, 10, 2), "control-0": Size(10, 1, 1)}),
        (0.15, {"supervisor": Size(102, 14, 2)}),  # a role starts
        (0.19, {"supervisor": Size(100, 10, 2)}),
        (0.5, {"supervisor": Size(900, 90, 9)}),
        (0.95, {"supervisor": Size(103, 10, 2)}),
        (1.0, {"supervisor": Size(103, 10, 2)}),
    ]
    assert dict(grown(looks)) == {
        "rss of supervisor": pytest.approx(0.03),
        "files of supervisor": 0.0,
        "threads of supervisor": 0.0,
    }
