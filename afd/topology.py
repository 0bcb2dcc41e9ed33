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


def width_slices(width: int, ranks: int, multiple: int = 8) -> tuple[tuple[int, int], ...]:
    """Half-open slice of an expert's intermediate dimension per tensor-parallel rank.

    The cuts fall on multiples of 64 where that divides the width and every rank gets some, else of
    32, 16 or 8: kernels tile by them, and 8 values of 16 bits are one aligned load. Sizes differ by
    one such unit at most; of a width that none divides the last rank takes the rest.

    Args:
        multiple: what the weights' format allows at least, columns that share a scale.

    Raises:
        ConfigError: the width has fewer units than there are ranks.
    """
    if ranks == 1:
        return ((0, width),)
    if width // multiple < ranks:
        raise ConfigError(
            f"experts of width {width} cannot be cut for {ranks} ranks in multiples of {multiple};"
            f" set ffn.tp to {max(1, width // multiple)} or fewer, and more ffn.instances instead"
        )
    units = (unit for unit in (64, 32, 16, 8) if unit % multiple == 0)
    fitting = (unit for unit in units if width % unit == 0 and width // unit >= ranks)
    unit = next(fitting, multiple)
    bounds = [width // unit * rank // ranks * unit for rank in range(ranks)]
    return tuple(itertools.pairwise([*bounds, width]))


@dataclass(frozen=True)
class FfnPlace:
    """One rank of one FFN instance, and the order in which processes of the pool are led.

    Rank 0 of instance 0 is the leader: it decides the members of a step. It tells the heads, rank 0
    of each instance, and a head tells the ranks of its instance.
    """

    instance: int
    rank: int
    instances: int
    tp: int

    @property
    def number(self) -> int:
        return ffn_number(self.instance, self.rank, self.tp)

    @property
    def superior(self) -> tuple[int, int] | None:
        """(instance, rank) that this one follows; None for the leader."""
        if self.rank:
            return self.instance, 0
        return (0, 0) if self.instance else None

    @property
    def ranks(self) -> tuple[tuple[int, int], ...]:
        """(instance, rank) of all ranks of the same instance."""
        return tuple((self.instance, rank) for rank in range(self.tp))

    @property
    def mates(self) -> tuple[tuple[int, int], ...]:
        """(instance, rank) of those that a head tells what to do; nobody for other ranks."""
        return self.ranks[1:] if self.rank == 0 else ()

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """(instance, rank) of the heads that the leader tells what to do; nobody for others."""
        leads = self.superior is None
        return tuple((j, 0) for j in range(1, self.instances)) if leads else ()


def ffn_number(instance: int, rank: int, tp: int) -> int:
    """Place of one rank among the processes of the FFN pool, instance by instance."""
    return instance * tp + rank


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
    role: str, number: int, attention_instances: int, ffn_ranks: int, gpus: int | None = None
) -> tuple[int, ...]:
    """GPUs of one host as a process should see them: its own first, then its peers'.

    Attention instances take the first GPUs, the ranks of the FFN instances those after them, and
    where there are fewer ``gpus`` than processes they begin again at the first one. Mapping a
    peer's memory needs the peer's GPU to be visible, so every process sees all of them; its own is
    device 0. ``number``: of the process among those of its role, see :func:`ffn_number`.
    """
    count = attention_instances + ffn_ranks if gpus is None else gpus
    own = (number if role == "attention" else attention_instances + number) % count
    return (own, *(gpu for gpu in range(count) if gpu != own))


def visible_gpus(order: Sequence[int], allowed: str | None) -> str:
    """Value of CUDA_VISIBLE_DEVICES for a process that should see the GPUs in this order.

    Args:
        allowed: the variable's value now, which ``order`` then counts in; None: all GPUs of the
            host.

    Raises:
        ConfigError: fewer GPUs are allowed than the deployment takes.
    """
    names = allowed.split(",") if allowed is not None else [str(gpu) for gpu in sorted(order)]
    if len(names) < len(order):
        raise ConfigError(
            f"the deployment takes {len(order)} GPUs but CUDA_VISIBLE_DEVICES={allowed}; allow one"
            " GPU per instance (per rank with ffn.tp), use fewer, or set gpus to share them"
        )
    return ",".join(names[gpu] for gpu in order)


@dataclass(frozen=True)
class SlotMap:
    """Slot numbers inside the two kinds of Region of an xAyF deployment.

    The Region of an FFN rank holds, for each attention instance, one slot per micro-batch and one
    control slot (an idle instance leaves the step epoch through it). An attention instance's Region
    holds, for each FFN rank by its number (:func:`ffn_number`), one slot per micro-batch.
    """

    attention_instances: int
    ffn_ranks: int
    max_depth: int

    @property
    def ffn_region_slots(self) -> int:
        return self.attention_instances * (self.max_depth + 1)

    @property
    def attention_region_slots(self) -> int:
        return self.ffn_ranks * self.max_depth

    def to_ffn(self, attention: int, micro_batch: int) -> int:
        """Slot of (attention instance, micro-batch) in every FFN rank's Region."""
        return attention * (self.max_depth + 1) + micro_batch

    def control_to_ffn(self, attention: int) -> int:
        return self.to_ffn(attention, self.max_depth)

    def ffn_claim(self, attention: int) -> tuple[int, int]:
        """(first slot, number of slots) of an attention instance in an FFN rank's Region."""
        return self.to_ffn(attention, 0), self.max_depth + 1

    def to_attention(self, ffn: int, micro_batch: int) -> int:
        """Slot of (FFN rank, micro-batch) in every attention instance's Region."""
        return ffn * self.max_depth + micro_batch

    def attention_claim(self, ffn: int) -> tuple[int, int]:
        return self.to_attention(ffn, 0), self.max_depth
