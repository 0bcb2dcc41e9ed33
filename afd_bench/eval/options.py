"""The command-line options of `afd eval`. Pure."""

import argparse
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from afd.config.deployment import Deployment
from afd.config.sections import MAX_DEPTH
from afd.errors import ConfigError
from afd_bench.eval.cases import REDUCES, WIRES
from afd_bench.eval.gates import TOKENS
from afd_bench.eval.scoring import Effort

FULL = Effort(tokens=TOKENS, cloze=40, whole=64)
QUICK = Effort(tokens=2048, cloze=8, whole=0, stride=192, top=16)


@dataclass(frozen=True)
class Options:
    """What to evaluate.

    dtypes: may include "auto". texts: () for the model's own texts. out: folder of eval.json and
    eval.md, or None. page: a Markdown file whose table to update, or None. at_once: servers that
    run at a time. command: command line that reproduces the run.
    """

    wires: tuple[str, ...]
    depths: tuple[int, ...]
    ffns: tuple[int, ...]
    tps: tuple[int, ...]
    reduces: tuple[str, ...]
    dtypes: tuple[str, ...]
    texts: tuple[Path, ...]
    effort: Effort
    out: Path | None
    page: Path | None
    at_once: int
    command: str


def options_of(args: argparse.Namespace, deployment: Deployment) -> Options:
    """Returns the options with defaults from the deployment. Raises ConfigError."""
    deepest = deployment.pipeline.max_depth
    depths = _numbers("--depth", args.depth) or tuple(range(1, deepest + 1))
    if not all(1 <= depth <= MAX_DEPTH for depth in depths):
        raise ConfigError(f"--depth {args.depth} is out of range; use 1 to {MAX_DEPTH}")
    ffns = _numbers("--ffn", args.ffn) or (deployment.ffn.instances,)
    if min(ffns) < 1:
        raise ConfigError(f"--ffn {args.ffn} is not a number of FFN instances; use 1 or more")
    tps = _numbers("--tp", args.tp) or (deployment.ffn.tp,)
    if min(tps) < 1:
        raise ConfigError(f"--tp {args.tp} is not a number of ranks; use 1 or more")
    if args.page is not None and args.out is None:
        raise ConfigError("--page needs the results in --out DIR; add --out")
    at_once = 1 if args.at_once is None else args.at_once
    if at_once < 1:
        raise ConfigError(f"--at-once {at_once} is not a number of servers; use 1 or more")
    return Options(
        wires=_names(args.wire) or WIRES,
        depths=depths[-1:] if args.quick and not args.depth else depths,
        ffns=ffns,
        tps=tps,
        reduces=_names(args.reduce) or REDUCES,
        dtypes=_names(args.dtype) or (deployment.attention.dtype,),
        texts=tuple(args.text),
        effort=QUICK if args.quick else FULL,
        out=args.out,
        page=args.page,
        at_once=at_once,
        command=_command(args),
    )


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",")) if text else ()


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(name) for name in _names(text)}))
    except ValueError:
        raise ConfigError(
            f"{option} {text} is not a list of whole numbers; write it like {option} 1,2"
        ) from None


def _command(args: argparse.Namespace) -> str:
    """Returns the command line that repeats the run, without the options for output files."""
    words = ["afd", "eval", str(args.config)]
    for name in ("wire", "reduce", "depth", "ffn", "tp", "dtype"):
        value: str | None = vars(args)[name]
        words += [f"--{name}", value] if value else []
    words += _repeated("--set", args.overrides) + _repeated("--text", map(str, args.text))
    words += ["--quick"] if args.quick else []
    return shlex.join(words)


def _repeated(option: str, values: Iterable[str]) -> list[str]:
    return [word for value in values for word in (option, value)]
