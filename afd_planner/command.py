"""`afd plan`: turns arguments into a request, and prints and writes the plan."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import textwrap
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from afd.errors import ConfigError
from afd_planner.cost.measured import load_measured
from afd_planner.cost.shape import Efficiency, calibrated
from afd_planner.facts.files import DATA
from afd_planner.facts.hardware import Accelerator, accelerators, load_accelerator
from afd_planner.facts.model import ModelSpec
from afd_planner.facts.model_hf import load_model, models
from afd_planner.facts.precision import PRECISIONS, Precision
from afd_planner.report.as_json import plan_data
from afd_planner.report.emit import deployment_yaml
from afd_planner.report.presets import FOLDER, PRESET_MODELS, write_presets
from afd_planner.report.simulation import simulation_yaml
from afd_planner.report.text import render
from afd_planner.sizing.context import parse_context
from afd_planner.sizing.decide import make_plan
from afd_planner.sizing.imbalance import EVEN_SPREAD, ExpertSpread, load_spread
from afd_planner.sizing.layout import parse_layout
from afd_planner.sizing.plan import Plan
from afd_planner.sizing.request import Request

MOST_ACCEPTED = 64
"""Tokens per step that no draft model reaches."""


def plan_command(args: argparse.Namespace) -> int:
    """Runs one `afd plan` and returns the exit status, 0 for either verdict."""
    if args.list:
        print(known_names())
        return 0
    if args.presets:
        files, changed = write_presets()
        print(f"{files} files in {FOLDER}, {changed} changed")
        return 0
    request = request_of(args)
    report = _report_of(args.report) if args.report else None
    plan = make_plan(request)
    # Files come first, so that a closed pipe (`| head`) cannot prevent them.
    if args.json:
        _write(args.json, json.dumps(plan_data(plan), indent=1, allow_nan=False) + "\n")
    if report:
        _write(args.report, report(plan))
    if args.emit:
        _write(args.emit, deployment_yaml(plan, _model_path(args.model, args.emit)))
    if args.simulate:
        _write(args.simulate, simulation_yaml(plan))
    print(render(plan))
    for warning in _partition_warnings(request):
        print(f"note: {warning}")
    return 0


def known_names() -> str:
    """Returns the names that `afd plan` accepts, and the folder of the presets, for a terminal."""
    partitions = [
        f"{name}/{partition.name}"
        for name in accelerators()
        for partition in load_accelerator(name).partitions
    ]
    groups = {
        "models": models(),
        "accelerators": (*accelerators(), *partitions),
        "precisions": tuple(PRECISIONS),
        "efficiencies": tuple(field.name for field in fields(Efficiency)),
    }
    width = max(len(title) for title in groups) + 2
    lines = []
    for title, names in groups.items():
        text = textwrap.fill(", ".join(names), 100 - width, break_on_hyphens=False)
        lines.append(f"{title:<{width}}" + text.replace("\n", "\n" + " " * width))
    folders = {
        "presets": FOLDER,
        "routing loads": DATA / "routing",
        "simulations": DATA / "simulate",
    }
    return "\n".join([*lines, *(f"{title:<{width}}{path}" for title, path in folders.items())])


def request_of(args: argparse.Namespace) -> Request:
    """Returns the request that the arguments describe. Raises ConfigError."""
    if not args.model:
        raise ConfigError("afd plan needs a model; give a name of afd plan --list, or a path")
    both = args.accelerators
    if both and (args.attention or args.ffn):
        raise ConfigError("give either --accelerators for both pools, or --attention and --ffn")
    first, second = both or args.attention, both or args.ffn
    if not first or not second:
        raise ConfigError(
            "afd plan needs --accelerators A[,B], or --attention A and --ffn B; choose from "
            + ", ".join(accelerators())
        )
    drafts = args.draft_tokens
    if drafts is None:
        if not 1 <= args.accepted < MOST_ACCEPTED:
            raise ConfigError(
                f"--accepted {args.accepted:g} is out of range; give a number of at least 1 and"
                f" below {MOST_ACCEPTED}"
            )
        drafts = math.ceil(args.accepted) - 1
    attention, ffn = _accelerators(first), _accelerators(second)
    return Request(
        model=_model(args.model),
        attention=attention,
        ffn=ffn,
        context=parse_context(args.context),
        tpot_s=args.tpot / 1e3,
        gpus=args.gpus,
        tokens_per_s=args.tokens_per_s,
        precision=_precision(args.precision),
        accepted=args.accepted,
        positions=1 + drafts,
        wires=(args.wire,) if args.wire else ("exact", "fp8"),
        depths=(args.depth,) if args.depth else (1, 2, 3),
        redundant=(0, 1) if args.redundant_experts is None else (args.redundant_experts,),
        efficiency=_efficiency(args.efficiency, calibrated((*attention, *ffn))),
        spread=_spread(args.routing),
        measured=load_measured(args.measured) if args.measured else None,
        layouts=tuple(parse_layout(text) for text in args.layout),
        batch=args.batch,
    )


def _model(name: str) -> ModelSpec:
    if name.lower() not in models() and not Path(name).exists():
        raise ConfigError(
            f"model {name!r} is unknown;{_nearest(name, models())} use one of"
            f" {', '.join(models())}, or a folder with a config.json"
        )
    return load_model(name)


def _accelerators(names: str) -> tuple[Accelerator, ...]:
    found = []
    for name in dict.fromkeys(names.split(",")):
        stem = name.strip().lower().partition("/")[0]
        if stem not in accelerators():
            raise ConfigError(
                f"accelerator {name!r} is unknown;{_nearest(stem, accelerators())} use one of"
                f" {', '.join(accelerators())}"
            )
        found.append(load_accelerator(name.strip()))
    return tuple(found)


def _partition_warnings(request: Request) -> list[str]:
    """Returns the warnings for requested partitions, as stated by their sources."""
    found = {}
    for accelerator in (*request.attention, *request.ffn):
        whole, _, partition = accelerator.name.partition("/")
        for known in load_accelerator(whole).partitions if partition else ():
            if known.name == partition:
                found[accelerator.name] = f"{accelerator.name} counts partitions; {known.warning}"
    return list(found.values())


def _nearest(name: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    return f" did you mean {' or '.join(close)}?" if close else ""


def _precision(name: str) -> Precision:
    if name not in PRECISIONS:
        raise ConfigError(f"precision {name!r} is unknown; use one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def _efficiency(changes: list[str], base: Efficiency) -> Efficiency:
    values: dict[str, Any] = {}
    known = [field.name for field in fields(Efficiency)]
    for change in changes:
        name, _, text = change.partition("=")
        if name not in known:
            raise ConfigError(
                f"--efficiency {name} is unknown;{_nearest(name, tuple(known))} use one of"
                f" {', '.join(known)}"
            )
        try:
            values[name] = float(text)
        except ValueError:
            raise ConfigError(f"--efficiency {change} is not KEY=NUMBER") from None
    return replace(base, **values)


def _spread(routing: str | None) -> ExpertSpread:
    if routing is None:
        return load_spread()
    return EVEN_SPREAD if routing == "even" else load_spread(Path(routing))


def _model_path(name: str, emitted: Path) -> str:
    """Returns the value of `model:` in a file at ``emitted``.

    For a model that comes with the planner, this is the folder of its presets, which has a
    config.json but no weights.
    """
    if name.lower() in PRESET_MODELS:
        return os.path.relpath(FOLDER / name.lower(), emitted.absolute().parent)
    path = Path(name)
    folder = path if path.is_dir() else path.parent
    return str(folder.resolve()) if path.exists() else name


def _report_of(path: Path) -> Callable[[Plan], str | bytes]:
    """Returns the function that makes the report; checked before planning to fail early."""
    if path.suffix not in (".html", ".png"):
        raise ConfigError(f"--report {path} must end in .html or .png")
    from afd_planner.report.html import html
    from afd_planner.report.plots import png

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
