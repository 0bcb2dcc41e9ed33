"""AMD Instinct GPUs. A process sees its own GPU as device 0 (:func:`afd.topology.gpu_order`).

A name of its own, and not one name for both makers: FP8 type, kernels, reduce backends and remedies
differ by maker, and a deployment file has to say the same on a host without GPUs.

``HIP_VISIBLE_DEVICES`` is set, and not ``ROCR_VISIBLE_DEVICES``, because vLLM 0.26 and torch read
it and HIP numbers devices by it. vLLM ends if ``CUDA_VISIBLE_DEVICES``, its older name, differs
(vllm/platforms/rocm.py: _sync_hip_cuda_env_vars). ROCR hides devices below HIP, so that no process
can map their memory: it is left to the operator, and HIP's numbers count what ROCR leaves
(docs/amd.md).
"""

from afd.devices.device import Device

ROCM = Device(
    name="rocm",
    torch_device="cuda:0",
    region_device="hip:0",
    runtime="afd.wire.streams_torch:CudaRuntime",
    has_streams=True,
    captures_graphs=True,
    stamps_in_graphs=False,
    host_memory=False,
    visible_variables=("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    hiding_variable="ROCR_VISIBLE_DEVICES",
    listed_by="rocminfo",
)

FP8_OF_ARCH = {"gfx942": "e4m3fnuz", "gfx950": "e4m3fn"}
"""FP8 type that the matrix instructions of an architecture multiply, by LLVM's name of it."""
PRODUCTS = {"gfx942": "MI300X, MI325X", "gfx950": "MI350X, MI355X"}
"""What is sold with each architecture, for messages."""
