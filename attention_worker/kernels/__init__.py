"""Triton kernels of an attention instance. No torch, so that they compile without it."""
