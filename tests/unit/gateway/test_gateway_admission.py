"""Requests that wait for their turn: order, bounds, and what ends the wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from gateway_fakes import QUICK, FakeInstance, Rig, rig, run

from afd_gateway.admission import Admission, Room
from afd_gateway.counts import Counts
from afd_gateway.errors import GatewayError
from afd_gateway.upstreams import Condition

ONE = replace(QUICK, max_running=1, waiting=4, waiting_s=5.0)


class Desk:
    """Requests in front of an Admission, without HTTP."""

    def __init__(self, capacity: int = 1, max_queued: int = 8, queue_s: float = 5.0) -> None:
        self.refused: list[str] = []
        self.counts = Counts()
        self.capacity = capacity
        self.wait = True
        settings = replace(QUICK, waiting=max_queued, waiting_s=queue_s)
        self.admission = Admission(
            settings, self.counts, lambda: Room(self.capacity, self.wait), lambda: None,
            self.refused.append,
        )  # fmt: skip
        self.order: list[str] = []
        self._gates: list[asyncio.Event] = []

    async def request(self, name: str) -> None:
        """Runs until ``finish``; the key is the first letter of the name."""
        async with self.admission.turn(name[0]):
            self.order.append(name)
            gate = asyncio.Event()
            self._gates.append(gate)
            await gate.wait()

    async def ask(self, *names: str) -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(self.request(name)) for name in names]
        await asyncio.sleep(0.01)
        return tasks

    async def finish(self, count: int = 1) -> None:
        for _ in range(count):
            self._gates.pop(0).set()
            await asyncio.sleep(0.01)

    def is_empty(self) -> bool:
        return all(
            self.counts.total(name) == 0
            for name in ("running", "waiting", "running a", "running b")
        )


def drive(work: Callable[[], object]) -> None:
    run(work())  # type: ignore[arg-type]


def test_requests_of_one_key_keep_their_order() -> None:
    async def work() -> None:
        desk = Desk(capacity=2)
        tasks = await desk.ask("a1", "a2", "a3", "a4")
        assert desk.order == ["a1", "a2"] and desk.admission.waiting == 2
        await desk.finish(4)
        await asyncio.gather(*tasks)
        assert desk.order == ["a1", "a2", "a3", "a4"] and desk.is_empty()

    drive(work)


def test_a_key_with_many_requests_does_not_keep_another_waiting() -> None:
    async def work() -> None:
        desk = Desk(capacity=2)
        tasks = await desk.ask("a1", "a2", "a3", "a4", "a5", "b1", "b2")
        await desk.finish(7)
        await asyncio.gather(*tasks)
        assert desk.order == ["a1", "a2", "b1", "a3", "b2", "a4", "a5"] and desk.is_empty()

    drive(work)


def test_a_full_queue_refuses_with_503() -> None:
    async def work() -> None:
        desk = Desk(max_queued=2)
        tasks = await desk.ask("a1", "a2", "a3")
        with pytest.raises(GatewayError, match="2 requests wait already") as told:
            await desk.request("a4")
        assert told.value.status == 503 and told.value.headers["Retry-After"] == "5"
        await desk.finish(3)
        await asyncio.gather(*tasks)
        assert desk.refused == ["queue_full"] and desk.is_empty()

    drive(work)


def test_a_full_queue_makes_place_for_a_key_that_has_little_of_it() -> None:
    async def work() -> None:
        desk = Desk(max_queued=3)
        tasks = await desk.ask("a1", "a2", "a3", "a4", "b1")
        with pytest.raises(GatewayError, match="its share") as told:
            await tasks[3]  # the newest of the longest queue
        assert told.value.status == 429
        with pytest.raises(GatewayError, match="its share"):
            await desk.request("b2")  # as many as the others: it is refused itself
        await desk.finish(4)
        await asyncio.gather(*tasks[:3], tasks[4])
        assert desk.order == ["a1", "b1", "a2", "a3"]
        assert desk.refused == ["queue_share"] * 2 and desk.is_empty()

    drive(work)


def test_a_wait_that_is_too_long_ends_with_503() -> None:
    async def work() -> None:
        desk = Desk(queue_s=0.1)
        tasks = await desk.ask("a1")
        began = time.monotonic()
        with pytest.raises(
            GatewayError, match=r"waited 0\.1 s for its turn: the attention"
        ) as told:
            await desk.request("a2")
        assert told.value.status == 503 and time.monotonic() - began < 2.0
        await desk.finish()
        await asyncio.gather(*tasks)
        assert desk.refused == ["queue_time"] and desk.is_empty()

    drive(work)


def test_clients_that_go_away_leave_the_queue_and_give_their_turn_on() -> None:
    async def work() -> None:
        desk = Desk()
        tasks = await desk.ask("a1", "a2", "a3", "a4")
        tasks[1].cancel()
        await asyncio.sleep(0.01)
        assert desk.admission.waiting == 2
        desk._gates.pop(0).set()
        tasks[2].cancel()  # in the moment in which it gets its turn
        await asyncio.sleep(0.05)
        assert desk.order == ["a1", "a4"]
        await desk.finish()
        await asyncio.gather(tasks[0], tasks[3])
        assert desk.is_empty()

    drive(work)


def test_room_made_elsewhere_is_noticed() -> None:
    async def work() -> None:
        desk = Desk(capacity=0)
        tasks = await desk.ask("a1")
        assert desk.order == []
        desk.capacity = 1  # an instance came back, or another process finished a request
        await asyncio.sleep(0.2)
        assert desk.order == ["a1"]
        await desk.finish()
        await asyncio.gather(*tasks)

    drive(work)


async def until_waiting(gw: Rig, count: int) -> None:
    while gw.server.gateway.admission.waiting != count:
        await asyncio.sleep(0.01)


def test_requests_beyond_the_limit_wait_and_are_served() -> None:
    async def work() -> None:
        instance = FakeInstance()
        async with rig(instance, settings=ONE) as gw:
            first = asyncio.create_task(gw.client.post(f"{gw.url}/v1/wait"))
            await instance.arrived.wait()
            others = [asyncio.create_task(gw.client.post(f"{gw.url}/v1/x")) for _ in range(4)]
            await until_waiting(gw, 4)
            assert len(instance.seen) == 1
            async with gw.client.get(f"{gw.url}/v1/models") as answer:
                assert answer.status == 200  # no work for an engine
            async with gw.client.post(f"{gw.url}/v1/x") as answer:
                assert answer.status == 503 and answer.headers["Retry-After"] == "5"
                await gw.error(answer)
            async with gw.client.get(f"{gw.url}/metrics") as answer:
                page = await answer.text()
            assert 'afd_gateway_waiting_requests{instance="gateway-0"} 4.0' in page
            assert 'afd_gateway_refused_total{instance="gateway-0",reason="queue_full"} 1.0' in page
            instance.go_on.set()
            assert {(await task).status for task in [first, *others]} == {200}

    run(work())


def test_new_requests_wait_while_the_only_instance_is_away() -> None:
    async def work() -> None:
        instance = FakeInstance()
        async with rig(instance, settings=ONE) as gw:
            (member,) = gw.members
            async with gw.client.post(f"{gw.url}/v1/x") as answer:
                assert answer.status == 200
            gw.members.clear()
            gw.server.members_changed()
            asking = asyncio.create_task(gw.client.post(f"{gw.url}/v1/x"))
            await until_waiting(gw, 1)
            await asyncio.sleep(0.1)
            assert not asking.done()
            gw.members.append(replace(member, generation=2))
            gw.server.members_changed()
            assert (await asking).status == 200

    run(work())


def test_a_wait_for_an_absent_instance_names_it() -> None:
    async def work() -> None:
        instance = FakeInstance()
        async with rig(instance, settings=replace(ONE, waiting_s=0.2)) as gw:
            async with gw.client.post(f"{gw.url}/v1/x") as answer:
                assert answer.status == 200
            gw.members.clear()
            async with gw.client.post(f"{gw.url}/v1/x") as answer:
                assert answer.status == 503
                error = await gw.error(answer)
            assert "waited 0.2 s for its turn" in str(error["message"])
            assert "attention-0 has not joined" in str(error["message"])

    run(work())


def test_requests_before_the_first_instance_and_during_a_drain_do_not_wait() -> None:
    async def work() -> None:
        instance = FakeInstance()
        async with rig(instance, settings=ONE, wait=False) as gw:
            member = gw.members.pop()
            gw.server.members_changed()
            async with gw.client.post(f"{gw.url}/v1/x") as answer:
                assert answer.status == 503
            gw.members.append(member)
            await gw.until("attention-0", Condition.HEALTHY)
            async with gw.client.post(f"{gw.url}/v1/x") as answer:
                assert answer.status == 200
            gw.members[0] = replace(member, state="draining")
            async with gw.client.post(f"{gw.url}/v1/x") as answer:
                assert answer.status == 503 and "draining" in await answer.text()

    run(work())
