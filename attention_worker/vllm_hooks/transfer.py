"""How vLLM moves the KV cache of a prompt to the instance that generates. Imports no vLLM.

Connectors that copy layer by layer inside a step are not among them: they would look for one
attention metadata, and a step that is split has one per micro-batch
(vllm/distributed/kv_transfer/kv_connector/v1/example_connector.py: start_load_kv returns).
"""

import importlib.util
import json
from collections.abc import Mapping

from afd.config.roles import RoleSpec
from afd.devices import ROCM, device_named
from afd.errors import ConfigError

_NOTIFY_PORT, _PREFILL = 61005, 64  # vLLM's default, and room for attention instances
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def transfer_arguments(
    role: RoleSpec, environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Returns vLLM's arguments and environment for a role of a deployment with prefill instances.

    The instance that generates fetches the KV cache before the first step of the request, so that
    it does not matter whether steps are split. If it cannot, it computes the prompt itself
    (``kv_load_failure_policy``).

    Raises:
        ConfigError: the package that moves it is missing.
    """
    deployment = role.deployment
    device = device_named(deployment.attention.device)
    nixl = deployment.prefill.connector == "NixlConnector"
    package = ("rixl" if device is ROCM else "nixl") if nixl else "mori"
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"prefill moves the KV cache with the package {package}, which is not installed;"
            f" install it, or set prefill.instances to 0"
        )
    host = deployment.prefill.host if role.role == "prefill" else deployment.attention.host
    prefills = role.role == "prefill" or deployment.prefills(role.index)
    config = {
        "kv_connector": deployment.prefill.connector,
        "kv_role": "kv_producer" if prefills else "kv_consumer",
        "kv_buffer_device": device.torch_type,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            **({"kv_lease_duration": deployment.prefill.lease_s} if nixl else _mori(role, host)),
            **deployment.prefill.connector_config,
        },
    }
    told = [f"--kv-transfer-config={json.dumps(config, separators=(',', ':'))}"]
    if not nixl:
        return told, {}
    extra = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(role.transfer_port),
    }
    if host in _LOOPBACK and "UCX_NET_DEVICES" not in environment:
        extra["UCX_NET_DEVICES"] = "lo"  # else UCX listens on every network of the host
    return told, extra


def _mori(role: RoleSpec, host: str) -> dict[str, str | int]:
    """Returns the settings of MoRI-IO: the instance that generates reads, without vLLM's own proxy
    (vllm/distributed/kv_transfer/kv_connector/v1/moriio/moriio_common.py)."""
    return {
        "read_mode": "true",
        "host_ip": host,
        "proxy_ip": "",
        "proxy_ping_port": 0,
        "http_port": role.api_port,
        "handshake_port": role.transfer_port,
        "notify_port": _NOTIFY_PORT + role.index + (_PREFILL if role.role == "prefill" else 0),
    }
