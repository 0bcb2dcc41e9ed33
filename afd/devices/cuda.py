"""NVIDIA GPUs. A process sees its own GPU as device 0 (:func:`afd.topology.gpu_order`)."""

from afd.devices.device import Device

CUDA = Device(
    name="cuda",
    torch_device="cuda:0",
    region_device="cuda:0",
    runtime="afd.wire.streams_torch:CudaRuntime",
    has_streams=True,
    captures_graphs=True,
    stamps_in_graphs=True,
    host_memory=False,
    visible_variables=("CUDA_VISIBLE_DEVICES",),
    listed_by="nvidia-smi -L",
)
