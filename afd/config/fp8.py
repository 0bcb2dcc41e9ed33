"""Which FP8 type the wire carries: the one that the FFN instances' GPUs multiply. Pure."""

from afd.devices.rocm import FP8_OF_ARCH, PRODUCTS, ROCM

DEFAULT = "e4m3fn"
"""What every GPU but gfx942 multiplies, and what CPUs convert to."""


def fp8_of(device: str, arch: str, wanted: str) -> str | None:
    """Returns the FP8 type of the wire; None if only the GPUs can say.

    Args:
        device, arch, wanted: ``ffn.device``, ``ffn.arch`` and ``wire.fp8``; the last two may be
            "auto".

    Raises:
        ValueError: the wanted type is not the one that the FFN instances multiply.
    """
    if device != ROCM.name:
        if device != "cpu" and wanted not in ("auto", DEFAULT):
            raise ValueError(f"wire.fp8 {wanted} is a type of AMD's gfx942 only; remove wire.fp8")
        return DEFAULT if wanted == "auto" else wanted
    if arch == "auto":
        return None if wanted == "auto" else wanted
    native = FP8_OF_ARCH[arch]
    if wanted not in ("auto", native):
        raise ValueError(
            f"wire.fp8 {wanted} does not fit FFN instances on {arch} ({PRODUCTS[arch]}), which"
            f" multiply {native} only; remove wire.fp8, which follows the architecture by itself"
        )
    return native
