"""Numbering of experts, ranks, GPUs and slots of an xAyF deployment. Pure functions."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from afd.devices import Device
from afd.errors import ConfigError


def expert_ranges(num_experts: int, instances: int) -> tuple[tuple[int, int], ...]:
    """Returns one contiguous half-open range of routed experts per FFN instance.

    Sizes differ by at most 1.

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
    """Returns the half-open slice of the shared expert's intermediate dimension of one instance.

    Cuts are multiples of 64 if the width allows it, because GEMM kernels tile by 64.
    """
    unit = 64 if intermediate % 64 == 0 and intermediate // 64 >= instances else 1
    blocks = intermediate // unit
    return blocks * index // instances * unit, blocks * (index + 1) // instances * unit


def width_slices(width: int, ranks: int, multiple: int = 8) -> tuple[tuple[int, int], ...]:
    """Returns one half-open slice of an expert's intermediate dimension per tensor-parallel rank.

    The cut unit is the largest of 64, 32, 16 and 8 that divides the width and gives every rank at
    least one unit: kernels tile by these, and 8 values of 16 bits are one aligned load. Sizes
    differ by at most one unit. If none divides the width, the last rank takes the remainder.

    Args:
        multiple: smallest unit that the weights' format allows (columns that share a scale).

    Raises:
        ConfigError: the width has fewer units than there are ranks.
    """
    if ranks == 1:
        return ((0, width),)
    if width // multiple < ranks:
        raise ConfigError(
            f"experts of width {width} cannot be cut for {ranks} ranks in multiples of {multiple};"
            f" set ffn.tp to {max(1, width // multiple)} or fewer, or use more ffn.instances"
        )
    units = (unit for unit in (64, 32, 16, 8) if unit % multiple == 0)
    fitting = (unit for unit in units if width % unit == 0 and width // unit >= ranks)
    unit = next(fitting, multiple)
    bounds = [width // unit * rank // ranks * unit for rank in range(ranks)]
    return tuple(itertools.pairwise([*bounds, width]))


@dataclass(frozen=True)
class FfnPlace:
    """One rank of one FFN instance, and who gives it orders.

    Rank 0 of instance 0 is the leader: it decides the members of each step. It sends orders to the
    heads (rank 0 of every other instance). The leader and each head pass orders on to the followers
    (the other ranks) of their instance.
    """

    instance: int
    rank: int
    instances: int
    tp: int

    @property
    def number(self) -> int:
        return rank_number(self.instance, self.rank, self.tp)

    @property
    def follows(self) -> tuple[int, int] | None:
        """(instance, rank) whose orders this rank executes; None for the leader."""
        if self.rank:
            return self.instance, 0
        return (0, 0) if self.instance else None

    @property
    def ranks(self) -> tuple[tuple[int, int], ...]:
        """(instance, rank) of every rank of this instance."""
        return tuple((self.instance, rank) for rank in range(self.tp))

    @property
    def followers(self) -> tuple[tuple[int, int], ...]:
        """(instance, rank) of this instance's followers; empty unless this is rank 0."""
        return self.ranks[1:] if self.rank == 0 else ()

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """(instance, rank) of the heads that execute the leader's orders; empty for other ranks."""
        leads = self.follows is None
        return tuple((j, 0) for j in range(1, self.instances)) if leads else ()


def member_id(role: str, index: int, rank: int = 0) -> str:
    """Returns the name of a member: "ffn-1" for rank 0 of FFN instance 1, "ffn-1.1" for rank 1."""
    return f"{role}-{index}.{rank}" if rank else f"{role}-{index}"


def key_owner(member: str) -> str:
    """Returns the member whose keys this one has. The ranks of an attention instance share those of
    rank 0, because one engine starts them; every other process has its own."""
    return member.partition(".")[0] if member.startswith("attention-") else member


def rank_number(instance: int, rank: int, tp: int) -> int:
    """Returns the number of a rank among all of its role, instance by instance."""
    return instance * tp + rank


PINNED_SPIN_US = 50
"""How long a pinned role spins for a doorbell before it sleeps, microseconds. This is longer than a
stage of a small model, so a busy pipeline never pays for a futex wake-up."""


def session(attention_generation: int, ffn_generation: int) -> int:
    """Returns the number (u32) of the session between one attention and one FFN instance.

    Every doorbell of the pair carries it. Generations only grow, so a restart of either side gives
    a larger number than the pair's slots have seen. A late message of an earlier session is
    therefore never mistaken for a new one.
    """
    return (attention_generation + ffn_generation) % 2**32


def gpu_order(own: int, processes: int, gpus: int | None = None, ranks: int = 1) -> tuple[int, ...]:
    """Returns the order in which a process should see the GPUs of its host: its own first.

    If there are fewer ``gpus`` than processes, the numbering starts again at the first GPU. Every
    process sees all GPUs, because mapping a peer's memory needs the peer's GPU to be visible.

    Args:
        own: number of the process among those with GPUs on its host, see
            :meth:`afd.config.roles.RoleSpec.gpu_environment`.
        processes: how many those are.
        gpus: GPUs that they share; None: one per process.
        ranks: how many GPUs are its own; they have consecutive numbers.
    """
    count = processes if gpus is None else min(gpus, processes)
    first = tuple((own + rank) % count for rank in range(ranks))
    return (*first, *(gpu for gpu in range(count) if gpu not in first))


def visible_gpus(
    device: Device, order: Sequence[int], environment: Mapping[str, str]
) -> dict[str, str]:
    """Returns the environment variables that show a process the GPUs in this order.

    The device's first variable is set, and any other name of it that ``environment`` has.

    Args:
        device: kind of the GPUs; for a host device the result is {}.
        order: indices into the GPUs that ``environment`` allows, or into all GPUs of the host.

    Raises:
        ConfigError: fewer GPUs are allowed than the deployment needs, or two names of the variable
            differ.
    """
    if not device.visible_variables:
        return {}
    given = {name: environment[name] for name in device.visible_variables if name in environment}
    if len(set(given.values())) > 1:
        pairs = " but ".join(f"{name}={value}" for name, value in given.items())
        raise ConfigError(f"{pairs}; set only {device.visible_variables[0]}")
    hidden_by = device.hiding_variable
    names = [str(gpu) for gpu in sorted(order)]
    said = ""
    if given:
        name, allowed = next(iter(given.items()))
        names, said = allowed.split(","), f"{name}={allowed}"
    elif hidden_by is not None and hidden_by in environment:
        # The variable above it numbers the GPUs that are left.
        left = environment[hidden_by]
        names, said = [str(n) for n in range(len(left.split(",")))], f"{hidden_by}={left}"
    if len(names) < len(order):
        raise ConfigError(
            f"the deployment takes {len(order)} GPUs but {said}; allow one GPU per"
            " attention instance and FFN rank, use fewer of them, or set gpus to share GPUs"
        )
    value = ",".join(names[gpu] for gpu in order)
    return {name: value for name in (device.visible_variables[0], *given)}


@dataclass(frozen=True)
class SlotMap:
    """Slot numbers in the Regions of an xAyF deployment.

    The Region of an FFN rank has one slot per micro-batch and one control slot for each attention
    rank. An idle one leaves the step epoch through its control slot. The Region of an attention
    rank has one slot per micro-batch for each FFN rank. Both are numbered by :func:`rank_number`.
    """

    attention_ranks: int
    ffn_ranks: int
    max_depth: int

    @property
    def ffn_region_slots(self) -> int:
        return self.attention_ranks * (self.max_depth + 1)

    @property
    def attention_region_slots(self) -> int:
        return self.ffn_ranks * self.max_depth

    def to_ffn(self, attention: int, micro_batch: int) -> int:
        """Slot of (attention rank, micro-batch) in every FFN rank's Region."""
        return attention * (self.max_depth + 1) + micro_batch

    def control_to_ffn(self, attention: int) -> int:
        return self.to_ffn(attention, self.max_depth)

    def ffn_claim(self, attention: int) -> tuple[int, int]:
        """(first slot, number of slots) of an attention rank in an FFN rank's Region."""
        return self.to_ffn(attention, 0), self.max_depth + 1

    def to_attention(self, ffn: int, micro_batch: int) -> int:
        """Slot of (FFN rank, micro-batch) in every attention rank's Region."""
        return ffn * self.max_depth + micro_batch

    def attention_claim(self, ffn: int) -> tuple[int, int]:
        return self.to_attention(ffn, 0), self.max_depth
