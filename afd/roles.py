"""What one process of a deployment is told about itself, handed over in a private JSON file.

The supervisor writes one file per role; the role, and the vLLM engine process below an attention
instance, find it through the environment variable ``AFD_ROLE_FILE``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from afd.config import Deployment
from afd.control.messages import member_id
from afd.errors import ConfigError
from afd.topology import ffn_number, gpu_order, visible_gpus

ROLE_FILE_ENV = "AFD_ROLE_FILE"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
Role = Literal["control", "ffn", "attention", "gateway"]
ROLES: tuple[Role, ...] = ("control", "ffn", "attention", "gateway")


@dataclass(frozen=True)
class RoleSpec:
    """One role instance.

    role/index/rank: the member id is "attention-0" and so on, "ffn-0.1" for the second rank of an
    FFN instance; both count from 0.
    control_address: "tcp://HOST:PORT". keys_file: CURVE keys, or None for a plain local socket.
    api_port: where an attention instance serves HTTP (the gateway's port for the gateway), else 0.
    metrics_port: 0 = any free port. cpus: cores to compute on; () = not pinned.
    """

    role: Role
    index: int
    deployment: Deployment
    control_address: str
    keys_file: Path | None = None
    api_port: int = 0
    metrics_port: int = 0
    cpus: tuple[int, ...] = ()
    rank: int = 0

    @property
    def id(self) -> str:
        return member_id(self.role, self.index, self.rank)

    @property
    def number(self) -> int:
        """Place among the processes of its role."""
        tp = self.deployment.ffn.tp if self.role == "ffn" else 1
        return ffn_number(self.index, self.rank, tp)

    @property
    def threads(self) -> int:
        """Compute threads: ``ffn.threads`` if set, else one per core the role may use."""
        wanted = self.deployment.ffn.threads
        if self.role == "ffn" and wanted != "auto":
            return wanted
        return len(self.cpus) or len(os.sched_getaffinity(0))

    def gpu_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """What shows a GPU role its GPUs in the right order; empty on CPU. Raises ConfigError."""
        deployment = self.deployment
        pool = deployment.attention if self.role == "attention" else deployment.ffn
        if pool.device == "cpu":
            return {}
        order = gpu_order(
            self.role,
            self.number,
            deployment.attention.instances,
            deployment.ffn.ranks,
            deployment.gpus,
        )
        return {_VISIBLE: visible_gpus(order, environment.get(_VISIBLE))}

    def save(self, path: Path) -> None:
        """Write the file, mode 0600: the deployment may carry vLLM arguments such as an API key."""
        data = {item.name: getattr(self, item.name) for item in fields(self)}
        data["deployment"] = self.deployment.plain()
        data["keys_file"] = str(self.keys_file) if self.keys_file else None
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file)


def load_role(path: str | Path | None = None) -> RoleSpec:
    """Read a role file; without ``path`` the one ``AFD_ROLE_FILE`` names. Raises ConfigError."""
    path = path or os.environ.get(ROLE_FILE_ENV)
    if not path:
        raise ConfigError(f"{ROLE_FILE_ENV} is not set; start this role with afd serve or afd ROLE")
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        data["deployment"] = Deployment.from_plain(data["deployment"])
        data["keys_file"] = Path(data["keys_file"]) if data["keys_file"] else None
        data["cpus"] = tuple(data["cpus"])
        return RoleSpec(**data)
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as err:
        reason = " ".join(str(err).split())[:200]
        raise ConfigError(
            f"role file {path} cannot be used ({reason}); restart the deployment"
        ) from None
