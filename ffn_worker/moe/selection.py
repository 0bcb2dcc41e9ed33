"""Selects the MoE backend of an FFN instance."""

from collections.abc import Callable
from dataclasses import dataclass

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
    *,
    any_math: bool = False,
) -> str:
    """Returns the name of the backend to use.

    "auto" selects the first backend that can run: on AMD GPUs in the order of the architecture
    (:mod:`ffn_worker.moe.instinct`), else in AUTO_ORDER for plain weights and in AUTO_QUANTISED for
    quantised ones.

    Args:
        dtype: serving dtype. hidden, intermediate: H and I of the routed experts.
        device: where the experts are computed. scheme: format of the weights.
        any_math: the experts have biases, or another activation than silu.
        pairs: mean pairs (row, expert) per expert of the largest decode step; None: unknown.

    Raises:
        ConfigError: the name is unknown, or the named backend cannot run here.
    """

    def reason_against(name: str) -> str | None:
        return problem(name, dtype, hidden, intermediate, device, scheme, any_math=any_math)

    if name == "auto":
        return next(n for n in _order(device, scheme, pairs) if reason_against(n) is None)
    if name not in BACKENDS:
        known = ", ".join(("auto", *BACKENDS))
        raise ConfigError(f"MoE backend {name!r} is not known; use one of {known}")
    reason = reason_against(name)
    if reason is not None:
        raise ConfigError(f"MoE backend {name} cannot run: {reason}; use the backend torch")
    return name


def _order(device: torch.device, scheme: Scheme, pairs: float | None) -> tuple[str, ...]:
    """The backends that "auto" tries here, in order."""
    if device_kind(device) == ROCM.name:
        return order_of(architecture() or "").of(scheme.value, pairs)
    return AUTO_ORDER if scheme is Scheme.PLAIN else AUTO_QUANTISED


def problem(
    name: str,
    dtype: torch.dtype,
    hidden: int,
    intermediate: int,
    device: torch.device,
    scheme: Scheme,
    *,
    any_math: bool = False,
) -> str | None:
    """Why a registered backend cannot run here, None if it can. Arguments: as choose_backend."""
    never = _never(name, device, scheme, any_math)
    return (
        BACKENDS[name].load().unavailable(dtype, hidden, intermediate) if never is None else never
    )


def _never(name: str, device: torch.device, scheme: Scheme, any_math: bool) -> str | None:
    """Why a backend cannot hold such weights on such a device, whatever the sizes."""
    backend = BACKENDS[name]
    kind = device_kind(device)
    if backend.devices and kind not in backend.devices:
        return f"it runs on {' and '.join(backend.devices)}, not on {kind}"
    if scheme not in backend.schemes:
        known = " and ".join(s.value for s in backend.schemes)
        return f"it takes {known} weights, not {scheme.value} (ffn.weights)"
    if any_math and not backend.any_math:
        return "it computes silu without biases only"
    return None


@dataclass(frozen=True)
class Selection:
    """backend: a name of BACKENDS. scheme: in which it holds the experts."""

    backend: str
    scheme: Scheme


def select(
    backend: str,
    weights: str,
    stored: Scheme,
    dtype: torch.dtype,
    hidden: int,
    width_of: Callable[[Scheme], int],
    device: torch.device = _CPU,
    pairs: float | None = None,
    *,
    any_math: bool = False,
) -> Selection:
    """Returns backend and scheme for the experts of a checkpoint.

    ``weights`` "auto": as stored if a backend has a kernel for that here, or the backend that is
    named takes it; else plain, so that the experts are decoded once, at load.

    Args:
        backend, weights: ``ffn.backend`` and ``ffn.weights``.
        stored: the scheme that holds the experts as stored.
        width_of: the width of a rank's experts, if they are cut for a scheme.
        pairs: see :func:`choose_backend`.

    Raises:
        ConfigError: the backend is unknown or cannot run here, or the width cannot be cut.
    """

    def chosen(scheme: Scheme) -> Selection:
        sizes = dtype, hidden, width_of(scheme)
        name = choose_backend(backend, *sizes, device, scheme, pairs, any_math=any_math)
        return Selection(name, scheme)

    if weights != "auto":
        return chosen(Scheme(weights))
    if stored is not Scheme.PLAIN:
        kernels = [name for name in _order(device, stored, pairs) if name != "torch"]
        wanted = kernels if backend == "auto" else [backend] if backend in BACKENDS else []
        taking = [name for name in wanted if _never(name, device, stored, any_math) is None]
        for name in taking:
            if problem(name, dtype, hidden, width_of(stored), device, stored) is None:
                return Selection(name, stored)
    return chosen(Scheme.PLAIN)
