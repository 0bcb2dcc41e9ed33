"""What the instances of a deployment need from a Ray cluster, and what they run. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass

from afd.config.deployment import Deployment
from afd.devices import device_named
from afd.topology import member_id


@dataclass(frozen=True)
class Instance:
    """One actor. ranks: processes that it runs; gpus: all of them together take."""

    role: str
    index: int
    ranks: int
    gpus: int

    @property
    def name(self) -> str:
        return member_id(self.role, self.index)

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(member_id(self.role, self.index, rank) for rank in range(self.ranks))

    def bundle(self, cpus: float) -> dict[str, float]:
        """Resources of its placement-group bundle."""
        return {"CPU": cpus * self.ranks} | ({"GPU": float(self.gpus)} if self.gpus else {})

    def arguments(self, address: str, control: str, folder: str) -> list[list[str]]:
        """Arguments of ``afd`` per rank, with its files in ``folder`` on the actor's node.

        address: of the node. The instance is a host of its own, so that GPUs are numbered among
        those that Ray gives it; nothing uses the other host's address.
        """
        own = {
            "name": "node",
            "address": address,
            "accelerators": {"count": self.gpus},
            "attention": [self.index] if self.role == "attention" else [],
            "ffn": [self.index] if self.role == "ffn" else [],
        }
        others = {"name": "others", "address": "unused", "accelerators": {"count": 65536}}
        hosts = f"hosts={json.dumps([own, others])}"
        common = [self.role, f"{folder}/deployment.yaml", "--index", str(self.index)]
        common += ["--control", control, "--set", hosts]
        ranks = [["--rank", str(rank)] if self.role == "ffn" else [] for rank in range(self.ranks)]
        keys = [["--set", f"control.keys={folder}/{member}.keys"] for member in self.members]
        return [[*common, *rank, *key] for rank, key in zip(ranks, keys, strict=True)]


def instances_of(deployment: Deployment) -> tuple[Instance, ...]:
    """FFN instances first: attention instances wait for them."""
    ffn, attention = deployment.ffn, deployment.attention
    takes = {
        name: bool(device_named(pool.device).visible_variables)
        for name, pool in (("ffn", ffn), ("attention", attention))
    }
    return (
        *(Instance("ffn", j, ffn.tp, ffn.tp * takes["ffn"]) for j in range(ffn.instances)),
        *(
            Instance("attention", i, 1, attention.tp * takes["attention"])
            for i in range(attention.instances)
        ),
    )
