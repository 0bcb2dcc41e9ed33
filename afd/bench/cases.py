"""What `afd bench identity` runs: its cases, and the settings that both systems are given."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from afd.demo.make_model import make_model
from afd.demo.sizes import FAMILIES, resolve
from afd.errors import ConfigError

BLOCK = 32  # tokens; vLLM's CPU attention has its fast kernels for multiples of 32
MAX_MODEL_LEN = 256
MAX_LOGPROBS = 2048  # the vocabulary of the tiny models: agreement is also taken over all of it
# Few enough KV blocks that the workload makes the scheduler preempt, by attention instances.
KV_BLOCKS = {1: 24, 2: 14, 3: 10}
SETTINGS: dict[str, int | float] = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 64,  # a long prompt takes several steps
    "kv_cache_gib": 0.1,
}
# bfloat16 rounds differently when work is cut differently; these show one and several instances.
BFLOAT16_TOPOLOGIES = ("1A1F", "2A2F")


@dataclass(frozen=True)
class Case:
    """One server: ``topology`` is "colocated" for the reference, else such as "2A1F"."""

    family: str
    dtype: str
    wire: str
    topology: str

    @property
    def is_reference(self) -> bool:
        return self.topology == "colocated"

    @property
    def scored(self) -> bool:
        """Whether distributions are compared too: wherever tokens need not be the same."""
        return self.dtype != "float32" or self.wire != "exact"

    @property
    def reference(self) -> "Case":
        return self.reference_in(self.dtype)

    def reference_in(self, dtype: str) -> "Case":
        return Case(self.family, dtype, "exact", "colocated")

    @property
    def name(self) -> str:
        """``qwen3_moe float32 2A1F``, with the wire where distributions are compared."""
        wire = f"{self.wire} " if self.wire != "exact" else ""
        return f"{self.family} {self.dtype} {wire}{self.topology}"


def instances(topology: str) -> tuple[int, int]:
    """(attention, FFN) instances of ``2A1F``. Raises ConfigError for anything else."""
    found = re.fullmatch(r"([1-9])A([1-9])F", topology)
    if found is None:
        raise ConfigError(f"{topology!r} is not a topology; write it like 2A1F")
    attention, ffn = int(found[1]), int(found[2])
    if attention not in KV_BLOCKS:
        raise ConfigError(f"{topology} has more than {max(KV_BLOCKS)} attention instances")
    return attention, ffn


def cases(
    families: Sequence[str],
    dtypes: Sequence[str],
    topologies: Sequence[str],
    wires: Sequence[str],
) -> Iterator[Case]:
    """The matrix in running order: each reference before the cases compared with it.

    float32 on the exact wire takes every topology; bfloat16, and the fp8 wire (in bfloat16), those
    of :data:`BFLOAT16_TOPOLOGIES` that were asked for.
    """
    few = [topology for topology in topologies if topology in BFLOAT16_TOPOLOGIES]
    for family in families:
        if family not in FAMILIES:
            raise ConfigError(f"family {family!r} is not known; use one of {', '.join(FAMILIES)}")
        for dtype in dtypes:
            yield Case(family, dtype, "exact", "colocated")
            for wire in wires:
                if wire == "fp8" and dtype == "float32":
                    continue
                for topology in topologies if dtype == "float32" else few:
                    yield Case(family, dtype, wire, topology)


def vllm_args(attention_instances: int) -> list[str]:
    """Further arguments of vLLM's server, the same on both sides."""
    return [
        f"--block-size={BLOCK}",
        f"--num-gpu-blocks-override={KV_BLOCKS[attention_instances]}",
        f"--max-logprobs={MAX_LOGPROBS}",
    ]


def deployment(case: Case, model: Path, max_depth: int) -> dict[str, object]:
    """Contents of the deployment file of a case."""
    attention, ffn = instances(case.topology)
    return {
        "model": str(model.absolute()),
        "attention": {
            **SETTINGS,
            "instances": attention,
            "dtype": case.dtype,
            "vllm_args": vllm_args(attention),
        },
        "ffn": {"instances": ffn},
        "pipeline": {"depth": max_depth, "min_rows": 1},
        "wire": {"format": case.wire},
        # Two servers start at a time, on whatever cores there are.
        "control": {"timeout_s": 15.0},
        "deadlines": {"start_s": 600.0},
    }


def tiny_model(folder: Path, family: str) -> Path:
    """The family's tiny checkpoint below ``folder``, made if it is not there yet."""
    path = folder / f"tiny-{family}"
    if not (path / "config.json").exists():
        make_model(family, path, resolve(family, "tiny"))
    return path
