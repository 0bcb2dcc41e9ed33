"""The control client of a role, made from its hand-over file; one way for all roles."""

from __future__ import annotations

from afd.control.client import ControlClient
from afd.control.contract import Contract
from afd.control.keys import CurveKeys
from afd.control.messages import Timing
from afd.roles import RoleSpec


def keys_of(spec: RoleSpec) -> CurveKeys | None:
    """The deployment's CURVE keys, None where it has none. Raises ConfigError."""
    return CurveKeys.load(spec.keys_file) if spec.keys_file else None


def timing_of(spec: RoleSpec) -> Timing:
    control = spec.deployment.control
    return Timing(control.heartbeat_s, control.timeout_s)


def client_for(spec: RoleSpec, contract: Contract | None = None) -> ControlClient:
    """A client that has not joined yet. ``contract``: what an attention or FFN role is held to."""
    return ControlClient(
        spec.control_address,
        keys_of(spec),
        role=spec.role,
        index=spec.index,
        rank=spec.rank,
        contract=contract,
        timing=timing_of(spec),
    )
