"""Makes the control client of a role from its role file."""

from __future__ import annotations

from afd.config.contract import Contract
from afd.config.roles import RoleSpec
from afd.control.client import ControlClient
from afd.control.keys import ClientKeys, load_client
from afd.control.messages import Timing
from afd.errors import ConfigError
from afd.topology import key_owner

NO_KEYS = (
    "control.keys is not set, and roles started by hand need keys; make a key file with"
    " `afd keys FILE`, copy it to every host and set control.keys to it"
)


def keys_of(spec: RoleSpec) -> ClientKeys:
    """The CURVE keys with which the role proves that it is this member. Raises ConfigError."""
    if spec.keys_file is None:
        raise ConfigError(NO_KEYS)
    return load_client(spec.keys_file, key_owner(spec.id))


def timing_of(spec: RoleSpec) -> Timing:
    control = spec.deployment.control
    return Timing(control.heartbeat_s, control.timeout_s)


def client_for(spec: RoleSpec, contract: Contract | None = None) -> ControlClient:
    """Returns a client that has not joined yet. contract: of an attention or FFN role."""
    return ControlClient(
        spec.control_address,
        keys_of(spec),
        role=spec.role,
        index=spec.index,
        rank=spec.rank,
        contract=contract,
        timing=timing_of(spec),
    )
