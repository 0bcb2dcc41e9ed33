"""Imports that a backend makes when it is built, because most processes do not need them."""

from __future__ import annotations

import contextlib
import importlib

import torch

VLLM_EXPERTS = "vllm.model_executor.layers.fused_moe.fused_moe"
"""Takes 6 to 8 s on a host with an H200: three quarters of what an FFN rank took to come back."""


def import_all() -> None:
    """Imports them ahead of time, in a process that waits to become an FFN rank on a GPU.

    A build of torch for CUDA says nothing: PyPI's runs on hosts without GPUs too.
    """
    if torch.version.cuda is not None and torch.cuda.device_count() > 0:
        with contextlib.suppress(ImportError):  # a backend that can run without it says so
            importlib.import_module(VLLM_EXPERTS)
