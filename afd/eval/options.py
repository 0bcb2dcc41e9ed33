"""What a user asked `afd eval` for. Pure."""

import argparse
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from afd.config import MAX_DEPTH, Deployment
from afd.errors import ConfigError
from afd.eval.cases import REDUCES, WIRES
from afd.eval.gates import TOKENS
from afd.eval.scoring import Effort

FULL = Effort(tokens=TOKENS, cloze=40, whole=64)
QUICK = Effort(tokens=2048, cloze=8, whole=0, stride=192, top=16)


@dataclass(frozen=True)
class Options:
    """dtypes may hold "auto". texts: empty for the model's own. out: folder of eval.json and
    eval.md, or None. page: a Markdown file whose table is renewed, or None. at_once: servers that
    run at a time. command: what reproduces it."""

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
    """Fill in what the command line left out. Raises ConfigError."""
    deepest = deployment.pipeline.max_depth
    depths = _numbers("--depth", args.depth) or tuple(range(1, deepest + 1))
    if not all(1 <= depth <= MAX_DEPTH for depth in depths):
        raise ConfigError(f"--depth {args.depth} is not between 1 and {MAX_DEPTH}")
    ffns = _numbers("--ffn", args.ffn) or (deployment.ffn.instances,)
    if min(ffns) < 1:
        raise ConfigError(f"--ffn {args.ffn} has a deployment without FFN instances; use 1 or more")
    tps = _numbers("--tp", args.tp) or (deployment.ffn.tp,)
    if min(tps) < 1:
        raise ConfigError(f"--tp {args.tp} has an FFN instance without ranks; use 1 or more")
    if args.page is not None and args.out is None:
        raise ConfigError("--page takes its table from the results in --out DIR; give that too")
    at_once = 1 if args.at_once is None else args.at_once
    if at_once < 1:
        raise ConfigError(f"--at-once {at_once} runs no server; use 1 or more")
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
    """The command line that does the same again, but for where results go."""
    words = ["afd", "eval", str(args.config)]
    for name in ("wire", "reduce", "depth", "ffn", "tp", "dtype"):
        value: str | None = vars(args)[name]
        words += [f"--{name}", value] if value else []
    words += _repeated("--set", args.overrides) + _repeated("--text", map(str, args.text))
    words += ["--quick"] if args.quick else []
    return shlex.join(words)


def _repeated(option: str, values: Iterable[str]) -> list[str]:
    return [word for value in values for word in (option, value)]
