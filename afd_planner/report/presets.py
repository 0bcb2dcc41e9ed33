"""Presets: deployment files for well-known models in afd_planner/data/topologies.

``afd plan --presets`` writes them. A test checks that they match what the planner writes today.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from afd.errors import ConfigError
from afd_planner.cost.shape import AfdShape, calibrated
from afd_planner.facts.files import DATA
from afd_planner.facts.hardware import Accelerator, load_accelerator
from afd_planner.facts.model import ModelSpec
from afd_planner.facts.model_hf import FOLDER as MODELS
from afd_planner.facts.model_hf import load_model
from afd_planner.report.emit import advice_text, file_text
from afd_planner.sizing.context import fixed
from afd_planner.sizing.error import CALIBRATED_ERROR, MODEL_ERROR, Decision, error_of
from afd_planner.sizing.request import Request
from afd_planner.sizing.search import Search, afd_operating

FOLDER = DATA / "topologies"

PRESET_MODELS = ("step-3", "deepseek-v3", "qwen3-235b-a22b", "qwen3-30b-a3b")
PRESET_ACCELERATORS = ("h800", "h200", "mi300x", "mi355x")
CONTEXTS_K = (4, 8, 16, 32, 64, 128)
TPOT_S = 0.050

_README_HEAD = """# Presets

Deployment files per model, accelerator and mean context length, written by `afd plan --presets`.
They are planned for a TPOT of 50 ms, experts and cache in FP8, attention weights in bfloat16, and
at most 256 GPUs per unit. Each names its hosts, with example addresses, and passes
`afd serve --check-file`: its GPUs hold the weights, the cache of all planned sequences and the
slots of the transport. Usage: [docs/planner.md].

Cells show xAyF and its tokens per USD relative to the best colocated plan. An instance is one
server, or one GPU if both pools fit into one server. **Bold**: disaggregation wins also with the
model's error, a factor of {fitted:.2f} on H200 and {default:.2f} on the others here. The rest is
within that error or below it, for users who disaggregate anyway.

[docs/planner.md]: ../../../docs/planner.md"""

_HEAD = (
    "# Written by `afd plan --presets`. This folder has a config.json but no weights: serve with\n"
    "# --set model=/path/to/checkpoint\n"
)


@dataclass(frozen=True)
class Preset:
    """One preset file. ``plan``: e.g. ``2A2F``; ``ratio``: to the best colocated plan, or None."""

    model: str
    accelerator: str
    thousands: int
    plan: str
    ratio: float | None
    decision: Decision
    text: str

    @property
    def path(self) -> str:
        return f"{self.model}/{self.accelerator}-{self.thousands}k.yaml"


def preset_files() -> dict[str, str]:
    """Returns the text of every preset, config.json and the summary, by path below FOLDER."""
    accelerators = [load_accelerator(name) for name in PRESET_ACCELERATORS]
    presets = [
        preset
        for name in PRESET_MODELS
        for accelerator in accelerators
        for preset in _of_all_contexts(load_model(name), accelerator)
    ]
    files = {f"{name}/config.json": config_text(name) for name in PRESET_MODELS}
    files.update({preset.path: preset.text for preset in presets})
    files["README.md"] = _summary(presets)
    return files


def _summary(presets: list[Preset]) -> str:
    """Returns the README: a table per model with xAyF and its ratio to the colocated plan."""
    head = _README_HEAD.format(fitted=CALIBRATED_ERROR.high, default=MODEL_ERROR.high)
    lines = [head]
    by_place = {(p.model, p.accelerator, p.thousands): p for p in presets}
    for name in PRESET_MODELS:
        lines.append(f"\n## {name}\n")
        lines.append("| context | " + " | ".join(PRESET_ACCELERATORS) + " |")
        lines.append("|---|" + "---|" * len(PRESET_ACCELERATORS))
        for thousands in CONTEXTS_K:
            row = [by_place.get((name, gpu, thousands)) for gpu in PRESET_ACCELERATORS]
            if any(row):
                lines.append(f"| {thousands}K | " + " | ".join(_cell(p) for p in row) + " |")
    return "\n".join(lines) + "\n"


def _cell(preset: Preset | None) -> str:
    if preset is None:
        return "-"
    if preset.ratio is None:
        return f"**{preset.plan}**, no colocated plan"
    text = f"{preset.plan} {preset.ratio:.2f}"
    return f"**{text}**" if preset.decision is Decision.DISAGGREGATE else text


def config_text(name: str) -> str:
    """Returns the config.json of a model that comes with the planner, as of a bfloat16 checkpoint.

    ``quantization_config`` is omitted: files are checked with bfloat16 attention weights, which
    need the most memory. ``ffn.weights`` says how experts are held.
    """
    file = yaml.safe_load((MODELS / f"{name}.yaml").read_text(encoding="utf-8"))
    keys = {key: value for key, value in file["config"].items() if key != "quantization_config"}
    return json.dumps(keys, indent=2) + "\n"


def _of_all_contexts(model: ModelSpec, accelerator: Accelerator) -> Iterator[Preset]:
    """Yields a preset per context that the model supports and an xAyF unit can serve in time."""
    shortest = fixed(CONTEXTS_K[0] * 1024)
    gpus = (accelerator,)
    search = Search(Request(model, gpus, gpus, shortest, TPOT_S, efficiency=calibrated(gpus)))
    for thousands in CONTEXTS_K:
        if not model.max_context or thousands * 1024 <= model.max_context:
            preset = _preset(search.at_context(fixed(thousands * 1024)), thousands)
            if preset is not None:
                yield preset


def _preset(search: Search, thousands: int) -> Preset | None:
    """Returns the preset, or None if no xAyF unit meets the TPOT."""
    afd, colocated = search.best_afd(search.limits), search.best_colocated(search.limits)
    if afd is None:
        return None
    request = search.request
    point, _ = afd_operating(afd)
    assert isinstance(point.shape, AfdShape)
    ratio = afd.score / colocated.score if colocated else None
    decision = Decision.DISAGGREGATE if ratio is None else error_of(request).decide(ratio)
    advice = advice_text(decision, ratio)
    return Preset(
        request.model.name,
        request.attention[0].name,
        thousands,
        f"{point.shape.attention.instances}A{point.shape.ffn.instances}F",
        ratio,
        decision,
        _HEAD + file_text(point, request, ".", advice),
    )


def write_presets(folder: Path = FOLDER) -> tuple[int, int]:
    """Writes all presets, removes obsolete ones, and returns (files, changed files).

    Raises:
        ConfigError: The folder cannot be written.
    """
    wanted = preset_files()
    changed = 0
    try:
        for name, text in wanted.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")
                changed += 1
        for path in folder.glob("*/*.yaml"):
            if path.relative_to(folder).as_posix() not in wanted:
                path.unlink()
                changed += 1
    except OSError as err:
        raise ConfigError(f"cannot write presets to {folder}: {err.strerror}") from None
    return len(wanted), changed
