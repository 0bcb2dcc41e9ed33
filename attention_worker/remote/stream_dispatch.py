"""Routed dispatch in stream form: each FFN instance's rows, with constant shapes.

A graph has fixed shapes and cannot wait for the host. So each FFN instance gets a buffer for all
rows of the micro-batch. The rows that it has to compute come first. The number of rows is a word in
page-locked memory: a transport that reads it sends that many rows and no more. From there on the
expert slots are -1, so a buffer that travels whole costs bytes and no experts.

:mod:`attention_worker.remote.dispatch` is the host form, and the reference of the tests.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from attention_worker.remote.encoded_batch import EncodedBatch


@dataclass(frozen=True)
class Places:
    """Where the rows of a micro-batch are in the messages to the FFN instances.

    rows: int32 [instances, rows], the row at each place of an instance's message, ascending; 0 from
        the instance's count on.
    of_rows: int32 [instances, rows], the place of each row; -1: the instance does not get the row.
    counts: int32 [instances], rows of each instance.
    """

    rows: torch.Tensor
    of_rows: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True)
class SplitBatch:
    """One micro-batch, split by FFN instance.

    batches: by FFN instance, its rows; expert slots are -1 from its count on.
    places: where each row is. counts: addresses of the number of rows of each instance, uint32 in
        page-locked memory; written when the stream reaches this point.
    """

    batches: tuple[EncodedBatch, ...]
    places: Places
    counts: tuple[int, ...]


class StreamSplitter:
    """Splits micro-batches by FFN instance. Nothing here waits for the device."""

    def __init__(self, bounds: Sequence[int], depth: int, device: torch.device) -> None:
        """bounds: instance j holds the slots [bounds[j], bounds[j + 1]) of each bank. depth: most
        micro-batches of a step."""
        self._instances = len(bounds) - 1
        self._slots = bounds[-1]
        self._bounds = torch.tensor(bounds, dtype=torch.int32, device=device)
        sizes = [high - low for low, high in itertools.pairwise(bounds)]
        one_bank = torch.arange(self._instances).repeat_interleave(torch.tensor(sizes))
        # Index -1 (a masked pair) reads the last entry: an instance that does not exist.
        no_instance = torch.tensor([self._instances])
        self._instance_of = torch.cat([one_bank, one_bank, no_instance]).to(device)
        # One word per micro-batch and instance is enough: the next layer's message follows the
        # answer to this one.
        pinned = device.type != "cpu"
        self._words = torch.zeros((depth, self._instances), dtype=torch.int32, pin_memory=pinned)
        self._sent = torch.zeros(self._instances, dtype=torch.int32, device=device)
        self._sent_in_step = torch.zeros(self._instances, dtype=torch.int32, pin_memory=pinned)

    def begin_step(self) -> None:
        self._sent.zero_()

    def end_step(self) -> None:
        self._sent_in_step.copy_(self._sent, non_blocking=True)

    @property
    def sent_in_step(self) -> list[int]:
        """Rows to each FFN instance in the last step that has ended."""
        sent: list[int] = self._sent_in_step.tolist()
        return sent

    def split(self, micro_batch: int, batch: EncodedBatch) -> SplitBatch:
        """Returns the rows of each FFN instance. batch: with expert slots."""
        places = self.places(batch.ids)
        word = self._words[micro_batch]
        word.copy_(places.counts, non_blocking=True)
        gathered = gather(batch, places)
        return SplitBatch(
            tuple(_of_instance(gathered, j) for j in range(self._instances)),
            places,
            tuple(word[j].data_ptr() for j in range(self._instances)),
        )

    def places(self, slots: torch.Tensor) -> Places:
        """Returns the places of rows with these expert slots, int32 [rows, top_k]."""
        if slots.is_cuda:
            return self._places_on_gpu(slots)
        count = len(slots)
        shape = (count, self._instances + 1)
        gets = torch.zeros(shape, dtype=torch.bool, device=slots.device)
        gets = gets.scatter_(1, self._instance_of[slots], True)[:, :-1].t()
        place = gets.cumsum(dim=1) - 1
        # Rows that an instance does not get go to one more place, which is cut off.
        to = torch.where(gets, place, count)
        numbers = torch.arange(count, dtype=torch.int32, device=slots.device).expand_as(to)
        rows = torch.zeros((len(to), count + 1), dtype=torch.int32, device=slots.device)
        rows = rows.scatter_(1, to, numbers)[:, :count]
        counts = gets.sum(dim=1).int()
        self._sent += counts
        return Places(rows, torch.where(gets, place, -1).int(), counts)

    def _places_on_gpu(self, slots: torch.Tensor) -> Places:
        """:meth:`places` as one kernel launch."""
        from attention_worker.kernels.dispatch import places_kernel

        count, top_k = slots.shape
        rows, of_rows = (slots.new_empty((self._instances, count)) for _ in range(2))
        counts = slots.new_empty(self._instances)
        places_kernel[(self._instances,)](
            slots, self._bounds, rows, of_rows, counts, self._sent, count, self._slots,
            TOP_K=top_k, BLOCK=256,
        )  # fmt: skip
        return Places(rows, of_rows, counts)


def gather(batch: EncodedBatch, places: Places) -> EncodedBatch:
    """Returns the rows of all FFN instances: each tensor of the batch as [instances, rows, ...].

    Expert slots are -1 from an instance's count on. There the other tensors hold row 0 on a CPU,
    and anything on a GPU.
    """
    if batch.ids.is_cuda:
        return _gather_on_gpu(batch, places)
    index = places.rows.long()
    beyond = torch.arange(batch.rows).unsqueeze(0) >= places.counts.unsqueeze(1)
    return replace(
        batch,
        payload=batch.payload[index],
        scales=None if batch.scales is None else batch.scales[index],
        ids=batch.ids[index].masked_fill_(beyond.unsqueeze(2), -1),
        weights=batch.weights[index],
    )


def _gather_on_gpu(batch: EncodedBatch, places: Places) -> EncodedBatch:
    """:func:`gather` as one kernel launch, which copies only rows below the counts."""
    from attention_worker.kernels.dispatch import gather_rows_kernel, power_above

    instances, rows = places.rows.shape

    def room(part: torch.Tensor) -> torch.Tensor:
        return torch.empty((instances, *part.shape), dtype=part.dtype, device=part.device)

    scales = None if batch.scales is None else room(batch.scales)
    to = replace(
        batch,
        payload=room(batch.payload),
        scales=scales,
        ids=room(batch.ids),
        weights=room(batch.weights),
    )
    payload, to_payload = _bytes(batch.payload), _bytes(to.payload)
    given, taken, scale_bytes = payload, to_payload, 0
    if batch.scales is not None and to.scales is not None:
        given, taken = _bytes(batch.scales), _bytes(to.scales)
        scale_bytes = given.shape[1]
    top_k = batch.ids.shape[1]
    gather_rows_kernel[(rows, instances)](
        payload, given, batch.ids, batch.weights, places.rows, places.counts,
        to_payload, taken, to.ids, to.weights, payload.shape[1], scale_bytes,
        TOP_K=top_k, KINDS=power_above(top_k), BLOCK=power_above(payload.shape[1]),
        SCALE_BLOCK=power_above(scale_bytes) if scale_bytes else 0,
    )  # fmt: skip
    return to


def _of_instance(batch: EncodedBatch, instance: int) -> EncodedBatch:
    return replace(
        batch,
        payload=batch.payload[instance],
        scales=None if batch.scales is None else batch.scales[instance],
        ids=batch.ids[instance],
        weights=batch.weights[instance],
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
