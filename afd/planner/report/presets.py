"""Deployment files for well-known models, written by the planner: configs/topologies.

``afd plan --presets`` writes them; a test checks that they are what the planner still writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from afd.errors import ConfigError
from afd.planner.cost.shape import AfdShape
from afd.planner.facts.files import CONFIGS
from afd.planner.facts.hardware import Accelerator, load_accelerator
from afd.planner.facts.model import ModelSpec
from afd.planner.facts.model_hf import FOLDER as MODELS
from afd.planner.facts.model_hf import load_model
from afd.planner.report.emit import file_text
from afd.planner.sizing.context import fixed
from afd.planner.sizing.request import Request
from afd.planner.sizing.search import Spaces, afd_operating
from afd.planner.sizing.verdict import NEEDED

FOLDER = CONFIGS / "topologies"

PRESET_MODELS = ("step-3", "deepseek-v3", "qwen3-235b-a22b", "qwen3-30b-a3b")
PRESET_ACCELERATORS = ("h800", "h200", "mi300x", "mi355x")
CONTEXTS_K = (4, 8, 16, 32, 64, 128)
TPOT_S = 0.050

_README_HEAD = """# Presets

Written by `afd plan --presets`: deployment files per model, accelerator and mean context length,
for 50 ms per token, FP8 weights and cache, and at most 256 GPUs per unit. [docs/planner.md] says
how to use them. Cells: xAyF (instances of one server, or of one GPU where both pools fit one
server), and how many times as many tokens per USD it gives as the best colocated plan; **bold**
where that is worth a second pool (1.05 and more). The others are for who disaggregates anyway.

[docs/planner.md]: ../../docs/planner.md"""

_HEAD = (
    "# Written by `afd plan --presets`, see docs/planner.md. `model: .` holds config.json and no\n"
    "# weights; serve with --set model=/path/to/checkpoint\n"
)


@dataclass(frozen=True)
class Preset:
    """One file. ratio: times the best colocated plan, None where none fits; plan: ``2A2F``."""

    model: str
    accelerator: str
    thousands: int
    plan: str
    ratio: float | None
    text: str

    @property
    def path(self) -> str:
        return f"{self.model}/{self.accelerator}-{self.thousands}k.yaml"


def preset_files() -> dict[str, str]:
    """Text of every preset, of the models' config.json and of the summary, by path below FOLDER."""
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
    """A table per model: xAyF and how it compares with the best colocated plan."""
    lines = [_README_HEAD]
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
    return f"**{text}**" if preset.ratio >= NEEDED else text


def config_text(name: str) -> str:
    """The publisher's config.json keys of a model of configs/models, as of a bfloat16 copy: FFN
    instances read no quantised checkpoints."""
    file = yaml.safe_load((MODELS / f"{name}.yaml").read_text(encoding="utf-8"))
    keys = {key: value for key, value in file["config"].items() if key != "quantization_config"}
    return json.dumps(keys, indent=2) + "\n"


def _of_all_contexts(model: ModelSpec, accelerator: Accelerator) -> Iterator[Preset]:
    """Contexts that the model reads and for which an xAyF unit meets the service level."""
    shortest = fixed(CONTEXTS_K[0] * 1024)
    spaces = Spaces(Request(model, (accelerator,), (accelerator,), shortest, TPOT_S))
    for thousands in CONTEXTS_K:
        if not model.max_context or thousands * 1024 <= model.max_context:
            preset = _preset(spaces.at_context(fixed(thousands * 1024)), thousands)
            if preset is not None:
                yield preset


def _preset(spaces: Spaces, thousands: int) -> Preset | None:
    """None where no xAyF unit meets the service level."""
    afd, colocated = spaces.best_afd(spaces.limits), spaces.best_colocated(spaces.limits)
    if afd is None:
        return None
    request = spaces.request
    point, _ = afd_operating(afd)
    assert isinstance(point.shape, AfdShape)
    ratio = afd.score / colocated.score if colocated else None
    if ratio is None:
        advice = "recommended: no colocated plan fits"
    else:
        word = "recommended" if ratio >= NEEDED else "NOT recommended"
        advice = f"{word}: {ratio:.2f} times the best colocated plan"
    return Preset(
        request.model.name,
        request.attention[0].name,
        thousands,
        f"{point.shape.attention.instances}A{point.shape.ffn.instances}F",
        ratio,
        _HEAD + file_text(point, request, ".", advice),
    )


def write_presets(folder: Path = FOLDER) -> tuple[int, int]:
    """Write all presets and remove those that no longer exist; (files, files that changed).

    Raises:
        ConfigError: the folder cannot be written.
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
