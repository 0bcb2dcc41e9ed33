"""`afd bench gpu WHAT`: deployments on the GPUs of this host, and what they are compared with.

    identity    greedy tokens and distributions of every topology against colocated vLLM
    decode      tokens/s per GPU at a time per token, against colocated vLLM on as many GPUs
    efficiency  busy time of the busier side over step time, stage times, a Perfetto trace
    step3       one layer of Step-3 at the paper's load per GPU, without vLLM
    attention   decode attention of Step-3 alone, beside FlashAttention 3, on one GPU
    fused       kernels of one launch beside what they replace, on one GPU
    jitter      time per token over thousands of steps, beside colocated vLLM
    peer        the same requests on vllm-project/afd-plugin, from a checkout of it
    profile     no host synchronisation per layer: the host's CUDA calls of replayed steps

Every one writes its records cell by cell (--out), stops starting cells after --seconds, and has a
dry run: --device cpu with a tiny model. `afd bench gpu WHAT --help` says more.
"""

import importlib
import signal
from collections.abc import Sequence

from afd.errors import ConfigError

COMMANDS = (
    "identity",
    "decode",
    "efficiency",
    "step3",
    "attention",
    "fused",
    "jitter",
    "peer",
    "profile",
)


def main(argv: Sequence[str]) -> int:
    """Exit status: 0, or 1 if something that was to be measured could not be."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    if argv[0] not in COMMANDS:
        raise ConfigError(f"afd bench gpu has no {argv[0]!r}; use one of {', '.join(COMMANDS)}")
    # A run that is cut off (`timeout`) ends its servers as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    status: int = importlib.import_module(f"afd.bench.gpu.{argv[0]}").main(argv[1:])
    return status
