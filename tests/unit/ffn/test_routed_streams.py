"""Routed dispatch and expert moves on streams: the bits of the host form, on one recording."""

from __future__ import annotations

import pytest
from remote_support import Deployed, reference_model
from test_stream_steps import run_on_streams, stream_of


@pytest.fixture
def deploy(tiny_models):
    running = []

    def make(family, x, y, dispatch="routed", **sections):
        sections = {"transport": {"backend": "ipc"}, "wire": {"dispatch": dispatch}, **sections}
        running.append(Deployed(tiny_models(family), x, y, **sections))
        return running[-1]

    yield make
    for deployed in running:
        deployed.close()


@pytest.mark.parametrize("tp", [1, 2])
def test_routed_stream_steps_match_the_reference(deploy, tiny_models, tp):
    deployed = deploy("deepseek_v3", 1, 3, ffn={"redundant_experts": 1, "tp": tp})
    expected = reference_model(tiny_models("deepseek_v3"))
    client, stream = deployed.clients[0], stream_of(deployed, 0)
    for rows, depth, real in [(8, 1, 5), (9, 2, 9), (3, 3, 3), (23, 3, 20)]:
        run_on_streams(client, stream, deployed.resolved, expected, rows, depth, rows, real=real)
