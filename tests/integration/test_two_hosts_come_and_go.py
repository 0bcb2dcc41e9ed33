"""Instances come to, and leave, both of two hosts under load: no request fails or changes.

./run test -m long tests/integration/test_two_hosts_come_and_go.py
"""

from pathlib import Path

import pytest
from deployments import BLOCK, SETTINGS, TOOLS, Models
from helpers import HEALTH_S
from machines import why_not
from steady_load import Load
from two_hosts import CONTROL, GATEWAY, deployed

from afd_launch.come_and_go import Operator

pytest.importorskip("openai", reason="comes with vLLM; ./run test installs it")
pytestmark = [pytest.mark.serve, pytest.mark.long]

_REASON = why_not()
if _REASON is not None:
    pytest.skip(_REASON, allow_module_level=True)

ATTENTION = {**SETTINGS, "max_num_batched_tokens": 128, "vllm_args": [BLOCK, *TOOLS]}


@pytest.mark.timeout(900)
def test_instances_come_and_go_on_both_hosts(
    tiny_models: Models, tmp_path: Path, terse: dict[str, float]
) -> None:
    """1A1F on each host, room for one more of each kind. The supervisor of the host that has the
    seat starts and ends the process."""
    with deployed(
        tmp_path,
        tiny_models("qwen3_moe"),
        attention={**ATTENTION, "instances": 2, "max_instances": 3},
        ffn={"instances": 2, "max_instances": 3},
    ) as hosts:
        for name in ("a", "b"):
            hosts.serve(name)
        hosts.runs["a"].says("ready after", HEALTH_S)
        with hosts.machines["a"].inside():
            hosts.await_whole()
            instances = Operator(CONTROL, hosts.keys.operator, 180)
            with Load(GATEWAY, terse) as load:
                load.whole_rounds(1)
                assert instances.add("ffn") == "ffn-2"
                assert instances.add("attention") == "attention-2"
                hosts.await_whole(members=7)
                load.whole_rounds()
                spaces = {m.id: m.pid_space for m in hosts.members().members}
                assert len(set(spaces.values())) == 2
                instances.remove("ffn-1")  # on host b, of the start
                instances.remove("attention-1")
                load.whole_rounds()
                assert instances.add("ffn") == "ffn-1"
                assert instances.add("attention") == "attention-1"
                hosts.await_whole(members=7)
                load.whole_rounds()
                instances.restart("attention-0")
                instances.restart("ffn-1")
                hosts.await_whole(members=7)
                instances.remove("ffn-2")
                instances.remove("attention-2")
                load.whole_rounds()
            hosts.await_whole(members=5)
