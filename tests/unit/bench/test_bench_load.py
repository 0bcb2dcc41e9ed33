"""`afd bench load`: shapes, records, and both sides on a small checkpoint."""

import json

import pytest

torch = pytest.importorskip("torch")

from afd_bench import load  # noqa: E402
from afd_bench.load import Cell, Shape, records, shape_of, table  # noqa: E402
from afd_bench.load_torch import _ours, _vllm, write  # noqa: E402


def test_the_checkpoint_is_as_large_as_asked():
    shape = shape_of(4)
    assert abs(shape.nbytes / load.GIB - 4) < 0.3 and shape.width % (8 * 64) == 0
    assert shape_of(0.01).layers == 2


def test_records_compare_with_vllm():
    ours = Cell("afd", "tp8", "host", 2.0, 10**9, 5 * 10**6)
    theirs = Cell("vllm", "tp8", "host", 3.0, 10**9, 10**8)
    alone = Cell("afd", "all", "host", 1.0, 10**9, 0)
    shape = Shape(2, 4, 8, 8)
    seconds, peak = records([ours, theirs, alone], shape, "2 cores", "afd bench load", "2026-11-23")
    assert (seconds.metric, seconds.value, seconds.peer_value, seconds.ratio) == (
        "seconds",
        2.0,
        3.0,
        1.5,
    )
    assert (peak.metric, peak.unit, peak.ratio) == ("peak_host_bytes", "bytes", 20.0)
    assert "| tp8 | host | vllm | 3.00 | 1000 | 100 |" in table([ours, theirs], shape)


@pytest.mark.parametrize(("instances", "tp"), [(1, 1), (2, 1), (1, 2)])
def test_both_sides_load_the_same_weights(tmp_path, instances, tp):
    pytest.importorskip("vllm")
    write({"folder": str(tmp_path), "layers": 2, "experts": 4, "hidden": 64, "width": 128})
    assert json.loads((tmp_path / "config.json").read_text())["num_experts"] == 4
    cpu = torch.device("cpu")
    ours = _ours(tmp_path, instances, tp, 2, cpu)()
    theirs = _vllm(tmp_path, instances, tp, 2, cpu)()
    assert len(ours) == len(theirs) == 4
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
