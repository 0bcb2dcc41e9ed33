"""Trains a checkpoint further, to make it robust against rounding on the wire:

    python -m training.finetune CHECKPOINT DIR/packed/tokens.npz OUT

- Every row of tokens runs twice, unrounded and rounded. The rounded run rounds expert inputs to FP8
  as the wire does, and layer outputs to bfloat16. Both errors are multiplied by ``strength``.
  Gradients ignore the rounding (straight-through).
- A second loss term, KL(unrounded || rounded), keeps both next-token distributions close.
- Both runs learn prose, including some that the first training did not see (stream ``fresh``). A
  model that has memorised its text is overconfident, which makes it sensitive to rounding.
- On conversations and lexicon, targets mix the text with the distribution of the original
  checkpoint, so that the model keeps what it learned.

Matrix products are bfloat16 over float32 weights.
"""

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor, nn

from training.export import export
from training.model import Model, Moe, Routing, auxiliary_losses
from training.rounding import Code, bfloat16, divergence, fp8_wire, identity, run
from training.routing import load_model
from training.train import TrainConfig, Trainer

# Positions whose logits are held at a time: 16 MiB fit into a CPU's cache, 256 MiB keep a GPU busy.
_CHUNK = {"cpu": 512, "cuda": 8192}


@dataclass(frozen=True)
class FinetuneConfig(TrainConfig):
    """Settings of the second training.

    Attributes:
        mixture: Shares of fresh, prose, lexicon and chat.
        strength: Factor on the rounding errors.
        kl: Weight of the KL term.
        teacher: Share of the original checkpoint's distribution in the targets of lexicon and chat;
            the rest is the text.
    """

    steps: int = 400
    batch: int = 4
    row: int = 256
    lr: float = 3e-4
    warmup: int = 10
    decay_share: float = 0.7
    mixture: tuple[float, ...] = (0.5, 0.0, 0.0, 0.5)
    decay_mixture: tuple[float, ...] = (0.25, 0.0, 0.25, 0.5)
    strength: float = 2.0
    kl: float = 40.0
    teacher: float = 1.0
    log_every: int = 10
    eval_every: int = 40
    eval_rows: int = 4


@dataclass(frozen=True)
class Taught:
    """Targets from the original model (the teacher) for some rows.

    Attributes:
        first: First row with such a target; earlier rows have the text's next token.
        hidden: [rows, hidden] output of the teacher before its head.
        head: [vocab, hidden] the teacher's head.
        share: Share of the teacher's distribution in the target.
    """

    first: int
    hidden: Tensor
    head: Tensor
    share: float

    def put(self, target: Tensor, start: int) -> None:
        """Mixes the teacher's distribution into target [rows, vocab], which begins at ``start``."""
        begin = max(self.first - start, 0)
        if begin < len(target):
            at = start + begin - self.first
            known = self.hidden[at : at + len(target) - begin]
            low = torch.bfloat16 if torch.is_autocast_enabled(known.device.type) else known.dtype
            said = (known.to(low) @ self.head.to(low).T).float().softmax(-1)
            target[begin:].lerp_(said.to(target.dtype), self.share)


