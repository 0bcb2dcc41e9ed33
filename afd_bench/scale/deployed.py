"""The processes of one case of `afd bench scale`, and what is measured on them."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from afd.config.deployment import Deployment
from afd.config.roles import Role, RoleSpec
from afd.control.keys import CurveKeys
from afd.errors import AfdError
from afd.host.ports import held_ports
from afd.topology import member_id
from afd_bench.scale.shared import Case, Count, Rows, Tally

_HOST = "127.0.0.1"
_CONTROL = "control"
_POLL_S = 0.005
_END_S = 20.0
DEADLINE_S = 300.0
"""For the start, and for one event."""


@dataclass(frozen=True)
class Window:
    """Means over the measured seconds.

    steps_per_s: of the pool. leader_us, orders_us, waits_us, answer_us: CPU time of the leader's
        thread per step, see ``Count``. control_cores: CPU time of the control plane per s.
    """

    steps_per_s: float
    leader_us: float
    orders_us: float
    waits_us: float
    answer_us: float
    control_cores: float


class Deployed:
    """A control plane, y FFN ranks and x attention drivers on this host."""

    def __init__(self, case: Case, checkpoint: Path, keys: Path, layers: Sequence[Rows]) -> None:
        """checkpoint: of the model. keys: a key file. layers: what attention sends."""
        # Started once with its imports, so that a process is a fork: dozens of them importing
        # torch would take minutes and gigabytes on few cores, and say nothing of the deployment.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["afd_bench.scale.roles_torch"])
        self._case, self._keys, self._layers = case, keys, layers
        self._ports = contextlib.ExitStack()
        (port,) = self._ports.enter_context(held_ports([_HOST]))
        self._address = f"tcp://{_HOST}:{port}"
        self._deployment = _deployment(case, checkpoint, self._address, keys)
        self._processes: dict[str, BaseProcess] = {}
        self.tallies: dict[str, Tally] = {}

    @property
    def attention(self) -> list[str]:
        return [member_id("attention", i) for i in range(self._case.x)]

    @property
    def ffn(self) -> list[str]:
        return [member_id("ffn", j) for j in range(self._case.y)]

    def start(self) -> float:
        """Starts every process. Returns the seconds until every attention instance has done a
        step, without the imports."""
        self._warm()
        began = time.monotonic()
        self._start("control", 0)
        for name in (*self.ffn, *self.attention):
            self.start_member(name)
        for name in self.attention:
            self.tallies[name].running = True
        self.await_steps(self.attention)
        return time.monotonic() - began

    def start_member(self, name: str) -> None:
        """Starts an attention or FFN process, a killed one anew."""
        role, index = name.rsplit("-", 1)
        self._start("ffn" if role == "ffn" else "attention", int(index))

    def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.join()

    def await_steps(self, names: Sequence[str], steps: int = 1) -> float:
        """Waits until each of these attention instances has done ``steps`` more steps. Returns the
        seconds.

        Raises:
            AfdError: a process ended, or it takes longer than DEADLINE_S.
        """
        began, before = time.monotonic(), {n: self.tallies[n][Count.STEPS] for n in names}
        self._wait_for(
            lambda: all(self.tallies[n][Count.STEPS] >= before[n] + steps for n in names),
            f"{steps} steps of {', '.join(names)}",
        )
        return time.monotonic() - began

    def measure(self, seconds: float) -> Window:
        leader, control = self.tallies[self.ffn[0]], psutil.Process(self._pid(_CONTROL))
        began, cpu = time.monotonic(), sum(control.cpu_times()[:2])
        before = [leader[count] for count in Count]
        time.sleep(seconds)
        self._check()
        spent = {count: leader[count] - before[count] for count in Count}
        elapsed, steps = time.monotonic() - began, spent[Count.STEPS]
        if not steps:
            raise AfdError(f"{self._case.name} did no step in {elapsed:.1f} s; raise --seconds")
        return Window(
            steps_per_s=steps / elapsed,
            leader_us=spent[Count.LEADER_NS] / steps / 1e3,
            orders_us=spent[Count.ORDER_NS] / steps / 1e3,
            waits_us=spent[Count.WAIT_NS] / steps / 1e3,
            answer_us=spent[Count.ANSWER_NS] / steps / 1e3,
            control_cores=(sum(control.cpu_times()[:2]) - cpu) / elapsed,
        )

    def close(self) -> None:
        """Ends every process: the attention instances first, the control plane last."""
        for names in (self.attention, self.ffn):
            for name in names:
                if name in self.tallies:
                    self.tallies[name].stop = True
            end = time.monotonic() + _END_S
            for name in names:
                if name in self._processes:
                    self._processes[name].join(max(0.0, end - time.monotonic()))
        for process in self._processes.values():
            process.terminate()
            process.join(1.0)
            process.kill()
            process.join()
        self._ports.close()

    def _warm(self) -> None:
        """Starts the fork server: its first child waits for the imports."""
        process = self._context.Process(target=_nothing)
        process.start()
        process.join()

    def _start(self, role: Role, index: int) -> None:
        from afd_bench.scale import roles_torch

        spec = RoleSpec(role, index, self._deployment, self._address, self._keys)
        target: Callable[..., None] = roles_torch.control
        args: tuple[object, ...] = (spec,)
        if role != "control":
            tally = self.tallies[spec.id] = Tally(self._context)
            tally.running = True
            target, args = roles_torch.ffn, (spec, tally)
        if role == "attention":
            target, args = roles_torch.attention, (*args, self._layers)
        process = self._context.Process(target=target, args=args, name=spec.id, daemon=True)
        process.start()
        self._processes[spec.id if role != "control" else _CONTROL] = process

    def _pid(self, name: str) -> int:
        pid = self._processes[name].pid
        assert pid is not None
        return pid

    def _check(self) -> None:
        for name, process in self._processes.items():
            if not process.is_alive():
                raise AfdError(
                    f"{name} ended with status {process.exitcode}; see its message above"
                )

    def _wait_for(self, done: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not done():
            self._check()
            if time.monotonic() > end:
                raise AfdError(f"{what} did not come in {DEADLINE_S:.0f} s; see the log above")
            time.sleep(_POLL_S)


def _nothing() -> None: ...


@contextlib.contextmanager
def deployed(case: Case, checkpoint: Path, layers: Sequence[Rows]) -> Iterator[Deployed]:
    """Gives the case's processes, not started yet; ends them with the context."""
    keys = checkpoint.parent / "keys.json"
    CurveKeys.generate().save(keys)
    processes = Deployed(case, checkpoint, keys, layers)
    try:
        yield processes
    finally:
        processes.close()
        keys.unlink()


def _deployment(case: Case, checkpoint: Path, address: str, keys: Path) -> Deployment:
    return Deployment.from_plain(
        {
            "model": str(checkpoint),
            "attention": {
                "instances": case.x,
                "dtype": "float32",
                "max_num_seqs": 8,
                "max_num_batched_tokens": 8,
            },
            "ffn": {
                "instances": case.y,
                "backend": "reference",
                "threads": 1,
                # Dozens of processes share a few cores, so a step gathers slowly.
                "step_wait_ms": 2000.0,
                "late_ms": 10000.0,
            },
            "pipeline": {"depth": 1, "min_rows": 1},
            "transport": {"backend": "shm"},
            "control": {"address": address, "keys": str(keys), "timeout_s": 20.0},
            "deadlines": {"start_s": DEADLINE_S, "ffn_s": DEADLINE_S},
            "metrics": {"enabled": False},
        }
    )
