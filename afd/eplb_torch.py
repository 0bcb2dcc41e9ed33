"""vLLM's balancer of expert load (EPLB) behind our kind of table. Needs vLLM, which needs torch."""

import importlib
import itertools
from collections.abc import Sequence
from types import ModuleType

from afd.errors import ConfigError
from afd.placement import Load, Table, sorted_by_instance

MODULE = "vllm.distributed.eplb.policy.default"


def _policy() -> ModuleType:
    try:
        return importlib.import_module(MODULE)
    except ImportError as err:
        raise ConfigError(
            f"vLLM's balancer cannot be imported ({err}); use --policy greedy"
        ) from None


def vllm_balance(load: Load, bounds: Sequence[int]) -> tuple[Table, ...]:
    """Tables of all layers by vLLM 0.26's default policy, which packs copies hierarchically.

    It may put two copies of an expert on one instance; see :func:`afd.placement.problem`.

    Raises:
        ConfigError: no vLLM here, or instances with different numbers of slots, for which it is not
            made.
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
