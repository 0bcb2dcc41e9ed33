"""The tests of the host form, with the host queueing work behind answers.

On the reference accelerator a wait of a stream holds up the calling thread, so that only the other
thread can recover what the stream waits for.
"""

import random

import pytest
from remote_support import (
    DEPTH,
    Deployed,
    Traffic,
    deploying,
    random_rows,
    reference_model,
    run_step,
)
from test_remote_loop import (  # noqa: F401
    reference,
    test_a_member_removed_and_registered_again_continues,
    test_an_ffn_restart_in_mid_step_loses_nothing,
    test_an_ffn_that_dies_again_on_its_return_is_waited_for,
    test_an_ffn_that_never_comes_back_is_an_error_that_names_it,
    test_an_instance_dropped_by_an_ffn_can_reconnect,
    test_an_instance_removed_while_it_waits_for_an_ffn_continues,
    test_every_topology_equals_the_reference,
)

from afd.errors import PeerLost
from afd.wire.streams_torch import HostStreams
from attention_worker.remote.launch_ahead import LaunchAhead


class Ahead(Deployed):
    def __init__(self, checkpoint, x, y, **sections):
        super().__init__(checkpoint, x, y, **{"transport": {"backend": "ipc"}, **sections})

    def client(self, i):
        client = super().client(i)
        client.launch_ahead(LaunchAhead(client._region, HostStreams(), lambda: None))
        return client


@pytest.fixture
def deploy(tiny_models):
    with deploying(Ahead) as start:
        yield lambda family, x, y, **sections: start(tiny_models(family), x, y, **sections)


@pytest.mark.parametrize("dispatch", ["broadcast", "routed"])
def test_ffn_instances_restart_at_any_moment(deploy, tiny_models, dispatch):
    deployed = deploy("qwen3_moe", 2, 2, wire={"dispatch": dispatch})
    draw = random.Random(dispatch)
    with Traffic(deployed, reference_model(tiny_models("qwen3_moe"))) as traffic:
        for kill in range(6):
            traffic.run_on(draw.randint(1, 4))
            deployed.stop_ffn(kill % 2)
            deployed.start_ffn(kill % 2)
        traffic.run_on()
    for client in deployed.clients:
        assert client._observer.metrics.ffn_retries["lost"] == 6


def test_answers_for_another_placement_end_the_engine(deploy, tiny_models):
    """What is queued adds up the answers of the FFN instances that were asked first."""
    deployed = deploy("qwen3_moe", 1, 2, wire={"dispatch": "routed"})
    client, resolved = deployed.clients[0], deployed.resolved
    run_step(client, resolved, reference_model(tiny_models("qwen3_moe")), [3] * DEPTH, 0)
    client.begin_step(1)
    deployed.stop_ffn(1)
    client.send(resolved.model.moe_layers[0], 0, *random_rows(resolved, 3, 1))
    deployed.renew("attention", 0)
    deployed.start_ffn(1)
    with pytest.raises(PeerLost, match="had given this instance up"):
        client.recv(0)
        client.end_step()
