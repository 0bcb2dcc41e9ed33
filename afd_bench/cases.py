"""The cases of `afd bench identity`, and the settings of both systems under test."""

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from afd.errors import ConfigError
from afd.records import results_file
from afd_bench.stand_in_nic import PORTS
from afd_demo.make_model import make_model
from afd_demo.sizes import FAMILIES, resolve

AUTO = "auto"
BLOCK = 32  # tokens; vLLM's CPU attention has fast kernels for multiples of 32
MAX_MODEL_LEN = 256
MAX_LOGPROBS = 2048  # vocabulary size of the tiny models; distributions are also compared over all
# KV blocks by number of attention instances: few enough that the workload causes preemption.
KV_BLOCKS = {1: 24, 2: 14, 3: 10}
SETTINGS: dict[str, int | float] = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 64,  # a long prompt takes several steps
    "kv_cache_gib": 0.1,
}
# In bfloat16 the partition of work changes the rounding; these cover one and several instances.
BFLOAT16_TOPOLOGIES = ("1A1F", "2A2F")


@dataclass(frozen=True)
class Case:
    """One server under test.

    topology: "colocated" for the reference, else a name like "2A1F". over: the transport's backend.
    """

    family: str
    dtype: str
    wire: str
    topology: str
    over: str = AUTO

    @property
    def is_reference(self) -> bool:
        return self.topology == "colocated"

    @property
    def scored(self) -> bool:
        """Whether distributions are compared too, which is so if tokens need not be equal."""
        return self.dtype != "float32" or self.wire != "exact"

    @property
    def reference(self) -> "Case":
        return self.reference_in(self.dtype)

    def reference_in(self, dtype: str) -> "Case":
        return Case(self.family, dtype, "exact", "colocated")

    @property
    def name(self) -> str:
        """A name such as ``qwen3_moe float32 2A1F``, with the wire format if it is not exact, and
        the backend if one is named: ``qwen3_moe float32 2A1F over tcp``."""
        wire = f"{self.wire} " if self.wire != "exact" else ""
        over = f" over {self.over}" if self.over != AUTO else ""
        return f"{self.family} {self.dtype} {wire}{self.topology}{over}"


def instances(topology: str) -> tuple[int, int]:
    """Parses ``2A1F`` into (attention instances, FFN instances). Raises ConfigError."""
    found = re.fullmatch(r"([1-9])A([1-9])F", topology)
    if found is None:
        raise ConfigError(f"{topology!r} is not a topology; write it like 2A1F")
    attention, ffn = int(found[1]), int(found[2])
    if attention not in KV_BLOCKS:
        raise ConfigError(
            f"{topology} has too many attention instances; use at most {max(KV_BLOCKS)}"
        )
    return attention, ffn


def cases(
    families: Sequence[str],
    dtypes: Sequence[str],
    topologies: Sequence[str],
    wires: Sequence[str],
    overs: Sequence[str] = (AUTO,),
) -> Iterator[Case]:
    """Yields the cases in running order: each reference before the cases compared with it.

    float32 runs every topology on the exact wire. bfloat16 runs every wire format, on those of
    :data:`BFLOAT16_TOPOLOGIES` that are in ``topologies``. Each runs over every backend of
    ``overs``.
    """
    few = [topology for topology in topologies if topology in BFLOAT16_TOPOLOGIES]
    for family in families:
        if family not in FAMILIES:
            raise ConfigError(f"family {family!r} is unknown; use one of {', '.join(FAMILIES)}")
        for dtype in dtypes:
            yield Case(family, dtype, "exact", "colocated")
            for wire in wires:
                if wire == "fp8" and dtype == "float32":
                    continue
                for topology in topologies if dtype == "float32" else few:
                    for over in overs:
                        yield Case(family, dtype, wire, topology, over)


def vllm_args(attention_instances: int) -> list[str]:
    """Returns further arguments of vLLM's server, equal for both systems."""
    return [
        f"--block-size={BLOCK}",
        f"--num-gpu-blocks-override={KV_BLOCKS[attention_instances]}",
        f"--max-logprobs={MAX_LOGPROBS}",
    ]


def deployment(
    case: Case, model: Path, max_depth: int, nic: Path | None = None
) -> dict[str, object]:
    """Returns the contents of a case's deployment file.

    nic: libibverbs without hardware, for cases over verbs.
    """
    attention, ffn = instances(case.topology)
    verbs = {"verbs": {"ports": list(PORTS), "library": str(nic)}} if nic is not None else {}
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
        "transport": {"backend": case.over, **verbs},
        # Long deadlines: several servers start at a time on few cores.
        "control": {"timeout_s": 15.0},
        "deadlines": {"start_s": 600.0},
    }


def tiny_model(folder: Path, family: str) -> Path:
    """Returns the path of the family's tiny checkpoint below ``folder``; creates it if missing."""
    path = folder / f"tiny-{family}"
    if not (path / "config.json").exists():
        make_model(family, path, resolve(family, "tiny"))
    return path


def add_files(parser: argparse.ArgumentParser, bench: str) -> None:
    """Adds the options that name the models and the records of a benchmark on tiny models."""
    parser.add_argument(
        "--models",
        type=Path,
        default=Path("models"),
        help="folder of tiny models, created if missing",
    )
    parser.add_argument(
        "--out",
        type=results_file,
        default=Path(f"docs/results/{bench}.json"),
        help="file of the records; the page gets the same name with .md",
    )
