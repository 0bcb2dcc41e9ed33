"""A member that the control plane refuses after it has joined."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from control_support import KEYS, contract_with, control_client, control_server, eventually

from afd.control.ending import exit_if_refused

MEMBER = """
import sys, time
from control_support import CurveKeys, control_client
from afd.control.ending import exit_if_refused
client = control_client(sys.argv[1], "ffn", 0, CurveKeys.from_json(sys.argv[2], source="test"))
client.join(deadline_s=5)
exit_if_refused(client)
print("joined", flush=True)
time.sleep(60)
"""
OTHER = contract_with(dtype="float32")


def test_the_process_of_a_refused_member_ends_with_the_reason(address: str) -> None:
    """Its supervisor starts it again. It stayed up before, unregistered."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-c", MEMBER, address, KEYS.to_json()]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    ) as child:
        try:
            with control_server(address):
                assert child.stdout is not None
                assert child.stdout.readline() == "joined\n"
            with control_server(address, contract=OTHER):
                _, errors = child.communicate(timeout=20)
        finally:
            child.kill()
    assert child.returncode == 1
    assert "afd: error: ffn-0 refused: dtype is bfloat16 here but float32 on" in errors


def test_a_refusal_before_the_call_counts(address: str) -> None:
    ended: list[str] = []
    with control_client(address, "ffn", 0) as client:
        with control_server(address):
            client.join(deadline_s=5)
            exit_if_refused(client, ended.append)
        assert not ended
        with control_server(address, contract=OTHER):
            eventually(lambda: ended, 10)
        late: list[str] = []
        exit_if_refused(client, late.append)
    assert late[0] == ended[0] and "dtype" in late[0]
