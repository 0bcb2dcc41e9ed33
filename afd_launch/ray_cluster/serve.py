"""The driver of `afd serve FILE --ray`: places the instances, restarts them, and stops all.

Control plane and gateway run beside the driver. Every instance has one bundle of a placement group,
spread over the nodes. If a node is lost, Ray moves the actor to another one, and the driver starts
the instance there; it registers with the same control plane as a new generation.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from afd.config.deployment import Deployment
from afd.control import operator
from afd.control.keys import CurveKeys
from afd.control.local_keys import announced
from afd.errors import ConfigError, DeadlineExceeded
from afd.host.ports import held_ports
from afd_gateway.files import check_files
from afd_launch.private_folder import private_folder
from afd_launch.process import Command, RoleProcess, describe_exit
from afd_launch.ray_cluster.keeper import Keeper
from afd_launch.ray_cluster.plan import Instance, instances_of
from afd_launch.restarts import backoff_s
from afd_launch.role_log import RoleLog, say
from afd_launch.serve import summary

_TURN_S = 0.3
_STOP_S = {"attention": 15.0, "ffn": 5.0}


class _Stop(Exception):
    """A signal asked the driver to stop."""


@dataclass
class _Kept:
    """An instance and its actor. due: when to start it (time.monotonic()); None while it runs.
    pending: the running call of ``poll``."""

    instance: Instance
    actor: Any
    due: float | None = 0.0
    deaths: list[float] = field(default_factory=list)
    pending: Any = None


def serve_on_ray(
    deployment: Deployment, address: str, cpus: float, log_dir: Path | None = None
) -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit status.

    Args:
        address: of the Ray cluster; auto: the one that this node belongs to. cpus: of each process.

    Raises:
        ConfigError: the cluster cannot be reached or has too few resources, or an instance died
            more than ``restart.max_restarts`` times.
    """
    if deployment.hosts:
        raise ConfigError("hosts and --ray exclude each other: Ray places the instances")
    if deployment.prefill.instances:
        raise ConfigError("--ray places no prefill instances; set prefill.instances to 0")
    check_files(deployment.gateway)
    ray = _connected(address)
    try:
        with private_folder() as (run_dir, _watchdog):
            return _Driver(ray, deployment, cpus, run_dir, log_dir).run()
    finally:
        ray.shutdown()


def _connected(address: str) -> Any:
    try:
        import ray
    except ModuleNotFoundError:
        raise ConfigError("--ray needs the package ray; pip install ray") from None
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace="afd")
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray cluster at {address} ({error}); run `ray start --head` here, or pass"
            " --ray HOST:PORT"
        ) from None
    return ray


