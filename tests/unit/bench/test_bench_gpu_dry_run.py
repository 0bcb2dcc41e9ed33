"""A dry run of `afd bench gpu` (--device cpu) must fit into the memory of a small host: on CPU vLLM
touches the whole KV cache when it starts."""

from pathlib import Path
from types import ModuleType

import pytest

from afd.errors import AfdError
from afd_bench.gpu import decode, efficiency, identity, jitter, lengths
from afd_bench.gpu.targets import settings_of

MOST_GIB = 2.0  # of one server


def caches(bench: ModuleType, monkeypatch, tmp_path: Path, *argv: str) -> dict[str, float]:
    """GiB of KV cache per server in a run on the tiny model; starts no server."""
    given = {}

    def running(asked, setup):
        given.update({t.label: float(settings_of(t, setup.sizes)["kv_cache_gib"]) for t in asked})
        raise AfdError("that is all")

    monkeypatch.setattr(bench, "running", running)
    places = ["--models", str(tmp_path), "--logs", str(tmp_path)]
    with pytest.raises(AfdError):
        bench.main(["--model", "tiny", *places, *argv])
    return given


@pytest.mark.parametrize(
    ("bench", "argv"),
    [
        (decode, ["--targets", "1A1F", "1A3F", "TP1"]),
        (efficiency, []),
        (identity, []),
        (jitter, ["--targets", "1A1F", "TP1"]),
        (lengths, ["--cells", "8x256", "16x64"]),
    ],
)
def test_no_server_takes_the_cache_of_a_gpu(bench, argv, monkeypatch, tmp_path):
    given = caches(bench, monkeypatch, tmp_path, "--device", "cpu", *argv)
    assert given and {label: gib for label, gib in given.items() if gib > MOST_GIB} == {}


def test_the_cache_that_is_asked_for_is_given(monkeypatch, tmp_path):
    argv = ["--targets", "1A1F", "TP1"]
    for more, expected in (
        ([], [16.0, 8.0]),
        (["--kv-gib", "3"], [6.0, 3.0]),
        (["--device", "cpu", "--kv-gib", "3"], [6.0, 3.0]),
    ):
        assert list(caches(decode, monkeypatch, tmp_path, *argv, *more).values()) == expected
