"""Measured stage times in place of the cost model's: a file format and what it answers.

A file is one JSON object::

    {"format": "afd-stage-times-1", "machine": "...", "model": "...", "command": "...",
     "date": "2026-01-31",
     "attention": [{"rows": 16, "context": 512, "us": 1296.0}, ...],
     "ffn":       [{"rows": 16, "us": 1519.0, "experts": 16}, ...],
     "wire":      [{"bytes": 16384, "us": 4.0}, ...],
     "rest":      [{"rows": 32, "us": 6000.0}, ...],
     "prefill":   [{"rows": 256, "us": 9000.0}, ...]}

rows: of one micro-batch; of the whole step for ``rest``. context: mean tokens in the KV cache per
row. attention, ffn: one layer, one micro-batch. ffn rows: of all attention instances together.
experts (optional): routed experts held by the FFN instance. wire: one message one way, from post to
visible. rest: what a step takes on the attention side beside its layers (scheduling, embedding, LM
head, sampling). prefill: attention half of one layer over ``rows`` prompt tokens, for the simulator
only. us: microseconds. Any hardware may write it; ``afd bench stages`` does.

Interpolation and what happens outside of the data: :mod:`afd.planner.cost.interpolate`.
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
from afd.planner.cost.interpolate import Curve, Surface

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
    """One time and where it comes from."""

    seconds: float
    source: Source


class StageModel(Protocol):
    """Stage times from a model, in seconds: what the tables fall back on. Arguments as there."""

    def t_attention(self, rows: float, context: float) -> float: ...

    def t_ffn(self, rows: float) -> float: ...

    def t_wire(self, num_bytes: float) -> float: ...

    def t_rest(self, rows: float) -> float: ...


@dataclass(frozen=True)
class MeasuredTimes:
    """Stage times of a file, interpolated. A stage without points comes from ``fallback``.

    about: machine, model, command, date as the file states them. notes: what a reader should know
    of the data, one sentence each (a time that falls where more work should raise it).
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
        """The same tables; ``model`` answers for stages that the file lacks."""
        return replace(self, fallback=model)

    def t_attention(self, rows: float, context: float) -> Timed:
        """Attention half of one layer for one micro-batch of ``rows`` with ``context`` tokens each.

        Raises:
            ConfigError: no points for this stage and no fallback. So for the other three.
        """
        if self.attention is None:
            return Timed(self._model("attention").t_attention(rows, context), "modelled")
        return _on_surface(self.attention, rows, context)

    def t_ffn(self, rows: float, experts: float | None = None) -> Timed:
        """Experts of one layer over ``rows`` of all attention instances together.

        Args:
            experts: routed experts the instance holds; needed where the file has several numbers,
                of no effect where it names none.
        """
        if self.ffn is None:
            return Timed(self._model("ffn").t_ffn(rows), "modelled")
        return _on_surface(self.ffn, rows, self.experts_line(experts))

    def t_wire(self, num_bytes: float) -> Timed:
        """One message of ``num_bytes`` one way."""
        if self.wire is None:
            return Timed(self._model("wire").t_wire(num_bytes), "modelled")
        return _on_curve(self.wire, num_bytes)

    def t_rest(self, rows: float) -> Timed:
        """What a step of ``rows`` takes on the attention side beside its layers."""
        if self.rest is None:
            return Timed(self._model("rest").t_rest(rows), "modelled")
        return _on_curve(self.rest, rows)

    def experts_line(self, experts: float | None) -> float:
        """Where on the FFN table an instance of ``experts`` experts stands; see ``t_ffn``."""
        if experts is not None and self.ffn_experts:
            return experts
        if len(self.ffn_experts) > 1:
            held = ", ".join(f"{count:g}" for count in self.ffn_experts)
            raise ConfigError(
                f"the measured FFN times are for {held} experts per instance;"
                " say how many the planned instance holds"
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


_ANY = 1.0  # second argument of FFN points that name no number of experts


def load_measured(path: Path) -> MeasuredTimes:
    """Read a file of measured stage times.

    Raises:
        ConfigError: one sentence naming the file, the place, and what to do.
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
    """The tables of a file's contents. name: of the file, for messages. Raises ConfigError."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ConfigError(
            f'{name} does not begin with "format": "{FORMAT}"; it is not a file of stage times'
        )
    unknown = sorted(set(data) - {"format", *_ABOUT, *STAGES})
    if unknown:
        raise ConfigError(f"{name}: key {unknown[0]!r} is not known; stages are {_words(STAGES)}")
    points = {stage: _points(data.get(stage, []), stage, name) for stage in STAGES}
    if not any(points.values()):
        raise ConfigError(f"{name} has no points for any stage; measure with afd bench stages")
    named = ["experts" in point for point in points["ffn"]]
    if any(named) and not all(named):
        raise ConfigError(f"{name}: some ffn points name experts and some do not; name all or none")
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
            raise ConfigError(f"{place} must have {_words(sorted(needed))} and nothing unknown")
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
    """A sentence for every place where a time falls as the work grows."""
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
        f"{label} falls between {low:g} and {high:g} {what}; used as measured"
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
    inside = bool(curve.covers(np.float64(x)))
    return Timed(seconds, "interpolated" if inside else "extrapolated")


def _words(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names[:-1]) + " and " + names[-1]
