"""NVIDIA GPUs. A process sees its own GPU as device 0 (:func:`afd.topology.gpu_order`)."""

from afd.devices.device import Device

CUDA = Device(
    name="cuda",
    torch_device="cuda:0",
    region_device="cuda:0",
    streams="afd.wire.streams_torch:CudaStreams",
    has_streams=True,
    captures_graphs=True,
    host_memory=False,
    visible_variable="CUDA_VISIBLE_DEVICES",
)
