"""Selects the MoE backend of an FFN instance."""

import torch

from afd.devices import ROCM
from afd.errors import ConfigError
from ffn_worker.moe.device import architecture, device_kind
from ffn_worker.moe.instinct import order_of
from ffn_worker.moe.registry import AUTO_ORDER, AUTO_QUANTISED, BACKENDS
from ffn_worker.moe.scheme import Scheme

_CPU = torch.device("cpu")


def choose_backend(
    name: str,
    dtype: torch.dtype,
    hidden: int,
    intermediate: int,
    device: torch.device = _CPU,
    scheme: Scheme = Scheme.PLAIN,
    pairs: float | None = None,
) -> str:
    """Returns the name of the backend to use.

    "auto" selects the first backend that can run: on AMD GPUs in the order of the architecture
    (:mod:`ffn_worker.moe.instinct`), else in AUTO_ORDER for plain weights and in AUTO_QUANTISED for
    quantised ones.

    Args:
        dtype: serving dtype. hidden, intermediate: H and I of the routed experts.
        device: where the experts are computed. scheme: format of the weights.
        pairs: mean pairs (row, expert) per expert of the largest decode step; None: unknown.

    Raises:
        ConfigError: the name is unknown, or the named backend cannot run here.
    """

    def reason_against(name: str) -> str | None:
        return problem(name, dtype, hidden, intermediate, device, scheme)

    if name == "auto":
        if device_kind(device) == ROCM.name:
            order = order_of(architecture() or "").of(scheme.value, pairs)
        else:
            order = AUTO_ORDER if scheme is Scheme.PLAIN else AUTO_QUANTISED
        return next(n for n in order if reason_against(n) is None)
    if name not in BACKENDS:
        known = ", ".join(("auto", *BACKENDS))
        raise ConfigError(f"MoE backend {name!r} is not known; use one of {known}")
    reason = reason_against(name)
    if reason is not None:
        raise ConfigError(f"MoE backend {name} cannot run: {reason}; use the backend torch")
    return name


def problem(
    name: str,
    dtype: torch.dtype,
    hidden: int,
    intermediate: int,
    device: torch.device,
    scheme: Scheme,
) -> str | None:
    """Why a registered backend cannot run here, None if it can. Arguments: as choose_backend."""
    backend = BACKENDS[name]
    kind = device_kind(device)
    if backend.devices and kind not in backend.devices:
        return f"it runs on {' and '.join(backend.devices)}, not on {kind}"
    if scheme not in backend.schemes:
        known = " and ".join(s.value for s in backend.schemes)
        return f"it takes {known} weights, not {scheme.value} (ffn.weights)"
    return backend.load().unavailable(dtype, hidden, intermediate)
