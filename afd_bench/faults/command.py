"""`afd bench faults`: faults under load, at random moments. Counts failed and wrong requests.

A 2A2F deployment of a tiny model serves streams in flight all the time. Each fault is injected
``--repeat`` times. The seed of the moments is printed, and ``--seed`` repeats it. Answers are
compared token by token with those of an undisturbed round.
"""

from __future__ import annotations

import argparse
import random
import shlex
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from afd.errors import AfdError
from afd.records import command_line, machine, results_file, today, write_records
from afd_bench.faults.faults import FAULTS
from afd_bench.faults.measure import Cell, config_of, inject, records
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
    draw = random.Random(seed)
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="afd-faults-") as folder:
        model = Path(folder)
        make_model(FAMILY, model, resolve(FAMILY, "tiny"))
        with disaggregated(config_of(model), log=args.log) as server:
            subject = Subject(server)
            subject.await_whole(120)
            asked = jobs(seed, 24, vocab=VOCAB, new_tokens=(50, 150))
            asked = answered(server.url, server.model, asked)
            with Traffic(
                server.url, server.model, asked, clients=args.clients, seed=seed
            ) as traffic:
                for fault in chosen:
                    for _ in range(args.repeat):
                        try:
                            cells.append(inject(subject, traffic, fault, draw))
                        except AfdError as error:
                            print(f"{fault.name}: {error}", flush=True)
                            return 1
                        print(cells[-1].line, flush=True)
    if args.out is not None:
        command = command_line("faults", [shlex.quote(word) for word in argv])
        write_records(args.out, list(records(cells, chosen, machine(), command, today())))
    lost = sum(c.counts.failed + c.counts.wrong for c in cells if not FAULTS[c.fault].loses)
    return int(lost > 0)


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
    parser.add_argument("--repeat", type=int, default=3, help="of each fault (default 3)")
    parser.add_argument("--clients", type=int, default=24, help="requests in flight (default 24)")
    parser.add_argument("--seed", type=int, help="of the moments (default: new)")
    parser.add_argument("--log", type=Path, help="file for the output of the deployment")
    parser.add_argument("--out", type=results_file, help="file of the records")
    return parser.parse_args(argv)
