"""`afd bench gpu NAME`: benchmarks of deployments on the GPUs of this host.

    identity    greedy tokens and distributions of every topology against colocated vLLM
    decode      tokens/s per GPU at a time per token, against colocated vLLM on as many GPUs
    efficiency  busy time of the busiest role / step time, stage times, a Perfetto trace
    step3       layers of Step-3 at the report's load per GPU, without vLLM's engine
    attention   decode attention of Step-3 against FlashAttention 3, on one GPU
    fused       fused kernels against the kernels that they replace, on one GPU
    fused_served  a served 1A1F with and without attention.fused
    jitter      time per token over thousands of steps, against colocated vLLM
    peer        throughput against vllm-project/afd-plugin, run from a checkout
    host        what the host adds to a decode step
    lengths     decode steps of requests of different lengths, against equal ones
    prefill     time to first token and prompt tokens/s against colocated vLLM
    profile     checks that replayed steps have no host synchronization per layer

Each benchmark writes its records cell by cell (--out), starts no cell after --seconds, and has a
dry run on a tiny model (--device cpu). `afd bench gpu NAME --help` describes its options.
"""

import importlib
import signal
from collections.abc import Sequence

from afd.errors import ConfigError

COMMANDS = {
    "identity": "afd_bench.gpu.identity",
    "decode": "afd_bench.gpu.decode",
    "efficiency": "afd_bench.gpu.efficiency",
    "step3": "afd_bench.step3.command",
    "attention": "afd_bench.gpu.attention",
    "fused": "afd_bench.step3.fused_command",
    "fused_served": "afd_bench.gpu.fused_served",
    "jitter": "afd_bench.gpu.jitter",
    "peer": "afd_bench.gpu.peer",
    "host": "afd_bench.gpu.host",
    "lengths": "afd_bench.gpu.lengths",
    "prefill": "afd_bench.gpu.prefill",
    "profile": "afd_bench.gpu.profile",
}


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 1 if a measurement failed, else 0. Raises ConfigError, AfdError."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    if argv[0] not in COMMANDS:
        raise ConfigError(f"afd bench gpu has no {argv[0]!r}; use one of {', '.join(COMMANDS)}")
    # SIGTERM (for example of `timeout`) ends the servers as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    status: int = importlib.import_module(COMMANDS[argv[0]]).main(argv[1:])
    return status
