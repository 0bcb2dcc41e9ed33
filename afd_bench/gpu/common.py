"""Shared parts of `afd bench gpu`: common options, time budget, records."""

import argparse
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from afd.devices import DEVICES
from afd.errors import ConfigError
from afd.records import (
    Record,
    command_line,
    gpu_names,
    machine,
    results_file,
    today,
    write_records,
)
from afd_bench.gpu.checkpoint import make
from afd_bench.gpu.slices import Slice, find

_ROUTING: Mapping[str, Mapping[str, str]] = {
    "model": {},
    # vllm/model_executor/layers/fused_moe/router/routing_simulator_router.py
    "even": {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"},
}


@dataclass(frozen=True)
class Budget:
    """The time budget of a run in seconds; a cell that has begun is finished."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    began: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "began", self.clock())

    @property
    def left(self) -> float:
        return self.seconds - (self.clock() - self.began)

    def allows(self, what: str, cost_s: float = 0.0) -> bool:
        """Returns whether ``cost_s`` seconds are left for ``what``; prints a line if not."""
        if self.left > cost_s:
            return True
        print(f"no time left for {what}; raise --seconds or select fewer cells", flush=True)
        return False


TOKENS = "tokens_per_request"
"""A metric: see :meth:`Report.add_tokens`."""


@dataclass
class Report:
    """Records of a run, written immediately, because a run may be interrupted."""

    bench: str
    out: Path | None
    command: str
    machine: str = field(default_factory=machine)
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def add(
        self,
        case: str,
        metric: str,
        value: float,
        unit: str,
        peer: str,
        peer_value: float,
        *,
        more_is_better: bool = True,
    ) -> None:
        high, low = (value, peer_value) if more_is_better else (peer_value, value)
        ratio = high / low if low else float(high == low)  # against 0: 1 if equal, else 0
        record = Record(
            bench=self.bench,
            case=case,
            metric=metric,
            value=value,
            unit=unit,
            peer=peer,
            peer_value=peer_value,
            ratio=ratio,
            machine=self.machine,
            command=self.command,
            date=today(),
        )
        if self.out is not None:
            with self._writing:
                write_records(self.out, [record])

    def add_tokens(self, case: str, tokens: float, prompt: int) -> None:
        """Records the mean tokens of a request, prompt and answer, while a case was measured."""
        self.add(case, TOKENS, tokens, "tokens", "prompt", prompt)


def usable_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """Returns how many GPUs of this host a bench may use, by CUDA_VISIBLE_DEVICES and its like."""
    names = (name for device in DEVICES.values() for name in device.visible_variables)
    allowed = [len(environ[name].split(",")) for name in names if environ.get(name)]
    return min([len(gpu_names()), *allowed])


def gpus_case(gpus: int) -> str:
    """Returns what a case says of so many of this host's GPUs; 0 for the CPU."""
    if not gpus:
        return "cpu"
    return gpu_names()[0] if gpus == 1 else f"{gpus} x {gpu_names()[0]}"


def count(text: str) -> int:
    """Parses an argument that is a whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def add_kv(options: argparse.ArgumentParser) -> None:
    """Adds the option --kv."""
    options.add_argument(
        "--kv", default="bfloat16", choices=("bfloat16", "fp8"), help="dtype of every KV cache"
    )


def check_kv(args: argparse.Namespace) -> None:
    """Raises ConfigError if the device has no such KV cache."""
    if args.device == "cpu" and args.kv != "bfloat16":
        raise ConfigError("--kv fp8 needs a GPU; leave it out for a dry run")


def cached_case(args: argparse.Namespace) -> str:
    """Returns what a case says of --kv, after the model's name."""
    return "" if args.kv == "bfloat16" else f" {args.kv} cache"


def parser(what: str, doc: str | None, seconds: float) -> argparse.ArgumentParser:
    """Returns a parser with the options of every sub-command. seconds: default of --seconds."""
    options = argparse.ArgumentParser(
        prog=f"afd bench gpu {what}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument(
        "--device", default="cuda", choices=tuple(DEVICES), help="cpu: a dry run on a tiny model"
    )
    options.add_argument(
        "--seconds", type=float, default=seconds, help="start no cell after this time"
    )
    options.add_argument("--seed", type=int, default=1, help="seed of the requests")
    options.add_argument(
        "--logs", type=Path, default=Path("logs/gpu"), metavar="DIR", help="folder of server logs"
    )
    options.add_argument(
        "--out", type=results_file, help="JSON file of the records, written cell by cell"
    )
    return options


def add_model(options: argparse.ArgumentParser, default: str, *, several: bool = False) -> None:
    """Adds the options that select a model. several: ``--model`` takes a list."""
    options.add_argument(
        "--model",
        nargs="+" if several else None,
        default=[default] if several else default,
        help="model slice of afd_bench/gpu/slices.py" + (", or several" if several else ""),
    )
    options.add_argument(
        "--layers", type=count, help="layers of the slice; default: its own number"
    )
    options.add_argument(
        "--models",
        type=Path,
        default=Path("models"),
        help="folder of checkpoints, which are created if missing",
    )
    options.add_argument(
        "--vllm-args",
        nargs="*",
        default=[],
        help="arguments for every vLLM, of attention instances and of peers",
    )


def add_routing(options: argparse.ArgumentParser) -> None:
    """Adds the option --routing."""
    options.add_argument(
        "--routing", default="model", choices=tuple(_ROUTING),
        help="who chooses a row's experts: the model's router, or even: chance, on every server (by"
        " vLLM's simulation). With random weights a router sends all rows to the same few",
    )  # fmt: skip


def routed_case(args: argparse.Namespace) -> str:
    """Returns what a case says of --routing, after the model's name."""
    return "" if args.routing == "model" else f" {args.routing} routing"


def routing_variables(args: argparse.Namespace) -> Mapping[str, str]:
    """Returns the environment variables of servers for --routing.

    Raises:
        ConfigError: the device has only the model's router.
    """
    if args.routing != "model" and args.device == "cpu":
        raise ConfigError(
            "--routing even needs a GPU: on CPUs attention instances do not ask vLLM's router"
        )
    return _ROUTING[args.routing]


def add_peers(options: argparse.ArgumentParser) -> None:
    """Adds the option --peers."""
    options.add_argument(
        "--peers", default="compiled", choices=("compiled", "graphs"),
        help="how colocated vLLM runs: with torch.compile (vLLM's default), or only with CUDA"
        " graphs, which starts sooner",
    )  # fmt: skip


def model_of(
    args: argparse.Namespace, name: str, length: int, *, experts: bool = True
) -> tuple[Slice, Path]:
    """Returns the slice ``name`` with --layers layers and its checkpoint, created if missing.

    Args:
        length: tokens of the longest request.
        experts: see :func:`afd_bench.gpu.checkpoint.make`.

    Raises:
        ConfigError: ``length`` exceeds the model's positions, or as in ``make``.
    """
    model_slice = find(name, args.layers)
    if length > model_slice.sizes.max_positions:
        raise ConfigError(
            f"requests of {length} tokens exceed the {model_slice.sizes.max_positions} positions of"
            f" {name}; lower the context, or the length of answers (steps)"
        )
    began = time.monotonic()
    path = make(name, model_slice, args.models, experts=experts)
    print(f"{path}: ready after {time.monotonic() - began:.1f} s", flush=True)
    return model_slice, path


def case_of(name: str, model_slice: Slice) -> str:
    """Returns the model's name in records; it includes the layers, because a slice has fewer."""
    return f"{name} {model_slice.sizes.layers} layers"


def report(bench: str, args: argparse.Namespace, what: str, argv: Sequence[str]) -> Report:
    """Returns the report of a run of the sub-command ``what``."""
    return Report(bench, args.out, command_line(f"gpu {what}", argv))
