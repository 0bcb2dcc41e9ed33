"""Triton kernels of the experts, for CUDA and ROCm."""
