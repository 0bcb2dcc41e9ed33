"""Measured stage times, which replace those of the cost model: file format and look-up.

A file is one JSON object::

    {"format": "afd-stage-times-1", "machine": "...", "model": "...", "command": "...",
     "date": "2026-01-31",
     "attention": [{"rows": 16, "context": 512, "us": 1296.0}, ...],
     "ffn":       [{"rows": 16, "us": 1519.0, "experts": 16}, ...],
     "wire":      [{"bytes": 16384, "us": 4.0}, ...],
     "rest":      [{"rows": 32, "us": 6000.0}, ...],
     "prefill":   [{"rows": 256, "us": 9000.0}, ...]}

- ``attention``: attention of one layer for one micro-batch of ``rows`` rows; ``context`` is the
  mean number of tokens per row in the KV cache.
- ``ffn``: experts of one layer for one micro-batch; ``rows`` counts all attention instances;
  ``experts`` (optional) is the number of routed experts that the FFN instance holds.
- ``wire``: one message in one direction, from post until it is visible.
- ``rest``: part of a step outside its layers on the attention side (scheduling, embedding, LM head,
  sampling); ``rows`` of the whole step.
- ``prefill``: attention of one layer over ``rows`` prompt tokens. Only the simulator uses it.

``us`` is microseconds. ``afd bench stages`` writes such files, and so may any other tool.
:mod:`afd_planner.cost.interpolate` interpolates and extrapolates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from afd.errors import ConfigError
from afd_planner.cost.interpolate import Curve, Surface

FORMAT = "afd-stage-times-1"
STAGES = ("attention", "ffn", "wire", "rest", "prefill")

Source = Literal["measured", "interpolated", "extrapolated", "modelled"]

_ARGUMENTS = {
    "attention": ("rows", "context"),
    "ffn": ("rows",),
    "wire": ("bytes",),
    "rest": ("rows",),
    "prefill": ("rows",),
}
_OPTIONAL = {"ffn": ("experts",)}
_ABOUT = ("machine", "model", "command", "date")


@dataclass(frozen=True)
class Timed:
    """A time and its origin."""

    seconds: float
    source: Source


class StageModel(Protocol):
    """A model of stage times in seconds, the fallback of ``MeasuredTimes``. Same arguments."""

    def t_attention(self, rows: float, context: float) -> float: ...

    def t_ffn(self, rows: float) -> float: ...

    def t_wire(self, num_bytes: float) -> float: ...

    def t_rest(self, rows: float) -> float: ...


@dataclass(frozen=True)
class MeasuredTimes:
    """Interpolated stage times of a file. ``fallback`` provides stages without points.

    Attributes:
        ffn_experts: Numbers of experts for which the file has FFN times, ascending.
        about: Machine, model, command and date as stated in the file.
        notes: Peculiarities of the data, one sentence each, e.g. a time that falls with more rows.
    """

    attention: Surface | None
    ffn: Surface | None
    wire: Curve | None
    rest: Curve | None
    prefill: Curve | None = None
    ffn_experts: tuple[float, ...] = ()
    about: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    fallback: StageModel | None = None

    def with_fallback(self, model: StageModel) -> MeasuredTimes:
        """Returns the same tables with ``model`` as the fallback."""
        return replace(self, fallback=model)

    def t_attention(self, rows: float, context: float) -> Timed:
        """Returns attention of one layer for ``rows`` rows with ``context`` tokens each.

        Raises:
            ConfigError: The file has no points for this stage and there is no fallback. The other
                methods raise it for the same reason.
        """
        if self.attention is None:
            return Timed(self._model("attention").t_attention(rows, context), "modelled")
        return _on_surface(self.attention, rows, context)

    def t_ffn(self, rows: float, experts: float | None = None) -> Timed:
        """Returns the experts of one layer for ``rows`` rows of all attention instances.

        Args:
            experts: Routed experts of the FFN instance. Required if the file has times for several
                numbers of experts, ignored if it names none.
        """
        if self.ffn is None:
            return Timed(self._model("ffn").t_ffn(rows), "modelled")
        return _on_surface(self.ffn, rows, self.experts_line(experts))

    def t_wire(self, num_bytes: float) -> Timed:
        """Returns the time of one message of ``num_bytes`` in one direction."""
        if self.wire is None:
            return Timed(self._model("wire").t_wire(num_bytes), "modelled")
        return _on_curve(self.wire, num_bytes)

    def t_rest(self, rows: float) -> Timed:
        """Returns the part of a step of ``rows`` rows outside its layers, on the attention side."""
        if self.rest is None:
            return Timed(self._model("rest").t_rest(rows), "modelled")
        return _on_curve(self.rest, rows)

    def experts_line(self, experts: float | None) -> float:
        """Returns the second argument of the FFN table for an instance of ``experts`` experts."""
        if experts is not None and self.ffn_experts:
            return experts
        if len(self.ffn_experts) > 1:
            held = ", ".join(f"{count:g}" for count in self.ffn_experts)
            raise ConfigError(
                f"the measured FFN times are for {held} experts per instance;"
                " state how many the instance holds"
            )
        return self.ffn_experts[0] if self.ffn_experts else _ANY

    def _model(self, stage: str) -> StageModel:
        if self.fallback is None:
            raise self._missing(stage)
        return self.fallback

    def _missing(self, stage: str) -> ConfigError:
        return ConfigError(
            f"the measured stage times have no {stage} points;"
            f" measure them with afd bench stages, or add a {stage!r} list to the file"
        )


_ANY = 1.0  # second argument of FFN points without a number of experts


def load_measured(path: Path) -> MeasuredTimes:
    """Reads a file of measured stage times.

    Raises:
        ConfigError: The file cannot be read or is invalid. The message names the place.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as err:
        raise ConfigError(
            f"cannot read the measured times {path} ({err.strerror}); write them with"
            " afd bench stages"
        ) from None
    if not text.strip():
        raise ConfigError(f"{path} is empty; write it with afd bench stages")
    try:
        data = json.loads(text)
    except ValueError as err:
        raise ConfigError(f"{path} is not JSON ({err}); write it with afd bench stages") from None
    return parse_measured(data, str(path))


