"""The facts that one role is started with, passed in a private JSON file.

The supervisor writes one file per role. The role, and the vLLM engine process that an attention
instance starts, find it through the environment variable ``AFD_ROLE_FILE``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from afd.config.deployment import Deployment
from afd.devices import device_named
from afd.errors import ConfigError
from afd.topology import gpu_order, member_id, rank_number, visible_gpus

ROLE_FILE_ENV = "AFD_ROLE_FILE"
Role = Literal["control", "ffn", "attention", "prefill", "gateway"]


@dataclass(frozen=True)
class RoleSpec:
    """One process of a deployment.

    role, index, rank: make the member id: "attention-0", or "ffn-0.1" for the second rank of FFN
        instance 0. index and rank count from 0. The role file of an attention instance has rank 0.
    control_address: "tcp://HOST:PORT".
    keys_file: CURVE keys, see afd.control.connect; None only until they are assigned.
    api_port: HTTP port of an attention or prefill instance or of the gateway; 0 for other roles.
    prefill_ports: of the gateway: HTTP ports of the colocated prefill instances.
    transfer_port: where an instance tells others how to fetch its KV cache; 0 without prefill.
    metrics_port: port of /metrics; 0: any free port.
    cpus: cores to run on; (): not pinned. lent: cores of the other side, to use while that waits.
    host: name of the host that it runs on; "" if the deployment file names none.
    deployment: as seen from this host, see afd_launch.host_view.
    """

    role: Role
    index: int
    deployment: Deployment
    control_address: str
    keys_file: Path | None = None
    api_port: int = 0
    metrics_port: int = 0
    cpus: tuple[int, ...] = ()
    lent: tuple[int, ...] = ()
    rank: int = 0
    host: str = ""
    prefill_ports: tuple[int, ...] = ()
    transfer_port: int = 0

    @property
    def id(self) -> str:
        return member_id(self.role, self.index, self.rank)

    @property
    def number(self) -> int:
        """Number of this process among the processes of its role."""
        tp = {"attention": self.deployment.attention.tp, "ffn": self.deployment.ffn.tp}
        return rank_number(self.index, self.rank, tp.get(self.role, 1))

    @property
    def threads(self) -> int:
        """Compute threads: ``ffn.threads`` if set, else one per core of the role. A role without
        cores of its own: OMP_NUM_THREADS, else one per core that it may use."""
        wanted = self.deployment.ffn.threads
        if self.role == "ffn" and wanted != "auto":
            return wanted
        given = os.environ.get("OMP_NUM_THREADS", "")
        return len(self.cpus) or (
            int(given) if given.isdigit() and int(given) else len(os.sched_getaffinity(0))
        )

    def gpu_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The variable that shows the role its GPUs, its own first; {} on a host device.

        environment: limits the GPUs that may be used. Raises ConfigError if they are too few.
        """
        deployment = self.deployment
        pool = deployment.ffn if self.role == "ffn" else deployment.attention
        device = device_named(pool.device)
        if not device.visible_variables:
            return {}
        processes = gpu_processes(deployment, self.host)
        own = processes.index((self.role, self.index, self.rank))
        ranks = deployment.attention.tp if self.role == "attention" else 1
        order = gpu_order(own, len(processes), deployment.gpus, ranks)
        return visible_gpus(device, order, environment)

    def save(self, path: Path) -> None:
        """Write the role file with mode 0600: vLLM arguments may contain an API key."""
        data = {item.name: getattr(self, item.name) for item in fields(self)}
        data["deployment"] = self.deployment.plain()
        data["keys_file"] = str(self.keys_file) if self.keys_file else None
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file)


def gpu_processes(deployment: Deployment, host: str) -> list[tuple[str, int, int]]:
    """Returns (role, index, rank) of the processes with a GPU on one host, by number of the GPU.

    Attention ranks take the first GPUs, FFN ranks the following ones, then colocated prefill
    instances, and instances that can be added the last.
    """
    place, tp = deployment.place_of(host), deployment.attention.tp
    found: list[tuple[str, int, int]] = []
    on_gpus = bool(device_named(deployment.attention.device).visible_variables)
    ffn_on_gpus = bool(device_named(deployment.ffn.device).visible_variables)
    if on_gpus:
        found += [("attention", i, rank) for i in place.attention for rank in range(tp)]
    if ffn_on_gpus:
        found += [("ffn", j, rank) for j in place.ffn for rank in range(deployment.ffn.tp)]
    if on_gpus:
        found += [("prefill", i, 0) for i in range(deployment.prefill.colocated)]
    found += [("attention", i, r) for i in place.spare if on_gpus for r in range(tp)]
    ranks = range(deployment.ffn.tp if ffn_on_gpus else 0)
    return found + [("ffn", j, rank) for j in place.spare_ffn for rank in ranks]


def load_role(path: str | Path | None = None) -> RoleSpec:
    """Read the role file ``path``, by default the one in ``AFD_ROLE_FILE``. Raises ConfigError."""
    path = path or os.environ.get(ROLE_FILE_ENV)
    if not path:
        raise ConfigError(f"{ROLE_FILE_ENV} is not set; start this role with afd serve or afd ROLE")
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        data["deployment"] = Deployment.from_plain(data["deployment"])
        data["keys_file"] = Path(data["keys_file"]) if data["keys_file"] else None
        data["cpus"] = tuple(data["cpus"])
        data["lent"] = tuple(data["lent"])
        data["prefill_ports"] = tuple(data["prefill_ports"])
        return RoleSpec(**data)
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as err:
        reason = " ".join(str(err).split())[:200]
        raise ConfigError(
            f"role file {path} cannot be used ({reason}); restart the deployment"
        ) from None
