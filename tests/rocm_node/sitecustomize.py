"""Makes device rocm the stand-in node in every Python process that has this folder in PYTHONPATH.

Only data is replaced: entries of the tables of devices, MoE backends and all-reduce backends, and
the name of vLLM's worker. Tensors are host memory, because torch for ROCm cannot be installed
beside torch for CPUs; slots, streams, graphs and links are those of the stand-in libamdhip64
(hip.cc), through the product's own HIP code in comm/.
"""

import dataclasses

from afd import devices
from attention_worker.vllm_hooks import command
from ffn_worker.allreduce import registry as sums
from ffn_worker.moe import registry

_ROCM = dataclasses.replace(
    devices.ROCM, torch_device="cpu", runtime="stand_in_rocm:StandInRuntime"
)
devices.DEVICES["rocm"] = _ROCM
devices._OF_TORCH["cpu"] = _ROCM
registry.BACKENDS["reference"] = dataclasses.replace(
    registry.BACKENDS["reference"], target="stand_in_rocm:CapturedReference"
)
sums.BACKENDS["gloo"] = dataclasses.replace(sums.BACKENDS["gloo"], target="stand_in_rocm:make_sum")
command.CPU_WORKER = ("stand_in_vllm", "NodeWorker")
