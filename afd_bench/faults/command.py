"""`afd bench faults`: faults under load, at random moments. Counts failed and wrong requests.

A deployment of a tiny model (2A2F, or ``--shape``) serves streams in flight all the time. Each
fault is injected ``--repeat`` times. The seed of the moments is printed, and ``--seed`` repeats
it. Answers are compared token by token with those of an undisturbed round.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import shlex
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from afd.errors import AfdError
from afd.records import command_line, machine, results_file, today, write_records
from afd_bench.faults.faults import FAULTS
from afd_bench.faults.measure import WHOLE_S, Cell, config_of, inject, records
from afd_bench.faults.subject import Subject
from afd_bench.faults.traffic import Traffic, answered, jobs
from afd_bench.servers import disaggregated
from afd_demo.make_model import make_model
from afd_demo.sizes import resolve

FAMILY = "qwen3_moe"
VOCAB = 2000


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    seed = args.seed if args.seed is not None else int(time.time())
    print(f"--seed {seed}", flush=True)
    chosen = [FAULTS[name] for name in args.faults]
    attention, ffn = args.shape
    shape = f"{attention}A{ffn}F"
    draw = random.Random(seed)
    cells: list[Cell] = []
    with contextlib.ExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="afd-faults-")))
        make_model(FAMILY, model, resolve(FAMILY, "tiny"))
        with disaggregated(config_of(model, attention, ffn), log=args.log) as server:
            subject = Subject(server)
            subject.await_whole(120)
            asked = jobs(seed, 24, vocab=VOCAB, new_tokens=(50, 150))
            asked = answered(server.url, server.model, asked)
            with Traffic(
                server.url, server.model, asked, clients=args.clients, seed=seed, comes_back=True
            ) as traffic:
                subject.await_waiting_attention(WHOLE_S)
                for fault in chosen:
                    for _ in range(args.repeat):
                        try:
                            cells.append(inject(subject, traffic, fault, draw))
                        except AfdError as error:
                            print(f"{fault.name}: {error}", flush=True)
                            return 1
                        print(cells[-1].line, flush=True)
                    if args.out is not None:  # now: a later fault may take long, or end all
                        command = command_line("faults", [shlex.quote(word) for word in argv])
                        found = records(cells, [fault], shape, machine(), command, today())
                        write_records(args.out, list(found))
    return int(any(c.counts.failed + c.counts.wrong > 0 for c in cells))


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="afd bench faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS), metavar="NAME",
        help=f"which ones (default: all): {', '.join(FAULTS)}",
    )  # fmt: skip
    parser.add_argument(
        "--shape", type=_shape, default=(2, 2), metavar="xAyF", help="instances (default 2A2F)"
    )
    parser.add_argument("--repeat", type=int, default=3, help="of each fault (default 3)")
    parser.add_argument("--clients", type=int, default=24, help="requests in flight (default 24)")
    parser.add_argument("--seed", type=int, help="of the moments (default: new)")
    parser.add_argument("--log", type=Path, help="file for the output of the deployment")
    parser.add_argument("--out", type=results_file, help="file of the records")
    return parser.parse_args(argv)


def _shape(text: str) -> tuple[int, int]:
    """ "2A1F" -> (2, 1): attention and FFN instances."""
    if not (found := re.fullmatch(r"(\d+)A(\d+)F", text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape; write one as 2A1F")
    return int(found[1]), int(found[2])
