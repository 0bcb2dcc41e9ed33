"""Fused kernels against the kernels of vLLM and torch that they replace, and small FP8 products.

Shapes are those of the Step-3 slice (afd_bench/step3/load.py). Each time is that of one call among
many consecutive calls in a captured graph, so it includes launch and gap, as in a step.
"""

from collections.abc import Sequence

from afd_bench.gpu.common import Budget, parser, report
from afd_bench.step3.load import PAPER, TINY


def main(argv: Sequence[str]) -> int:
    options = parser("fused", __doc__, 60.0)
    args = options.parse_args(argv)
    # Imported here: `afd bench gpu --help` needs no torch.
    from afd_bench.step3.fused_cases_torch import cases, microseconds

    load = TINY if args.device == "cpu" else PAPER
    out, budget = report("fused", args, "fused", argv), Budget(args.seconds)
    for case in cases(load, args.device):
        if budget.allows(case.name):
            us, peer_us = (microseconds(call, args.device) for call in (case.ours, case.peer))
            print(
                f"{case.name}: {us:.1f} us, {case.peer_name} {peer_us:.1f} us"
                f" ({peer_us / us:.2f}x)",
                flush=True,
            )
            out.add(case.name, "us", us, "us", case.peer_name, peer_us, more_is_better=False)
    return 0
