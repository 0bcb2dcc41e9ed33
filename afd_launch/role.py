"""`afd control|ffn|attention|gateway`: runs one role in this process."""

from __future__ import annotations

import logging
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from afd.config.deployment import Deployment
from afd.config.roles import Role, RoleSpec
from afd.config.sections import Attention, Ffn
from afd.control.connect import NO_KEYS
from afd.errors import ConfigError
from afd.host.collector import collector_rests
from afd.host.logs import LOG_FORMAT, say_phase
from afd.topology import member_id, rank_number
from afd_launch.host_view import control_address, home_of, seen_from, settings_of
from afd_launch.readiness import local_address
from afd_launch.versions import installed_versions


def standalone_spec(
    deployment: Deployment, role: Role, index: int, control: str | None, rank: int = 0
) -> RoleSpec:
    """The spec of a role that a user starts by hand. Raises ConfigError."""
    address = control or control_address(deployment)
    if address == "auto" and role != "prefill":
        raise ConfigError(
            "control.address is auto, which only afd serve can choose; set it to tcp://HOST:PORT in"
            " the file, or pass --control"
        )
    pools: dict[str, Attention | Ffn] = {"attention": deployment.attention, "ffn": deployment.ffn}
    pool, ports = pools.get(role), deployment.prefill.api_ports()
    if role == "gateway":
        instances, setting = deployment.gateway.processes, "gateway.processes"
    elif role == "attention":
        instances, setting = deployment.attention.capacity, "attention.max_instances"
    elif role == "prefill":
        instances, setting = len(ports), "colocated prefill.instances"
    else:
        instances, setting = pool.instances if pool else 1, f"{role}.instances"
    if not instances:
        raise ConfigError("the file has no colocated prefill instances; set prefill.instances")
    if not 0 <= index < instances:
        raise ConfigError(
            f"--index {index} does not exist with {setting} = {instances}; use 0 to {instances - 1}"
        )
    ranks = deployment.ffn.tp if role == "ffn" else 1  # vLLM starts those of attention
    if not 0 <= rank < ranks:
        raise ConfigError(
            f"--rank {rank} does not exist with ffn.tp = {ranks}; use 0 to {ranks - 1}"
        )
    if deployment.control.keys is None and role != "prefill":
        raise ConfigError(NO_KEYS)
    host = home_of(deployment, role, index)
    return RoleSpec(
        role,
        index,
        seen_from(deployment, host),
        address,
        deployment.control.keys,
        api_port=_api_port(deployment, role, index),
        cpus=pool.cpus[rank_number(index, rank, ranks)] if pool and pool.cpus != "auto" else (),
        rank=rank,
        host=host,
        prefill_ports=ports,
    )


def _api_port(deployment: Deployment, role: Role, index: int) -> int:
    if role == "gateway":
        return deployment.gateway.port
    if role == "attention":
        return deployment.attention.api_ports()[index]
    if role == "prefill":
        return deployment.prefill.api_ports()[index]
    return 0


def end_at_once(status: int) -> NoReturn:
    """Ends a process that has closed what it had open: an exit takes seconds with torch in it."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_role(spec: RoleSpec, file: Path | None) -> int:
    """Runs a role until it ends. file: the role file, if a supervisor wrote one."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    if spec.role == "attention":
        from afd_launch.attention_role import run_attention

        return run_attention(spec, file)
    if spec.role == "prefill":
        from afd_launch.prefill_role import run_prefill

        run_prefill(spec)
    if spec.role == "ffn":
        say_phase(logging.getLogger("afd.ffn"), "importing torch")
        with collector_rests():
            from ffn_worker.main import run_ffn

        run_ffn(spec)
        return 0
    if spec.role == "gateway":
        return _gateway(spec, supervised=file is not None)
    return _control(spec, anchored=file is not None)


