"""What the expert backends must know of the GPU they run on."""

import torch

from afd.wire.layout import Tag

FP8_OF_ARCH = {"gfx942": Tag.E4M3FNUZ, "gfx950": Tag.E4M3FN}
"""The FP8 kind of each AMD architecture's matrix instructions."""


def architecture() -> str | None:
    """An AMD GPU's LLVM name ("gfx950"), None without a ROCm device."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0]


def native_fp8() -> Tag:
    """The FP8 kind that this machine multiplies; e4m3fn where it multiplies none."""
    return FP8_OF_ARCH.get(architecture() or "", Tag.E4M3FN)
