"""`afd simulate`: run a simulation file and print, or write, what came out."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from afd.errors import ConfigError
from afd.planner.simulate.engine import simulate
from afd.planner.simulate.result import Result, describe
from afd.planner.simulate.spec import load_spec
from afd.planner.simulate.trace import write_trace

TRACED_STEPS = 3


def run(path: Path, *, seed: int, trace: Path | None, out: Path | None) -> int:
    """Raises ConfigError if the file, or one that it names, cannot be used or written."""
    spec = load_spec(path)
    result = simulate(spec, seed=seed, traced_steps=TRACED_STEPS if trace else 0)
    print(describe(result, spec.sources))
    try:
        if trace:
            count = write_trace(trace, result.timeline)
            print(f"{trace} written: {count} spans; open it at ui.perfetto.dev")
        if out:
            out.write_text(json.dumps(as_json(result), indent=1) + "\n", encoding="utf-8")
            print(f"{out} written")
    except OSError as err:
        raise ConfigError(f"cannot write {err.filename} ({err.strerror})") from None
    return 0


def as_json(result: Result) -> dict[str, object]:
    """All of a result but its timeline."""
    values = {key: value for key, value in vars(result).items() if key != "timeline"}
    for key in ("step", "tpot", "request_tpot", "ttft", "requests"):
        values[key] = asdict(values[key])
    values["failures"] = [asdict(failure) for failure in result.failures]
    return values