def _control(spec: RoleSpec, *, anchored: bool) -> int:
    """anchored: the control plane itself knows the contract; else the first member's is taken.

    A supervisor starts all roles from one file on one host. By hand, the host of the control plane
    need not have the checkpoint that the contract is made from.
    """
    from afd.config.resolve import resolve
    from afd.control.authority import member_ids
    from afd.control.connect import timing_of
    from afd.control.depths import DepthPolicy
    from afd.control.host_table import HostRules
    from afd.control.keys import CurveKeys
    from afd_launch.control_role import run_control

    if spec.keys_file is None:
        raise ConfigError(NO_KEYS)

    pipeline = spec.deployment.pipeline
    target_s = None if pipeline.tpot_ms is None else pipeline.tpot_ms / 1e3
    return run_control(
        spec.control_address,
        CurveKeys.load(spec.keys_file),
        members=member_ids(spec.deployment),
        timing=timing_of(spec),
        contract=resolve(spec.deployment).contract if anchored else None,
        depth=DepthPolicy(spec.deployment.depth == "auto", target_s),
        hosts=HostRules(
            spec.host,
            tuple(host.name for host in spec.deployment.hosts),
            settings_of(spec.deployment),
            installed_versions(),
        ),
        attention=spec.deployment.attention.instances,
        ffn=spec.deployment.ffn.instances,
    )


def _gateway(spec: RoleSpec, *, supervised: bool) -> int:
    """supervised: the same user runs the attention instances, on this host."""
    from afd.config.vllm_arguments import checks_api_key
    from afd.control.connect import client_for
    from afd.metrics.otlp import check_packages
    from afd_gateway.counts import Counts
    from afd_gateway.inherited import inherited
    from afd_gateway.kept_answers import make_answers
    from afd_gateway.listener import listening
    from afd_gateway.main import run_gateway
    from afd_gateway.settings import GatewaySettings
    from afd_gateway.tls import server_context

    deployment = spec.deployment
    gateway, attention = deployment.gateway, deployment.attention
    host = local_address(deployment.prefill.host)
    tls, from_environment = deployment.gateway.tls, "VLLM_API_KEY" in os.environ
    if from_environment and deployment.gateway.api_keys is not None:
        raise ConfigError(
            "gateway.api_keys is set, and VLLM_API_KEY makes attention instances check keys too;"
            " remove VLLM_API_KEY from the environment"
        )
    if deployment.metrics.otlp is not None:
        check_packages()
    settings = GatewaySettings(
        host=deployment.gateway.host,
        port=spec.api_port,
        attention_instances=deployment.attention.instances,
        ffn_instances=deployment.ffn.instances,
        ffn_tp=deployment.ffn.tp,
        drain_s=deployment.deadlines.drain_s,
        instance=spec.id,
        metrics=deployment.metrics.enabled,
        pass_credentials=checks_api_key(deployment.attention.vllm_args) or from_environment,
        api_keys=deployment.gateway.api_keys,
        waiting=deployment.gateway.waiting,
        waiting_s=deployment.gateway.waiting_s,
        replay_s=deployment.gateway.replay_s,
        resume_s=gateway.resume_s,
        tls=None if tls is None else server_context(tls.certificate, tls.key),
        own_upstreams=supervised,
        routing=gateway.routing,
        max_running=(
            2 * attention.max_num_seqs if gateway.max_running == "auto" else gateway.max_running
        ),
        prefill_urls=tuple(
            f"http://{f'[{host}]' if ':' in host else host}:{port}" for port in spec.prefill_ports
        ),
        prefill_ids=frozenset(
            member_id("attention", i) for i in range(attention.instances) if deployment.prefills(i)
        ),
        slow_client_s=gateway.slow_client_s,
        otlp=deployment.metrics.otlp,
        otlp_share=deployment.metrics.otlp_share,
        trace_steps=deployment.metrics.stage_every > 0,
        process=spec.index,
        processes=gateway.processes,
    )
    listener = counts = None
    if (port := inherited()) is not None:
        listener = listening(socket.socket(fileno=port.listener))
        counts = Counts(port.counts, spec.index, gateway.processes)
        answers = port.answers
    else:  # nobody holds the port, so answers last as long as this process
        answers = make_answers(gateway.processes)
    return run_gateway(
        replace(settings, answers=answers),
        lambda: client_for(spec),
        join_deadline_s=deployment.deadlines.start_s,
        listener=listener,
        counts=counts,
    )
