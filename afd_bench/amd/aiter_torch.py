"""AITER's experts against the reference on this GPU: eager, captured and replayed, per scheme.

``python -m afd_bench.amd.aiter_torch``: prints one line per case, and AITER's own lines on the rows
of its tuning tables that it used. Exit status 1 if a result is too far from the reference. Has not
run on AMD hardware.
"""

import sys

import torch

from afd.wire.streams_torch import runtime_of
from ffn_worker.moe.aiter import AiterBackend
from ffn_worker.moe.device import architecture, launched_as, native_fp8
from ffn_worker.moe.quantise import Weight, in_scheme
from ffn_worker.moe.reference import ReferenceBackend
from ffn_worker.moe.scheme import Scheme

EXPERTS, TOP_K = 32, 8
SHAPES = ((2048, 768), (7168, 2048))
ROWS = (1, 16, 64, 304, 336, 1024)
"""304 and 336: rows at which AITER's FP8 blocks faulted on gfx942 (ROCm/aiter issue 4783)."""
LIMITS = {Scheme.PLAIN: 2e-2, Scheme.FP8_BLOCK: 8e-2, Scheme.MXFP4: 0.4}
"""Relative errors (Euclidean norm). AITER also quantises the rows, as the weights are."""


def main() -> int:
    device, failed = torch.device("cuda", 0), False
    runtime_of(device).enter(device)
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, device=device, generator=generator)
        rows: torch.Tensor = (values / shape[-1] ** 0.5).bfloat16()
        return rows

    for hidden, width in SHAPES:
        w13, w2 = random(EXPERTS, 2 * width, hidden), random(EXPERTS, hidden, width)
        for scheme in Scheme:
            if scheme is Scheme.MXFP4 and architecture() == "gfx942":
                continue
            made = [
                in_scheme(Weight.of(w.clone()), scheme, native_fp8(), torch.bfloat16)
                for w in (w13, w2)
            ]
            reference, ours = ReferenceBackend((0, EXPERTS)), AiterBackend((0, EXPERTS))
            reference.prepare(0, *made)
            wanted = []
            for rows in ROWS:
                x = random(rows, hidden) * hidden**0.5
                scores = torch.rand(rows, EXPERTS, device=device, generator=generator)
                weights, ids = scores.topk(TOP_K, dim=-1)
                call = (x, ids.int(), weights)
                wanted.append((call, reference.forward(0, *call).float()))
            ours.prepare(0, *made)  # shuffles the weights, so the reference comes first
            for (x, ids, weights), want in wanted:
                rows = len(x)
                calls = {"eager": ours.forward(0, x, ids, weights)}
                if ours.capturable:
                    calls["graph"] = _replayed(ours, device, x, ids, weights)
                for mode, got in calls.items():
                    error = float((got.float() - want).norm() / want.norm())
                    bad = not error < LIMITS[scheme]
                    failed |= bad
                    word = "bad" if bad else "ok"
                    print(f"{word} {hidden}x{width} {scheme.value} {rows} rows {mode} {error:.2e}")
    return int(failed)


def _replayed(
    backend: AiterBackend,
    device: torch.device,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    with launched_as("graph"):
        backend.forward(0, x, ids, weights)  # compiles
        torch.cuda.synchronize(device)
        out, replay = runtime_of(device).capture(
            device, lambda: backend.forward(0, x, ids, weights)
        )
    for _ in range(3):
        replay()
    torch.cuda.synchronize(device)
    return out


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
