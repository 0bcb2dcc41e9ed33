"""Trains the model on the token streams: `python -m training.train tokens.npz OUT`.

Writes OUT/metrics.jsonl (a line per measurement), OUT/checkpoint (Hugging Face layout) and, with
--state, the state to resume from (`--resume`). The learning rate warms up, stays constant and
decays to zero ("WSD"). During the decay, the mixture of streams has more conversations.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.export import export
from training.model import Model, ModelConfig, Routing, auxiliary_losses

STREAMS = ("prose", "lexicon", "chat")


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 10_000
    batch: int = 64  # rows
    row: int = 1024  # tokens of a row
    lr: float = 1.2e-3
    warmup: int = 300
    decay_share: float = 0.3  # of all steps
    weight_decay: float = 0.1
    clip: float = 1.0
    balance: float = 0.01  # weight of the load-balancing loss
    z: float = 1e-4
    mixture: tuple[float, ...] = (0.22, 0.13, 0.65)
    decay_mixture: tuple[float, ...] = (0.15, 0.10, 0.75)
    log_every: int = 100
    eval_every: int = 500
    eval_rows: int = 64  # per stream
    seed: int = 20
    minutes: float = 60.0  # the schedule is shortened to end within this time


def learning_rate(config: TrainConfig, progress: float) -> float:
    """Returns the learning rate at `progress` (0 to 1): warm-up, constant, linear to zero."""
    warm = min(1.0, (progress * config.steps + 1) / config.warmup)
    left = min(1.0, (1.0 - progress) / config.decay_share)
    return config.lr * warm * max(left, 0.0)


class Stream:
    """A token stream on the device, from which rows that begin with a text are drawn."""

    def __init__(self, ids: np.ndarray, starts: np.ndarray, length: int, device: str) -> None:
        self.ids = torch.from_numpy(ids.astype(np.int32)).to(device)
        usable = starts[starts + length + 1 <= len(ids)]
        self.starts = torch.from_numpy(usable).to(device)
        self.span = torch.arange(length + 1, device=device)

    def rows(self, index: Tensor) -> Tensor:
        """Returns rows [n, length + 1] int64 that begin at the given texts."""
        return self.ids[self.starts[index][:, None] + self.span].long()

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        index = torch.randint(
            len(self.starts), (count,), generator=generator, device=self.starts.device
        )
        return self.rows(index)

    def fixed(self, count: int) -> Tensor:
        """Returns evenly spaced rows, always the same ones, for evaluation."""
        last = len(self.starts) - 1
        return self.rows(torch.linspace(0, last, min(count, last + 1)).long().to(self.ids.device))


def load_streams(
    file: Path, split: str, length: int, device: str, names: tuple[str, ...] = STREAMS
) -> dict[str, Stream]:
    with np.load(file) as arrays:
        return {
            name: Stream(
                arrays[f"{name}.{split}"], arrays[f"{name}.{split}.starts"], length, device
            )
            for name in names
        }


def draw_batch(
    streams: dict[str, Stream], mixture: tuple[float, ...], rows: int, generator: torch.Generator
) -> Tensor:
    """Returns [rows, length + 1] with fixed shares of the streams."""
    edges = [round(rows * sum(mixture[: i + 1])) for i in range(len(mixture))]
    counts = [end - start for start, end in zip([0, *edges], edges, strict=False)]
    parts = [s.draw(n, generator) for s, n in zip(streams.values(), counts, strict=True) if n]
    return torch.cat(parts)


def optimiser(model: Model, config: TrainConfig) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)


@torch.no_grad()
def evaluate(model: Model, streams: dict[str, Stream], rows: int, batch: int) -> dict[str, object]:
    """Evaluates a model on held-out rows.

    Returns the perplexity per stream; and per layer, over all streams, the entropy of the expert
    load (1 means even) and the largest load over the mean.
    """
    device = next(model.parameters()).device
    result: dict[str, object] = {}
    load = torch.zeros(model.c.layers, model.c.experts, device=device)
    for name, stream in streams.items():
        fixed = stream.fixed(rows)
        total, count = 0.0, 0
        for part in fixed.split(batch):
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits, routings = model(part[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten())
            total, count = total + loss.item() * len(part), count + len(part)
            load += torch.stack([r.chosen.sum(0) for r in routings])
        result[f"perplexity.{name}"] = math.exp(total / count)
    share = load / load.sum(1, keepdim=True)
    entropy = -(share * share.clamp_min(1e-12).log()).sum(1) / math.log(model.c.experts)
    result["load_entropy"] = [round(e, 4) for e in entropy.tolist()]
    result["imbalance"] = [round(i, 3) for i in (share.amax(1) * model.c.experts).tolist()]
    return result


class Trainer:
    """State of a training run: model, optimiser, step, random generator."""

    streams: tuple[str, ...] = STREAMS

    def __init__(self, model: Model, config: TrainConfig, data: Path, device: str) -> None:
        self.model, self.config, self.device = model.to(device), config, device
        self.optimiser = optimiser(model, config)
        self.train = load_streams(data, "train", config.row, device, self.streams)
        self.heldout = load_streams(data, "heldout", config.row, device, self.streams)
        self.generator = torch.Generator(device).manual_seed(config.seed)
        self.mixture = config.mixture
        self.step = 0

    def save(self, file: Path) -> None:
        state = {
            "model": self.model.state_dict(), "optimiser": self.optimiser.state_dict(),
            "step": self.step, "generator": self.generator.get_state(),
        }  # fmt: skip
        torch.save(state, file)

    def resume(self, file: Path) -> None:
        state = torch.load(file, map_location=self.device)
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step = state["step"]
        self.generator.set_state(state["generator"].cpu())

    def run(self, log: TextIO, *, compiled: bool, until: int | None = None) -> None:
        """Trains to step `until` (default: the last) and writes measurements to `log`."""
        config = self.config
        forward = torch.compile(self.model) if compiled else self.model
        began = time.monotonic()
        first, since = self.step, began
        sums: dict[str, Tensor] = {}
        end = config.steps if until is None else min(until, config.steps)
        while self.step < end:
            elapsed = (time.monotonic() - began) / 60
            progress = max(self.step / config.steps, min(1.0, elapsed / config.minutes))
            if progress >= 1.0:
                break
            lr = learning_rate(config, progress)
            for group in self.optimiser.param_groups:
                group["lr"] = lr
            decaying = progress > 1 - config.decay_share
            self.mixture = config.decay_mixture if decaying else config.mixture
            rows = draw_batch(self.train, self.mixture, config.batch, self.generator)
            total, parts = self.objective(forward, rows)
            total.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
            self.optimiser.step()
            self.optimiser.zero_grad(set_to_none=True)
            for name, part in (*parts.items(), ("grad_norm", norm)):
                sums[name] = sums.get(name, 0.0) + part.detach()
            self.step += 1
            if self.step % config.log_every == 0:
                line: dict[str, object] = {
                    name: (value / config.log_every).item() for name, value in sums.items()
                }
                now = time.monotonic()
                rate = config.log_every * rows[:, 1:].numel() / (now - since)
                since = now
                sums.clear()
                line |= {"lr": lr, "tokens_per_s": rate, "seconds": now - began}
                self.write(log, line)
            if self.step % config.eval_every == 0 or self.step in (end, first + 1):
                self.measure(log)
                since = time.monotonic()
        self.measure(log)

    def objective(
        self, forward: Callable[[Tensor], tuple[Tensor, list[Routing]]], rows: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss on rows [batch, row + 1], and its parts for the log."""
        cuda = self.device == "cuda"
        with torch.autocast(self.device, torch.bfloat16, enabled=cuda):
            logits, routings = forward(rows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
            balance, z = auxiliary_losses(routings, self.model.c.top_k)
            total = loss + self.config.balance * balance + self.config.z * z
        return total, {"loss": loss, "balance": balance, "z": z}

    def measure(self, log: TextIO) -> None:
        self.model.eval()
        found = evaluate(self.model, self.heldout, self.config.eval_rows, self.config.batch)
        self.write(log, found)
        self.model.train()

    def write(self, log: TextIO, line: dict[str, object]) -> None:
        log.write(json.dumps({"step": self.step, **line}) + "\n")
        log.flush()
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}, self.step,
              flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the small MoE model.")
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--state", type=Path, help="file for the state to resume from")
    parser.add_argument("--until", type=int, help="stop at this step of the schedule")
    for owner in (TrainConfig, ModelConfig):
        for field in fields(owner):
            if field.type in (int, float):
                parser.add_argument(f"--{field.name.replace('_', '-')}", type=field.type)
    args = vars(parser.parse_args())

    def chosen(owner: type) -> dict[str, float]:
        names = [f.name for f in fields(owner) if f.type in (int, float)]
        return {n: args[n] for n in names if args[n] is not None}

    config = TrainConfig(**chosen(TrainConfig))  # type: ignore[arg-type]
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("high")
    model = Model(ModelConfig(**chosen(ModelConfig)))  # type: ignore[arg-type]
    out: Path = args["out"]
    out.mkdir(parents=True, exist_ok=True)
    (out / "run.json").write_text(json.dumps([asdict(config), model.c.asdict()], indent=1) + "\n")
    trainer = Trainer(model, config, args["data"], args["device"])
    if args["resume"]:
        trainer.resume(args["resume"])
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters on {args['device']}", flush=True)
    with (out / "metrics.jsonl").open("a") as log:
        trainer.run(log, compiled=not args["no_compile"], until=args["until"])
    if args["state"]:
        trainer.save(args["state"])
    export(model, out / "checkpoint")


if __name__ == "__main__":
    main()
