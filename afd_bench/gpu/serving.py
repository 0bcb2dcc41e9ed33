"""Starts the servers of `afd bench gpu`.

All servers of a run are up at the same time and are measured in turns, so that a drift of the GPU
clocks affects all of them equally. A server without requests does not use its GPUs.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from afd.errors import AfdError, ConfigError
from afd_bench.gpu.targets import (
    START_S,
    Afd,
    Sizes,
    Target,
    compilation,
    deployment,
    graph_args,
    settings_of,
)
from afd_bench.servers import Server, colocated, disaggregated


@dataclass(frozen=True)
class Setup:
    """What the servers of a run have in common.

    args: arguments of every vLLM. logs: folder of their logs. variables: of their environment.
    """

    model: Path
    sizes: Sizes
    device: str
    args: Sequence[str]
    logs: Path
    variables: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def serve(target: Target, setup: Setup) -> Iterator[Server]:
    """Runs a server of the target on the first GPUs. Raises AfdError."""
    device, sizes, variables = setup.device, setup.sizes, setup.variables
    setup.logs.mkdir(parents=True, exist_ok=True)
    timestamped = "-timestamped" if isinstance(target, Afd) and target.stage_every else ""
    log = setup.logs.absolute() / f"{target.label.replace(' ', '-')}{timestamped}.log"
    with contextlib.ExitStack() as stack:
        if isinstance(target, Afd):
            config = deployment(target, setup.model, sizes, device, setup.args)
            started = disaggregated(config, deadline_s=START_S, log=log, variables=variables)
            yield stack.enter_context(started)
            return
        flags = [*setup.args, *([] if device == "cpu" else graph_args(target, sizes))]
        parallel = []
        if device == "cpu" and target.gpus > 1:
            raise ConfigError(f"{target.name} needs {target.gpus} GPUs; use TP1 on CPU")
        if target.gpus > 1:
            parallel = [f"--tensor-parallel-size={target.tp}"]
        if target.dp > 1:
            parallel += [f"--data-parallel-size={target.dp}", "--enable-expert-parallel"]
        if target.mode in ("compiled", "graphs") and device != "cpu":
            parallel.append(f"--compilation-config={json.dumps(compilation(target))}")
        yield stack.enter_context(
            colocated(
                setup.model.absolute(),
                dtype="bfloat16",
                vllm_args=[*parallel, *flags],
                compiled=target.mode != "eager" and device != "cpu",
                gpus=() if device == "cpu" else range(target.gpus),
                ranks=target.dp if target.dp > 1 else 0,
                deadline_s=START_S,
                log=log,
                variables=variables,
                **settings_of(target, sizes),
            )
        )


@contextlib.contextmanager
def running(targets: Sequence[Target], setup: Setup) -> Iterator[Mapping[Target, Server]]:
    """Runs all targets, which start and stop together; yields those that started.

    Prints the error of each target that failed. A duplicate target is started once.

    Raises:
        AfdError: no target started.
    """
    targets = list(dict.fromkeys(targets))

    def start(target: Target) -> tuple[contextlib.ExitStack, Server] | str:
        stack = contextlib.ExitStack()
        for last in (False, True):
            try:
                return stack, stack.enter_context(serve(target, setup))
            except AfdError as err:
                # Retry once: ports are chosen before they are bound; another server may take one.
                if last or "in use" not in str(err):
                    return str(err)
        raise AssertionError

    with ThreadPoolExecutor(len(targets)) as pool:
        started = dict(zip(targets, pool.map(start, targets), strict=True))
        up = {target: found for target, found in started.items() if not isinstance(found, str)}
        try:
            for target, found in started.items():
                if isinstance(found, str):
                    print(f"{target.label}: FAILED: {found}", flush=True)
            if not up:
                raise AfdError("no server started; see the errors above")
            yield {target: server for target, (_, server) in up.items()}
        finally:
            list(pool.map(lambda found: found[0].close(), up.values()))
