"""Names of accelerators as the files of configs/ have them."""


def slug(device: str) -> str:
    """A device's name, as torch gives it, as part of a path: "NVIDIA H200" -> "nvidia-h200"."""
    return "-".join(device.lower().replace("/", " ").split())
