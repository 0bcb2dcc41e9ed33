"""Who talks to whom, and who holds which expert. Pure: integers in, frozen dataclasses out."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from afd.errors import ConfigError


def expert_ranges(num_experts: int, instances: int) -> tuple[tuple[int, int], ...]:
    """Half-open range of routed experts per FFN instance, contiguous, sizes differing by at most 1.

    Raises:
        ConfigError: there are more FFN instances than routed experts.
    """
    if instances > num_experts:
        raise ConfigError(
            f"{instances} FFN instances cannot share {num_experts} routed experts; "
            f"set ffn.instances to {num_experts} or fewer"
        )
    bounds = [num_experts * j // instances for j in range(instances + 1)]
    return tuple(itertools.pairwise(bounds))


def shared_slice(intermediate: int, instances: int, index: int) -> tuple[int, int]:
    """Half-open slice of the shared expert's intermediate dimension held by one FFN instance.

    The cut falls on multiples of 64 where the width allows it, because GEMM kernels tile by 64.
    """
    unit = 64 if intermediate % 64 == 0 and intermediate // 64 >= instances else 1
    blocks = intermediate // unit
    return blocks * index // instances * unit, blocks * (index + 1) // instances * unit


PINNED_SPIN_US = 50
"""How long a role with cores of its own spins for a doorbell before it sleeps, microseconds. Longer
than a stage of a small model, so that a busy pipeline never pays for a futex wake-up."""


def session(attention_generation: int, ffn_generation: int) -> int:
    """Number (u32) of the session between one attention and one FFN instance.

    It goes into every doorbell of the pair. Generations only grow, so each time either side starts
    anew the number is larger than any that the pair's slots have seen, and a late message of an
    earlier session can never be taken for a new one.
    """
    return (attention_generation + ffn_generation) % 2**32


def gpu_order(
    role: str, index: int, attention_instances: int, ffn_instances: int
) -> tuple[int, ...]:
    """GPUs of one host as an instance should see them: its own first, then its peers'.

    Attention instances take the first GPUs, FFN instances those after them. Mapping a peer's memory
    needs the peer's GPU to be visible, so every instance sees all of them; its own is device 0.
    """
    own = index if role == "attention" else attention_instances + index
    others = (gpu for gpu in range(attention_instances + ffn_instances) if gpu != own)
    return (own, *others)


def visible_gpus(order: Sequence[int], allowed: str | None) -> str:
    """Value of CUDA_VISIBLE_DEVICES for a process that should see the GPUs in this order.

    Args:
        allowed: the variable's value now, which ``order`` then counts in; None: all GPUs of the
            host.

    Raises:
        ConfigError: fewer GPUs are allowed than the deployment has GPU instances.
    """
    names = allowed.split(",") if allowed is not None else [str(gpu) for gpu in sorted(order)]
    if len(names) < len(order):
        raise ConfigError(
            f"the deployment has {len(order)} GPU instances but CUDA_VISIBLE_DEVICES={allowed}; "
            "allow one GPU per instance, or use fewer instances"
        )
    return ",".join(names[gpu] for gpu in order)


@dataclass(frozen=True)
class SlotMap:
    """Slot numbers inside the two kinds of Region of an xAyF deployment.

    An FFN instance's Region holds, for each attention instance, one slot per micro-batch and one
    control slot (an idle instance leaves the step epoch through it). An attention instance's Region
    holds, for each FFN instance, one slot per micro-batch.
    """

    attention_instances: int
    ffn_instances: int
    max_depth: int

    @property
    def ffn_region_slots(self) -> int:
        return self.attention_instances * (self.max_depth + 1)

    @property
    def attention_region_slots(self) -> int:
        return self.ffn_instances * self.max_depth

    def to_ffn(self, attention: int, micro_batch: int) -> int:
        """Slot of (attention instance, micro-batch) in every FFN instance's Region."""
        return attention * (self.max_depth + 1) + micro_batch

    def control_to_ffn(self, attention: int) -> int:
        return self.to_ffn(attention, self.max_depth)

    def ffn_claim(self, attention: int) -> tuple[int, int]:
        """(first slot, number of slots) that one attention instance writes in an FFN Region."""
        return self.to_ffn(attention, 0), self.max_depth + 1

    def to_attention(self, ffn: int, micro_batch: int) -> int:
        """Slot of (FFN instance, micro-batch) in every attention instance's Region."""
        return ffn * self.max_depth + micro_batch

    def attention_claim(self, ffn: int) -> tuple[int, int]:
        return self.to_attention(ffn, 0), self.max_depth
