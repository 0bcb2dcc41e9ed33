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
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from afd.config.deployment import Deployment
from afd.control import operator
from afd.control.keys import CurveKeys
from afd.control.local_keys import announced
from afd.control.messages import Members
from afd.errors import ConfigError, DeadlineExceeded
from afd.host.ports import check_free, held_ports
from afd_gateway.files import check_files
from afd_launch.orders import RoleWish
from afd_launch.private_folder import private_folder
from afd_launch.process import Command, describe_exit
from afd_launch.ray_cluster.keeper import Keeper
from afd_launch.ray_cluster.placed import Placed, Surroundings, wish_for
from afd_launch.ray_cluster.plan import Instance, instances_of
from afd_launch.readiness import health_wait
from afd_launch.restarts import backoff_s
from afd_launch.role_log import RoleLog, say
from afd_launch.role_table import RoleTable
from afd_launch.roles_of_host import STOP_S
from afd_launch.serve import make_log_dir, reachable, summary
from afd_launch.watchdog import Watchdog

_TURN_S = 0.2
_ASK_S = 1.0  # between two status requests
_ANSWER_S = 0.5
_PROGRESS_S = 10.0


class _Stop(Exception):
    """A signal or an operator asked the driver to stop. The message says so."""


def serve_on_ray(
    deployment: Deployment, address: str, cpus: float, log_dir: Path | None = None
) -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit status.

    Args:
        address: of the Ray cluster; auto: the one that this node belongs to. cpus: of each process.

    Raises:
        ConfigError: the cluster cannot be reached or has too few resources, a role could not start,
            or it ended more than ``restart.max_restarts`` times.
    """
    if deployment.hosts:
        raise ConfigError("hosts and --ray exclude each other: Ray places the instances")
    if deployment.prefill.instances:
        raise ConfigError("--ray places no prefill instances; set prefill.instances to 0")
    check_files(deployment.gateway)
    if log_dir:
        make_log_dir(log_dir)
    ray = _connected(address)
    node = ray.util.get_node_ip_address()
    gateway, wanted = deployment.gateway, deployment.control.address
    try:
        with (
            held_ports([gateway.host, node]) as (port, control_port),
            private_folder() as (run_dir, watchdog),
        ):
            port = gateway.port or port
            check_free(gateway.host, port, "gateway.port (or --port)")
            control = f"tcp://{node}:{control_port}" if wanted == "auto" else wanted
            driver = _Driver(ray, deployment, cpus, run_dir, watchdog, log_dir, control, port)
            return driver.run()
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
        self,
        ray: Any,
        deployment: Deployment,
        cpus: float,
        run_dir: Path,
        watchdog: Watchdog,
        log_dir: Path | None,
        control: str,
        port: int,
    ) -> None:
        self._ray, self._deployment, self._cpus = ray, deployment, cpus
        self._run_dir, self._log_dir = run_dir, log_dir
        self._control, self._port = control, port
        given = deployment.control.keys
        self._keys = CurveKeys.load(given) if given else CurveKeys.generate()
        self._signals: list[int] = []
        self._table = RoleTable(watchdog, sys.stdout, log_dir, lambda: len(self._signals) > 1)
        self._local: dict[str, Command] = {}
        self._due: dict[str, float] = {}  # when to start a local role again
        self._deaths: dict[str, list[float]] = {}
        self._logs: dict[str, RoleLog] = {}
        self._members: Members | None = None
        self._asked = 0.0
        self._serving = False

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        began = time.monotonic()
        operator_keys = self._run_dir / "operator.keys"
        self._keys.operator.save(operator_keys)
        with ExitStack() as stack:
            stack.callback(self._close)
            found = stack.enter_context(announced(self._control, operator_keys))
            named = "" if found else f" --keys {operator_keys}"
            try:
                placed = stack.enter_context(self._placed())
                try:
                    for role in ("control", "gateway"):
                        self._add_local(role)
                    say(f"operate it with: afd ctl --control {self._control}{named} status")
                    self._serve(placed, began)
                finally:
                    self._stop(placed)
            except _Stop as reason:
                say(f"{reason}: stopped")
        return 0

    # -- placement

    @contextlib.contextmanager
    def _placed(self) -> Iterator[list[Placed]]:
        """One actor per instance, each in its bundle."""
        ray, instances = self._ray, instances_of(self._deployment)
        bundles = [instance.bundle(self._cpus) for instance in instances]
        group = ray.util.placement_group(bundles, strategy="SPREAD")
        say(f"placing {len(bundles)} instances on Ray: {summary(self._deployment)}")
        try:
            self._await_place(group, bundles)
            around = Surroundings(
                ray,
                self._files,
                self._feed,
                self._error_of,
                self._control,
                self._deployment.restart,
            )
            yield [
                Placed(
                    around, instance, self._actor(group, number, instance), self._leave_s(instance)
                )
                for number, instance in enumerate(instances)
            ]
        finally:
            ray.util.remove_placement_group(group)

    def _await_place(self, group: Any, bundles: list[dict[str, float]]) -> None:
        limit_s, began = self._deployment.deadlines.hosts_s, time.monotonic()
        reference, shown = group.ready(), began
        while not self._ray.wait([reference], timeout=_ASK_S)[0]:
            self._check_signals()
            now = time.monotonic()
            has = {k: v for k, v in self._ray.cluster_resources().items() if k in ("CPU", "GPU")}
            text = f"Ray has not placed {bundles}; the cluster has {has}"
            if now - began > limit_s:
                raise ConfigError(
                    f"{text} after {limit_s:g} s (deadlines.hosts_s); add nodes, or lower"
                    " --ray-cpus"
                )
            if now - shown > _PROGRESS_S:
                shown = now
                say(f"{now - began:.0f} s: {text}")

    def _actor(self, group: Any, number: int, instance: Instance) -> Any:
        own = instance.bundle(self._cpus)
        place = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=number
        )
        options = {
            "num_cpus": own["CPU"],
            "num_gpus": own.get("GPU", 0),
            "max_restarts": -1,
            "scheduling_strategy": place,
            "runtime_env": {"env_vars": {"PYTHONUNBUFFERED": "1"}},
        }
        given = self._deployment.ffn.threads
        threads = max(1, int(self._cpus))
        if instance.role == "ffn" and given != "auto":
            threads = given
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        return self._ray.remote(Keeper).options(**options).remote(instance, threads, niceness)

    def _leave_s(self, instance: Instance) -> float:
        drain_s = self._deployment.deadlines.drain_s if instance.role == "attention" else 0.0
        return STOP_S[instance.role] + drain_s

    # -- what the roles read

    def _file(self) -> str:
        """The deployment file of every role; control.keys differs and is given by --set."""
        plain = self._deployment.plain()
        plain["control"] = {k: v for k, v in plain["control"].items() if k != "keys"}
        plain["gateway"] |= {"processes": 1, "port": self._port}  # the one beside this driver
        return yaml.safe_dump(plain)

    def _files(self, instance: Instance) -> Mapping[str, str]:
        files = {"deployment.yaml": self._file()}
        for member in instance.members:
            key_file = self._run_dir / f"{member}.keys"
            key_file.unlink(missing_ok=True)
            self._keys.member(member).save(key_file)
            files[key_file.name] = key_file.read_text()
        return files

    # -- control plane and gateway, beside the driver

    def _add_local(self, role: str) -> None:
        name = f"{role}-0"
        file, keys = self._run_dir / f"{name}.yaml", self._run_dir / f"{name}.keys"
        file.write_text(self._file())
        (self._keys if role == "control" else self._keys.member(name)).save(keys)
        argv = (sys.executable, "-m", "afd_launch.cli", role, str(file), "--control", self._control)
        env = {"PYTHONUNBUFFERED": "1", "TMPDIR": str(self._run_dir)}
        ends_all = role == "control"
        command = Command(name, (*argv, "--set", f"control.keys={keys}"), env, ends_all=ends_all)
        self._local[name] = command
        self._table.start(command)

    def _look_at_local(self, now: float) -> None:
        """Notices a role that ended, and starts it again when it is due."""
        for name, command in self._local.items():
            process = self._table.running.get(name)
            if process is None:
                if now >= self._due[name]:
                    self._table.start(command)
                continue
            if (code := process.exit_code()) is None:
                continue
            if code == 0 and command.ends_all:
                raise _Stop(f"{name} was shut down")
            if not self._serving and (reason := self._table.error_of(name)) is not None:
                raise ConfigError(f"{name}: {reason}")
            text, why = f"{name} {describe_exit(code)}", self._table.why(name)
            self._table.end([process], 0.0)
            deaths, restart = self._deaths.setdefault(name, []), self._deployment.restart
            deaths.append(now)
            wait_s = backoff_s(deaths, now, restart.max_restarts, restart.window_s)
            if wait_s is None:
                raise ConfigError(f"{text} more than restart.max_restarts times{why}")
            say(f"{text}; starting it again in {wait_s:g} s")
            self._due[name] = now + wait_s

    # -- serving

    def _serve(self, placed: list[Placed], began: float) -> None:
        while True:
            self._table.pump(_TURN_S)
            self._check_signals()
            now = time.monotonic()
            self._look_at_local(now)
            members = self._known(now)
            for one in placed:
                wish: RoleWish = "run" if members is None else wish_for(members, one.instance)
                one.turn(now, wish, serving=self._serving)
            if not self._serving:
                self._check_start(placed, members, now - began)

    def _known(self, now: float) -> Members | None:
        """The members; None while the control plane is away, or too young to know them all."""
        process = self._table.running.get("control-0")
        if process is None or now - process.started < self._deployment.control.timeout_s:
            self._members = None
        elif now - self._asked > _ASK_S:
            self._asked = now
            try:
                self._members = operator.status(
                    self._control, self._keys.operator, deadline_s=_ANSWER_S
                )
            except DeadlineExceeded:
                self._members = None
        return self._members

    def _check_start(self, placed: list[Placed], members: Members | None, age_s: float) -> None:
        gateway, limit_s = self._deployment.gateway, self._deployment.deadlines.start_s
        scheme = "http" if gateway.tls is None else "https"
        url = f"{scheme}://{reachable(gateway.host)}:{self._port}"
        if members is not None:
            ready = {member.id for member in members.members if member.state == "ready"}
            wanted = {member for one in placed for member in one.instance.members}
            if wanted <= ready and health_wait(f"{url}/health") is None:
                self._serving = True
                say(f"ready after {age_s:.0f} s: {url}/v1 ({summary(self._deployment)})")
                return
        if age_s > limit_s:
            raise ConfigError(
                f"not ready after {limit_s:g} s (deadlines.start_s); see the last lines of the"
                " instances above"
            )

    # -- stopping

    def _stop(self, placed: list[Placed]) -> None:
        """The gateway drains first; then attention, FFN and the control plane."""
        self._end_local("gateway-0", STOP_S["gateway"] + self._deployment.deadlines.drain_s)
        for role in ("attention", "ffn"):
            own = [one for one in placed if one.instance.role == role]
            calls = [one.actor.stop.remote(STOP_S[role]) for one in own]
            with contextlib.suppress(self._ray.exceptions.RayError):  # a lost node has none left
                for output in self._ray.get(calls, timeout=STOP_S[role] + 10.0):
                    for member, data in output.items():
                        self._feed(member, data)
        self._end_local("control-0", STOP_S["control"])

    def _end_local(self, name: str, seconds: float) -> None:
        if name in self._table.running:
            self._table.end([self._table.running[name]], seconds)

    def _close(self) -> None:
        self._table.close()
        for log in self._logs.values():
            log.close()

    def _check_signals(self) -> None:
        if self._signals:
            raise _Stop(signal.Signals(self._signals[0]).name)

    # -- output of the instances

    def _feed(self, name: str, data: bytes) -> None:
        if name not in self._logs:
            self._logs[name] = RoleLog(name, out=sys.stdout, directory=self._log_dir)
        self._logs[name].feed(data)

    def _error_of(self, name: str) -> str:
        error = self._logs[name].error if name in self._logs else None
        return f"{name}: {error}" if error else ""

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)
