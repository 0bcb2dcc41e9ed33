"""Becoming one role: `afd control|ffn|attention|gateway`."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from types import FrameType

from afd.config import Attention, Deployment, Ffn
from afd.errors import ConfigError
from afd.launch.logs import LOG_FORMAT
from afd.launch.ports import held_ports
from afd.launch.serve import run_directory
from afd.roles import ROLE_FILE_ENV, Role, RoleSpec
from afd.topology import ffn_number


def standalone_spec(
    deployment: Deployment, role: Role, index: int, control: str | None, rank: int = 0
) -> RoleSpec:
    """The spec of a role that is started by hand. Raises ConfigError naming what is missing."""
    address = control or deployment.control.address
    if address == "auto":
        raise ConfigError(
            "control.address is auto, which only afd serve can choose; set it to tcp://HOST:PORT in"
            " the file, or give --control"
        )
    pools: dict[str, Attention | Ffn] = {"attention": deployment.attention, "ffn": deployment.ffn}
    pool = pools.get(role)
    instances = pool.instances if pool else 1
    if not 0 <= index < instances:
        raise ConfigError(
            f"--index {index} does not exist with {role}.instances = {instances};"
            f" use 0 to {instances - 1}"
        )
    ranks = deployment.ffn.tp if role == "ffn" else 1
    if not 0 <= rank < ranks:
        raise ConfigError(
            f"--rank {rank} does not exist with ffn.tp = {ranks}; use 0 to {ranks - 1}"
        )
    return RoleSpec(
        role,
        index,
        deployment,
        address,
        deployment.control.keys,
        api_port=_api_port(deployment, role, index),
        cpus=pool.cpus[ffn_number(index, rank, ranks)] if pool and pool.cpus != "auto" else (),
        rank=rank,
    )


def _api_port(deployment: Deployment, role: Role, index: int) -> int:
    if role == "gateway":
        return deployment.gateway.port
    if role == "attention":
        return deployment.attention.api_ports()[index]
    return 0


def run_role(spec: RoleSpec, file: Path | None) -> int:
    """Run it until it ends; ``file`` is its role file where a supervisor wrote one."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    if spec.role == "attention":
        return _attention(spec, file)
    if spec.role == "ffn":
        from ffn_worker.main import run_ffn

        run_ffn(spec)
        return 0
    if spec.role == "gateway":
        return _gateway(spec)
    return _control(spec)


def _attention(spec: RoleSpec, file: Path | None) -> int:
    from attention_worker.launch import attention_command

    if file is not None:  # the supervisor removes the file
        argv, environment = attention_command(spec)
        os.execvpe(argv[0], argv, {**environment, ROLE_FILE_ENV: str(file.absolute())})
    with run_directory() as run_dir, held_ports([spec.deployment.attention.host]) as (free,):
        spec = replace(spec, api_port=spec.api_port or free)
        argv, environment = attention_command(spec)
        spec.save(run_dir / "role.json")
        environment = {**environment, ROLE_FILE_ENV: str(run_dir / "role.json")}
        return _run_child(argv, environment)


def _run_child(argv: list[str], environment: dict[str, str]) -> int:
    """Run a command in our place, passing on the signals that end it."""
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, _frame: FrameType | None) -> None:
        if child is not None:
            child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, forward)
    # its own session: a terminal's Ctrl-C reaches it once, through us
    child = subprocess.Popen(argv, env=environment, start_new_session=True)
    status = child.wait()
    return status if status >= 0 else 128 - status


def _control(spec: RoleSpec) -> int:
    from afd.control.connect import keys_of, timing_of
    from afd.control.depths import DepthPolicy
    from afd.control.main import run_control

    pipeline = spec.deployment.pipeline
    target_s = None if pipeline.tpot_ms is None else pipeline.tpot_ms / 1e3
    return run_control(
        spec.control_address,
        keys_of(spec),
        timing=timing_of(spec),
        depth=DepthPolicy(pipeline.depth == "auto", target_s),
    )


def _gateway(spec: RoleSpec) -> int:
    from afd.control.connect import client_for
    from afd.gateway.main import run_gateway
    from afd.gateway.settings import GatewaySettings

    deployment = spec.deployment
    settings = GatewaySettings(
        host=deployment.gateway.host,
        port=spec.api_port,
        attention_instances=deployment.attention.instances,
        ffn_instances=deployment.ffn.instances,
        ffn_tp=deployment.ffn.tp,
        drain_s=deployment.deadlines.drain_s,
        instance=spec.id,
        metrics=deployment.metrics.enabled,
    )

    return run_gateway(
        settings, lambda: client_for(spec), join_deadline_s=deployment.deadlines.start_s
    )
