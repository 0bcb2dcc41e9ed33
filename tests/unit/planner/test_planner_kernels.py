"""A measured kernel costs what was measured, in the cost model and in the search."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from planner_support import request

from afd_planner.cost import kernels
from afd_planner.cost.colocated import colocated_step
from afd_planner.cost.grids import Grid
from afd_planner.cost.kernels import (
    attention_fixed_s,
    kernel_attention,
    kernel_ffn,
    kernel_head,
)
from afd_planner.cost.roofline import attention_parts, ffn_part
from afd_planner.cost.shape import ColocatedShape, Efficiency, Pool, Routing, calibrated
from afd_planner.cost.stages import step_seconds
from afd_planner.facts.hardware import load_accelerator
from afd_planner.facts.model_hf import load_model
from afd_planner.facts.precision import PRECISIONS
from afd_planner.sizing.afd_units import afd_units
from afd_planner.sizing.colocated_units import colocated_units
from afd_planner.sizing.unit_cost import afd_point, routing_for

FP8, MODEL = PRECISIONS["fp8"], "qwen3-30b-a3b"
CACHED = (
    "core_factors",
    "projection_factors",
    "expert_factors",
    "head_factors",
    "table_of",
    "_expert_grids",
)
KEY = {"kind": "gqa", "heads": 32, "kv_heads": 4, "head_dim": 128, "value_dim": 128, "cache": "fp8"}
LAYER = {"hidden": 2048, "num_experts": 128, "top_k": 8, "scheme": "fp8_block", "backend": "triton"}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Kernel times of an H200 for one model."""

    def clear():
        for name in CACHED:
            getattr(kernels, name).cache_clear()

    entries = {
        "attention": [
            {**KEY, "rows": rows, "context": context, "us": 9 + rows * context / 30_000}
            for rows in (16, 256)
            for context in (1024, 16_384)
        ],
        "mixed_attention": [
            {**KEY, "rows": rows, "context": context, "us": 12 + rows * context / 20_000}
            for rows in (16, 256)
            for context in (1024, 16_384)
        ],
        "dense": [
            {"model": MODEL, "tp": 1, "parameters": 19_136_512, "rows": rows, "us": 20 + rows / 9}
            for rows in (16, 512)
        ],
        "experts": [
            {**LAYER, "width": width, "experts": held, "rows": rows, "us": 50 + rows / 20,
             "pairs": rows * held // 16, "used": held}
            for width, held in ((768, 16), (768, 2), (384, 32))
            for rows in (64, 4096)
        ],
        "rest": [{"hidden": 2048, "vocab": 151_936, "rows": rows, "us": 300} for rows in (16, 512)],
    }  # fmt: skip
    (tmp_path / "h200.json").write_text(json.dumps(entries))
    clear()
    monkeypatch.setattr(kernels, "FOLDER", tmp_path)
    yield replace(calibrated((load_accelerator("h200"),)), kernels=True, equal_lengths=True)
    clear()


def test_a_measured_cell_costs_what_was_measured(table):
    model, gpu = load_model(MODEL), load_accelerator("h200")
    group = model.groups[-1]
    _, core = kernel_attention(group, gpu, 256, 16_384, FP8, 1, table)
    assert core.seconds == pytest.approx((9 + 256 * 16_384 / 30_000) * 1e-6)
    assert kernel_attention(group, gpu, 16, 1024, FP8, 1, table)[0].seconds == pytest.approx(
        (20 + 16 / 9) * 1e-6
    )
    assert kernel_head(2048, 151_936, gpu, 16, FP8, table).seconds == pytest.approx(300e-6)
    # 64 rows choose all 16 experts of a shard, with the pairs of an even load.
    even, fixed = kernel_ffn(group.ffn, gpu, 64, FP8, 8, 1, table)
    assert even.seconds + fixed == pytest.approx(53.2e-6, rel=0.02)


def test_requests_of_different_lengths_have_cells_of_their_own(table):
    model, gpu = load_model(MODEL), load_accelerator("h200")
    mixed = replace(table, equal_lengths=False)
    _, core = kernel_attention(model.groups[-1], gpu, 256, 16_384, FP8, 1, mixed)
    assert core.seconds == pytest.approx((12 + 256 * 16_384 / 20_000) * 1e-6)
    assert kernels.measured_kernels("h200", model, FP8)[0] == "attention kernel (mixed lengths)"
    assert kernels.measured_kernels("h200", model, FP8, True)[0] == "attention kernel"


def test_without_cells_of_mixed_lengths_those_of_equal_ones_hold():
    model, gpu = load_model(MODEL), load_accelerator("h100")
    efficiency = replace(calibrated((gpu,)), kernels=True)
    found = [
        kernel_attention(
            model.groups[-1], gpu, 64, 4096, FP8, 1, replace(efficiency, equal_lengths=equal)
        )
        for equal in (False, True)
    ]
    assert found[0] == found[1]


def test_what_was_not_measured_follows_the_roofline(table):
    gpu, bf16 = load_accelerator("h200"), PRECISIONS["bf16"]
    other = load_model("deepseek-v3").groups[-1]
    plain = replace(table, kernels=False)
    assert kernel_ffn(other.ffn, gpu, 64, bf16, 8, 1, table)[0] == ffn_part(
        other.ffn, gpu, 64, bf16, 8, 1, plain
    )
    group = load_model(MODEL).groups[-1]
    assert (
        kernel_attention(group, gpu, 16, 1024, bf16, 1, table)[1]
        == attention_parts(group, gpu, 16, 1024, bf16, 1, plain)[1]
    )
    mi300x = load_accelerator("mi300x")
    assert kernel_ffn(group.ffn, mi300x, 64, FP8, 8, 1, table)[0] == ffn_part(
        group.ffn, mi300x, 64, FP8, 8, 1, plain
    )


def test_a_layer_of_another_size_has_the_factor_of_the_nearest(table):
    gpu, plain = load_accelerator("h200"), replace(table, kernels=False)
    own, other = load_model(MODEL).groups[-1].ffn, load_model("deepseek-v3").groups[-1].ffn
    one, two = (
        kernel_ffn(ffn, gpu, 16 * ffn.experts, FP8, ffn.experts // 16, 1, table)[0].seconds
        / ffn_part(ffn, gpu, 16 * ffn.experts, FP8, ffn.experts // 16, 1, plain).seconds
        for ffn in (own, other)
    )
    assert one == pytest.approx(two, rel=1e-9) != pytest.approx(1.0)  # 128 rows per expert
    assert kernels.experts_measured("h200", own, FP8)
    assert not kernels.experts_measured("h200", other, FP8)


def test_units_with_kernels_cost_what_the_cost_model_says(table):
    asked = request(MODEL, "h200", context=5000, efficiency=table)
    random = np.random.default_rng(7)
    changed = 0
    for units in afd_units(asked, {}):
        rows = np.floor(np.exp(random.uniform(0, math.log(600), units.x.shape)))
        seconds = units.step(rows)
        plain = replace(units, request=replace(asked, efficiency=asked.roofline)).step(rows)
        changed += int((np.abs(seconds / plain - 1) > 0.01).sum())
        for i in random.integers(0, len(rows), 3):
            which = int(units.which[i])
            attention = Pool(
                units.attention.accelerator,
                int(units.x[i]),
                units.attention.gpus,
                units.attention.tp,
            )
            pool = Pool(
                units.ffn.accelerator, int(units.y[i]), units.ffn.gpus, int(units.ffn.tp[which])
            )
            depth, whole = int(units.depth[i]), float(rows[i] * attention.groups)
            copies = int(units.redundant[i])
            _, stages, _ = afd_point(asked, attention, pool, depth, whole, units.wire, copies)
            assert seconds[i] == pytest.approx(step_seconds(stages, depth), rel=1e-9)
    assert changed


def test_colocated_units_with_kernels_cost_what_the_cost_model_says(table):
    asked = request(MODEL, "h200", context=5000, efficiency=table)
    (units,) = colocated_units(asked)
    random = np.random.default_rng(8)
    rows = np.floor(np.exp(random.uniform(0, math.log(600), units.gpus.shape)))
    seconds = units.step(rows)
    for i in random.integers(0, len(rows), 8):
        micro_batches = int(units.micro_batches[i])
        whole = float(rows[i] * units.groups[i])
        ep, redundant = int(units.ep[i]), int(units.redundant[i])
        shape = ColocatedShape(
            units.accelerator,
            int(units.gpus[i]),
            int(units.tp[i]),
            ep,
            whole * micro_batches,
            5000,
            replace(asked.precision, wire="fp8"),
            routing_for(asked, whole, ep, redundant) if ep > 1 else Routing(redundant=redundant),
            overlap=micro_batches == 2,
        )
        said = colocated_step(asked.model, shape, table).seconds
        assert seconds[i] == pytest.approx(said, rel=1e-9)


def test_the_factor_at_the_end_of_a_grid_holds_beyond_it():
    grid = Grid.of([(10, 1, 2.0), (1000, 1, 8.0), (10, 4, 1.0)])
    asked = np.array([1.0, 100.0, 1e6])
    assert grid.at(asked, np.ones(3)) == pytest.approx([2.0, 4.0, 8.0])
    assert grid.at(np.array([10.0]), np.array([2.0])) == pytest.approx([math.sqrt(2)])


def test_one_factor_is_that_of_the_arrays():
    random = np.random.default_rng(7)
    for keys in (1, 2, 5):
        points = [
            (first, second, float(random.uniform(0.5, 3.0)))
            for second in random.uniform(1, 500, keys)
            for first in random.uniform(1, 5000, random.integers(1, 6))
        ]
        grid = Grid.of(points)
        first, second = (np.exp(random.uniform(-1, 10, 200)) for _ in range(2))
        # Also at the points themselves, where a curve bends.
        first = np.concatenate([first, [a for a, _, _ in points]])
        second = np.concatenate([second, [b for _, b, _ in points]])
        asked = zip(first.tolist(), second.tolist(), strict=True)
        assert [grid.one(*pair) for pair in asked] == pytest.approx(grid.at(first, second))


def test_kernels_are_off_by_default():
    assert not Efficiency().kernels


def test_attention_has_no_fixed_time_where_its_products_were_measured(table):
    gpu, plain = load_accelerator("h200"), replace(table, kernels=False)

    def fixed(model, efficiency, handed_over=True):
        group = load_model(model).groups[-1]
        return attention_fixed_s(group, gpu, FP8, efficiency, handed_over=handed_over)

    assert fixed(MODEL, table) == 0.0
    both = plain.attention_overhead_s + plain.handover_s
    assert fixed(MODEL, plain) == fixed("qwen3-235b-a22b", table) == both
    assert fixed(MODEL, plain, handed_over=False) == plain.attention_overhead_s
    assert fixed("deepseek-v3", table) == both + plain.latent_overhead_s
