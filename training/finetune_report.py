"""Writes the record of the second training:

    python -m training.finetune_report RUN --machine NAME --command LINE

RUN is the folder of training.finetune. Adds records of bench "finetuning" to
docs/results/finetuning.json and writes the table of docs/results/finetuning.md.
"""

import argparse
import datetime
from pathlib import Path

from afd.bench.records import Record, write_records
from training.finetune import Finetuner
from training.report import RESULTS, read_metrics

_MARKER = "<!-- tables, written by training.finetune_report -->"


def records(run: Path, machine: str, command: str, date: str) -> list[Record]:
    """Of held-out rows at the end, with the first measurement (after one step) as the peer."""
    training, evaluation = read_metrics(run / "metrics.jsonl")
    first, last = evaluation[0], evaluation[-1]
    found = []
    for name in Finetuner.streams:
        for metric, unit in (("perplexity", "per token"), ("kl", "nats")):
            value, start = (float(str(at[f"{metric}.{name}"])) for at in (last, first))
            found.append(
                Record(
                    "finetuning", f"held-out {name}", metric, value, unit, "after one step", start,
                    start / value, machine, command, date,
                )
            )  # fmt: skip
    kl, start_kl = training[-1]["kl"], training[0]["kl"]
    found.append(
        Record(
            "finetuning", "rows of the last steps", "kl", kl, "nats", "first steps", start_kl,
            start_kl / kl, machine, command, date,
        )
    )  # fmt: skip
    return found


def table(run: Path) -> str:
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
        cells += [f"{float(str(found[f'kl.{n}'])):.1e}" if found else "" for n in names]
        cells += [f"{float(str(found[f'perplexity.{n}'])):.2f}" if found else "" for n in names]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the record of the second training.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--machine", required=True)
    parser.add_argument("--command", required=True)
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    args = parser.parse_args()
    found = records(args.run, args.machine, args.command, args.date)
    write_records(RESULTS / "finetuning.json", found)
    page = RESULTS / "finetuning.md"
    head = page.read_text().split(_MARKER)[0] if page.exists() else "# Second training\n\n"
    page.write_text(f"{head}{_MARKER}\n\n{table(args.run)}\n")


if __name__ == "__main__":
    main()
