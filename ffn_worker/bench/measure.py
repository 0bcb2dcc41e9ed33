"""Measures cells of `afd bench moe`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from afd.errors import AfdError
from afd.wire.rows_torch import EncodedRows
from ffn_worker.bench.layers import BOUNDS, Batch, Problem, batch, cost_of, error_against
from ffn_worker.bench.shapes import Ceilings
from ffn_worker.bench.timing import as_graph, clock_of, repetitions_for
from ffn_worker.model import FfnModel
from ffn_worker.moe import BACKENDS
from ffn_worker.moe.crossover import least_pairs, mean_pairs

_CHECKED_ROWS = 64
_ROUND_S = {"cpu": 0.02, "cuda": 0.01}


@dataclass(frozen=True)
class Cell:
    """One measured cell, times in microseconds. ours: the backend that `auto` computes this cell
    with, and us its time. vllm_us: None where vLLM has no such kernel. apart_us: ours with the
    shared expert computed apart; None where there is none, or where it is computed apart anyway.
    error: of ours against the reference. triton_us, deep_gemm_us: both of ours where there are
    two; pairs: mean per expert, by which one is taken."""

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
    error: float
    triton_us: float | None = None
    deep_gemm_us: float | None = None
    pairs: float = 0.0


def taken(cell: Cell, least_pairs: float) -> Cell:
    """The cell with the backend that the device's ``least_pairs`` takes, where both were
    measured."""
    if cell.triton_us is None or cell.deep_gemm_us is None:
        return cell
    if cell.pairs >= least_pairs:
        return replace(cell, ours="deep_gemm", us=cell.deep_gemm_us)
    return replace(cell, ours="triton", us=cell.triton_us)


@dataclass(frozen=True)
class Contender:
    """A way to compute the layers; ``rows`` picks the format in which it is given them."""

    ffn: FfnModel
    rows: Callable[[Batch], EncodedRows]

    def call(self, given: Batch) -> Callable[[], None]:
        """All layers once, one after the other."""
        x, layers = self.rows(given), self.ffn.model.moe_layers

        def run() -> None:
            for layer in layers:
                self.ffn.forward(layer, x, given.ids, given.weights)

        return run


def ours_and_vllm(device: torch.device) -> tuple[str, str]:
    """Names of the backends that are compared on a device."""
    if device.type == "cpu":
        return "torch", "vllm_cpu"
    return ("aiter" if torch.version.hip else "triton"), "vllm_cuda"


def contenders(problem: Problem, ours: str, vllm: str) -> dict[str, Contender]:
    """``ours`` by its name, beside the Triton kernels "deep_gemm" where it can run, "vllm" where it
    can, and where it differs "apart"."""

    def encoded(given: Batch) -> EncodedRows:
        return given.encoded

    def runs(name: str) -> bool:
        backend, shape = BACKENDS[name], problem.shape
        takes = problem.scheme in backend.schemes and problem.device.type in backend.devices
        return takes and backend.unavailable(torch.bfloat16, shape.hidden, shape.width) is None

    both = ours == "triton" and runs("deep_gemm")
    found = {
        name: Contender(problem.ffn(name), encoded) for name in (ours, "deep_gemm")[: 1 + both]
    }
    if found[ours].ffn.joins_shared:
        apart = problem.ffn("hopper" if both else ours, join_shared=False)
        found["apart"] = Contender(apart, encoded)
    if runs(vllm):
        # Colocated vLLM has bfloat16 rows, which it quantises itself.
        found["vllm"] = Contender(problem.ffn(vllm), lambda given: given.plain)
    return found


def check(problem: Problem, ours: Contender) -> float:
    """Error against the reference on the same weights and rows.

    Raises:
        AfdError: it is beyond the bound of the scheme; times of wrong results are worth nothing.
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
            f"{error:.3g} of its largest value, where {BOUNDS[problem.scheme]:.3g} is the bound"
        )
    return error


def cells(
    name: str,
    problem: Problem,
    rows: tuple[int, ...],
    modes: tuple[str, ...],
    ceilings: Ceilings,
    backends: tuple[str, str],
) -> Iterator[Cell]:
    """All cells of one shape and scheme, one after the other.

    Raises:
        AfdError: a result is wrong.
    """
    who = contenders(problem, *backends)
    error = max(check(problem, who[name]) for name in (backends[0], "deep_gemm") if name in who)
    clock, device = clock_of(problem.device), problem.device.type
    layers = len(problem.model.moe_layers)
    for count in rows:
        given = batch(problem.shape, count, problem.device)
        cost = cost_of(problem.shape, given)
        for mode in modes:
            us: dict[str, float] = {}
            for key, contender in who.items():
                call = contender.call(given)
                once = clock(call, 1)
                if mode == "graph":
                    call = as_graph(call)
                seconds = clock(call, repetitions_for(once, _ROUND_S[device]))
                us[key] = seconds / layers * 1e6
            cell = Cell(
                shape=name,
                scheme=problem.shape.scheme,
                rows=count,
                mode=mode,
                ours=backends[0],
                us=us[backends[0]],
                vllm_us=us.get("vllm"),
                apart_us=us.get("apart"),
                roofline_us=cost.seconds(ceilings, problem.shape.scheme) * 1e6,
                bound=cost.bound(ceilings, problem.shape.scheme),
                error=error,
                triton_us=us["triton"] if "deep_gemm" in us else None,
                deep_gemm_us=us.get("deep_gemm"),
                pairs=mean_pairs(count, problem.shape.top_k, problem.shape.num_experts),
            )
            if "deep_gemm" in us:
                name_of_gpu = torch.cuda.get_device_name(problem.device)
                cell = taken(cell, least_pairs(name_of_gpu))
            yield cell
