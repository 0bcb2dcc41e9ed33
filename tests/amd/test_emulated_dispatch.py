"""Rung 5: the kernels of routed dispatch on the emulator, compared with plain Python and numpy."""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("tinygrad", reason="tinygrad is not installed here; ./run test-amd")

from kernel_run import Runner

from afd.placement.dispatch import rows_of_instances
from afd.schedule import row_shares
from afd.wire import codecs
from afd.wire.layout import Tag, layouts

FP8 = {"gfx942": Tag.E4M3FNUZ, "gfx950": Tag.E4M3FN}
BOUNDS = (0, 3, 4, 9, 10)
"""Slots of four instances in one bank."""


def routing(rows: int) -> tuple[np.ndarray, list[list[int]]]:
    """Returns expert slots int32 [rows, 3] of both banks, and the rows of each instance. The last
    instance gets no row; some pairs and rows are masked."""
    rng = np.random.default_rng(rows)
    slots = rng.integers(0, BOUNDS[-2], (rows, 3)).astype(np.int32)
    slots[rng.random(slots.shape) < 0.3] = -1
    slots[5] = -1
    expected = [list(part) for part in rows_of_instances(slots.tolist(), BOUNDS)]
    slots[(slots >= 0) & (np.arange(rows) % 2 == 1)[:, None]] += BOUNDS[-1]
    return slots, expected


@pytest.mark.parametrize("arch", FP8)
@pytest.mark.parametrize("rows", [7, 300])
def test_places_of_rows(compiled, arch, rows):
    """300 rows are more than one block of the kernel."""
    slots, expected = routing(rows)
    instances = len(BOUNDS) - 1
    outputs = [np.full((instances, rows), 77, np.int32) for _ in range(2)]
    outputs += [np.full(instances, 77, np.int32), np.full(instances, 5, np.int32)]
    listed, of_rows, counts, sent = Runner(compiled, arch)(
        "places",
        [slots, np.array(BOUNDS, np.int32)],
        outputs,
        [("i", rows), ("i", BOUNDS[-1])],
        (instances,),
    )
    assert (sent == 5 + counts).all()
    for j, mine in enumerate(expected):
        assert counts[j] == len(mine)
        assert listed[j].tolist() == mine + [0] * (rows - len(mine))
        places = {row: place for place, row in enumerate(mine)}
        assert of_rows[j].tolist() == [places.get(row, -1) for row in range(rows)]


@pytest.mark.parametrize("arch", FP8)
@pytest.mark.parametrize("wire", ["fp8", "exact"])
def test_messages_are_gathered(compiled, arch, wire):
    rows, hidden = 9, 384
    slots, expected = routing(rows)
    instances = len(expected)
    layout, _ = layouts(wire, "bfloat16", 16, hidden, 3, "e4m3fn")
    rng = np.random.default_rng(3)
    payload = rng.integers(0, 256, (rows, layout.row_bytes)).astype(np.uint8)
    scales = rng.integers(0, 256, (rows, layout.scale_row_bytes or 1)).astype(np.uint8)
    weights = rng.random((rows, 3)).astype(np.float32)
    listed = np.zeros((instances, rows), np.int32)
    for j, mine in enumerate(expected):
        listed[j, : len(mine)] = mine
    counts = np.array([len(mine) for mine in expected], np.int32)
    given = [payload, scales, slots, weights]
    outputs = [np.full((instances, *part.shape), 7, part.dtype) for part in given]
    got = Runner(compiled, arch)(
        "gather_message" if layout.scale_columns else "gather_message[unscaled]",
        [*given, listed, counts],
        outputs,
        [("i", layout.row_bytes), ("i", layout.scale_row_bytes)],
        (rows, instances),
    )
    for j, mine in enumerate(expected):
        for n, (part, source) in enumerate(zip(got, given, strict=True)):
            want = np.full_like(outputs[n][j], -1 if n == 2 else 7)
            if n != 1 or layout.scale_columns:
                want[: len(mine)] = source[mine]
            np.testing.assert_array_equal(part[j], want)


@pytest.mark.parametrize("arch", FP8)
@pytest.mark.parametrize("form", ["bf16", "fp8"])
@pytest.mark.parametrize("tp", [1, 4])
def test_sums_of_answers_to_a_part_of_the_rows(compiled, arch, form, tp):
    """With 9 rows, four ranks have shares of 3, 2, 2 and 2. A row without answers is zero."""
    rows, hidden, tag = 9, 640, FP8[arch]
    _, expected = routing(rows)
    instances = len(expected)
    name = "e4m3fnuz" if tag == Tag.E4M3FNUZ else "e4m3fn"
    wire = "exact" if form == "bf16" else "mxfp4"
    _, layout = layouts(wire, "bfloat16", 16, hidden, 3, name)
    order = list(np.random.default_rng(0).permutation(instances * tp))
    memory = np.zeros((len(order), layout.nbytes), np.uint8)
    want = np.zeros((rows, hidden), np.float32)
    of_rows = np.full((instances, rows), -1, np.int32)
    for j, mine in enumerate(expected):
        x = np.random.default_rng(j).standard_normal((rows, hidden)).astype(ml_dtypes.bfloat16)
        of_rows[j, mine] = range(len(mine))
        for rank, (start, end) in enumerate(row_shares(rows, tp)):
            part, slot = x[start:end], memory[order[j * tp + rank]]
            values, payload = part.astype(np.float32), part.view(np.uint8)
            if form == "fp8":
                payload, scales = codecs.quantise_fp8(values, tag)
                values, raw = codecs.dequantise_fp8(payload, scales, tag), scales.view(np.uint8)
                slot[layout.scales_offset :][: raw.size] = raw.reshape(-1)
            slot[: payload.nbytes] = payload.view(np.uint8).reshape(-1)
            for place in range(start, min(end, len(mine))):
                want[mine[place]] += values[place - start]
    first = int(order[0]) * layout.nbytes
    far = np.array([(int(n) - int(order[0])) * layout.nbytes // 16 for n in order], np.int64)
    *_, got = Runner(compiled, arch).on_parts(
        f"sum_places[{form}]",
        memory,
        [first, first + (layout.scales_offset if form == "fp8" else 0)],
        [of_rows, far, np.full((rows, hidden), 7, ml_dtypes.bfloat16)],
        [("i", hidden), ("i", instances), ("i", tp)],
        (rows, 1),
    )
    want = want.astype(ml_dtypes.bfloat16)
    if form == "bf16":
        assert (got.view(np.uint16) == want.view(np.uint16)).all()
    else:  # a fused multiply-add may round product and sum together
        close = np.abs(got.astype(np.float32) - want.astype(np.float32))
        assert (close <= 2**-7 * np.abs(want.astype(np.float32)) + 1e-6).all()
