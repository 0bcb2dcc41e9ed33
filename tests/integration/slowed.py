"""A 2A2F deployment of real servers, and ways to slow one of its members.

Each member has a network and a control group of its own, as on hosts or in containers of their own.
"""

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from deployments import BLOCK, SETTINGS
from helpers import answers, environment, openai_client, tokens_of, wait_until
from machines import Machine, star
from roles import AFD, Role, role, write_config
from safetensors.numpy import load_file, save_file

from afd.control import operator
from afd.control.keys import CurveKeys
from afd_demo.make_model import make_model
from afd_demo.sizes import resolve

MEMBERS = ("attention-0", "attention-1", "ffn-0", "ffn-1")
CONTROL = "tcp://10.77.0.1:5555"
GATEWAY = "http://127.0.0.1:8000"  # of the hub
HOT = (0, 2)
"""All rows choose these two experts; each instance holds one of them."""
EVEN = (0, 1, 2, 3)
UNEVEN = {"ffn-0": (0, 2, 1, 3), "ffn-1": (1, 3, 2, 0)}
_GROUPS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))  # version 1, version 2
_BURN = "while True: pass"


def groups_folder() -> Path | None:
    """Where a control group of processor time can be made; None if nowhere."""
    for place in _GROUPS:
        if (place / "cgroup.procs").exists():
            version_1 = place == _GROUPS[0]
            if version_1:  # below our own group
                lines = Path("/proc/self/cgroup").read_text().splitlines()
                own = next(w[2] for w in (one.split(":", 2) for one in lines) if w[1] == "cpu")
                place = place / own.lstrip("/")
            control = place / "cgroup.subtree_control"
            if os.access(place, os.W_OK) and (version_1 or "cpu" in control.read_text().split()):
                return place
    return None


@contextlib.contextmanager
def group(name: str) -> Iterator[Path]:
    """A control group with the usual share of processor time; its processes have to end first."""
    place = groups_folder()
    assert place is not None
    made = place / f"afd-test-{os.getpid()}-{name}"
    made.mkdir()
    try:
        yield made
    finally:
        wait_until(lambda: not (made / "cgroup.procs").read_text(), 20, f"{name} has ended")
        made.rmdir()


def make_skewed(folder: Path) -> Path:
    """A random DeepSeek-V3 whose rows all go to HOT, by the router's correction bias. Its experts
    are so wide that they, not Python, take most of the time of an FFN stage."""
    sizes = resolve(
        "deepseek_v3", "tiny", groups=1, top_groups=1, experts=4, layers=3, intermediate=8192
    )
    make_model("deepseek_v3", folder, sizes)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensors[name] = np.zeros_like(tensor)
            tensors[name][list(HOT)] = 10.0
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


@dataclass
class Slowed:
    """machines, roles, groups: by member. folder: with a file per FFN instance that makes it
    sleep. draw: sizes of the faults."""

    machines: dict[str, Machine]
    roles: dict[str, Role]
    groups: dict[str, Path]
    folder: Path
    keys: CurveKeys
    draw: random.Random
    busy: bool = True
    errors: list[str] = field(default_factory=list)

    def inside(self) -> contextlib.AbstractContextManager[None]:
        return self.machines["hub"].inside()

    def load(self, requests: int) -> None:
        """Keeps so many requests running until the end. They are not streamed: the clients would
        take processor time from the members."""

        def run(number: int) -> None:
            with self.inside():
                while self.busy:
                    try:
                        openai_client(GATEWAY).completions.create(
                            model="model",
                            prompt=list(tokens_of(f"slow{number}", 8)),
                            max_tokens=500,
                            temperature=0,
                            extra_body={"ignore_eos": True},
                        )
                    except Exception as error:
                        if self.busy:
                            self.errors.append(str(error))
                            time.sleep(0.5)

        for number in range(requests):
            threading.Thread(target=run, args=(number,), daemon=True).start()

    # -- one fault each

    @contextlib.contextmanager
    def processor(self, member: str) -> Iterator[str]:
        """Other work in the control group of a member, one process per core, which gets about nine
        tenths of the group's time."""
        burn = ["nice", "-n", "-10", sys.executable, "-c", _BURN]
        count = os.cpu_count() or 1
        burners = [subprocess.Popen(burn) for _ in range(count)]
        try:
            for burner in burners:
                (self.groups[member] / "cgroup.procs").write_text(str(burner.pid))
            yield f"{count} burners"
        finally:
            for burner in burners:
                burner.kill()
                burner.wait()

    @contextlib.contextmanager
    def accelerator(self, member: str) -> Iterator[str]:
        """Expert calls that take longer without using a core."""
        file = self.folder / member
        seconds = self.draw.uniform(0.01, 0.04)
        file.write_text(str(seconds))
        try:
            yield f"{seconds * 1e3:.0f} ms of sleep"
        finally:
            file.unlink()

    @contextlib.contextmanager
    def wire(self, member: str) -> Iterator[str]:
        """A slow network card: what the member sends."""
        tc = self.machines[member].argv("tc", "qdisc")
        mbit = self.draw.uniform(1.0, 4.0)
        shape = f"tbf rate {mbit * 1e3:.0f}kbit burst 2kb latency 4s"
        subprocess.run([*tc, *f"add dev eth0 root {shape}".split()], check=True, timeout=10)
        try:
            yield f"{mbit:.1f} Mbit/s"
        finally:
            subprocess.run([*tc, *["del", "dev", "eth0", "root"]], check=True, timeout=10)

    @contextlib.contextmanager
    def imbalance(self, member: str) -> Iterator[str]:
        """Both hot experts at one instance."""
        self._move(UNEVEN[member])
        try:
            yield "both hot experts"
        finally:
            self._move(EVEN)

    def _move(self, table: tuple[int, ...]) -> None:
        contract = operator.contract(CONTROL, self.keys.operator)
        assert contract is not None
        tables = (table,) * len(contract.moe_layers)
        operator.move_experts(CONTROL, self.keys.operator, tables=tables)

        def settled() -> bool:
            return not operator.status(CONTROL, self.keys.operator).moves_left

        wait_until(settled, 30, "the experts have moved")


