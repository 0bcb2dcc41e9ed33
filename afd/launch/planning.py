"""`afd plan`: from arguments to a request, and the plan to a table and files."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

from afd.errors import ConfigError
from afd.planner.cost.measured import load_measured
from afd.planner.cost.shape import Efficiency
from afd.planner.facts.hardware import Accelerator, accelerators, load_accelerator
from afd.planner.facts.model import ModelSpec
from afd.planner.facts.model_hf import load_model, models
from afd.planner.facts.precision import PRECISIONS, Precision
from afd.planner.report.as_json import plan_data
from afd.planner.report.emit import deployment_yaml
from afd.planner.report.presets import FOLDER, PRESET_MODELS, write_presets
from afd.planner.report.text import render
from afd.planner.sizing.context import parse_context
from afd.planner.sizing.decide import make_plan
from afd.planner.sizing.imbalance import EVEN, ExpertSpread, load_spread
from afd.planner.sizing.plan import Plan
from afd.planner.sizing.request import Request


def plan_command(args: argparse.Namespace) -> int:
    """Run one `afd plan`; the exit status is 0 whatever the verdict."""
    if args.presets:
        files, changed = write_presets()
        print(f"{files} files in {FOLDER.name}, {changed} changed")
        return 0
    request = request_of(args)
    report = _report_of(args.report) if args.report else None
    plan = make_plan(request)
    # Files first: a reader of the output who leaves early (`| head`) must not cost them.
    if args.json:
        _write(args.json, json.dumps(plan_data(plan), indent=1, allow_nan=False) + "\n")
    if report:
        _write(args.report, report(plan))
    if args.emit:
        _write(args.emit, deployment_yaml(plan, _model_path(args.model, args.emit)))
    print(render(plan))
    for warning in _partition_warnings(request):
        print(f"note: {warning}")
    return 0


def request_of(args: argparse.Namespace) -> Request:
    """The request that the arguments describe. Raises ConfigError."""
    if not args.model:
        raise ConfigError(f"afd plan needs a model; known are {', '.join(models())}, or a path")
    both = args.accelerators
    if both and (args.attention or args.ffn):
        raise ConfigError("give --accelerators for both pools, or --attention and --ffn, not both")
    first, second = both or args.attention, both or args.ffn
    if not first or not second:
        raise ConfigError(
            "afd plan needs --accelerators A[,B], or --attention A and --ffn B; known are "
            + ", ".join(accelerators())
        )
    drafts = args.draft_tokens
    if drafts is None:
        drafts = math.ceil(args.accepted) - 1
    return Request(
        model=_model(args.model),
        attention=_accelerators(first),
        ffn=_accelerators(second),
        context=parse_context(args.context),
        tpot_s=args.tpot / 1e3,
        gpus=args.gpus,
        tokens_per_s=args.tokens_per_s,
        precision=_precision(args.precision),
        accepted=args.accepted,
        positions=1 + drafts,
        wires=(args.wire,) if args.wire else ("exact", "fp8"),
        depths=(args.depth,) if args.depth else (1, 2, 3),
        efficiency=_efficiency(args.efficiency),
        spread=_spread(args.routing),
        measured=load_measured(args.measured) if args.measured else None,
    )


def _model(name: str) -> ModelSpec:
    if name.lower() not in models() and not Path(name).exists():
        raise ConfigError(
            f"model {name!r} is unknown;{_nearest(name, models())} known are {', '.join(models())},"
            " or give the path of a folder with a config.json"
        )
    return load_model(name)


def _accelerators(names: str) -> tuple[Accelerator, ...]:
    found = []
    for name in dict.fromkeys(names.split(",")):
        stem = name.strip().lower().partition("/")[0]
        if stem not in accelerators():
            raise ConfigError(
                f"accelerator {name!r} is unknown;{_nearest(stem, accelerators())} known are"
                f" {', '.join(accelerators())}"
            )
        found.append(load_accelerator(name.strip()))
    return tuple(found)


def _partition_warnings(request: Request) -> list[str]:
    """What the sources say against the partitions asked for."""
    found = {}
    for accelerator in (*request.attention, *request.ffn):
        whole, _, partition = accelerator.name.partition("/")
        for known in load_accelerator(whole).partitions if partition else ():
            if known.name == partition:
                found[accelerator.name] = f"{accelerator.name} counts parts; {known.warning}"
    return list(found.values())


def _nearest(name: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    return f" did you mean {' or '.join(close)}?" if close else ""


def _precision(name: str) -> Precision:
    if name not in PRECISIONS:
        raise ConfigError(f"precision {name!r} is unknown; use one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def _efficiency(changes: list[str]) -> Efficiency:
    found = Efficiency()
    known = [field.name for field in fields(Efficiency)]
    for change in changes:
        name, _, text = change.partition("=")
        if name not in known:
            raise ConfigError(
                f"--efficiency {name} is unknown;{_nearest(name, tuple(known))} known are"
                f" {', '.join(known)}"
            )
        try:
            found = replace(found, **{name: float(text)})
        except ValueError:
            raise ConfigError(f"--efficiency {change} is not KEY=NUMBER") from None
    return found


def _spread(routing: str | None) -> ExpertSpread:
    if routing is None:
        return load_spread()
    return EVEN if routing == "even" else load_spread(Path(routing))


def _model_path(name: str, emitted: Path) -> str:
    """What `model:` says in a file at ``emitted``: the folder given, or that of the presets, which
    holds a config.json without weights."""
    if name.lower() in PRESET_MODELS:
        return os.path.relpath(FOLDER / name.lower(), emitted.absolute().parent)
    path = Path(name)
    folder = path if path.is_dir() else path.parent
    return str(folder.resolve()) if path.exists() else name


def _report_of(path: Path) -> Callable[[Plan], str | bytes]:
    """What makes the report; before the plan, as a mistake or a missing package needs none."""
    if path.suffix not in (".html", ".png"):
        raise ConfigError(f"--report {path} must end in .html or .png")
    from afd.planner.report.html import html
    from afd.planner.report.plots import png

    return html if path.suffix == ".html" else png


def _write(path: Path, content: str | bytes) -> None:
    try:
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content, encoding="utf-8")
    except OSError as err:
        raise ConfigError(f"cannot write {path}: {err.strerror}") from None
    print(f"{path} written")
