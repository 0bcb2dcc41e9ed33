"""The host's own processors."""

from afd.devices.device import Device

CPU = Device(
    name="cpu",
    torch_device="cpu",
    region_device="cpu",
    runtime="afd.wire.streams_torch:HostRuntime",
    has_streams=False,
    captures_graphs=False,
    stamps_in_graphs=False,
    host_memory=True,
    visible_variables=(),
)