def _write(folder: Path, machines: dict[str, Machine]) -> str:
    hosts: list[dict[str, object]] = [
        {"name": "hub", "address": machines["hub"].address, "attention": [], "ffn": []}
    ]
    for name in MEMBERS:
        kind, _, index = name.partition("-")
        own = {"attention": [], "ffn": [], kind: [int(index)]}
        hosts.append({"name": name, "address": machines[name].address, **own})
    attention = {**SETTINGS, "instances": 2, "max_num_batched_tokens": 128, "vllm_args": [BLOCK]}
    return write_config(folder / "deployment.yaml", {
        "model": str(make_skewed(folder / "model")),
        "served_model_name": "model",
        "hosts": hosts,
        "attention": attention,
        "ffn": {"instances": 2, "threads": 1},
        # One micro-batch: on few cores, two would make the sides wait for each other's core.
        "pipeline": {"depth": 1, "min_rows": 1},
        "transport": {"backend": "tcp", "trace": True},
        "control": {"keys": "control.keys"},
        "wire": {"dispatch": "broadcast"},
        "deadlines": {"drain_s": 1},  # requests run until the end
    })  # fmt: skip


@contextlib.contextmanager
def deployed(folder: Path, draw: random.Random) -> Iterator[Slowed]:
    """Everything is up and idle."""
    keys = CurveKeys.generate()
    keys.save(folder / "control.keys")
    with contextlib.ExitStack() as stack:
        groups = {name: stack.enter_context(group(name)) for name in MEMBERS}
        machines = stack.enter_context(star(MEMBERS))
        config = _write(folder, machines)
        roles: dict[str, Role] = {}
        for name in ("control", "gateway", *MEMBERS):
            kind, _, index = name.partition("-")
            program = AFD
            if kind == "ffn":
                program = (sys.executable, str(Path(__file__).with_name("sleepy_ffn.py")))
            where = machines.get(name, machines["hub"])
            argv = (kind, config, "--control", CONTROL)
            argv += ("--index", index) if index else ()
            procs = groups[name] / "cgroup.procs" if index else Path("/dev/null")
            # A shell puts itself into the group before it becomes the role.
            join = ("sh", "-c", f'echo $$ > {procs} && exec "$@"', "sh")
            with environment(OMP_NUM_THREADS="1", SLEEPY=str(folder / name)):
                roles[name] = stack.enter_context(
                    role(name, *argv, folder=folder, program=(*join, *where.argv(*program)))
                )
        found = Slowed(machines, roles, groups, folder, keys, draw)

        def healthy() -> bool:
            for one in roles.values():
                assert one.process.poll() is None, one.log.read_text()[-3000:]
            members = operator.status(CONTROL, keys.operator).members
            ready = sum(member.state == "ready" for member in members)
            return answers(f"{GATEWAY}/health") and ready > len(MEMBERS)

        with found.inside():
            wait_until(healthy, 150, "the deployment is healthy")
            yield found
            found.busy = False
