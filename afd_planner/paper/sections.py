"""Figures that the Step-3 report derives in its text: sections 4.2, 5, 6 and 7.3.

Where the text continues with a rounded intermediate value (272 us, 67 MB, 7.1 GB), so does this
module.
"""

import math

from afd_planner.cost.budget import slot_seconds
from afd_planner.facts.ffn import MoeFfn
from afd_planner.facts.hardware import load_accelerator
from afd_planner.facts.model_hf import load_model
from afd_planner.paper import printed
from afd_planner.paper.cells import Cell
from afd_planner.paper.tables import (
    CONTEXTS,
    arithmetic_intensity,
    attention_usd,
    decode_work,
    ffn_usd,
    server_sparsity_floor,
)

STAGE_BUDGET_S = 16.6e-3
"""A TPOT of 50 ms over a 3-stage pipeline, rounded as in the report (section 3.1)."""

SLOT_US = 272
SERVER_GPUS = 8
TPOT_S = 0.050
MEASURED_2A2F = 4039
"""Tokens per GPU and second of 2A2F in Table 8, the input of its extrapolations."""


def section_cells() -> tuple[Cell, ...]:
    """Returns every derived figure of the text."""
    return (*_section_4(), *_section_5(), *_section_6(), *_section_7())


def _section_4() -> list[Cell]:
    """Observation 1: the cheapest accelerator for each side."""
    claims = {
        ("step-3", "8K"): "0.055",
        ("deepseek-v3", "8K"): "0.068",
        ("qwen3-235b-a22b", "8K"): "0.062",
        ("step-3", "32K"): "0.129",
        ("deepseek-v3", "32K"): "0.211",
        ("qwen3-235b-a22b", "32K"): "0.193",
    }
    cells = []
    for (name, label), text in claims.items():
        work = decode_work(load_model(name), CONTEXTS[label])
        gpus = [load_accelerator(gpu) for gpu in printed.ACCELERATORS]
        # The report adds the rounded costs of Table 6.
        attention = min(round(attention_usd(work, gpu), 3) for gpu in gpus)
        value = attention + min(round(ffn_usd(work, gpu), 3) for gpu in gpus)
        cells.append(Cell("Section 4.2", name, f"AFD {label}", text, value, "USD/Mtok"))
    return cells


def _section_5() -> list[Cell]:
    step3, h800 = load_model("step-3"), load_accelerator("h800")
    floor = server_sparsity_floor(h800, step3, h800.nic_bandwidth)
    moe = load_model("deepseek-v3").groups[1].ffn
    assert isinstance(moe, MoeFfn)
    slower = server_sparsity_floor(h800, step3, 40e9)  # measured with DeepEP
    intensity = {"step-3": "128", "deepseek-v3": "512", "qwen3-235b-a22b": "32"}
    return [
        *(
            Cell("Section 5.1", name, "FLOPs per KV byte", text, value, "FLOP/byte")
            for name, text in intensity.items()
            for value in (arithmetic_intensity(load_model(name)),)
        ),
        Cell(
            "Section 5.4",
            "deepseek-v3",
            "experts to activate on H800",
            "14",
            (moe.experts + 1) * round(floor, 3) - 1,
            "experts",
        ),
        Cell("Section 5.4", "h800", "minimum S at 40 GB/s per NIC", "0.073", slower, "1"),
        Cell(
            "Section 5.4", "step-3", "S of its experts", "0.08", step3.groups[1].ffn.sparsity, "1"
        ),
    ]


def _section_6() -> list[Cell]:
    step3, l20 = load_model("step-3"), load_accelerator("l20")
    attention = step3.groups[0].attention
    slot = slot_seconds(STAGE_BUDGET_S, 1.0, 0.0, step3.num_layers, 1)
    reach = l20.memory_bandwidth * SLOT_US * 1e-6
    # TP 8 for the output projection; every GPU holds the others (footnote 7).
    weights = sum(
        p.parameters / (SERVER_GPUS if p.name == "o" else 1) for p in attention.projections()
    )
    kv_mb = round(reach / 1e6) - round(weights / 1e6)
    per_token = attention.kv_read_bytes(1.0, "fp8")
    tokens = kv_mb * 1e6 / per_token
    per_layer = reach * 0.5
    # The report truncates the MB per layer before it continues.
    per_gpu_gb = round(math.floor(per_layer / 1e6) * step3.num_layers / 1e3, 1)
    servers = math.ceil(300 / (per_gpu_gb * SERVER_GPUS))
    slower = round(l20.memory_bandwidth / load_accelerator("l4").memory_bandwidth)
    return [
        Cell("Section 6", "step-3", "stage slot", "272", slot * 1e6, "us"),
        Cell("Section 6", "L20", "MB per slot", "235", reach / 1e6, "MB"),
        Cell("Section 6", "L20", "projection MB", "67", weights / 1e6, "MB"),
        Cell("Section 6", "L20", "KV MB", "168", kv_mb, "MB"),
        Cell("Section 6", "step-3", "KV bytes per token and layer", "512", per_token, "bytes"),
        Cell("Section 6", "L20", "tokens of context", "328", tokens / 1e3, "thousand tokens"),
        Cell("Section 6", "L20", "batch at 8K", "41", tokens / 8e3, "rows"),
        Cell("Section 6", "L20", "FFN MB per layer", "117", per_layer / 1e6, "MB"),
        Cell("Section 6", "L20", "FFN GB per GPU", "7.1", per_gpu_gb, "GB"),
        Cell("Section 6", "L20", "FFN GB per server", "56.8", per_gpu_gb * SERVER_GPUS, "GB"),
        Cell("Section 6", "L20", "servers", "6", servers, "servers"),
        Cell("Section 6", "L20", "cards", "48", servers * SERVER_GPUS, "cards"),
        Cell("Section 6", "L4", "cards", "144", servers * SERVER_GPUS * slower, "cards"),
    ]


def _section_7() -> list[Cell]:
    step3, h800 = load_model("step-3"), load_accelerator("h800")
    network = h800.nic_bandwidth * SERVER_GPUS
    rows = network * SLOT_US * 1e-6 / (3 * step3.hidden)
    batch, instances = 3 * 3072, 3 + 4
    upcycled = batch / (TPOT_S * instances * SERVER_GPUS)
    return [
        Cell("Table 8", "4A2F", "extrapolated", "2693", scaled_tgs(2, 4), "tokens/GPU/s"),
        Cell("Table 8", "16A2F", "extrapolated", "898", scaled_tgs(2, 16), "tokens/GPU/s"),
        Cell("Section 7.3", "scaled to 600B", "micro-batch rows", "3072", rows, "rows"),
        Cell("Section 7.3", "scaled to 600B", "3A4F", "3291", upcycled, "tokens/GPU/s"),
    ]


def scaled_tgs(attention: int, more_attention: int, ffn: int = 2) -> float:
    """Returns tokens per GPU and second after adding attention instances at the same total batch.

    TGS * (x + y) / (x' + y), starting from the measured 2A2F of Table 8 (section 7.3).
    """
    return MEASURED_2A2F * (attention + ffn) / (more_attention + ffn)
