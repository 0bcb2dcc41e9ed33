"""Which experts the rows of a decode step choose: counts per layer and expert, for the planner.

A step reads the weights of the experts that its rows choose. The planner assumes that chance
chooses them; random weights on random caches choose far fewer. This holds the load of a cell of
`afd bench gpu decode` or `efficiency` on 1A1F, on one GPU or two, and reads what the FFN instance
counts. The same checkpoint and prompts choose the same experts on any number of GPUs.
`afd bench planner` takes the counts for the cells that ran without `--routing even`.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from afd.errors import AfdError
from afd.records import command_line, current_commit, machine, today
from afd_bench.gpu.common import (
    Budget,
    add_cells,
    add_kv,
    add_model,
    check_kv,
    count,
    model_of,
    parser,
    usable_gpus,
)
from afd_bench.gpu.kv import kv_gib
from afd_bench.gpu.load import Load, held
from afd_bench.gpu.serving import Setup, running
from afd_bench.gpu.targets import Afd, Sizes, fitted, vllm_args
from afd_bench.servers import Server
from afd_planner.facts.ffn import MoeFfn
from afd_planner.facts.model_hf import load_model

_CELL_S = 15.0  # estimated time of a cell, with its ramp-up
_PROPAGATION_S = 0.3  # until the instances have received a new depth
_METRIC = "afd_expert_rows_total"


@dataclass(frozen=True)
class Choices:
    """What the rows of one cell chose.

    layers, kv, requests, context: as in the cases of `afd bench gpu decode`. rows: the rows that
    each expert computed in the window, by layer with experts.
    """

    model: str
    layers: int
    kv: str
    requests: int
    context: int
    rows: tuple[tuple[int, ...], ...]

    @property
    def key(self) -> tuple[str, int, str, int, int]:
        """What decides the choices."""
        return self.model, self.layers, self.kv, self.requests, self.context

    @property
    def loads(self) -> list[tuple[float, ...]]:
        """Share of all choices per expert, by layer."""
        return [tuple(count / sum(layer) for count in layer) for layer in self.rows]

    def used(self, ffn: MoeFfn) -> float:
        """Mean over the layers of the distinct experts of a step, by the planner's formula."""
        each = [ffn.expected_experts(self.requests, load) for load in self.loads]
        return sum(each) / len(each)


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    budget = Budget(args.seconds)
    length = max(context for _, context in args.cells) + args.answer
    model_slice, path = model_of(args, args.model, length)
    model = load_model(str(path))
    target = fitted(Afd(1, 1, lookahead=True), 0 if args.device == "cpu" else usable_gpus())
    cache = max(
        kv_gib([target], requests, context + args.answer, model, args.kv)
        for requests, context in args.cells
    )
    batches = tuple(sorted({requests for requests, _ in args.cells}))
    sizes = Sizes(max(batches), length, cache, batches)
    flags = [*vllm_args(args.device, True, args.kv), *args.vllm_args]
    ffn = next(group.ffn for group in model.groups if isinstance(group.ffn, MoeFfn))
    found = []
    with running([target], Setup(path, sizes, args.device, flags, args.logs)) as servers:
        server = servers[target]
        server.set_depth(1)
        time.sleep(_PROPAGATION_S)
        for requests, context in args.cells:
            what = f"{requests} requests of {context} tokens"
            if not budget.allows(what, _CELL_S):
                break
            load = Load(requests, context, length, model_slice.sizes.vocab, args.seed)
            try:
                rows = asyncio.run(chosen(server, load, model.moe_layers, ffn.experts, args.window))
            except AfdError as err:
                print(f"{what}: FAILED: {err}", flush=True)
                continue
            layers = model_slice.sizes.layers
            found.append(Choices(args.model, layers, args.kv, requests, context, rows))
            print(
                f"{args.model}, {layers} layers, {what}: a step uses {found[-1].used(ffn):.1f} of"
                f" {ffn.experts} experts, {ffn.expected_experts(requests):.1f} if even",
                flush=True,
            )
    if args.out is not None:
        write(args.out, found, command_line("gpu routing", argv))
    return 0 if len(found) == len(args.cells) else 1


async def chosen(
    server: Server, load: Load, layers: Sequence[int], experts: int, window_s: float
) -> tuple[tuple[int, ...], ...]:
    """Holds the load for ``window_s`` seconds and returns the rows of each expert by layer.

    Raises:
        AfdError: the requests did not run together, or no row was counted.
    """
    async with held(server, load):
        first = await asyncio.to_thread(_counted, server)
        await asyncio.sleep(window_s)
        last = await asyncio.to_thread(_counted, server)
    rows = []
    for layer in layers:
        places = [(layer, expert) for expert in range(experts)]
        rows.append(tuple(last.get(place, 0) - first.get(place, 0) for place in places))
        if not sum(rows[-1]):
            raise AfdError(f"no row was counted in layer {layer}; raise --window")
    return tuple(rows)


def _counted(server: Server) -> Mapping[tuple[int, int], int]:
    """Returns the rows that were computed by (layer, expert)."""
    return {
        (int(sample.labels["layer"]), int(sample.labels["expert"])): int(sample.value)
        for family in text_string_to_metric_families(server.metrics())
        for sample in family.samples
        if sample.name == _METRIC
    }


def write(file: Path, found: Sequence[Choices], command: str) -> None:
    """Adds cells to a file; a cell that is there is replaced."""
    origin = {
        "machine": machine(), "command": command, "commit": current_commit(), "date": today()
    }  # fmt: skip
    new = {cell.key: {**asdict(cell), **origin} for cell in found}
    old = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    kept = {_cell(entry).key: entry for entry in old}
    text = ",\n".join(json.dumps(entry) for entry in (kept | new).values())
    file.write_text(f"[\n{text}\n]\n", encoding="utf-8")


def read(file: Path) -> list[Choices]:
    """Returns the cells of a file."""
    return [_cell(entry) for entry in json.loads(file.read_text(encoding="utf-8"))]


def _cell(entry: Mapping[str, object]) -> Choices:
    named = {name: entry[name] for name in Choices.__dataclass_fields__ if name != "rows"}
    rows = tuple(tuple(layer) for layer in entry["rows"])  # type: ignore[attr-defined]
    return Choices(**named, rows=rows)  # type: ignore[arg-type]


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    options = parser("routing", __doc__, 240.0)
    add_model(options, "qwen3-30b-coarse-mqa")
    add_cells(options)
    add_kv(options)
    options.add_argument("--answer", type=count, default=1_200, help="most tokens of an answer")
    options.add_argument("--window", type=float, default=1.5, help="seconds per cell")
    args = options.parse_args(argv)
    check_kv(args)
    return args
