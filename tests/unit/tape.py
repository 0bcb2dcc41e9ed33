"""A stand-in for a captured graph on the CPU: records a step's operations and repeats them.

As in a graph, an operation keeps its addresses and shapes: a repeated operation reads the tensors
that it read first and writes where it wrote first. Operations that wait for data, or whose shape
depends on it, raise. Unlike a capture, recording also runs the operations, but not necessarily
those of the transport.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from afd.wire.slot_view_torch import RoutedRows
from ffn_worker.moe.quantise import dequantise_weight, widened, with_expert
from ffn_worker.moe.reference import ReferenceBackend

_aten = torch.ops.aten
_WAIT = {_aten._local_scalar_dense, _aten.nonzero, _aten.masked_select, _aten.bincount}
_HERE = threading.local()


class Tape(TorchDispatchMode):
    """Records inside ``with tape``; each :meth:`replay` repeats what was recorded."""

    def __init__(self, *, transport: bool = True) -> None:
        """transport: whether recording also runs what is enqueued on links, regions and gates."""
        super().__init__()
        self.transport = transport
        self._steps: list[Callable[[], object]] = []

    def __enter__(self):
        _HERE.tape = self
        return super().__enter__()

    def __exit__(self, *error):
        _HERE.tape = None
        return super().__exit__(*error)

    @torch.inference_mode()
    def replay(self) -> None:
        for step in self._steps:
            step()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert func.overloadpacket not in _WAIT, f"{func} waits for the device"
        if func.overloadpacket in (_aten.index, _aten.index_put, _aten.index_put_):
            kinds = [index.dtype for index in args[1] if index is not None]
            assert torch.bool not in kinds, "a shape that depends on data"
        out = func(*args, **kwargs)
        self._keep(func, args, kwargs, out)
        return out

    def _keep(self, func, args, kwargs, out) -> None:
        outs = list(out) if isinstance(out, tuple | list) else [out]
        read = {_storage(arg) for arg in pytree.tree_leaves((args, kwargs))}
        fresh = [isinstance(one, torch.Tensor) and _storage(one) not in read for one in outs]
        if not any(fresh) and not func._schema.is_mutable:
            return  # views of memory that other operations write

        def again() -> None:
            results = func(*args, **kwargs)
            results = results if isinstance(results, tuple | list) else [results]
            for was, now, new in zip(outs, results, fresh, strict=True):
                if new:
                    was.copy_(now)

        self._steps.append(again)


def _storage(value):
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else None


@cache
def load_torch() -> None:
    """Imports what torch loads when a tape is first used; it takes seconds."""
    with Tape():
        torch.zeros(1)


class Taped:
    """A link, region or gate of afd_comm whose enqueued operations the tape of this thread
    records."""

    def __init__(self, inner) -> None:
        self._inner = inner

    def __getattr__(self, name):
        found = getattr(self._inner, name)
        if not name.startswith("enqueue"):
            return found

        def enqueue(*args, **kwargs):
            tape = getattr(_HERE, "tape", None)
            if tape is not None:
                tape._steps.append(lambda: found(*args, **kwargs))
            return found(*args, **kwargs) if tape is None or tape.transport else None

        return enqueue


class TapeRecorder:
    """Stands in for ffn_worker.graphs.CudaGraphs."""

    def capture(self, step):
        tape = Tape(transport=False)
        with tape:
            observer = step()

        def replay():
            observer.launched()
            tape.replay()
            return observer

        return replay


def take_bucket(views, rows, bucket, tp, into):
    """afd.wire.slot_torch.take_bucket with shapes that do not depend on ``rows``, as on a GPU."""
    assert tp == 1
    for i, view in enumerate(views):
        here = into.cut(i * bucket, (i + 1) * bucket)
        here.copy_(RoutedRows.of(view, bucket))
        here.ids.masked_fill_((torch.arange(bucket) >= rows[i]).unsqueeze(1), -1)


class DenseBackend(ReferenceBackend):
    """Computes every expert for every row, so shapes do not depend on the routing."""

    capturable = True

    def __init__(self, experts, num_experts=None):
        super().__init__(experts, num_experts)
        self._joined = set()

    def prepare_shared(self, layer, gate_up, down):
        w13, w2 = self._weights[layer]
        if down.shape[-1] > w2.shape[-1]:
            return False
        gate_up, down = widened(gate_up, down, w2.shape[-1])
        self._weights[layer] = (with_expert(w13, gate_up), with_expert(w2, down))
        self._joined.add(layer)
        return True

    def forward(self, layer, x, topk_ids, topk_weights):
        w13, w2 = self._weights[layer]
        x32 = x.float()
        total = torch.zeros_like(x32)
        for n in range(len(w2.codes)):
            gate, up = F.linear(x32, dequantise_weight(w13[n])).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, dequantise_weight(w2[n]))
            chosen = topk_ids == self.start + n
            weight = torch.where(chosen, topk_weights, 0.0).sum(dim=1, keepdim=True)
            if n == self.end - self.start:
                weight = torch.ones_like(weight)
            total += torch.where(weight != 0, weight * y, 0.0)
        return total.to(x.dtype)
