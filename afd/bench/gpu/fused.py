"""Kernels of one launch beside the launches that they replace, and FP8 products of few rows.

Shapes of the Step-3 slice (afd/bench/gpu/step3_load.py). Each time is of one of many calls in a
captured graph, one behind the other: launch and gap are in it, as in a step. What they replace is
vLLM's kernels and torch's, as the slice launched them before.
"""

from collections.abc import Sequence

from afd.bench.gpu.common import Budget, parser, report
from afd.bench.gpu.step3_load import PAPER, TINY


def main(argv: Sequence[str]) -> int:
    made = parser("fused", __doc__, 60.0)
    args = made.parse_args(argv)
    # Imported here: `afd bench gpu --help` needs no torch.
    from afd.bench.gpu.fused_torch import cases, microseconds

    load = TINY if args.device == "cpu" else PAPER
    out, budget = report("fused", args, "fused", argv), Budget(args.seconds)
    for case in cases(load, args.device):
        if budget.allows(case.name):
            us, peer_us = (microseconds(call, args.device) for call in (case.ours, case.peer))
            print(
                f"{case.name}: {us:.1f} us, {case.what} {peer_us:.1f} ({peer_us / us:.2f})",
                flush=True,
            )
            out.add(case.name, "us", us, "us", case.what, peer_us, more_is_better=False)
    return 0