def parse_measured(data: object, name: str) -> MeasuredTimes:
    """Returns the tables of a parsed file. ``name`` names it in messages. Raises ConfigError."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ConfigError(
            f'{name} lacks "format": "{FORMAT}"; give a file that afd bench stages wrote'
        )
    unknown = sorted(set(data) - {"format", *_ABOUT, *STAGES})
    if unknown:
        raise ConfigError(f"{name}: unknown key {unknown[0]!r}; stages are {_words(STAGES)}")
    points = {stage: _points(data.get(stage, []), stage, name) for stage in STAGES}
    if not any(points.values()):
        raise ConfigError(f"{name} has no points for any stage; measure with afd bench stages")
    named = ["experts" in point for point in points["ffn"]]
    if any(named) and not all(named):
        raise ConfigError(f"{name}: only some ffn points name experts; name them in all or none")
    attention = [(p["rows"], p["context"], p["us"] * 1e-6) for p in points["attention"]]
    ffn = [(p["rows"], p.get("experts", _ANY), p["us"] * 1e-6) for p in points["ffn"]]
    wire = [(p["bytes"], p["us"] * 1e-6) for p in points["wire"]]
    rest = [(p["rows"], p["us"] * 1e-6) for p in points["rest"]]
    prefill = [(p["rows"], p["us"] * 1e-6) for p in points["prefill"]]
    tables = (
        Surface.of(attention) if attention else None,
        Surface.of(ffn) if ffn else None,
        Curve.of(wire) if wire else None,
        Curve.of(rest) if rest else None,
        Curve.of(prefill) if prefill else None,
    )
    return MeasuredTimes(
        *tables,
        ffn_experts=tuple(sorted({p["experts"] for p in points["ffn"] if "experts" in p})),
        about={key: str(data[key]) for key in _ABOUT if key in data},
        notes=_notes(*tables),
    )


def _points(entries: object, stage: str, name: str) -> list[dict[str, float]]:
    if not isinstance(entries, list):
        raise ConfigError(f"{name}: {stage} must be a list of points")
    needed = {*_ARGUMENTS[stage], "us"}
    allowed = needed | {*_OPTIONAL.get(stage, ())}
    for number, entry in enumerate(entries):
        place = f"{name}: {stage}[{number}]"
        if not isinstance(entry, dict) or not needed <= set(entry) <= allowed:
            raise ConfigError(f"{place} must have {_words(sorted(needed))} and no unknown keys")
        for key, value in entry.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or value < 0:
                raise ConfigError(f"{place}: {key} is {value!r}; it must be a number of at least 0")
            if key in ("rows", "us", "experts") and value == 0:
                raise ConfigError(f"{place}: {key} is 0; leave the point out")
    return [{key: float(value) for key, value in entry.items()} for entry in entries]


def _notes(
    attention: Surface | None,
    ffn: Surface | None,
    wire: Curve | None,
    rest: Curve | None,
    prefill: Curve | None,
) -> tuple[str, ...]:
    """Returns a sentence for every range in which the time falls as the work grows."""
    curves: list[tuple[str, str, Curve]] = []
    for label, what, surface in (("attention", "context", attention), ("ffn", "experts", ffn)):
        if surface is not None:
            for key, curve in zip(surface.keys, surface.curves, strict=True):
                place = f"{label} at {what} {key:g}" if len(surface.keys) > 1 else label
                curves.append((place, "rows", curve))
    singles = (("wire", "bytes", wire), ("rest", "rows", rest), ("prefill", "rows", prefill))
    for label, what, single in singles:
        if single is not None:
            curves.append((label, what, single))
    return tuple(
        f"the time of {label} falls between {low:g} and {high:g} {what}; used as measured"
        for label, what, curve in curves
        for low, high in curve.falls()
    )


def _on_surface(surface: Surface, first: float, second: float) -> Timed:
    seconds = float(surface.at(np.float64(first), np.float64(second)))
    if surface.holds(first, second):
        return Timed(seconds, "measured")
    return Timed(seconds, "interpolated" if surface.covers(first, second) else "extrapolated")


def _on_curve(curve: Curve, x: float) -> Timed:
    seconds = float(curve.at(np.float64(x)))
    if curve.holds(x):
        return Timed(seconds, "measured")
    return Timed(seconds, "interpolated" if curve.covers(x) else "extrapolated")


def _words(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names[:-1]) + " and " + names[-1]
