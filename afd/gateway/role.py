"""From a role file to a running gateway."""

from __future__ import annotations

import os

from afd.control.client import ControlClient
from afd.control.keys import CurveKeys
from afd.control.messages import Timing
from afd.gateway.main import run_gateway
from afd.gateway.settings import GatewaySettings
from afd.roles import RoleSpec


def settings_of(spec: RoleSpec) -> GatewaySettings:
    """What the deployment file says about the gateway; the rest keeps its defaults."""
    deployment = spec.deployment
    return GatewaySettings(
        host=deployment.gateway.host,
        port=spec.api_port or deployment.gateway.port,
        attention_instances=deployment.attention.instances,
        ffn_instances=deployment.ffn.instances,
        drain_s=deployment.deadlines.drain_s,
        instance=spec.id,
        metrics=deployment.metrics.enabled,
    )


def serve_gateway(spec: RoleSpec) -> int:
    """Run the gateway of ``spec`` until it is told to end; returns the exit code.

    Raises AfdError, see ``run_gateway``.
    """

    def connect() -> ControlClient:
        control = spec.deployment.control
        keys = CurveKeys.load(spec.keys_file) if spec.keys_file else CurveKeys.from_env(os.environ)
        return ControlClient(
            spec.control_address,
            keys,
            role=spec.role,
            index=spec.index,
            timing=Timing(control.heartbeat_s, control.timeout_s),
        )

    return run_gateway(
        settings_of(spec), connect, join_deadline_s=spec.deployment.deadlines.start_s
    )
