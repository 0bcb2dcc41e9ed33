"""vLLM's expert load balancer (EPLB), returning our tables. Imports vLLM and torch."""

import importlib
import itertools
from collections.abc import Sequence
from types import ModuleType

from afd.errors import ConfigError
from afd.placement.tables import Table
from afd_launch.balance import Load, sorted_by_instance

MODULE = "vllm.distributed.eplb.policy.default"


def _policy() -> ModuleType:
    try:
        return importlib.import_module(MODULE)
    except ImportError as err:
        raise ConfigError(
            f"vLLM's balancer cannot be imported ({err}); use --policy greedy"
        ) from None


def vllm_balance(load: Load, bounds: Sequence[int]) -> tuple[Table, ...]:
    """Returns the tables of all layers by vLLM 0.26's default (hierarchical) policy.

    A table may have two copies of an expert on one instance, see
    :func:`afd.placement.tables.problem`.

    Raises:
        ConfigError: vLLM is not installed, or instances have different numbers of slots, which the
            policy does not support.
    """
    sizes = {high - low for low, high in itertools.pairwise(bounds)}
    if len(sizes) > 1:
        raise ConfigError(
            f"vLLM's balancer needs instances of equal size, here they have {sorted(sizes)} slots;"
            " use --policy greedy"
        )
    policy = _policy()
    import torch

    found = policy.DefaultEplbPolicy.rebalance_experts(
        torch.tensor(load, dtype=torch.float64),
        num_replicas=bounds[-1],
        num_groups=1,
        num_nodes=1,
        num_ranks=len(bounds) - 1,
    )
    return tuple(sorted_by_instance(table, bounds) for table in found.tolist())
