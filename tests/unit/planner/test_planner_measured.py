"""Measured stage times: interpolation, the source of each number, and errors for bad files."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afd.errors import ConfigError
from afd_planner.cost.interpolate import Curve, Surface
from afd_planner.cost.measured import FORMAT, load_measured, parse_measured

DATA = {
    "format": FORMAT,
    "machine": "a machine",
    "attention": [
        {"rows": 8, "context": 1000, "us": 100},
        {"rows": 16, "context": 1000, "us": 140},
        {"rows": 8, "context": 3000, "us": 200},
        {"rows": 16, "context": 3000, "us": 300},
    ],
    "ffn": [{"rows": 32, "us": 500}, {"rows": 64, "us": 600}],
    "wire": [{"bytes": 0, "us": 5}, {"bytes": 1000, "us": 6}],
}


def table(**changes: object):
    return parse_measured({**DATA, **changes}, "file.json")


def us(timed) -> tuple[float, str]:
    return pytest.approx(timed.seconds * 1e6), timed.source


# -- values and their sources


def test_times_and_their_sources():
    t = table()
    assert us(t.t_attention(8, 1000)) == (100, "measured")
    assert us(t.t_attention(12, 1000)) == (120, "interpolated")
    assert us(t.t_attention(12, 2000)) == (185, "interpolated")
    assert us(t.t_attention(4, 1000)) == (100, "extrapolated")  # constant below the first point
    assert us(t.t_attention(24, 1000)) == (180, "extrapolated")  # continues the last segment
    assert us(t.t_attention(8, 5000)) == (300, "extrapolated")
    assert us(t.t_attention(8, 500)) == (100, "extrapolated")
    assert us(t.t_ffn(48)) == (550, "interpolated")
    assert us(t.t_wire(2000)) == (7, "extrapolated")
    assert t.about == {"machine": "a machine"} and t.notes == ()


def test_a_single_point_grows_in_proportion():
    t = table(ffn=[{"rows": 32, "us": 500}], attention=[{"rows": 4, "context": 100, "us": 10}])
    assert us(t.t_ffn(64)) == (1000, "extrapolated")
    assert us(t.t_ffn(16)) == (500, "extrapolated")
    assert us(t.t_attention(8, 200)) == (40, "extrapolated")


def test_repeated_points_use_their_median():
    t = table(ffn=[{"rows": 32, "us": value} for value in (500, 510, 900)])
    assert us(t.t_ffn(32)) == (510, "measured")


def test_times_depend_on_the_experts_per_instance():
    lines = [
        {"rows": rows, "experts": experts, "us": rows * experts}
        for experts in (10, 30)
        for rows in (8, 16)
    ]
    t = table(ffn=lines)
    assert us(t.t_ffn(8, experts=30)) == (240, "measured")
    assert us(t.t_ffn(8, experts=20)) == (160, "interpolated")
    with pytest.raises(ConfigError, match="for 10, 30 experts per instance"):
        t.t_ffn(8)
    assert us(table().t_ffn(32, experts=7)) == (500, "measured")


class _Model:
    def t_attention(self, rows: float, context: float) -> float:
        return 1.0

    def t_ffn(self, rows: float) -> float:
        return 2.0

    def t_wire(self, num_bytes: float) -> float:
        return 3.0

    def t_rest(self, rows: float) -> float:
        return 4.0


def test_a_missing_stage_is_modelled_or_an_error():
    with pytest.raises(ConfigError, match=r"no rest points; measure them with afd bench stages"):
        table().t_rest(3)
    t = table().with_fallback(_Model())
    assert (t.t_rest(3).seconds, t.t_rest(3).source) == (4.0, "modelled")
    assert t.t_ffn(32).source == "measured"


def test_falling_times_are_used_and_noted():
    t = table(ffn=[{"rows": 32, "us": 500}, {"rows": 64, "us": 400}])
    assert us(t.t_ffn(48)) == (450, "interpolated")
    assert us(t.t_ffn(128)) == (400, "extrapolated")
    assert t.notes == ("the time of ffn falls between 32 and 64 rows; used as measured",)


# -- properties

_POINTS = st.lists(
    st.tuples(st.integers(1, 50), st.integers(1, 5), st.floats(1, 100)), min_size=1, max_size=12
)


@given(_POINTS, st.integers(0, 60), st.integers(0, 7))
def test_a_surface_passes_through_its_points_and_is_never_negative(raw, x, z):
    surface = Surface.of({(a, b): (a, b, y) for a, b, y in raw}.values())
    for a, b, y in {(a, b): (a, b, y) for a, b, y in raw}.values():
        assert float(surface.at(np.float64(a), np.float64(b))) == pytest.approx(y)
        assert surface.covers(a, b) and surface.holds(a, b)
    assert float(surface.at(np.float64(x), np.float64(z))) >= 0


@given(_POINTS, st.lists(st.floats(0, 80), min_size=2, max_size=6))
def test_monotone_points_give_a_monotone_curve(raw, queries):
    xs = sorted({a for a, _, _ in raw})
    curve = Curve.of(zip(xs, sorted(y for _, _, y in raw), strict=False))
    assert not curve.falls()
    values = curve.at(np.array(sorted(queries)))
    assert (np.diff(values) >= -1e-9).all()


@given(_POINTS, st.integers(1, 60), st.integers(1, 7))
def test_many_queries_equal_single_ones(raw, x, z):
    surface = Surface.of(raw)
    first, second = np.array([1.0, x, 60.0]), np.array([1.0, z, 7.0])
    alone = [float(surface.at(np.float64(a), np.float64(b))) for a, b in zip(first, second)]  # noqa: B905
    np.testing.assert_allclose(surface.at(first, second), alone)


# -- messages


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; write it with afd bench stages"),
        ("{", "is not JSON"),
        ("[]", 'lacks "format": "afd-stage-times-1"'),
        (json.dumps({"format": FORMAT}), "has no points for any stage"),
        (json.dumps({"format": FORMAT, "fnn": []}), "unknown key 'fnn'"),
        (json.dumps({**DATA, "ffn": 3}), "ffn must be a list"),
        (json.dumps({**DATA, "ffn": [{"rows": 3}]}), r"ffn\[0\] must have rows and us"),
        (json.dumps({**DATA, "ffn": [{"rows": 3, "us": -1}]}), "must be a number of at least 0"),
        (json.dumps({**DATA, "ffn": [{"rows": 0, "us": 1}]}), "rows is 0"),
        (
            json.dumps({**DATA, "ffn": [{"rows": 1, "us": 1}, {"rows": 2, "us": 1, "experts": 4}]}),
            "only some ffn points name experts",
        ),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, message: str):
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_measured(path)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot read the measured times"):
        load_measured(tmp_path / "none.json")
