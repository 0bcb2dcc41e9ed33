"""The process that waits for attention instances: what its forks run, and when vLLM starts anew.

A small module stands in for vLLM's API server.
"""

import contextlib
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_supervisor import alive, soon

from afd.config.deployment import Deployment
from afd.config.roles import ROLE_FILE_ENV, RoleSpec
from afd_launch.attention_standby import late_changes
from afd_launch.process import Command, group_members
from afd_launch.standby import Standby
from afd_launch.watchdog import Watchdog

SPEC = RoleSpec("attention", 0, Deployment.from_plain({"model": "m"}), "tcp://127.0.0.1:1")

# Says what it is; its status is the number of its arguments. With the argument "wait" it waits.
SERVER = """
import json, logging, os, sys, time
assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals()
said = {"arguments": sys.argv[1:], "spec": __spec__.name, "parent": os.getppid(), "me": os.getpid()}
for name in ("AFD_ROLE_FILE", "LATE", "EARLY", "IMPORTED", "TOLD"):
    said[name] = os.environ.get(name)
said["logs"] = len(logging.getLogger().handlers)
with open(__file__ + ".told.new", "w") as file: json.dump(said, file)
os.rename(__file__ + ".told.new", __file__ + ".told")
print("the server runs", flush=True)
if "wait" in sys.argv: time.sleep(99)
sys.exit(len(sys.argv) - 1)
"""

# `python -m afd_launch.attention_standby`. EARLY cannot be changed after the imports.
WAITS = """
import os, sys
sys.path[:0] = {path!r}
from types import SimpleNamespace
from afd_launch import attention_role, attention_standby
from attention_worker.vllm_hooks import command, standby
def attention_command(spec, environment=os.environ):
    argv = [sys.executable, "-m", "server", *map(str, range(spec.index))]
    if spec.index == 5: argv.append("wait")
    changed = {{"EARLY": "changed"}} if spec.index == 9 else {{"EARLY": "same"}}
    changed["OPENBLAS_NUM_THREADS"] = "1"  # as the product's
    return argv, {{**environment, **changed, "LATE": str(spec.index)}}
attention_standby.attention_command = command.attention_command = attention_command
attention_standby.LATE = attention_standby.LATE | {{"LATE", "PYTEST_CURRENT_TEST"}}
def import_all(role):
    assert os.environ["EARLY"] == "same"
    sys.modules["server"] = SimpleNamespace()
    os.environ["IMPORTED"] = "1"  # as vLLM does
attention_standby.import_all = import_all
standby.layout = lambda: SimpleNamespace(server_module="server")
sys.exit(attention_standby.main(*sys.argv[1:]))
"""


@pytest.fixture
def standby(tmp_path, monkeypatch):
    (tmp_path / "server.py").write_text(SERVER)
    script = tmp_path / "waits.py"
    path = [str(tmp_path), *filter(None, sys.path)]
    script.write_text(WAITS.format(path=path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    for index in (0, 3, 5, 9):
        replace(SPEC, index=index).save(tmp_path / f"attention-{index}.json")
    watchdog = Watchdog()
    standby = Standby(watchdog)
    standby.keep(command(tmp_path, 0))
    soon(standby.is_ready, "it waits", 30)
    yield standby
    standby.close()
    watchdog.close()


def command(here: Path, index: int) -> Command:
    kind = (sys.executable, str(here / "waits.py"))
    argv = ("afd", "--role-file", str(here / f"attention-{index}.json"))
    return Command(f"attention-{index}", argv, {"TOLD": "1"}, standby=kind)


def told(here: Path) -> dict[str, object]:
    path = here / "server.py.told"
    soon(path.exists, "the server has said what it is", 30)
    return json.loads(path.read_text())


def test_changes_that_come_too_late():
    base = {"OMP_NUM_THREADS": "2", ROLE_FILE_ENV: "a"}
    assert late_changes(base, base) == {}
    late = {**base, ROLE_FILE_ENV: "b", "CUDA_VISIBLE_DEVICES": "1"}
    assert late_changes(base, late) == {ROLE_FILE_ENV: "b", "CUDA_VISIBLE_DEVICES": "1"}
    assert late_changes(late, base) == {ROLE_FILE_ENV: "a", "CUDA_VISIBLE_DEVICES": None}
    assert late_changes(base, {**base, "OMP_NUM_THREADS": "1"}) is None
    assert late_changes(base, {**base, "LD_PRELOAD": "x.so"}) is None


def test_a_fork_is_the_server_with_its_arguments_and_its_status_arrives(tmp_path, standby):
    process = standby.take(command(tmp_path, 3))
    said = told(tmp_path)
    soon(process.gone, "it has ended", 30)
    assert process.exit_code() == 3
    assert said["arguments"] == ["0", "1", "2"]
    assert said["parent"] == process.group and said["me"] != process.group
    file = str(tmp_path / "attention-3.json")
    assert [said[name] for name in (ROLE_FILE_ENV, "LATE", "EARLY", "IMPORTED", "TOLD")] == [
        file, "3", "same", "1", "1"
    ]  # fmt: skip
    assert said["spec"] == "server" and said["logs"] == 0
    assert os.read(process.output, 9999) == b"the server runs\n"
    process.close()


def test_vllm_starts_anew_if_it_needs_other_variables_for_its_imports(tmp_path, standby):
    process = standby.take(command(tmp_path, 9))
    said = told(tmp_path)
    soon(process.gone, "it has ended", 30)
    assert process.exit_code() == 9
    assert said["EARLY"] == "changed" and said["IMPORTED"] is None
    assert b"imported vLLM with other variables" in os.read(process.output, 9999)
    process.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_ends_with_its_leader(tmp_path, standby, number):
    process = standby.take(command(tmp_path, 5))
    server = told(tmp_path)["me"]
    os.kill(process.group, number)
    soon(process.gone, "it has ended", 30)
    assert process.exit_code() == (0 if number == signal.SIGTERM else -number)
    assert not group_members(process.group) and not alive(server)
    process.close()


def test_the_status_of_a_killed_server_arrives(tmp_path, standby):
    process = standby.take(command(tmp_path, 5))
    with contextlib.suppress(ProcessLookupError):
        os.kill(told(tmp_path)["me"], signal.SIGKILL)
    soon(process.gone, "it has ended", 30)
    assert process.exit_code() == -signal.SIGKILL
    process.close()
