"""File names of accelerators."""


def slug(device: str) -> str:
    """Returns torch's device name as a file name: "NVIDIA H200" -> "nvidia-h200"."""
    return "-".join(device.lower().replace("/", " ").split())
