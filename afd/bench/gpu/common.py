"""What the sub-commands of `afd bench gpu` share: arguments, the time budget, records."""

import argparse
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from afd.bench.gpu.checkpoint import make
from afd.bench.gpu.slices import Slice, find
from afd.bench.records import Record, machine, results_file, today, write_records
from afd.errors import ConfigError


@dataclass(frozen=True)
class Budget:
    """Seconds that a run may take; what has begun is finished."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    began: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "began", self.clock())

    @property
    def left(self) -> float:
        return self.seconds - (self.clock() - self.began)

    def allows(self, what: str, cost_s: float = 0.0) -> bool:
        """Whether there is time for one more; says so when there is not."""
        if self.left > cost_s:
            return True
        print(f"no time left for {what}; raise --seconds, or name fewer cells", flush=True)
        return False


@dataclass
class Report:
    """Records of a run, in the file as soon as they are known: a run may be cut off."""

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
        ratio = high / low if low else float(high == low)  # no ratio to 0: same or not
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


def count(text: str) -> int:
    """Type of an argument: a whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is no whole number above 0")
    return int(text)


def parser(what: str, doc: str | None, seconds: float) -> argparse.ArgumentParser:
    """With the arguments that every sub-command has."""
    made = argparse.ArgumentParser(
        prog=f"afd bench gpu {what}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a dry run, tiny and slow"
    )
    made.add_argument("--seconds", type=float, default=seconds, help="start no cell after it")
    made.add_argument("--seed", type=int, default=1, help="of the requests")
    made.add_argument(
        "--logs", type=Path, default=Path("logs/gpu"), metavar="DIR", help="of every server's log"
    )
    made.add_argument("--out", type=results_file, help="result records, JSON, written cell by cell")
    return made


def add_model(made: argparse.ArgumentParser, default: str, *, several: bool = False) -> None:
    """several: ``--model`` is a list."""
    made.add_argument(
        "--model",
        nargs="+" if several else None,
        default=[default] if several else default,
        help="a slice (afd/bench/gpu/slices.py)" + (", or several" if several else ""),
    )
    made.add_argument("--layers", type=count, help="of the slice, instead of its own number")
    made.add_argument(
        "--models", type=Path, default=Path("models"), help="folder of checkpoints, made if missing"
    )
    made.add_argument("--vllm-args", nargs="*", default=[], help="for every vLLM, ours and theirs")


def add_peers(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--peers", default="compiled", choices=("compiled", "graphs"),
        help="how vLLM runs: as it comes, or without torch.compile, which starts sooner",
    )  # fmt: skip


def model_of(
    args: argparse.Namespace, name: str, length: int, *, experts: bool = True
) -> tuple[Slice, Path]:
    """The slice of that name as it was asked for, and its checkpoint, made if missing.

    Args:
        length: tokens of the longest request.
        experts: see :func:`afd.bench.gpu.checkpoint.make`.

    Raises:
        ConfigError: the model has no positions for such requests, or see ``make``.
    """
    piece = find(name, args.layers)
    if length > piece.sizes.max_positions:
        raise ConfigError(
            f"requests of {length} tokens are over the {piece.sizes.max_positions} of {name}; lower"
            " the context, or the length of answers (steps)"
        )
    began = time.monotonic()
    path = make(name, piece, args.models, experts=experts)
    print(f"{path}: ready after {time.monotonic() - began:.1f} s", flush=True)
    return piece, path


def case_of(name: str, piece: Slice) -> str:
    """How the model is called in records: a slice is no whole model."""
    return f"{name} {piece.sizes.layers} layers"


def report(bench: str, args: argparse.Namespace, what: str, argv: Sequence[str]) -> Report:
    return Report(bench, args.out, " ".join(["afd bench gpu", what, *argv]))
