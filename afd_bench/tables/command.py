"""`afd bench kernels`: times of the kernels of a decode step on one GPU, for the planner.

    afd bench kernels --budget-s 400 --out afd_planner/data/kernels/h200.json

Measures attention (MLA, GQA and MFA; FP8 and bfloat16 cache; 1K to 64K tokens; 16 to 512 requests
of equal and of mixed lengths),
the products around it, the experts of the shards that 8 to 64 GPUs give for six models, and the end
of a step. The most valuable cells come first. The file is written after every cell, and a second
run with the same --out goes on where the first one stopped. It names the GPU: times of one kind of
GPU say nothing about another. A cell that fails is listed in the file, and the run goes on.

An afternoon without a budget measures all cells on any GPU that vLLM supports.

    afd bench kernels --records docs/results --gpu "NVIDIA H200" --out FILE

adds what `afd bench moe` and `afd bench gpu attention` have measured on such a GPU to the file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from afd.errors import ConfigError
from afd.records import (
    command_line,
    current_commit,
    machine,
    read_records,
    results_file,
    today,
)
from afd_bench.tables.cells import STAGE, AttentionCell, Cell, DenseCell, ExpertCell, cells, shrunk
from afd_bench.tables.from_records import entries_of
from afd_planner.cost.kernels import FORMAT

RECORDED = ("moe.json", "attention.json")
"""Record files that hold kernel times."""


@dataclass
class Table:
    """The file: what was measured, written after every cell."""

    path: Path
    gpu: str
    run: Mapping[str, str]
    """What makes this run's entries: command, commit, date, machine, versions."""
    runs: list[Mapping[str, str]] = field(default_factory=list)
    entries: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    earlier: frozenset[str] = frozenset()
    """Cells that failed in an earlier run; tried last."""

    def load(self) -> None:
        """Reads what an earlier run measured.

        Raises:
            ConfigError: the file is of another GPU or another format.
        """
        if not self.path.exists():
            return
        data = json.loads(self.path.read_text(encoding="utf-8"))
        if data.get("format") != FORMAT or data.get("gpu") != self.gpu:
            raise ConfigError(
                f"{self.path} holds times of {data.get('gpu')}, this is {self.gpu}; give another"
                " --out"
            )
        self.entries = {name: data[name] for name in STAGE.values() if name in data}
        self.runs = data["runs"]
        self.earlier = frozenset(text.partition(": ")[0] for text in data["failed"])

    def holds(self, cell: Cell) -> bool:
        wanted = asdict(cell)
        return any(
            wanted == {key: entry[key] for key in wanted}
            for entry in self.entries.get(STAGE[type(cell)], ())
        )

    def add(self, cell: Cell, **found: float) -> None:
        self.entries.setdefault(STAGE[type(cell)], []).append({**asdict(cell), **found})
        self.write()

    def write(self) -> None:
        about = {
            "format": FORMAT,
            "gpu": self.gpu,
            "runs": [run for run in self.runs if run != self.run] + [self.run],
            "failed": self.failed,
        }
        # One entry per line: small, and readable in a diff.
        parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in about.items()]
        for name, entries in self.entries.items():
            lines = ",\n  ".join(json.dumps(entry) for entry in entries)
            parts.append(f"{json.dumps(name)}: [\n  {lines}\n ]")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text("{\n " + ",\n ".join(parts) + "\n}\n", encoding="utf-8")
        partial.replace(self.path)


