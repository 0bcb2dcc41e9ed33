"""`afd bench NAME`: runs one benchmark. `afd bench NAME --help` describes it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from afd.errors import ConfigError

BENCHES = {
    "allreduce": "afd_bench.allreduce",
    "amd": "afd_bench.amd.command",
    "comm": "afd_bench.comm",
    "comm_gpu": "afd_bench.comm_gpu",
    "cpu": "afd_bench.cpu",
    "faults": "afd_bench.faults.command",
    "gateway": "afd_bench.gateway.cli",
    "families": "afd_bench.families.command",
    "gpu": "afd_bench.gpu",
    "hf": "afd_bench.hf",
    "identity": "afd_bench.identity",
    "kernels": "afd_bench.tables.command",
    "load": "afd_bench.load",
    "moe": "afd_bench.moe.cli",
    "operate": "afd_bench.operate.command",
    "paper": "afd_bench.paper",
    "pd": "afd_bench.pd",
    "planner": "afd_bench.planner.command",
    "prefill": "afd_bench.prefill",
    "report": "afd_bench.report.command",
    "routing": "afd_bench.routing",
    "scale": "afd_bench.scale.cli",
    "simulator": "afd_bench.simulator",
    "soak": "afd_bench.faults.soak",
    "speculation": "afd_bench.speculation",
    "stages": "afd_bench.stages",
    "versions": "afd_bench.versions",
    "wire_gpu": "afd_bench.wire_gpu",
}


def main(argv: Sequence[str]) -> int:
    """Runs one benchmark and returns its exit status.

    Raises:
        ConfigError: the name is unknown, or a package that the benchmark needs is not installed.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        print("names:", ", ".join(BENCHES))
        return 0
    name, *rest = argv
    if name not in BENCHES:
        raise ConfigError(f"benchmark {name!r} is unknown; use one of {', '.join(BENCHES)}")
    try:
        module = importlib.import_module(BENCHES[name])
    except ModuleNotFoundError as err:
        if (err.name or "").partition(".")[0].startswith(("afd", "ffn_worker", "attention_worker")):
            raise
        raise ConfigError(f"afd bench {name} needs the package {err.name}; install it") from None
    status: int = module.main(rest)
    return status
