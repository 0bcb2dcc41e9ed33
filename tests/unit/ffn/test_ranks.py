"""FFN instances of several ranks, in one process: RemoteExperts against leader, heads, followers.

Every answer is compared with the reference experts computed locally on the same rows.
"""

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from remote_support import DEPTH, deploying, in_background, reference_model, run_step
from test_stream_steps import run_on_streams, stream_of

from afd.config.choices import choices
from afd.errors import ConfigError
from afd.schedule import Position, row_shares
from afd.topology import FfnPlace, width_slices
from afd.wire.layout import Kind
from ffn_worker.allreduce.formats_table import REDUCE_FORMATS
from ffn_worker.pool.order_format import Order, Part, read_order
from ffn_worker.rank_reduce import sort_by_rank


@pytest.fixture
def deploy(tiny_models):
    with deploying() as start:
        yield lambda family, x, y, **sections: start(tiny_models(family), x, y, **sections)


@pytest.fixture
def reference(tiny_models):
    return lambda family: reference_model(tiny_models(family))


def run_clients(deployed, work):
    """Runs ``work(i)`` for every attention client on threads. Returns the exceptions raised."""
    started = [in_background(work, i) for i in range(len(deployed.clients))]
    for thread, _ in started:
        thread.start()
    for thread, _ in started:
        thread.join(40)
    assert not any(thread.is_alive() for thread, _ in started)
    return [error for _, raised in started for error in raised]


@given(width=st.integers(1, 4096), ranks=st.integers(1, 16), multiple=st.sampled_from([8, 32, 128]))
def test_width_slices_cover_the_width_in_units(width, ranks, multiple):
    if ranks > 1 and width // multiple < ranks:
        with pytest.raises(ConfigError, match=f"width {width} cannot be cut for {ranks} ranks"):
            width_slices(width, ranks, multiple)
        return
    slices = width_slices(width, ranks, multiple)
    assert [i for start, end in slices for i in range(start, end)] == list(range(width))
    assert all(start % multiple == 0 for start, _ in slices)
    sizes = [end - start for start, end in slices]
    assert min(sizes) > 0
    if width % multiple == 0:
        assert max(sizes) <= 2 * min(sizes)


def test_every_rank_but_the_leader_follows_exactly_one_rank():
    places = [FfnPlace(j, r, 3, 2) for j in range(3) for r in range(2)]
    assert [place.number for place in places] == list(range(6))
    led = [follower for place in places for follower in (*place.followers, *place.heads)]
    assert sorted(led) == [(p.instance, p.rank) for p in places[1:]]
    for place in places[1:]:
        parent = FfnPlace(*place.follows, 3, 2)
        assert (place.instance, place.rank) in (*parent.followers, *parent.heads)
    assert places[0].follows is None


def test_an_order_survives_the_wire():
    parts = (Part(0, 2**32 - 1, 7, 3, 2**31, 2**31, 2**40), Part(300, 1, 0, 1, 0, 0, 5))
    order = Order(Kind.DATA, Position(60, 2), parts, settled=9)
    assert read_order(Kind.DATA, 60, 2, 9, order.payload()) == order
    assert order.depth == 3


@given(rows=st.lists(st.integers(0, 9), min_size=1, max_size=4), world=st.integers(2, 5))
def test_rows_sorted_by_rank_match_row_shares(rows, world):
    out = torch.arange(1.0, sum(rows) + 1).unsqueeze(1)
    got = sort_by_rank(out, rows, world)
    firsts = [sum(rows[:i]) for i in range(len(rows))]
    cuts = row_shares(len(got), world)
    for rank in range(world):
        wanted = [
            float(first + row + 1)
            for first, n in zip(firsts, rows, strict=True)
            for row in range(*row_shares(n, world)[rank])
        ]
        mine = got[slice(*cuts[rank])].squeeze(1).tolist()
        assert mine[: len(wanted)] == wanted and not any(mine[len(wanted) :])


def test_every_reduce_choice_of_the_config_exists():
    wanted = tuple(choices("reduce_format"))
    assert set(wanted) <= set(REDUCE_FORMATS)


@pytest.mark.parametrize(("x", "y", "tp"), [(1, 1, 2), (2, 1, 3), (3, 2, 2)])
def test_answers_of_ranks_match_the_reference(deploy, reference, x, y, tp):
    deployed = deploy("deepseek_v3", x, y, ffn={"tp": tp})
    expected = reference("deepseek_v3")

    def work(i):
        for step in range(4):
            sizes = [1 + (i + step + mb) % 5 for mb in range(1 + (step + i) % DEPTH)]
            run_step(deployed.clients[i], deployed.resolved, expected, sizes, (i, step))
        deployed.clients[i].leave()

    assert not run_clients(deployed, work)
    steps = [sum(loop.rank.metrics.steps) for loop in deployed.loops.values()]
    assert len(steps) == y * tp and steps[0] >= 4
    ways_back = [loop.rank.metrics.wire_bytes[1] for loop in deployed.loops.values()]
    rows = sum(1 + (i + s + mb) % 5 for i in range(x) for s in range(4)
               for mb in range(1 + (s + i) % DEPTH))  # fmt: skip
    layers = len(deployed.resolved.model.moe_layers)
    assert sum(ways_back) == y * layers * deployed.resolved.f2a.message_bytes(rows)