def _this_run(command: str) -> dict[str, str]:
    return {
        "command": command,
        "commit": current_commit(),
        "date": today(),
        "machine": machine(),
        "vllm": _version("vllm"),
        "torch": _version("torch"),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    if args.records is not None:
        return _from_records(args.records, args.gpu, args.out, command_line("kernels", argv))
    import torch

    if args.device != "cpu" and not torch.cuda.is_available():
        raise ConfigError("torch sees no GPU; use --device cpu for a dry run")
    gpu = "cpu" if args.device == "cpu" else torch.cuda.get_device_name()
    table = Table(args.out, gpu, _this_run(command_line("kernels", argv)))
    table.load()
    wanted = [cell for cell in cells() if STAGE[type(cell)] in args.stages]
    if args.device == "cpu":
        wanted = list(dict.fromkeys(shrunk(cell) for cell in wanted))
    left = sorted(
        (cell for cell in wanted if not table.holds(cell)),
        key=lambda cell: str(cell) in table.earlier,
    )
    print(f"{gpu}: {len(left)} of {len(wanted)} cells to measure", flush=True)
    began = time.monotonic()
    done = measure(table, left, args.device, began + args.budget_s)
    print(
        f"{done} cells in {time.monotonic() - began:.0f} s, {len(table.failed)} failed,"
        f" {len(left) - done - len(table.failed)} left; {args.out} written"
    )
    for failure in table.failed:
        print(f"failed: {failure}")
    return 0 if done or not left else 1


def _from_records(folder: Path, gpu: str, out: Path, command: str) -> int:
    """Adds recorded kernel times to the table of a GPU; measured cells of the table stay."""
    from afd_bench.moe.layers import pairs_and_used

    table = Table(out, gpu, {"command": command})
    table.load()
    records = [record for name in RECORDED for record in read_records(folder / name)]
    added = 0
    for kind, entries in entries_of(records, gpu, cache(pairs_and_used)).items():
        kept = [entry for entry in table.entries.get(kind, ()) if "date" not in entry]
        table.entries[kind] = kept + entries
        added += len(entries)
    table.write()
    print(f"{added} recorded cells of {gpu}; {out} written")
    return 0 if added else 1


def measure(table: Table, left: Sequence[Cell], device: str, end: float) -> int:
    """Measures cells until ``end`` (time.monotonic); returns how many succeeded."""
    done = 0
    with Meter(device) as meter:
        for cell in left:
            if time.monotonic() > end:
                break
            try:
                found = meter.measured(cell)
            # A kernel that the GPU or the installed vLLM lacks, or no memory: of this cell only.
            except Exception as error:
                table.failed.append(f"{cell}: {type(error).__name__}: {str(error)[:300]}")
                print(f"failed: {table.failed[-1]}", flush=True)
                if "CUDA error" in str(error):  # nothing works in this process any more
                    break
            else:
                table.add(cell, **found)
                done += 1
                us = found["us"]
                print(f"{end - time.monotonic():.0f} s left: {cell}: {us:.1f} us", flush=True)
    table.write()
    return done


class Meter:
    """Measures cells on one device. Cells of one shard of experts that follow each other share its
    weights. Modules are imported when a cell needs them: each imports kernels of its own."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._held: ExpertCell | None = None
        self._shard: Any = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    def measured(self, cell: Cell) -> dict[str, float]:
        """Returns what was found: us, and for experts pairs and used."""
        if isinstance(cell, ExpertCell):
            return self._experts(cell)
        self._release()
        if isinstance(cell, AttentionCell):
            from afd_bench.tables.attention_torch import attention_us

            return {"us": round(attention_us(cell, self._device), 2)}
        from afd_bench.tables.dense_torch import dense_us, rest_us

        time_of = dense_us if isinstance(cell, DenseCell) else rest_us
        return {"us": round(time_of(cell, self._device), 2)}  # type: ignore[arg-type]  # as chosen

    def _experts(self, cell: ExpertCell) -> dict[str, float]:
        import torch

        from afd_bench.tables.experts_torch import experts_us, shard

        if self._held is None or replace(self._held, rows=cell.rows) != cell:
            self._release()
            self._shard = self._stack.enter_context(shard(cell, torch.device(self._device)))
            self._held = cell
        us, pairs, used = experts_us(cell, *self._shard)
        return {"us": round(us, 2), "pairs": pairs, "used": used}

    def _release(self) -> None:
        self._held = self._shard = None
        self._stack.close()


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="afd bench kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a dry run")
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), help="start no cell after this many seconds"
    )
    parser.add_argument(
        "--records", type=Path, metavar="DIR", help="measure nothing; take the records of a folder"
    )
    parser.add_argument("--gpu", default="NVIDIA H200", help="with --records: of which GPU")
    parser.add_argument(
        "--stages", nargs="+", choices=tuple(STAGE.values()), default=tuple(STAGE.values())
    )
    parser.add_argument(
        "--out", type=results_file, required=True, metavar="FILE", help="file of kernel times"
    )
    return parser.parse_args(argv)
