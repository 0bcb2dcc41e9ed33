"""Completes a deployment with the AMD GPUs of its FFN instances, before a role starts."""

from __future__ import annotations

import time
from dataclasses import replace

from afd.config.deployment import Deployment
from afd.config.fp8 import DEFAULT
from afd.config.roles import RoleSpec
from afd.control.connect import NO_KEYS
from afd.control.keys import load_client
from afd.control.operator import contract
from afd.devices.rocm import FP8_OF_ARCH
from afd.errors import ConfigError, DeadlineExceeded
from afd.host.amd_gpus import architectures, rocm_version
from afd_launch.seen_gpus import check_graphs, needs_pool, with_architecture, with_fp8

_ASK_S = 0.2
_REMEDY = f"set ffn.arch to {' or '.join(FP8_OF_ARCH)}"


def of_this_host(deployment: Deployment) -> Deployment:
    """The deployment if this host runs its FFN instances. Raises ConfigError if they do not fit."""
    seen = architectures()
    check_graphs(deployment, seen, rocm_version())
    return with_architecture(deployment, seen)


def of_role(spec: RoleSpec) -> RoleSpec:
    """The spec of a role that a user starts by hand.

    An FFN role looks at its host. The host of an attention role may have other GPUs, so it asks the
    control plane what the FFN instances agreed on, and waits for the first of them.

    Raises:
        ConfigError: the file does not fit the GPUs, or nobody could be asked.
    """
    if spec.role == "ffn":
        return replace(spec, deployment=of_this_host(spec.deployment))
    if spec.role == "attention":
        check_graphs(spec.deployment, architectures(), rocm_version())
    if spec.role == "attention" and needs_pool(spec.deployment):
        return replace(spec, deployment=with_fp8(spec.deployment, _fp8_of_pool(spec)))
    return spec


def _fp8_of_pool(spec: RoleSpec) -> str:
    """FP8 type in the contract that the control plane has from the FFN instances."""
    if spec.keys_file is None:
        raise ConfigError(NO_KEYS)
    keys = load_client(spec.keys_file)
    ends = time.monotonic() + spec.deployment.deadlines.start_s
    reason = "no FFN instance has registered"
    while time.monotonic() < ends:
        try:
            agreed = contract(spec.control_address, keys)
        except DeadlineExceeded as error:
            reason = str(error)
        except ConfigError as error:  # the file has this member's keys only
            reason = str(error)
            break
        else:
            if agreed is not None:
                return agreed.wire.partition(" ")[2] or DEFAULT
        time.sleep(_ASK_S)
    raise ConfigError(
        f"the FP8 type of the wire depends on the FFN instances' GPUs, but {reason}; {_REMEDY}"
    )
