"""A draining deployment at the gateway: running requests finish, new ones get a 503."""

from __future__ import annotations

import pytest
from gateway_fakes import FakeInstance, rig, run

from afd.control.messages import Member, Members, State
from afd_gateway.main import upstreams_of


@pytest.mark.parametrize(
    ("state", "shown"),
    [("starting", "starting"), ("ready", "draining"), ("draining", "draining")],
)
def test_ready_members_drain_with_the_deployment(state: State, shown: str) -> None:
    member = Member("attention", 0, 3, api_url="http://h:1", state=state)
    (upstream,) = upstreams_of(Members(members=(member,), draining=True))
    assert upstream.state == shown
    (upstream,) = upstreams_of(Members(members=(member,)))
    assert upstream.state == state


def test_a_drain_refuses_new_requests_until_it_is_undone() -> None:
    async def work() -> None:
        instance = FakeInstance()
        async with rig(instance) as gw:

            def drain(on: bool) -> None:
                member = Member("attention", 0, 1, api_url=gw.members[0].api_url, state="ready")
                gw.members[:] = upstreams_of(Members(members=(member,), draining=on))

            drain(False)
            async with gw.client.post(f"{gw.url}/v1/stream") as running:
                assert await running.content.readany()
                drain(True)
                async with gw.client.get(f"{gw.url}/v1/models") as refused:
                    assert refused.status == 503
                    assert int(refused.headers["Retry-After"]) > 0
                    assert "attention-0 is draining" in (await gw.error(refused))["message"]
                instance.go_on.set()
                assert (await running.read()).endswith(b"data: [DONE]\n\n")
            drain(False)
            async with gw.client.get(f"{gw.url}/v1/models") as again:
                assert again.status == 200

    run(work())
