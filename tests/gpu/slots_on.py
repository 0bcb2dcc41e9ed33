"""Names of the GPUs for afd_comm: torch's "cuda" is CUDA or HIP by its build."""

import torch

GPU = "hip" if torch.version.hip else "cuda"
GPU_0, GPU_1 = f"{GPU}:0", f"{GPU}:1"
