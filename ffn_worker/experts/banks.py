"""The routed experts that an FFN rank holds. They can change while the rank serves."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from afd.models import MoeModel
from afd.wire.streams_torch import runtime_of, synchronize
from ffn_worker.experts.shard import DTYPES, LayerWeights, Shard
from ffn_worker.moe.activation import ExpertMath
from ffn_worker.moe.base import MoeBackend
from ffn_worker.moe.load_counts import SlotLoad
from ffn_worker.moe.quantise import Weight, in_scheme
from ffn_worker.moe.registry import BACKENDS
from ffn_worker.moe.scheme import Scheme


@dataclass(frozen=True)
class HeldBank:
    """One bank of one layer.

    number: 0 or 1. backend: holds the weights and computes. experts: the routed expert in each
    expert slot of this instance. nbytes: of the weights. load: counts the rows of each expert slot.
    """

    number: int
    backend: MoeBackend
    experts: tuple[int, ...]
    nbytes: int
    load: SlotLoad


@dataclass(frozen=True)
class _Layer:
    """The experts of one layer. Replaced as a whole, because another thread may read it.

    held: the bank at home, then the other one while the layer's experts move. past_rows: by routed
    expert, the rows computed by banks that have been dropped.
    """

    held: tuple[HeldBank, ...]
    past_rows: tuple[int, ...]


class ExpertBanks:
    """The routed experts of one rank, all layers.

    A layer's experts are in one of two banks. While they move, the old ones are in one bank and the
    new ones in the other. The expert slots of a row select the bank: those of bank 1 start at
    ``shard.total_slots``.

    A layer has a *home*: memory that it keeps, and that captured graphs read. While experts move,
    the new bank is in other memory. When the old bank is dropped, the new one is copied home. So a
    graph stays valid, but it computes the bank at home only.

    Attributes:
        shard: the part of every layer that this rank holds.
        scheme: the format of the weights.
        nbytes: of all weights that the banks hold.
        joined: layers whose shared expert the backend computes with the routed ones.
    """

    def __init__(
        self, model: MoeModel, shard: Shard, backend: str, scheme: Scheme, device: torch.device
    ) -> None:
        """backend: a name of ``ffn_worker.moe.registry.BACKENDS``."""
        backend_class = BACKENDS[backend].load()
        self.shard = shard
        self.scheme = scheme
        self.nbytes = 0
        self.joined: set[int] = set()
        self._device = device
        self._dtype = DTYPES[model.dtype]
        self._home, self._away = (backend_class(shard.slots, shard.total_slots) for _ in range(2))
        self._activation = model.activation
        self._layers = {n: _Layer((), (0,) * model.num_experts) for n in model.moe_layers}

    @cached_property
    def aside(self) -> Callable[[], AbstractContextManager[object]]:
        """Returns a context for work on the weights while steps run."""
        return runtime_of(self._device).aside(self._device)

    @property
    def capturable(self) -> bool:
        """Whether a graph can hold calls of the backend."""
        return self._home.capturable

    def of(self, layer: int) -> tuple[HeldBank, ...]:
        """Returns the banks that hold experts of a layer: the one at home, then the other one while
        its experts move."""
        return self._layers[layer].held

    def held(self, layer: int) -> dict[int, tuple[int, ...]]:
        """Returns, by bank, the experts in this instance's expert slots of a layer."""
        return {held.number: held.experts for held in self.of(layer)}

    def holds(self, layer: int, slots: torch.Tensor) -> bool:
        """Returns whether this rank holds the banks of these expert slots. Waits for the device."""
        bank_size = self.shard.total_slots
        low, high = (int(n) // bank_size for n in torch.aminmax(slots))
        if low < 0 < high and ((slots >= 0) & (slots < bank_size)).any():
            low = 0  # the -1 of a lost sender, or of padding, hides the slots of bank 0
        return {bank for bank in (low, high) if bank >= 0} <= set(self.held(layer))

    def add(self, layer: int, bank: int, experts: tuple[int, ...], weights: LayerWeights) -> None:
        """Adds the routed experts of one layer in a bank that is free. Safe beside
        ``FfnModel.forward`` on another thread.

        Args:
            experts: the routed expert in each expert slot of this instance, in the order of
                ``weights``.
        """
        w13, w2 = self.kept(weights.w13, self.scheme), self.kept(weights.w2, self.scheme)
        nbytes, backend = w13.nbytes + w2.nbytes, self._away if self.of(layer) else self._home
        backend.prepare_math(layer, ExpertMath(self._activation, weights.w13_bias, weights.w2_bias))
        backend.prepare(layer, w13, w2)
        load = SlotLoad(experts, self.shard.slots[0], self._device)
        known = self._layers[layer]
        held = (*known.held, HeldBank(bank, backend, experts, nbytes, load))
        self._layers[layer] = replace(known, held=held)
        self.nbytes += nbytes

    def join_shared(self, layer: int, gate_up: Weight, down: Weight) -> bool:
        """Gives the layer's shared expert to its backend. Returns whether the backend takes it."""
        (held,) = self.of(layer)
        if not held.backend.prepare_shared(layer, gate_up, down):
            return False
        self.joined.add(layer)
        return True

    @torch.inference_mode()
    def drop(self, layer: int, bank: int) -> None:
        """Drops one of two banks of a layer, and moves the other one home. Waits for the device.
        Call it between two calls of ``FfnModel.forward``."""
        known = self._layers[layer]
        home, away = known.held
        past_rows = away.load.added_to(known.past_rows)
        if bank == home.number:
            past_rows = home.load.added_to(past_rows)
            self._home.take(layer, self._away)
            load = home.load.continued(away.experts)
            home = replace(away, backend=self._home, load=load)
        self._layers[layer] = _Layer((home,), past_rows)
        self.nbytes -= away.nbytes
        synchronize(self._device)
        self._away.release(layer)

    def expert_rows(self) -> dict[int, tuple[int, ...]]:
        """Returns, by layer, how many rows each routed expert has computed here. Any thread."""
        rows = {}
        with self.aside():
            for number, layer in list(self._layers.items()):
                rows[number] = layer.past_rows
                for held in layer.held:
                    rows[number] = held.load.added_to(rows[number])
        return rows

    def kept(self, weight: Weight, scheme: Scheme) -> Weight:
        """Returns a weight on the device, in a scheme that the backend takes."""
        return in_scheme(weight.to(self._device), scheme, self._home.fp8, self._dtype)