class PairLoss(torch.autograd.Function):
    """Cross entropy and divergence of an unrounded and a rounded run, through the output head.

    ``forward`` takes plain and rounded [rows, hidden], head [vocab, hidden], targets [rows], a
    ``Taught`` or None, and the weight of KL. It returns float32 means over the rows: (total, cross
    entropy of both runs, KL(plain || rounded)). Gradients are those of ``total``. ``forward``
    computes them in chunks of ``_CHUNK`` rows, so that not all logits are in memory at once.
    :func:`pair_loss_reference` computes the same without chunks.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        plain: Tensor,
        rounded: Tensor,
        head: Tensor,
        targets: Tensor,
        taught: Taught | None,
        weight: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = head.device.type
        low = head.bfloat16() if torch.is_autocast_enabled(device) else head
        grads = [torch.empty_like(plain), torch.empty_like(rounded)]
        head_grad = torch.zeros_like(head)
        entropy = plain.new_zeros(()).float()
        kl = plain.new_zeros(()).float()
        count = len(targets)
        for start in range(0, count, _CHUNK[device]):
            part = slice(start, start + _CHUNK[device])
            rows = (plain[part].to(low.dtype), rounded[part].to(low.dtype))
            p, q = ((x @ low.T).float().log_softmax(-1) for x in rows)
            target = torch.zeros_like(p).scatter_(1, targets[part, None], 1.0)
            if taught is not None:
                taught.put(target, start)
            entropy -= (target * (p + q)).sum() / (2 * count)
            difference = p - q
            p, q = p.exp_(), q.exp_()
            mine = (p * difference).sum(-1, keepdim=True)
            kl += mine.sum() / count
            # d KL / d logits: p (log p - log q - KL) and q - p; of cross entropy: p - target.
            slopes = (
                difference.sub_(mine).mul_(weight).add_(0.5).mul_(p),
                q.mul(weight + 0.5).sub_(p, alpha=weight),
            )
            for slope, x, grad in zip(slopes, rows, grads, strict=True):
                low_slope = slope.sub_(target, alpha=0.5).div_(count).to(low.dtype)
                grad[part] = low_slope @ low
                head_grad += low_slope.T @ x
        ctx.save_for_backward(*grads, head_grad)
        ctx.mark_non_differentiable(entropy, kl)
        return entropy + weight * kl, entropy, kl

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, total: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        plain, rounded, head = ctx.saved_tensors  # type: ignore[attr-defined]
        return plain * total, rounded * total, head * total, None, None, None


def pair_loss_reference(
    plain: Tensor,
    rounded: Tensor,
    head: Tensor,
    targets: Tensor,
    taught: Taught | None,
    weight: float,
) -> Tensor:
    """Returns ``total`` of :class:`PairLoss`, in plain torch."""
    p, q = ((x @ head.T).log_softmax(-1) for x in (plain, rounded))
    target = torch.nn.functional.one_hot(targets, len(head)).to(p.dtype)
    if taught is not None:
        said = (taught.hidden @ taught.head.T).softmax(-1)
        target[taught.first :].lerp_(said, taught.share)
    entropy = -(target * (p + q)).sum(-1).mean() / 2
    return entropy + weight * (p.exp() * (p - q)).sum(-1).mean()


def noisy(x: Tensor, code: Code, strength: float) -> Tensor:
    """Adds ``strength`` times the rounding error of ``code`` to the second half of x [rows, ...].

    The gradient is that of x.
    """
    half = len(x) // 2
    with torch.no_grad():
        error = strength * (code(x[half:]) - x[half:])
    return torch.cat((x[:half], x[half:] + error))


class NoisyMoe(nn.Module):
    """A MoE layer whose experts get the second half of the rows rounded; its router does not."""

    def __init__(self, moe: Moe, strength: float) -> None:
        super().__init__()
        self.moe, self.strength = moe, strength

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        rows = x.reshape(-1, x.shape[-1])
        weights, routing = self.moe.route(rows)
        out = self.moe.experts(noisy(rows, fp8_wire, self.strength), weights)
        return out.view_as(x), routing


@contextlib.contextmanager
def rounded_half(model: Model, strength: float) -> Iterator[None]:
    """Context in which every layer rounds the second half of a batch."""

    def after(_: nn.Module, __: object, found: tuple[Tensor, Routing]) -> tuple[Tensor, Routing]:
        return noisy(found[0], bfloat16, strength), found[1]

    hooks = [layer.register_forward_hook(after) for layer in model.layers]
    plain = [layer.mlp for layer in model.layers]
    for layer, moe in zip(model.layers, plain, strict=True):
        assert isinstance(moe, Moe)
        layer.mlp = NoisyMoe(moe, strength)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer, moe in zip(model.layers, plain, strict=True):
            layer.mlp = moe


@torch.no_grad()
def sharpen(model: Model, factor: float) -> None:
    """Multiplies the logits of every router.

    The choice of experts does not change. The last of the chosen experts, which a near tie may swap
    for another one, gets less weight.
    """
    for layer in model.layers:
        assert isinstance(layer.mlp, Moe)
        layer.mlp.gate.weight.mul_(factor)


class Finetuner(Trainer):
    """The training loop with :class:`PairLoss`.

    Args:
        teacher: The original model.
        out: Folder of the checkpoint, written at every measurement so that an aborted run leaves
            one.
        state: File of the state to resume from, written at the same time; None for none.
    """

    streams = ("fresh", "prose", "lexicon", "chat")
    config: FinetuneConfig

    def __init__(
        self,
        model: Model,
        teacher: Model,
        config: FinetuneConfig,
        data: Path,
        device: str,
        out: Path,
        state: Path | None,
    ) -> None:
        super().__init__(model, config, data, device)
        self.teacher, self.out, self.state = teacher.to(device), out, state

    def objective(
        self, forward: Callable[[Tensor], tuple[Tensor, list[Routing]]], rows: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        with torch.autocast(self.device, torch.bfloat16), rounded_half(self.model, config.strength):
            hidden, routings = self.model.trunk(rows[:, :-1].repeat(2, 1))
            plain, rounded = hidden.flatten(0, 1).chunk(2)
            head = self.model.lm_head.weight
            targets = rows[:, 1:].flatten()
            total, loss, kl = PairLoss.apply(  # type: ignore[no-untyped-call]  # of torch
                plain, rounded, head, targets, self.taught(rows), config.kl
            )
            balance, z = auxiliary_losses(routings, self.model.c.top_k)
        total = total + config.balance * balance + config.z * z
        return total, {"loss": loss, "kl": kl, "balance": balance, "z": z}

    @torch.no_grad()
    def taught(self, rows: Tensor) -> Taught | None:
        """Returns the teacher's targets for the rows of lexicon and chat."""
        first = round(len(rows) * sum(self.mixture[:2]))
        if self.config.teacher == 0.0 or first == len(rows):
            return None
        hidden, _ = self.teacher.trunk(rows[first:, :-1])
        head = self.teacher.lm_head.weight
        return Taught(first * self.config.row, hidden.flatten(0, 1), head, self.config.teacher)

    def measure(self, log: TextIO) -> None:
        """Logs float32 perplexity and the KL of FP8 rounding on held-out rows; saves the model."""
        found: dict[str, object] = {}
        self.model.eval()
        for name, stream in self.heldout.items():
            rows = list(stream.fixed(self.config.eval_rows))
            base = run(self.model, rows, identity)
            own = torch.cat([row[1:] for row in rows])[:, None]
            found[f"perplexity.{name}"] = (
                (-torch.cat(base.logprobs).gather(1, own).mean()).exp().item()
            )
            found[f"kl.{name}"] = divergence(base, run(self.model, rows, fp8_wire), rows).kl
        self.model.train()
        self.write(log, found)
        export(self.model, self.out)
        if self.state is not None:
            self.save(self.state)


