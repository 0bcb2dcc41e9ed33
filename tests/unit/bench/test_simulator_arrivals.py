"""The arrivals part of `afd bench simulator`: the client, and what a saved run says."""

import asyncio
import json
import statistics
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from aiohttp import web

from afd.errors import AfdError
from afd.records import read_records
from afd_bench.arrivals_run import Turn, engine_s, measured, save_turn
from afd_bench.message_times import Times
from afd_bench.open_loop import Planned, Sent, poisson, send
from afd_bench.simulator_arrivals import cells, load_of, outside_s, speeds, table, table_line
from afd_bench.stage_points import Decode, Observed
from afd_planner.simulate.engine import simulate

RATE = 4.0
US = {1: 500.0, 2: 520.0, 4: 560.0, 8: 640.0, 16: 800.0}
PROMPT_US = {16: 700.0, 64: 1500.0, 128: 2600.0}
SLOWER = {"attention": 1.4, "prefill": 1.3, "ffn": 1.2, "ffn_prefill": 1.5, "rest": 1.1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of one turn whose stages ran SLOWER during its load, on a made-up host."""
    times = Times()
    for rows, us in US.items():
        times.attention[rows] = times.ffn[rows] = times.rest[rows] = [us]
    times.wire[1024] = times.wire[4096] = [20.0]
    prompts = Times()
    for rows, us in PROMPT_US.items():
        prompts.attention[rows] = prompts.ffn[rows] = [us]
    observed = Observed([[Decode(80.0, times)]], [prompts])
    load = Times()
    for rows, us in US.items():
        if rows <= 8:  # of a micro-batch of decoding requests
            load.attention[rows] = [SLOWER["attention"] * us] * 3
            load.ffn[rows] = [SLOWER["ffn"] * us] * 3
        load.rest[rows] = [SLOWER["rest"] * us] * 3
    load.attention[64] = [SLOWER["prefill"] * PROMPT_US[64]] * 2
    load.ffn[64] = [SLOWER["ffn_prefill"] * PROMPT_US[64]] * 2
    load.rest[1].append(99_999.0)  # a pause without requests
    load.rest[64] = [9999.0]
    about: dict[str, str | int] = {
        "model": "made-up",
        "command": "test",
        "attention": 1,
        "ffn": 1,
        "depth": 2,
        "layers": 4,
        "hidden": 512,
    }
    saved = tmp_path / "1A1F"
    saved.mkdir()
    (saved / "run.json").write_text(json.dumps({**about, "turns": 1}))
    planned = poisson(RATE, 3.0, (32, 96), (16, 48), seed=1)
    blank = [Sent(p.at_s, p.prompt, p.output, 0.1, 0.2) for p in planned]
    turn = Turn({1: observed}, {RATE: blank}, {RATE: {1: load}}, {RATE: 0.07})
    save_turn(saved, 0, turn, about)
    return saved


def test_speeds_of_the_stages_in_a_load(folder):
    assert speeds(folder, 0, RATE)[1] == pytest.approx(SLOWER, rel=1e-3)


def test_a_cell_compares_the_load_at_the_speed_of_its_stages(folder):
    ours = simulate(load_of(folder, 0, RATE, {1: SLOWER}))
    found = {cell.metric: cell for cell in cells(folder)}
    assert found["tpot_p50"].simulated == pytest.approx(ours.tpot.p50, rel=1e-3)
    per_token = statistics.median(0.1 / (output - 1) for output in _outputs(folder))
    assert found["tpot_p50"].measured == pytest.approx(per_token)
    assert found["engine_ttft_mean"].measured == 0.07
    assert found["engine_ttft_mean"].simulated == pytest.approx(ours.ttft.mean - 0.03, rel=1e-3)
    for cell in found.values():
        assert cell.ratio == pytest.approx(cell.simulated / cell.measured)
    assert found["tpot_p50"].plain[0] < 0.9 * found["tpot_p50"].ratio


def _outputs(folder: Path) -> list[int]:
    lines = (folder / f"sent-0-{RATE:g}.csv").read_text().splitlines()[1:]
    return [int(line.split(",")[2]) for line in lines]


def test_a_table_of_all_runs(folder):
    lines = table(folder.parent).splitlines()
    assert len(lines) == 2 + 5
    assert f"| {folder.name} | 4 | tpot_p50 |" in "\n".join(lines)


def test_the_time_between_client_and_scheduler_is_measured(folder):
    assert outside_s(folder, 0, RATE) == pytest.approx(0.1 - 0.07)
    counters = (
        'vllm:request_queue_time_seconds_sum{engine="0"} 1.5\n'
        'vllm:request_queue_time_seconds_count{engine="0"} 10.0\n'
        'vllm:request_prefill_time_seconds_sum{engine="0"} 2.0\n'
        'vllm:request_prefill_time_seconds_sum{engine="1"} 0.25\n'
        "vllm:request_decode_time_seconds_sum 9.0\n"
    )
    assert engine_s(counters) == pytest.approx(3.75)


def test_metrics_of_a_load():
    sent = [Sent(0.0, 5, 11, 0.1, 1.1), Sent(1.0, 5, 21, 0.3, 3.3), Sent(2.0, 5, 1, 0.2, 0.2)]
    values = measured([one for one in sent if one.output > 1], 0.05)
    assert values["engine_ttft_mean"] == 0.05
    assert values["tpot_p50"] == pytest.approx((0.1 + 0.15) / 2)
    assert values["tokens_per_s"] == pytest.approx(32 / 4.3)


def test_poisson_gaps_and_lengths():
    planned = poisson(50.0, 100.0, (3, 9), (2, 4), seed=5)
    gaps = [b.at_s - a.at_s for a, b in pairwise(planned)]
    assert len(planned) == 5000 and planned[0].at_s == 0.0
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(0.02, rel=0.08)
    assert {p.prompt for p in planned} == set(range(3, 10))
    assert {p.output for p in planned} == {2, 3, 4}


@pytest.fixture
def token_server() -> Iterator[str]:
    """A server that waits 50 ms and then streams a token every 10 ms; 7 tokens are refused."""

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["max_tokens"] == 7:
            return web.Response(status=400, text="no sevens")
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.sleep(0.05)
        for number in range(body["max_tokens"]):
            await asyncio.sleep(0.01 if number else 0.0)
            await response.write(b'data: {"choices": [{"text": "x"}]}\n\n')
        await response.write(b"data: [DONE]\n\n")
        return response

    loop = asyncio.new_event_loop()
    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)

    async def start() -> int:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return int(runner.addresses[0][1])

    port = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield f"http://127.0.0.1:{port}"
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.run_until_complete(runner.cleanup())
    loop.close()


def test_requests_are_sent_at_their_moments_and_their_tokens_are_timed(token_server):
    planned = [Planned(0.0, 4, 11), Planned(0.03, 4, 21)]  # the second does not wait for the first
    first, second = send(token_server, "model", planned)
    assert first.arrival_s == 0.0 and 0.03 <= second.arrival_s < 0.12
    for sent in (first, second):
        assert 0.05 <= sent.ttft_s < sent.e2el_s
        assert 0.009 <= sent.tpot_s < 0.1
    with pytest.raises(AfdError, match="returned 400: no sevens"):
        send(token_server, "model", [Planned(0.0, 4, 7)])


RESULTS = Path(__file__).parents[3] / "docs/results"
RUNS = RESULTS / "simulator_arrivals"


def test_published_cells_follow_from_the_measurements_of_their_run():
    """Recomputes one load. The aim is 10 % in all cells."""
    records = [
        r for r in read_records(RESULTS / "simulator.json") if "prefill and decode" in r.case
    ]
    assert len(records) == 30
    close = {
        layout: sum(abs(r.ratio - 1) <= 0.1 for r in records if f" {layout} " in r.case)
        for layout in ("1A1F", "2A2F")
    }
    assert close == {"1A1F": 15, "2A2F": 15}
    alone = [r for r in records if " 1A1F " in r.case]
    page = (RESULTS / "simulator.md").read_text()
    found = {cell.metric: cell for cell in cells(RUNS / "1A1F", rates=(2.0,))}
    assert all(table_line("1A1F", cell) in page for cell in found.values())
    for record in alone:
        if " 2 requests/s" in record.case:
            assert found[record.metric].simulated == pytest.approx(record.value)
            assert found[record.metric].measured == pytest.approx(record.peer_value)
