"""The kinds of device a deployment runs on. A new kind is one file and one line in ``DEVICES``."""

from afd.devices.cpu import CPU
from afd.devices.cuda import CUDA
from afd.devices.device import Device
from afd.devices.rocm import ROCM
from afd.errors import ConfigError

__all__ = [
    "CPU",
    "CUDA",
    "DEVICES",
    "ROCM",
    "Device",
    "device_named",
    "device_of_region",
    "device_of_torch",
]

DEVICES: dict[str, Device] = {device.name: device for device in (CPU, CUDA, ROCM)}
"""By name, in the order in which messages list them."""
_OF_TORCH = {device.torch_type: device for device in reversed(DEVICES.values())}


def device_named(name: str) -> Device:
    """The device of this name. Raises ConfigError if there is none."""
    if name not in DEVICES:
        raise ConfigError(f"device {name!r} is unknown; use one of {', '.join(DEVICES)}")
    return DEVICES[name]


def device_of_torch(torch_type: str) -> Device:
    """The device whose tensors have this ``torch.device.type``: the first one where several share
    it, since those share streams and capabilities. Raises ConfigError if there is none."""
    if torch_type not in _OF_TORCH:
        raise ConfigError(f"no device has torch type {torch_type!r}; use {', '.join(_OF_TORCH)}")
    return _OF_TORCH[torch_type]


def device_of_region(region_device: str) -> Device:
    """The device of ``afd_comm.Region.device``, such as "hip:0". Raises ConfigError if there is
    none."""
    kind = region_device.partition(":")[0]
    for device in DEVICES.values():
        if device.region_type == kind:
            return device
    raise ConfigError(f"no device has slots on {region_device!r}; use one of {', '.join(DEVICES)}")