class _Driver:
    def __init__(
        self, ray: Any, deployment: Deployment, cpus: float, run_dir: Path, log_dir: Path | None
    ) -> None:
        self._ray, self._deployment, self._cpus = ray, deployment, cpus
        self._run_dir, self._log_dir = run_dir, log_dir
        self._node = ray.util.get_node_ip_address()
        given = deployment.control.keys
        self._keys = CurveKeys.load(given) if given else CurveKeys.generate()
        self._local: dict[str, RoleProcess] = {}
        self._logs: dict[str, RoleLog] = {}
        self._signals: list[int] = []

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        began = time.monotonic()
        with self._control_address() as control, self._placed() as kept:
            try:
                self._start_local("control", control)
                self._start_local("gateway", control)
                operator_keys = self._run_dir / "operator.keys"
                self._keys.operator.save(operator_keys)
                with announced(control, operator_keys):
                    say(f"operate it with: afd ctl --control {control} status")
                    self._serve(kept, control, began)
            except _Stop:
                say(f"{signal.Signals(self._signals[0]).name}: stopping")
                return 0
            finally:
                self._stop(kept)
        return 0

    # -- placement

    @contextlib.contextmanager
    def _placed(self) -> Iterator[list[_Kept]]:
        """One actor per instance, each in its bundle."""
        ray, instances = self._ray, instances_of(self._deployment)
        strategies = ray.util.scheduling_strategies
        bundles = [instance.bundle(self._cpus) for instance in instances]
        group = ray.util.placement_group(bundles, strategy="SPREAD")
        limit_s = self._deployment.deadlines.hosts_s
        say(f"placing {len(bundles)} instances on Ray: {summary(self._deployment)}")
        try:
            ready, _ = ray.wait([group.ready()], timeout=limit_s)
            if not ready:
                has = {k: v for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU")}
                raise ConfigError(
                    f"Ray has not placed {bundles} within {limit_s:g} s (deadlines.hosts_s); the"
                    f" cluster has {has}; add nodes, or lower --ray-cpus"
                )
            kept = []
            for number, instance in enumerate(instances):
                own = instance.bundle(self._cpus)
                place = strategies.PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=number
                )
                actor = (
                    ray.remote(Keeper)
                    .options(
                        num_cpus=own["CPU"],
                        num_gpus=own.get("GPU", 0),
                        max_restarts=-1,
                        scheduling_strategy=place,
                        runtime_env={"env_vars": {"PYTHONUNBUFFERED": "1"}},
                    )
                    .remote(instance)
                )
                kept.append(_Kept(instance, actor))
            yield kept
        finally:
            ray.util.remove_placement_group(group)

    @contextlib.contextmanager
    def _control_address(self) -> Iterator[str]:
        wanted = self._deployment.control.address
        if wanted != "auto":
            yield wanted
            return
        with held_ports([self._node]) as (port,):
            yield f"tcp://{self._node}:{port}"

    # -- control plane and gateway, beside the driver

    def _start_local(self, role: str, control: str) -> None:
        name = f"{role}-0"
        file, keys = self._run_dir / f"{name}.yaml", self._run_dir / f"{name}.keys"
        file.write_text(self._file())
        (self._keys if role == "control" else self._keys.member(name)).save(keys)
        command = (sys.executable, "-m", "afd_launch.cli", role, str(file), "--control", control)
        argv = (*command, "--set", f"control.keys={keys}")
        self._local[name] = RoleProcess(Command(name, argv, {"PYTHONUNBUFFERED": "1"}))

    def _file(self) -> str:
        """The deployment file of every role; control.keys differs and is given by --set."""
        plain = self._deployment.plain()
        plain["control"] = {k: v for k, v in plain["control"].items() if k != "keys"}
        plain["gateway"]["processes"] = 1  # the one beside this driver
        return yaml.safe_dump(plain)

    # -- serving

    def _serve(self, kept: list[_Kept], control: str, began: float) -> None:
        told = False
        while True:
            if self._signals:
                raise _Stop
            self._look_at_local()
            for one in kept:
                self._look_at(one, control)
            if not told and self._whole(kept, control):
                told = True
                gateway = self._deployment.gateway
                say(
                    f"ready after {time.monotonic() - began:.0f} s:"
                    f" http://{gateway.host}:{gateway.port}/v1 ({summary(self._deployment)})"
                )
            elif not told and time.monotonic() - began > self._deployment.deadlines.start_s:
                raise ConfigError(
                    f"not ready after {self._deployment.deadlines.start_s:g} s"
                    " (deadlines.start_s); see the last lines of the instances above"
                )
            time.sleep(_TURN_S)

    def _look_at_local(self) -> None:
        for name, process in self._local.items():
            self._feed(name, self._read(process))
            if (code := process.exit_code()) is not None:
                raise ConfigError(f"{name} {describe_exit(code)}; its last lines are above")

    def _look_at(self, one: _Kept, control: str) -> None:
        """Starts the instance if it is due; else reads its output and notices its end."""
        errors = self._ray.exceptions
        name, now = one.instance.name, time.monotonic()
        try:
            if one.due is not None:
                if now >= one.due:
                    self._start(one, control)
                return
            if one.pending is None:
                one.pending = one.actor.poll.remote()
            done, _ = self._ray.wait([one.pending], timeout=0)
            if not done:
                return
            output, ended = self._ray.get(one.pending)
            one.pending = None
            for member, data in output.items():
                self._feed(member, data)
            if ended:
                self._ray.get(one.actor.stop.remote(1.0))
                self._died(one, ended, now)
        except errors.RayActorError:
            one.pending = None
            self._died(one, f"the node of {name} or its actor is gone", now)

    def _start(self, one: _Kept, control: str) -> None:
        files = {"deployment.yaml": self._file()}
        for member in one.instance.members:
            key_file = self._run_dir / f"{member}.keys"
            key_file.unlink(missing_ok=True)
            self._keys.member(member).save(key_file)
            files[f"{member}.keys"] = key_file.read_text()
        # The actor knows its node only where it runs.
        node = self._ray.get(one.actor.node_address.remote(), timeout=30)
        self._ray.get(one.actor.start.remote(files, node, control), timeout=60)
        one.due = None
        say(f"{one.instance.name} starts on {node}")

    def _died(self, one: _Kept, text: str, now: float) -> None:
        one.deaths.append(now)
        restart = self._deployment.restart
        wait_s = backoff_s(one.deaths, now, restart.max_restarts, restart.window_s)
        if wait_s is None:
            raise ConfigError(
                f"{text}, more than restart.max_restarts = {restart.max_restarts} times within"
                f" {restart.window_s:g} s; its last lines are above"
            )
        say(f"{text}; starting {one.instance.name} again in {wait_s:g} s")
        one.due = now + wait_s

    def _whole(self, kept: list[_Kept], control: str) -> bool:
        try:
            found = operator.status(control, self._keys.operator, deadline_s=1.0)
        except DeadlineExceeded:
            return False
        ready = {member.id for member in found.members if member.state == "ready"}
        wanted = {member for one in kept for member in one.instance.members}
        return wanted <= ready and "gateway-0" in {m.id for m in found.members}

    # -- stopping

    def _stop(self, kept: list[_Kept]) -> None:
        """The gateway drains first; then attention, FFN and the control plane."""
        self._end_local("gateway-0", self._deployment.deadlines.drain_s + 5.0)
        for role, seconds in _STOP_S.items():
            calls = [one.actor.stop.remote(seconds) for one in kept if one.instance.role == role]
            with contextlib.suppress(Exception):  # a lost node has nothing left to end
                for output in self._ray.get(calls, timeout=seconds + 10.0):
                    for member, data in output.items():
                        self._feed(member, data)
        self._end_local("control-0", 5.0)
        for log in self._logs.values():
            log.close()
        say("stopped")

    def _end_local(self, name: str, seconds: float) -> None:
        process = self._local.pop(name, None)
        if process is None:
            return
        process.signal(signal.SIGTERM)
        ends = time.monotonic() + seconds
        while not process.gone():
            self._feed(name, self._read(process))
            if time.monotonic() > ends:
                process.signal(signal.SIGKILL)
            time.sleep(0.05)
        self._feed(name, self._read(process))
        process.close()

    # -- output

    def _feed(self, name: str, data: bytes) -> None:
        if name not in self._logs:
            self._logs[name] = RoleLog(name, out=sys.stdout, directory=self._log_dir)
        if data:
            self._logs[name].feed(data)

    def _read(self, process: RoleProcess) -> bytes:
        try:
            return os.read(process.output, 1 << 16)
        except BlockingIOError:
            return b""

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)
