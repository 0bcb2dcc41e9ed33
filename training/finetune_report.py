"""Writes the results of the second training:

    python -m training.finetune_report RUN [RUN ...] --machine NAME --command LINE [LINE ...]

Each RUN is an output folder of training.finetune; its name appears in the records. The first RUN is
the one whose weights are shipped. Writes docs/results/finetuning.json (bench "finetuning") and the
tables of docs/results/finetuning.md: the first and last measurement of every run, and all
measurements of the first run.
"""

import argparse
import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path

from afd.records import Record, write_records
from training.finetune import Finetuner
from training.report import RESULTS, read_metrics

_MARKER = "<!-- tables, written by training.finetune_report -->"
_WHEN = (("first", 0), ("last", -1))


def records(run: Path, machine: str, command: str, date: str) -> list[Record]:
    """Returns the final measurements of a run, compared with those after its first step."""
    training, evaluation = read_metrics(run / "metrics.jsonl")
    first, last = evaluation[0], evaluation[-1]
    found = []
    for name in Finetuner.streams:
        case = f"{run.name}, held-out {name}"
        for metric, unit in (("perplexity", "per token"), ("kl", "nats")):
            value, start = (float(str(at[f"{metric}.{name}"])) for at in (last, first))
            found.append(
                Record(
                    "finetuning", case, metric, value, unit, "after one step", start,
                    start / value, machine, command, date,
                )
            )  # fmt: skip
    kl, start_kl = training[-1]["kl"], training[0]["kl"]
    found.append(
        Record(
            "finetuning", f"{run.name}, rows of the last steps", "kl", kl, "nats", "first steps",
            start_kl, start_kl / kl, machine, command, date,
        )
    )  # fmt: skip
    return found


def ends(runs: Sequence[Path]) -> str:
    """Returns the first and last measurement of every run as a Markdown table."""
    names = Finetuner.streams
    head = ["run", "step", *(f"KL {n}" for n in names), *names]
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    measured = [(run.name, read_metrics(run / "metrics.jsonl")[1]) for run in runs]
    lines = [(f"{name}, {what}", found[at]) for name, found in measured for what, at in _WHEN]
    for name, found in lines:
        rows.append("| " + " | ".join([name, str(found["step"]), *_measures(found)]) + " |")
    return "\n".join(rows)


def _measures(found: Mapping[str, object]) -> list[str]:
    names = Finetuner.streams
    kls = [f"{float(str(found[f'kl.{n}'])):.1e}" for n in names]
    return [*kls, *(f"{float(str(found[f'perplexity.{n}'])):.2f}" for n in names)]


def table(run: Path) -> str:
    """Returns all measurements of a run as a Markdown table."""
    training, evaluation = read_metrics(run / "metrics.jsonl")
    by_step = {int(line["step"]): line for line in training}
    names = Finetuner.streams
    head = ["step", "loss", "KL in training", "learning rate", *(f"KL {n}" for n in names), *names]
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    steps = sorted({*by_step, *(int(str(line["step"])) for line in evaluation)})
    measured = {int(str(line["step"])): line for line in evaluation}
    for step in steps:
        train, found = by_step.get(step), measured.get(step)
        cells = [str(step)]
        cells += (
            [f"{train['loss']:.3f}", f"{train['kl']:.1e}", f"{train['lr']:.1e}"]
            if train
            else [""] * 3
        )
        cells += _measures(found) if found else [""] * (2 * len(names))
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the results of the second training.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--machine", required=True)
    parser.add_argument("--command", required=True, nargs="+", help="command line of each run")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    args = parser.parse_args()
    runs: list[Path] = args.runs
    write_records(
        RESULTS / "finetuning.json",
        [
            record
            for run, command in zip(runs, args.command, strict=True)
            for record in records(run, args.machine, command, args.date)
        ],
    )
    page = RESULTS / "finetuning.md"
    head = page.read_text().split(_MARKER)[0] if page.exists() else "# Second training\n\n"
    page.write_text(f"{head}{_MARKER}\n\n{ends(runs)}\n\n{table(runs[0])}\n")


if __name__ == "__main__":
    main()
