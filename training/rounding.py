"""Measures the effect of wire formats on the demo model: `python -m training.rounding CHECKPOINT`.

The inputs of every MoE layer are rounded to a wire format, its outputs to bfloat16; everything else
is float32 in plain torch. Further runs show where a divergence comes from: formats that the wire
does not offer, rounding in one layer only, and the choice of experts of the unrounded run. Writes
docs/results/rounding.json and rounding.md.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from afd.records import Record, machine, today, write_records
from afd.texts import read_texts, spread, windows
from afd.wire.codecs import FP8_MAX
from afd.wire.codecs_torch import dequantise_fp8, quantise_fp8
from afd.wire.layout import Tag
from training.model import Model, Moe, Routing
from training.routing import load_model

WINDOW = 256
Code = Callable[[Tensor], Tensor]


def identity(x: Tensor) -> Tensor:
    return x


def bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def fp8_wire(x: Tensor) -> Tensor:
    """Rounds as the wire format ``fp8``: e4m3, one float32 scale per 128 columns."""
    return dequantise_fp8(*quantise_fp8(x), torch.float32)


def _e4m3(blocks: Tensor, scales: Tensor) -> Tensor:
    return (blocks / scales).to(torch.float8_e4m3fn).float() * scales


def fp8(block: int, *, power_of_two: bool = False) -> Code:
    """Returns rounding to e4m3 with a scale per ``block`` columns.

    Scales are exact or, with ``power_of_two``, rounded up to a power of two.
    """

    def code(x: Tensor) -> Tensor:
        blocks = x.view(-1, block)
        scales = blocks.abs().amax(-1, keepdim=True) / FP8_MAX[Tag.E4M3FN]
        if power_of_two:
            scales = scales.log2().ceil().exp2()
        return _e4m3(blocks, scales).view_as(x)

    return code


def fp8_best_scale(x: Tensor) -> Tensor:
    """Rounds to e4m3 per 128 columns, with the best of 16 scales within a factor of two."""
    blocks = x.view(-1, 128)
    smallest = blocks.abs().amax(-1, keepdim=True) / FP8_MAX[Tag.E4M3FN]
    tries = torch.stack([_e4m3(blocks, smallest * 2 ** (i / 16)) for i in range(16)])
    errors = (tries - blocks).square().sum(-1, keepdim=True)
    return tries.gather(0, errors.argmin(0, keepdim=True).expand(1, *blocks.shape)).view_as(x)


def int8(block: int) -> Code:
    """Returns rounding to int8 (-127 to 127) with a scale per ``block`` columns."""

    def code(x: Tensor) -> Tensor:
        blocks = x.view(-1, block)
        scales = blocks.abs().amax(-1, keepdim=True) / 127
        return ((blocks / scales).round() * scales).view_as(x)

    return code


FORMATS: dict[str, Code] = {
    "bfloat16": bfloat16,
    "fp8 (the wire's)": fp8_wire,
    "fp8, power-of-two scales": fp8(128, power_of_two=True),
    "fp8, scale per 32 columns": fp8(32),
    "fp8, scale per row": fp8(256),
    "fp8, best of 16 scales": fp8_best_scale,
    "int8, scale per 128 columns": int8(128),
    "int8, scale per 32 columns": int8(32),
}


class Wire(nn.Module):
    """A MoE layer whose input and output are rounded.

    Args:
        code: Rounding of the input.
        back: Rounding of the output.
        chosen: Choice of experts per call, [rows, experts] bool, which replaces that of the router;
            None keeps the router's choice.
    """

    def __init__(self, moe: Moe, code: Code, back: Code, chosen: Iterator[Tensor] | None) -> None:
        super().__init__()
        self.moe, self.code, self.back, self.chosen = moe, code, back, chosen
        self.noise = self.power = 0.0

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        rows = x.reshape(-1, x.shape[-1])
        weights, routing = self.moe.route(rows)
        if self.chosen is not None:
            kept = routing.probabilities * next(self.chosen)
            weights = kept / kept.sum(-1, keepdim=True)
        sent = self.code(rows)
        self.noise += (sent - rows).square().sum().item()
        self.power += rows.square().sum().item()
        return self.back(self.moe.experts(sent, weights)).view_as(x), routing


@dataclass(frozen=True)
class Run:
    """Result of a run over all windows.

    Attributes:
        logprobs: Per window, [positions, vocab].
        routing: Per layer and window, the chosen experts, [rows, experts] bool.
        error: RMS of the rounding error over RMS of the rows.
    """

    logprobs: list[Tensor]
    routing: list[list[Tensor]]
    error: float


@torch.no_grad()
def run(
    model: Model,
    rows: list[Tensor],
    code: Code,
    *,
    only: int | None = None,
    like: Run | None = None,
) -> Run:
    """Runs the model with rounding.

    Args:
        code: Rounding of MoE inputs; ``identity`` disables all rounding.
        only: The only layer to round; None for all.
        like: A run whose choice of experts to use.
    """
    plain = [layer.mlp for layer in model.layers]
    wires = []
    for index, (layer, moe) in enumerate(zip(model.layers, plain, strict=True)):
        assert isinstance(moe, Moe)
        on = code is not identity and only in (None, index)
        chosen = iter(like.routing[index]) if like else None
        wires.append(Wire(moe, code if on else identity, bfloat16 if on else identity, chosen))
        layer.mlp = wires[-1]
    logprobs = []
    routing: list[list[Tensor]] = [[] for _ in plain]
    for row in rows:
        logits, found = model(row[None])
        logprobs.append(logits[0, :-1].log_softmax(-1))
        for kept, layer_routing in zip(routing, found, strict=True):
            kept.append(layer_routing.chosen.bool())
    error = (sum(w.noise for w in wires) / sum(w.power for w in wires)) ** 0.5
    for layer, moe in zip(model.layers, plain, strict=True):
        layer.mlp = moe
    return Run(logprobs, routing, error)


@dataclass(frozen=True)
class Divergence:
    """Divergence of a run from the unrounded one.

    Attributes:
        kl: Mean KL divergence per position over the whole vocabulary, nats.
        top1: Share of positions with the same most likely token.
        perplexity: Relative change.
    """

    kl: float
    top1: float
    perplexity: float


def divergence(base: Run, other: Run, rows: list[Tensor]) -> Divergence:
    """Returns the divergence of ``other`` from ``base`` over the token ids ``rows``."""
    p, q = torch.cat(base.logprobs), torch.cat(other.logprobs)
    own = torch.cat([row[1:] for row in rows])[:, None]
    kl = (p.exp() * (p - q)).sum(-1).mean().item()
    top1 = (p.argmax(-1) == q.argmax(-1)).float().mean().item()
    change = (p.gather(1, own).mean() - q.gather(1, own).mean()).exp().item() - 1.0
    return Divergence(kl, top1, change)


def measure(model: Model, rows: list[Tensor]) -> Iterator[tuple[str, Divergence, float]]:
    """Yields (name of the rounding, divergence, relative error of the rounded rows)."""
    base = run(model, rows, identity)
    for name, code in FORMATS.items():
        found = run(model, rows, code)
        yield name, divergence(base, found, rows), found.error
    for name in ("bfloat16", "fp8 (the wire's)", "int8, scale per 128 columns"):
        found = run(model, rows, FORMATS[name], like=base)
        yield f"{name}, experts of the unrounded run", divergence(base, found, rows), found.error
    for layer in range(model.c.layers):
        found = run(model, rows, fp8_wire, only=layer)
        name = f"fp8 (the wire's), layer {layer} only"
        yield name, divergence(base, found, rows), found.error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument(
        "--tokens",
        type=int,
        default=6144,
        help="tokens of each held-out text (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, default=Path("docs/results/rounding.json"))
    args = parser.parse_args()
    model = load_model(args.checkpoint)
    tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    lines = [
        "# What rounding does to the model",
        "",
        f"`python -m training.rounding {args.checkpoint}`, {machine()}, {today()}. In plain torch:",
        "expert inputs are rounded as stated, outputs to bfloat16, everything else is float32. KL:",
        "nats per position over the whole vocabulary. Error: RMS of the rounding over RMS of the",
        "rows. Conclusions: [formats](../formats.md).",
    ]
    for text in read_texts(args.checkpoint, []):
        heads = (tokenizer.encode(document).ids[:WINDOW] for document in text.documents)
        cut = [window for ids in heads for window in windows(ids, WINDOW, WINDOW - 1)]
        rows = [torch.tensor([*w.prompt, *w.continuation]) for w in spread(cut, args.tokens)]
        count = sum(len(row) - 1 for row in rows)
        lines += ["", f"## {text.name}, {count} tokens", ""]
        lines += ["| rounded | error | KL | top-1 | perplexity |", "|---|---|---|---|---|"]
        for name, found, error in measure(model, rows):
            lines.append(
                f"| {name} | {error:.2%} | {found.kl:.1e} | {found.top1:.4f} |"
                f" {found.perplexity:+.2%} |"
            )
            print(f"{text.name}: {lines[-1]}", flush=True)
            ratio = 1e-3 / max(found.kl, 1e-6)
            write_records(args.out, [Record(
                "rounding", f"{text.name} {name}", "kl", found.kl, "nats", "goal", 1e-3, ratio,
                machine(), f"python -m training.rounding {args.checkpoint}", today(),
            )])  # fmt: skip
    args.out.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
