"""Memory of each pool and the colocated cost model: hand-computed values and directions."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd.errors import ConfigError
from afd_planner.cost.budget import (
    attention_memory,
    colocated_memory,
    ffn_memory,
    kv_capacity_rows,
)
from afd_planner.cost.colocated import colocated_step, crossings, exchange_seconds
from afd_planner.cost.shape import IDEAL, AfdShape, ColocatedShape, Efficiency, Pool
from afd_planner.facts.hardware import load_accelerator
from afd_planner.facts.model_hf import load_model
from afd_planner.facts.precision import PRECISIONS, Precision

NAMES = ("step-3", "deepseek-v3", "qwen3-235b-a22b", "llama4-maverick", "minimax-m1")
MODELS = {name: load_model(name) for name in (*NAMES, "qwen3-32b")}
STEP3, H800, L20 = MODELS["step-3"], load_accelerator("h800"), load_accelerator("l20")
SPEEDS = ("memory_bandwidth", "scale_up_bandwidth", "nic_bandwidth")
names = st.sampled_from(NAMES)
precisions = st.sampled_from(sorted(PRECISIONS)).map(PRECISIONS.__getitem__)


def not_more(faster: float, slower: float) -> bool:
    return faster <= slower * (1 + 1e-9)


def test_memory_of_2a2f_by_hand():
    shape = AfdShape(Pool(H800, 2, 8), Pool(H800, 2, 8), 3, 2048, 4096)
    experts = 56 * (3 * 3 * 7168 * 5120 + 3 * 7168 * 5120 / 16)
    assert ffn_memory(STEP3, shape, IDEAL).weights == pytest.approx(experts)
    attention = attention_memory(STEP3, shape, IDEAL)
    dense = 5 * 3 * 7168 * 18432
    on_ffn = attention_memory(STEP3, replace(shape, dense_on_ffn=True), IDEAL)
    assert attention.weights - on_ffn.weights == pytest.approx(dense)
    rows = kv_capacity_rows(STEP3, attention, 4096, shape.precision, 1)
    assert rows == pytest.approx((80e9 - attention.weights) / (61 * 512 * 4096))


@settings(max_examples=40)
@given(name=names, precision=precisions, tp=st.sampled_from([1, 2, 4, 8]))
def test_capacity_directions(name, precision, tp):
    model = MODELS[name]
    shape = AfdShape(Pool(H800, 2, 8, tp), Pool(H800, 4, 8), 3, 64, 4096, precision)
    use = attention_memory(model, shape, Efficiency())
    rows = [kv_capacity_rows(model, use, c, shape.precision, tp) for c in (1024, 8192, 65536)]
    assert rows == sorted(rows, reverse=True) and rows[-1] >= 0
    bigger = replace(use, usable=use.usable * 2)
    assert kv_capacity_rows(model, bigger, 8192, shape.precision, tp) >= rows[1]


def test_a_pool_that_does_not_fit_has_no_kv_capacity():
    shape = AfdShape(Pool(L20, 1, 8), Pool(L20, 1, 8), 3, 64, 4096)
    use = ffn_memory(MODELS["deepseek-v3"], shape, Efficiency())
    assert not use.fits and use.free < 0
    assert kv_capacity_rows(MODELS["deepseek-v3"], use, 4096, Precision(), 1) == 0


def colocated(**changes: object) -> ColocatedShape:
    shape = ColocatedShape(H800, gpus=16, tp=1, ep=16, rows=2048.0, context=4096.0)
    return replace(shape, **changes)


def test_exchange_by_hand():
    """DeepEP low latency with EP128 and 128 tokens per GPU sends 7.5 MB and gets 14.7 MB back."""
    shape = colocated(gpus=128, ep=128, rows=128.0 * 128)
    moe = MODELS["deepseek-v3"].groups[1].ffn
    sent = 128 * 8 * (7168 + 56 * 4 + 2 * 7168)
    expected = sent * 120 / 128 / 50e9
    assert exchange_seconds(shape, shape.rows, moe, IDEAL) == pytest.approx(expected)
    assert exchange_seconds(colocated(tp=16, ep=1), 64, moe, IDEAL) == 0


def test_shards_of_several_gpus_gather_what_crosses():
    """EP2 x TP8: a token with 8 experts goes to almost both shards, and each shard gathers it."""
    moe = MODELS["deepseek-v3"].groups[1].ffn
    flat, grouped = colocated(), colocated(ep=2)
    assert crossings(flat, moe) == 8
    assert crossings(grouped, moe) == pytest.approx(2 * (1 - 0.5**8))
    step = colocated_step(MODELS["deepseek-v3"], grouped, replace(IDEAL, hidden_collectives=0))
    rows = 2048 * (1 - 0.5**8)
    gathered = rows * (7168 + 56 * 4 + 2 * 7168) * 7 / 8 / 200e9
    assert step.layers[1].compute.link_s == pytest.approx(gathered)
    assert colocated_step(MODELS["deepseek-v3"], flat, IDEAL).layers[1].compute.link_s == 0


@settings(max_examples=40)
@given(
    name=names,
    rows=st.integers(1, 8192),
    context=st.integers(1, 65536),
    overlap=st.booleans(),
    which=st.sampled_from(SPEEDS),
)
def test_colocated_directions(name, rows, context, overlap, which):
    model = MODELS[name]
    shape = colocated(rows=float(rows), context=float(context), overlap=overlap)
    base = colocated_step(model, shape, Efficiency()).seconds
    faster = replace(H800, **{which: getattr(H800, which) * 2})
    for change in ({"rows": rows / 2}, {"context": context / 2}, {"accelerator": faster}):
        assert not_more(colocated_step(model, replace(shape, **change), Efficiency()).seconds, base)
    assert base > colocated_step(model, shape, IDEAL).seconds


def test_dense_models_are_priced_without_exchange():
    shape = colocated(gpus=8, tp=8, ep=1, rows=64.0)
    found = colocated_step(MODELS["qwen3-32b"], shape, Efficiency())
    assert [layer.exchange_s for layer in found.layers] == [0.0]
    use = colocated_memory(MODELS["qwen3-32b"], shape, IDEAL)
    assert use.weights == pytest.approx(MODELS["qwen3-32b"].parameters / 8, rel=0.06)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tp": 3}, "16 GPUs cannot run TP 3"),
        ({"ep": 1}, "EP 1 needs all 16 GPUs in one TP group.*use TP 16"),
    ],
)
def test_refusals(changes, words):
    with pytest.raises(ConfigError, match=words):
        colocated(**changes)