def _shares(text: str) -> tuple[float, ...]:
    return tuple(float(share) for share in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a checkpoint further, with the rounding of the wire in the loop."
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--state", type=Path, help="file for the state to resume from")
    parser.add_argument("--until", type=int, help="stop at this step of the schedule")
    parser.add_argument(
        "--sharpen", type=float, default=1.0, help="multiply the routers' logits before training"
    )
    for field in fields(FinetuneConfig):
        if field.type in (int, float):
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=field.type)
    for name in ("mixture", "decay_mixture"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=_shares, metavar="F,P,L,C")
    args = vars(parser.parse_args())
    given = {f.name: args.get(f.name) for f in fields(FinetuneConfig)}
    config = FinetuneConfig(**{k: v for k, v in given.items() if v is not None})
    torch.manual_seed(config.seed)
    model = load_model(args["checkpoint"]).train()
    out: Path = args["out"]
    out.mkdir(parents=True, exist_ok=True)
    (out / "run.json").write_text(json.dumps([asdict(config), model.c.asdict()], indent=1) + "\n")
    trainer = Finetuner(
        model, load_model(args["checkpoint"]), config, args["data"], args["device"],
        out / "checkpoint", args["state"],
    )  # fmt: skip
    if args["resume"]:
        trainer.resume(args["resume"])
    sharpen(model, args["sharpen"])
    with (out / "metrics.jsonl").open("a") as log:
        trainer.run(log, compiled=False, until=args["until"])


if __name__ == "__main__":
    main()
