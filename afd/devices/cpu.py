"""The host's own processors."""

from afd.devices.device import Device

CPU = Device(
    name="cpu",
    torch_device="cpu",
    region_device="cpu",
    streams="afd.wire.streams_torch:host_streams",
    has_streams=False,
    captures_graphs=False,
    host_memory=True,
    visible_variable=None,
)
