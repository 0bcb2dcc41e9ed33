"""What vLLM's ROCm platform is told per model family and architecture: attention_worker/data.

Imports no vLLM and no torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from afd.errors import ConfigError
from afd.host.package_data import data_folder

FILE = data_folder("attention_worker") / "rocm.json"


@dataclass(frozen=True)
class _Data:
    """The file. A switch is {"value": ..., "why": ...}, by its name."""

    measured: bool
    source: str
    always: Mapping[str, Mapping[str, str]]
    architectures: Mapping[str, Mapping[str, Mapping[str, str]]]
    families: Mapping[str, Mapping[str, Mapping[str, str]]]
    kernels: Mapping[str, Mapping[str, str]]


@cache
def _data() -> _Data:
    return _Data(**json.loads(FILE.read_text(encoding="utf-8")))


def switches(family: str, arch: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns AITER's switches of vLLM (environment variables) that ``environment`` does not set.

    Args:
        family: name of the model's family. arch: LLVM's name of the GPU; None: not known here.
    """
    data = _data()
    of_arch = data.architectures.get(arch or "", {})
    groups = (data.always, of_arch, data.families.get(family, {}))
    found = {name: entry["value"] for group in groups for name, entry in group.items()}
    return {name: value for name, value in found.items() if name not in environment}


def attention_backend(kernel: str, family: str) -> str:
    """Returns vLLM's name of the attention backend for a value of ``attention.kernel``.

    Raises:
        ConfigError: this kernel does not compute the family's attention.
    """
    fitting = _data().kernels[kernel]
    if family not in fitting:
        raise ConfigError(
            f"attention.kernel {kernel} does not compute the attention of {family} models; leave"
            " attention.kernel at vllm"
        )
    return fitting[family]
