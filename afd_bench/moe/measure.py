"""Measures the cells of `afd bench moe`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from afd.errors import AfdError
from afd.wire.layout import SCALE_BLOCK
from afd.wire.rows_torch import EncodedRows
from afd_bench.moe.layers import BOUNDS, Batch, Problem, batch, cost_of, error_against
from afd_bench.moe.limits import Limits
from afd_bench.moe.shapes import Ceilings
from afd_bench.moe.timing import Call, as_graph, in_turns, on_streams
from ffn_worker.experts.model import FfnModel
from ffn_worker.moe.batch_selection import Comparison, SelectionByMode, selection_of
from ffn_worker.moe.selection import problem as cannot_run
from ffn_worker.moe.tiles import LayerShape

_CHECKED_ROWS = 64
STREAMS = 3
"""Concurrent micro-batches in mode "streams", in one graph. Times are per micro-batch."""
_ROUND_S = {"cpu": 0.02, "cuda": 0.01}


@dataclass(frozen=True)
class Cell:
    """One measured cell; times in microseconds.

    ours: the backend that computes this cell (on Hopper, the one that `hopper` selects). us: its
    time. vllm_us: None if vLLM has no such kernel. apart_us: time of ours with the shared expert
    computed separately; None if there is none or it is computed separately anyway. ceilings: what
    the machine reached in the same rounds. error: error of ours against the reference. layer: the
    shape for backend selection. times: of all backends that can be selected.
    """

    shape: str
    scheme: str
    rows: int
    mode: str
    ours: str
    us: float
    vllm_us: float | None
    apart_us: float | None
    roofline_us: float
    bound: str
    ceilings: Ceilings
    error: float
    layer: LayerShape
    times: Mapping[str, float] = field(default_factory=dict)


def with_selection(cell: Cell, selection: SelectionByMode) -> Cell:
    """The cell with the backend that ``selection`` selects, if several were measured."""
    if len(cell.times) < 2:
        return cell
    name = selection.of(cell.mode).of(cell.layer, cell.rows)
    name = name if name in cell.times else "triton"  # as `hopper` does with a shared expert
    return replace(cell, ours=name, us=cell.times[name])


def comparisons(cells: Sequence[Cell]) -> list[Comparison]:
    """The input of backend selection: times of all backends, for graphs and for eager calls."""
    return [
        Comparison.on(
            cell.layer,
            cell.rows,
            {name: round(us, 2) for name, us in cell.times.items()},
            cell.mode,
        )
        for cell in cells
        if cell.mode != "streams" and len(cell.times) > 1
    ]


@dataclass(frozen=True)
class Contender:
    """A model to time. rows: selects the format of its input rows."""

    ffn: FfnModel
    rows: Callable[[Batch], EncodedRows]

    def call(self, given: Batch) -> Callable[[], None]:
        """A call that computes every layer once, in order."""
        x, layers = self.rows(given), self.ffn.model.moe_layers

        def run() -> None:
            for layer in layers:
                self.ffn.forward(layer, x, given.ids, given.weights)

        return run


def ours_and_vllm(device: torch.device) -> tuple[str, str]:
    """Names of the two backends that are compared on a device: ours and vLLM's."""
    if device.type == "cpu":
        return "torch", "vllm_cpu"
    return ("aiter" if torch.version.hip else "triton"), "vllm_cuda"


def contenders(problem: Problem, ours: str, vllm: str) -> dict[str, Contender]:
    """What is timed for a problem.

    ``ours``, by its name. On Hopper also "deep_gemm", "grouped" and "vllm_cuda", which count as
    ours too. "vllm", if it can run. "apart": ours with the shared expert computed separately, if
    that differs.
    """

    def encoded(given: Batch) -> EncodedRows:
        return given.encoded

    def plain(given: Batch) -> EncodedRows:
        return given.plain

    def runs(name: str) -> bool:
        shape, device = problem.shape, problem.device
        sizes = shape.hidden, shape.width
        return cannot_run(name, torch.bfloat16, *sizes, device, problem.scheme) is None

    hopper = ours == "triton" and runs("deep_gemm")
    names = (ours, *(name for name in ("deep_gemm", "grouped") if hopper and runs(name)))
    found = {name: Contender(problem.ffn(name), encoded) for name in names}
    joined = found[ours].ffn.banks.joined
    if joined:
        apart = problem.ffn("hopper" if hopper else ours, join_shared=False)
        found["apart"] = Contender(apart, encoded)
    if runs(vllm):
        # Colocated vLLM has bfloat16 rows, which it quantises itself.
        found["vllm"] = Contender(problem.ffn(vllm), plain)
        if hopper and not joined:
            found[vllm] = Contender(found["vllm"].ffn, encoded)
    return found


