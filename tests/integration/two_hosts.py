"""A deployment on two machines (network namespaces): ``afd serve FILE --host NAME`` on each."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deployments import BLOCK, SETTINGS
from helpers import HEALTH_S, answers, wait_until
from machines import Machine, Run, running, two_machines
from roles import AFD, write_config

from afd.control.keys import CurveKeys
from afd.control.messages import Members
from afd.control.operator import status
from afd_bench.servers import Server

GATEWAY = "http://127.0.0.1:8000"
CONTROL = "tcp://10.77.0.1:5555"


@dataclass
class TwoHosts:
    """A deployment on machines a and b."""

    machines: dict[str, Machine]
    folder: Path
    config: str
    stack: contextlib.ExitStack
    runs: dict[str, Run]
    keys: CurveKeys
    starts: int = 0

    def serve(self, name: str, *more: str) -> Run:
        self.starts += 1
        log = self.folder / f"{name}{self.starts}.log"
        command = (*AFD, "serve", self.config, "--host", name, *more)
        run = self.stack.enter_context(running(self.machines[name], *command, log=log))
        self.runs[name] = run
        return run

    def server(self) -> Server:
        run = self.runs["a"]
        return Server(GATEWAY, "model", run.log, CONTROL, run.process.pid)

    def members(self) -> Members:
        return status(CONTROL, self.keys.operator)

    def is_whole(self) -> bool:
        for name, run in self.runs.items():
            assert run.process.poll() is None, f"host {name} ended:\n{run.text()[-3000:]}"
        return answers(f"{GATEWAY}/health")

    def await_whole(self, members: int = 5) -> None:
        def whole() -> bool:
            ready = [m for m in self.members().members if m.state == "ready"]
            return len(ready) == members and self.is_whole()

        wait_until(whole, HEALTH_S, "both hosts serve")


@contextlib.contextmanager
def deployed(folder: Path, model: Path, **sections: object) -> Iterator[TwoHosts]:
    """Machines with a deployment file for both; nothing runs yet."""
    keys = CurveKeys.generate()
    keys.save(folder / "control.keys")
    attention = {
        **SETTINGS,
        "instances": 2,
        "max_num_batched_tokens": 128,
        "vllm_args": [BLOCK],
    }
    config: dict[str, object] = {
        "model": str(model),
        "served_model_name": "model",
        "hosts": [{"name": "a", "address": "10.77.0.1"}, {"name": "b", "address": "10.77.0.2"}],
        "attention": attention,
        "ffn": {"instances": 2},
        "pipeline": {"depth": 3, "min_rows": 1},
        "transport": {"backend": "tcp", "tcp": {"connections": 3}},
        "control": {"keys": "control.keys", "heartbeat_s": 0.2, "timeout_s": 1.5},
        "deadlines": {"ffn_s": 150, "drain_s": 5},
        **sections,
    }
    path = write_config(folder / "deployment.yaml", config)
    with contextlib.ExitStack() as stack:
        a, b = stack.enter_context(two_machines())
        yield TwoHosts({"a": a, "b": b}, folder, path, stack, {}, keys)