@pytest.mark.parametrize(("x", "y", "tp"), [(2, 2, 1), (2, 1, 2), (3, 2, 2)])
def test_stream_steps_reach_every_rank(deploy, tiny_models, x, y, tp):
    sections = {"transport": {"backend": "ipc"}, "ffn": {"tp": tp}}
    deployed = deploy("deepseek_v3", x, y, **sections)
    expected = reference_model(tiny_models("deepseek_v3"))

    def work(i):
        client, stream = deployed.clients[i], stream_of(deployed, i)
        for step in range(6):
            depth = 1 + (step + i) % DEPTH
            if step % 3 == 2:
                run_step(client, deployed.resolved, expected, [2] * depth, (i, step))
            else:
                rows = depth + 2 + step
                run_on_streams(client, stream, deployed.resolved, expected, rows, depth, (i, step))
            if step == 3:
                client.leave()

    assert not run_clients(deployed, work)
    assert not any(loop.rank.metrics.late_peers for loop in deployed.loops.values())


@pytest.mark.parametrize(("y", "tp"), [(2, 1), (1, 2)])
def test_followers_get_an_announcement_after_many_leaves(deploy, tiny_models, y, tp):
    """Host steps lie between the stream steps, as prompts of one token cause them."""
    deployed = deploy("qwen3_moe", 1, y, transport={"backend": "ipc"}, ffn={"tp": tp})
    expected = reference_model(tiny_models("qwen3_moe"))

    def work(i):
        client, stream = deployed.clients[i], stream_of(deployed, i)
        for step in range(5):
            if step % 4:
                run_step(client, deployed.resolved, expected, [2], (i, step))
            else:
                run_on_streams(client, stream, deployed.resolved, expected, 5, 2, (i, step))
            client.leave()

    assert not run_clients(deployed, work)
    assert not any(loop.rank.metrics.late_peers for loop in deployed.loops.values())


@pytest.mark.parametrize(("y", "tp", "dies"), [(1, 2, 1), (2, 1, 0), (2, 2, 3)])
def test_a_dead_rank_ends_only_its_own_instance(deploy, reference, y, tp, dies):
    """dies: number of the killed rank. The test restarts the instance, as the supervisor would."""
    deployed = deploy("deepseek_v2", 2, y, ffn={"tp": tp, "late_ms": 300.0, "step_wait_ms": 5.0})
    expected = reference("deepseek_v2")

    def supervise():
        time.sleep(0.3)
        deployed.stop_ffn(dies)
        same_instance = [n for n in range(y * tp) if n // tp == dies // tp]
        for number in same_instance:
            deployed.threads[number].join(5)
            assert not deployed.threads[number].is_alive()
        assert set(deployed.ended) == set(same_instance) - {dies}
        for number in same_instance:
            deployed.start_ffn(number)

    def work(i):
        for step in range(4):
            sizes = [2, 3, 1]
            run_step(deployed.clients[i], deployed.resolved, expected, sizes, (i, step), pause=0.04)
        deployed.clients[i].leave()

    supervisor = threading.Thread(target=supervise)
    supervisor.start()
    assert not run_clients(deployed, work), deployed.ended
    supervisor.join(5)
    assert not deployed.ended
    for client in deployed.clients:
        assert sum(client._observer.metrics.ffn_retries.values()) == tp


def test_every_rank_drops_a_dead_attention_instance(deploy, reference):
    deployed = deploy("qwen3_moe", 2, 2, ffn={"tp": 2, "late_ms": 300.0})
    expected = reference("qwen3_moe")
    dying, other = deployed.clients
    for step in range(2):
        assert not run_clients(
            deployed,
            lambda i, step=step: run_step(
                deployed.clients[i], deployed.resolved, expected, [2, 3], (i, step)
            ),
        )
    dying.begin_step(2)
    layer = deployed.resolved.model.moe_layers[0]
    x = torch.zeros(2, deployed.resolved.model.hidden)
    ids = torch.zeros(2, deployed.resolved.model.top_k, dtype=torch.int32)
    dying.send(layer, 0, x, ids, torch.ones_like(ids, dtype=torch.float32))
    dying.close()
    deployed.leave("attention-0")
    started = time.monotonic()
    for step in range(2, 5):
        run_step(other, deployed.resolved, expected, [2, 3], (1, step))
    assert time.monotonic() - started < 3.0
    assert not deployed.ended
    deployed.clients.remove(dying)