def check(problem: Problem, ours: Contender) -> float:
    """Returns the error against the reference on the same weights and rows.

    Raises:
        AfdError: the error exceeds the bound of the scheme.
    """
    given = batch(problem.shape, _CHECKED_ROWS, problem.device)
    layer = problem.model.moe_layers[0]
    reference = problem.ffn("reference")
    want = reference.forward(layer, given.encoded, given.ids, given.weights).float()
    got = ours.ffn.forward(layer, ours.rows(given), given.ids, given.weights)
    error = error_against(want, got)
    if not error <= BOUNDS[problem.scheme]:
        raise AfdError(
            f"{ours.ffn.backend_name} is wrong on {problem.shape.name}: a row is off by "
            f"{error:.3g} of its largest value; the bound is {BOUNDS[problem.scheme]:.3g}"
        )
    return error


def cells(
    name: str,
    problem: Problem,
    rows: tuple[int, ...],
    modes: tuple[str, ...],
    backends: tuple[str, str],
) -> Iterator[Cell]:
    """Yields all cells of one shape and scheme.

    Raises:
        AfdError: a result is wrong.
    """
    who = contenders(problem, *backends)
    named = [key for key in who if key not in ("vllm", "apart")]
    error = max(check(problem, who[key]) for key in named)
    selection = None
    if len(named) > 1:
        selection = selection_of(torch.cuda.get_device_name(problem.device))
    limits = Limits(problem.device, problem.shape.scheme)
    # Tuning files name a shape with the width of a shared expert that is computed with the others.
    width = -(-problem.shape.shared // SCALE_BLOCK) * SCALE_BLOCK
    shape = replace(problem.shape, shared=width if who[backends[0]].ffn.banks.joined else 0)
    for count in rows:
        given = batch(problem.shape, count, problem.device)
        cost = cost_of(problem.shape, given)
        for mode in modes:
            seconds = _timed(problem, who, given, mode, limits)
            us = {key: seconds[key] * 1e6 for key in who}
            ceilings = limits.ceilings(seconds)
            cell = Cell(
                shape=name,
                scheme=problem.shape.scheme,
                rows=count,
                mode=mode,
                ours=backends[0],
                us=us[backends[0]],
                vllm_us=us.get("vllm"),
                apart_us=us.get("apart"),
                roofline_us=cost.seconds(ceilings) * 1e6,
                bound=cost.bound(ceilings),
                ceilings=ceilings,
                error=error,
                layer=shape,
                times={key: us[key] for key in named},
            )
            yield cell if selection is None else with_selection(cell, selection)


def _timed(
    problem: Problem, who: Mapping[str, Contender], given: Batch, mode: str, limits: Limits
) -> dict[str, float]:
    """Seconds of one layer per contender, and of the calls of ``limits``; all interleaved."""
    calls: dict[str, Call] = {}
    same: list[str] = []
    peer = who["vllm"].ffn if "vllm" in who else None
    for key, contender in who.items():
        if key != "vllm" and contender.ffn is peer and contender.rows(given) is given.plain:
            same.append(key)  # the same call as vLLM's
            continue
        call: Call = contender.call(given)
        if mode == "streams":
            call = on_streams(call, STREAMS)
        calls[key] = call if mode == "eager" else as_graph(call)
    found = in_turns(problem.device, calls | limits.calls, _ROUND_S[problem.device.type])
    layers = len(problem.model.moe_layers) * (STREAMS if mode == "streams" else 1)
    found |= {key: found[key] / layers for key in calls}
    return found | {key: found["vllm"] for key in same}
