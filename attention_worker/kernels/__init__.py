"""Triton kernels of an attention instance."""
