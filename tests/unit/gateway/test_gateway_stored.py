"""Requests that refer to a stored response reach the instance that has it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from aiohttp import web
from gateway_fakes import FakeInstance, rig, run


@dataclass(eq=False)
class Storing(FakeInstance):
    """Keeps responses by id, as vLLM does."""

    kept: set[str] = field(default_factory=set)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if not request.path.startswith("/v1/responses"):
            return await super()._answer(request)
        self.seen.append(request)
        if request.path == "/v1/responses":
            wanted = json.loads(await request.content.read()).get("previous_response_id")
            made = f"resp_{self.id}_{len(self.seen)}"
            self.kept.add(made)
        else:
            wanted = made = request.path.split("/")[3]
        if wanted and wanted not in self.kept:
            return web.json_response({"error": {"message": "not found"}}, status=404)
        return web.json_response({"id": made, "me": self.id})


def test_a_stored_response_is_found_with_two_instances() -> None:
    async def work() -> None:
        instances = [Storing(f"attention-{i}") for i in range(2)]
        async with rig(*instances) as gw:
            url = f"{gw.url}/v1/responses"
            made = []
            for home in instances:
                home.kept.add(f"resp_{home.id}")
                made.append((f"resp_{home.id}", home.id))
            for name, home in made * 3:
                for method, path in (("GET", name), ("POST", f"{name}/cancel"), ("DELETE", name)):
                    async with gw.client.request(method, f"{url}/{path}") as answer:
                        assert answer.status == 200 and (await answer.json())["me"] == home
                async with gw.client.post(url, json={"previous_response_id": name}) as answer:
                    assert answer.status == 200 and (await answer.json())["me"] == home
            async with gw.client.get(f"{url}/resp_unknown") as answer:
                assert answer.status == 404
            async with gw.client.post(url, json={"previous_response_id": "a/../b?"}) as answer:
                assert answer.status == 404
            async with gw.client.post(url, json={"previous_response_id": 7}) as answer:
                assert answer.status == 404
            seen = len(instances[0].seen) + len(instances[1].seen)
            async with gw.client.post(url, json={"input": "x"}) as answer:
                assert answer.status == 200
            assert len(instances[0].seen) + len(instances[1].seen) == seen + 1  # nothing was asked

    run(work())
