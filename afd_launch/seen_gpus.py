"""Completes a deployment with what only a host or the FFN instances know: their GPUs. Pure."""

from collections.abc import Sequence

from pydantic import ValidationError

from afd.config.deployment import Deployment
from afd.config.fp8 import fp8_of
from afd.config.messages import sentence
from afd.devices import device_named
from afd.devices.rocm import FP8_OF_ARCH, ROCM
from afd.errors import ConfigError


def with_architecture(deployment: Deployment, seen: Sequence[str]) -> Deployment:
    """Returns the deployment with ``ffn.arch`` as seen on a host that runs FFN instances.

    seen: LLVM's names of this host's AMD GPUs (:func:`afd.host.amd_gpus.architectures`).

    Raises:
        ConfigError: the GPUs are not what the file says, differ, or are no Instinct GPUs.
    """
    ffn = deployment.ffn
    if ffn.device != ROCM.name or not seen:
        return deployment
    kinds = tuple(dict.fromkeys(seen))
    known = [kind for kind in kinds if kind in FP8_OF_ARCH]
    if ffn.arch != "auto" and ffn.arch not in kinds:
        raise ConfigError(
            f"ffn.arch is {ffn.arch} but this host has {', '.join(kinds)}; remove ffn.arch, or"
            " start the FFN instances on another host"
        )
    if not known:
        raise ConfigError(
            f"this host has {', '.join(kinds)} GPUs, and device rocm runs on"
            f" {' and '.join(FP8_OF_ARCH)}; use device cpu"
        )
    if len(known) > 1 and ffn.arch == "auto":
        raise ConfigError(
            f"this host has {' and '.join(known)} GPUs, which multiply different FP8 types; set"
            " ffn.arch to that of the FFN instances and show them only those (HIP_VISIBLE_DEVICES)"
        )
    arch = known[0] if ffn.arch == "auto" else ffn.arch
    return _checked(deployment, "ffn", arch=arch)


BAD_GRAPHS = {"gfx942": ("7.2.0", "7.2.1", "7.2.2", "7.2.3")}
"""ROCm versions in which replayed graphs gave wrong results, by architecture
(https://github.com/ROCm/clr/issues/279)."""


def check_graphs(deployment: Deployment, seen: Sequence[str], rocm: str | None) -> None:
    """Raises ConfigError if replayed graphs are known to be wrong here.

    seen: as :func:`with_architecture`. rocm: version of this host's ROCm, such as "7.2.1".
    """
    sides = deployment.attention.device, deployment.ffn.device
    replays = deployment.pipeline.graphs and all(device_named(s).captures_graphs for s in sides)
    if ROCM.name not in sides or not replays or rocm is None:
        return
    for arch in seen:
        if rocm in BAD_GRAPHS.get(arch, ()):
            raise ConfigError(
                f"replayed graphs gave wrong results on {arch} with ROCm {rocm} (ROCm/clr issue"
                " 279); set pipeline.graphs: false, or use another version of ROCm"
            )


def with_fp8(deployment: Deployment, fp8: str) -> Deployment:
    """Returns the deployment with the FP8 type that its FFN instances agreed on."""
    return _checked(deployment, "wire", fp8=fp8)


def needs_pool(deployment: Deployment) -> bool:
    """Whether only the FFN instances can say which FP8 type the wire carries."""
    wire, ffn = deployment.wire, deployment.ffn
    return wire.format != "exact" and fp8_of(ffn.device, ffn.arch, wire.fp8) is None


def _checked(deployment: Deployment, section: str, **keys: str) -> Deployment:
    """The deployment with other values of a section's keys, validated. Raises ConfigError."""
    data = deployment.plain()
    data[section] |= keys
    try:
        return Deployment.from_plain(data)
    except ValidationError as err:
        raise ConfigError(sentence(err, Deployment, "the deployment file")) from None
