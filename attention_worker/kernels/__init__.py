"""Kernels of an attention instance. The Triton files import no torch and compile without it."""
