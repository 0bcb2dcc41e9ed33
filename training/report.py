"""Writes the training results: `python -m training.report RUN --machine NAME --command LINE`.

RUN is the output folder of training.train. Writes records of bench "training" to
docs/results/training.json, and the tables of docs/results/training.md.
"""

import argparse
import datetime
import json
from pathlib import Path

from afd.records import Record, write_records

RESULTS = Path("docs/results")
STREAMS = ("prose", "lexicon", "chat")


def read_metrics(file: Path) -> tuple[list[dict[str, float]], list[dict[str, object]]]:
    """Returns (training lines, evaluation lines) of a metrics.jsonl; the last one per step."""
    training: dict[int, dict[str, float]] = {}
    evaluation: dict[int, dict[str, object]] = {}
    for text in file.read_text().splitlines():
        line = json.loads(text)
        (training if "loss" in line else evaluation)[line["step"]] = line
    return list(training.values()), list(evaluation.values())


def records(run: Path, machine: str, command: str, date: str) -> list[Record]:
    """Returns records of final loss, held-out perplexities, expert load and speed.

    Perplexities are compared with the untrained model, loads with an even load.
    """
    training, evaluation = read_metrics(run / "metrics.jsonl")
    first, last = evaluation[0], evaluation[-1]

    def record(
        case: str, metric: str, value: float, unit: str, peer: str, peer_value: float, ratio: float
    ) -> Record:
        return Record(
            "training", case, metric, value, unit, peer, peer_value, ratio, machine, command, date
        )

    found = []
    for name in STREAMS:
        value, start = (
            float(str(last[f"perplexity.{name}"])),
            float(str(first[f"perplexity.{name}"])),
        )
        found.append(record(f"held-out {name}", "perplexity", round(value, 4), "",
                            "untrained", round(start, 2), round(start / value, 2)))  # fmt: skip
    loss, balance = training[-1]["loss"], training[-1]["balance"]
    found.append(record("training text", "loss", round(loss, 4), "nat/token",
                        "first 100 steps", round(training[0]["loss"], 4),
                        round(training[0]["loss"] / loss, 3)))  # fmt: skip
    found.append(record("router", "balance loss", round(balance, 4), "", "even load", 1.0,
                        round(1 / balance, 4)))  # fmt: skip
    entropy = last["load_entropy"]
    assert isinstance(entropy, list)
    for layer, value in enumerate(entropy):
        found.append(record(f"expert load, layer {layer}", "entropy", value, "of even load",
                            "even load", 1.0, value))  # fmt: skip
    speed = sorted(line["tokens_per_s"] for line in training)[len(training) // 2]
    found.append(record("training", "speed", round(speed), "tokens/s", "plan", 1.5e6,
                        round(speed / 1.5e6, 3)))  # fmt: skip
    return found


def tables(run: Path) -> str:
    """Returns Markdown tables: loss and perplexity over steps, and the final load per layer."""
    training, evaluation = read_metrics(run / "metrics.jsonl")
    by_step = {line["step"]: line for line in training}
    rows = ["| step | loss | balance | learning rate | prose | lexicon | chat | load entropy |",
            "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for line in evaluation:
        step = line["step"]
        train = by_step.get(step)  # type: ignore[call-overload]
        left = (
            f"{train['loss']:.3f} | {train['balance']:.3f} | {train['lr']:.2e}"
            if train
            else " | | "
        )
        right = " | ".join(f"{line[f'perplexity.{name}']:.2f}" for name in STREAMS)
        entropy = line["load_entropy"]
        assert isinstance(entropy, list)
        rows.append(f"| {step} | {left} | {right} | {min(entropy):.3f} to {max(entropy):.3f} |")
    last = evaluation[-1]
    rows += ["", "| layer | load entropy | busiest expert over the mean |", "|---|---|---|"]
    pairs = zip(last["load_entropy"], last["imbalance"], strict=True)  # type: ignore[call-overload]
    rows += [f"| {i} | {e} | {b} |" for i, (e, b) in enumerate(pairs)]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the results of a training run.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--machine", required=True)
    parser.add_argument("--command", required=True)
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    args = parser.parse_args()
    write_records(
        RESULTS / "training.json", records(args.run, args.machine, args.command, args.date)
    )
    page = RESULTS / "training.md"
    marker = "<!-- tables, written by training.report -->"
    head = page.read_text().split(marker)[0] if page.exists() else "# Training\n\n"
    page.write_text(f"{head}{marker}\n\n{tables(args.run)}\n")


if __name__ == "__main__":
    main()
