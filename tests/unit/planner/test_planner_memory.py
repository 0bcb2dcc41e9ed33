"""Plans fit the GPUs: the planned sequences, weights as served, and the slots of the transport."""

import numpy as np
import pytest
from planner_support import request, scaled

from afd.config.deployment import load_config
from afd.errors import ConfigError
from afd.topology import SlotMap
from afd.wire.layout import layouts
from afd_launch.memory_check import check_memory
from afd_planner.cost.served import USABLE, Buffers, attention_weights, step_tokens
from afd_planner.facts.precision import PRECISIONS
from afd_planner.report.emit import deployment_yaml, file_text
from afd_planner.report.presets import FOLDER
from afd_planner.sizing.afd_units import afd_units
from afd_planner.sizing.decide import make_plan
from afd_planner.sizing.memory import sequence_bytes
from afd_planner.sizing.search import Search, afd_operating


@pytest.mark.parametrize(
    ("model", "gpu", "changes"),
    [
        ("qwen3-30b-a3b", "h200", {"context": 8192}),
        ("qwen3-30b-a3b", "h200", {"context": 32768, "gpus": 64}),
        ("deepseek-v3", "h200", {"context": 65536, "gpus": 256}),
        ("deepseek-v3", "mi355x", {"precision": PRECISIONS["mxfp4"], "gpus": 32}),
        ("qwen3-235b-a22b", "h800", {"precision": PRECISIONS["bf16"], "gpus": 128}),
        ("step-3", "mi300x", {"precision": PRECISIONS["all-fp8"], "gpus": 64}),
        ("qwen3-235b-a22b", "h200", {"precision": PRECISIONS["fp8-bf16-cache"], "gpus": 64}),
        ("qwen3-30b-a3b", "h200", {"context": 1024, "positions": 4, "accepted": 2.0}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_file_holds_its_planned_sequences_and_passes_the_check(model, gpu, changes, tmp_path):
    asked = request(model, gpu, **changes)
    search = Search(asked)
    point, _ = afd_operating(search.best_afd(search.limits))
    path = tmp_path / "d.yaml"
    path.write_text(file_text(point, asked, str(FOLDER / model), "a test"))
    deployment = load_config(path)
    assert check_memory(deployment).startswith("; memory per GPU: attention")
    attention = deployment.attention
    assert attention.max_num_seqs * attention.instances >= point.shape.batch
    drafts = attention.speculation.num_speculative_tokens if attention.speculation else 0
    assert drafts == asked.positions - 1
    held = attention.kv_cache_gib * 2**30 / sequence_bytes(asked)
    assert held >= attention.max_num_seqs


def test_the_capacity_of_a_unit_is_that_of_its_buffers():
    asked = request("qwen3-30b-a3b", "h200", context=16384)
    random = np.random.default_rng(1)
    weights = attention_weights(asked.model, 2.0)
    for units in afd_units(asked, {}):
        for i in random.integers(0, units.x.size, 6):
            held = int(units.capacity[i])
            ranks = (units.attention_gpus[i], units.ffn_gpus[i], units.depth[i])
            slots = SlotMap(*map(int, ranks))

            def used(sequences, slots=slots, wire=units.wire, copied=not units.one_server):
                rows = step_tokens(sequences)
                out, back = layouts(wire, "bfloat16", rows, asked.model.hidden, 8)
                buffers = Buffers(slots, out.nbytes, back.nbytes, copied).attention
                return weights + buffers + sequences * sequence_bytes(asked)

            usable = USABLE * units.attention.accelerator.memory_bytes
            assert used(held) <= usable < used(held + 1) + 0.2 * 2**30


def test_experts_and_slots_that_fill_the_ffn_gpus_leave_no_plan():
    """The slots of many attention GPUs need room beside the experts."""
    asked = request("deepseek-v3", "h200", context=8192, redundant=(0,))
    tight = scaled(asked, "memory_bytes", 0.66)
    for units in afd_units(tight, {}):
        few = (units.ffn_gpus == units.ffn_gpus.min()) & (units.capacity > 0)
        if few.any() and not few.all():
            smallest = units.ffn_gpus == units.ffn_gpus.min()
            assert units.x[few].max() < units.x[smallest].max()


def test_copies_of_experts_take_memory():
    none, one = (
        max(units.ffn.weights.max() for units in afd_units(request(redundant=(n,)), {}))
        for n in (0, 1)
    )
    assert one > none * 1.05


def test_what_is_not_served_has_no_file():
    plan = make_plan(request("pangu-pro-moe", gpus=16))
    with pytest.raises(ConfigError, match="afd serve does not run PanguProMoEForCausalLM"):
        deployment_yaml(plan, "m")
    drafting = make_plan(request("step-3", "h200", gpus=16, positions=18, accepted=1.7))
    with pytest.raises(ConfigError, match="does not run speculation with more than 16 drafts"):
        deployment_yaml(drafting, "m")
