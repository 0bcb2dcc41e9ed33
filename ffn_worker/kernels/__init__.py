"""Triton kernels of the FFN side, for CUDA and ROCm. Only these files import triton."""
