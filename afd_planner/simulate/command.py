"""`afd simulate`: runs a simulation file, prints the result and writes the requested files."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from afd.errors import ConfigError
from afd_planner.simulate.engine import simulate
from afd_planner.simulate.load import with_load
from afd_planner.simulate.result import Quantiles, RequestCounts, Result, describe
from afd_planner.simulate.spec import load_spec
from afd_planner.simulate.trace import write_trace

TRACED_STEPS = 3


def simulate_command(args: argparse.Namespace) -> int:
    """Runs one `afd simulate` and returns the exit status.

    Raises:
        ConfigError: A file cannot be read, used or written.
    """
    spec = with_load(load_spec(args.spec), args)
    result = simulate(spec, seed=args.seed, traced_steps=TRACED_STEPS if args.trace else 0)
    print(describe(result, spec.sources))
    try:
        if args.trace:
            count = write_trace(args.trace, result.timeline)
            print(f"{args.trace} written: {count} spans; open it at ui.perfetto.dev")
        if args.json:
            text = json.dumps(as_json(result), indent=1) + "\n"
            args.json.write_text(text, encoding="utf-8")
            print(f"{args.json} written")
    except OSError as err:
        raise ConfigError(f"cannot write {err.filename} ({err.strerror})") from None
    return 0


def as_json(result: Result) -> dict[str, object]:
    """Returns the result without its timeline, ready for JSON."""
    values = {key: value for key, value in vars(result).items() if key != "timeline"}
    for key, value in values.items():
        if isinstance(value, Quantiles | RequestCounts):
            values[key] = asdict(value)
    values["failures"] = [asdict(failure) for failure in result.failures]
    return values
