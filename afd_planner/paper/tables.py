"""Tables 2 to 7 of the Step-3 report.

The report uses conventions that differ from exact arithmetic or that it does not state. The tables
confirm each of these:
- 8K and 32K contexts are 8,192 and 32,768 tokens. Routers, embedding and LM head are not counted.
- MLA counts rank + rope for both products (section 5.1: arithmetic intensity 512).
- A Lightning state is read and written in FP32 and takes 10 FLOPs per element. This is not stated;
  10 is the only integer that fits MiniMax M1 in both tables.
- KV cache: 1 byte, but BF16 in the full attention layers of Llama 4 and MiniMax M1 (section 4.1).
- Arithmetic runs in FP8 if the accelerator supports it, else in BF16 (section 4.1).
"""

from dataclasses import dataclass, replace

from afd_planner.cost.budget import sparsity_floor
from afd_planner.facts.attention import (
    Attention,
    GroupedQuery,
    Latent,
    Recurrent,
    projection_parameters,
)
from afd_planner.facts.hardware import Accelerator, load_accelerator
from afd_planner.facts.model import ModelSpec
from afd_planner.facts.model_hf import load_model
from afd_planner.paper import printed
from afd_planner.paper.cells import Cell

CONTEXTS = {"8K": 8192, "32K": 32768}

BF16_FULL_ATTENTION = ("llama4-maverick", "minimax-m1")


@dataclass(frozen=True)
class Work:
    """Work to decode one token, over all layers: bytes of cache, and FLOPs."""

    kv_bytes: float
    attention_flops: float
    projection_flops: float
    ffn_flops: float

    @property
    def columns(self) -> tuple[float, float, float, float]:
        return self.kv_bytes, self.attention_flops, self.projection_flops, self.ffn_flops


def decode_work(model: ModelSpec, context: float) -> Work:
    """Returns one row of Table 2 or 3."""
    kv_bytes = attention_flops = projection_flops = ffn_flops = 0.0
    for group in model.groups:
        attention, n = _as_reported(group.attention), len(group.layers)
        full = isinstance(attention, GroupedQuery) and not attention.window
        kv = "bfloat16" if full and model.name in BF16_FULL_ATTENTION else "fp8"
        kv_bytes += n * attention.kv_read_bytes(context, kv)
        attention_flops += n * attention.core_flops(context)
        projection_flops += n * 2.0 * projection_parameters(attention)
        ffn_flops += n * group.ffn.flops_per_token()
    return Work(kv_bytes, attention_flops, projection_flops, ffn_flops)


def usd_per_flop(accelerator: Accelerator) -> float:
    """Returns U_FLOP: USD per FLOP at full utilisation, in FP8 if supported (Table 5)."""
    return accelerator.price_per_hour / 3600 / accelerator.math_flops("fp8")


def usd_per_byte(accelerator: Accelerator) -> float:
    """Returns U_byte: USD per byte of memory traffic at full utilisation (Table 5)."""
    return accelerator.price_per_hour / 3600 / accelerator.memory_bandwidth


def attention_usd(work: Work, accelerator: Accelerator) -> float:
    """Returns USD per 10^6 tokens: max(FLOP_attn U_FLOP, Byte_KV U_byte) + FLOP_linear U_FLOP."""
    flop, byte = usd_per_flop(accelerator), usd_per_byte(accelerator)
    core = max(work.attention_flops * flop, work.kv_bytes * byte)
    return 1e6 * (core + work.projection_flops * flop)


def ffn_usd(work: Work, accelerator: Accelerator) -> float:
    """Returns USD per 10^6 tokens of a compute-bound FFN (section 4.2)."""
    return 1e6 * work.ffn_flops * usd_per_flop(accelerator)


def arithmetic_intensity(model: ModelSpec) -> float:
    """Returns FLOPs of the attention core per byte of an 8-bit cache (section 5.1)."""
    attention = _as_reported(model.groups[0].attention)
    return attention.core_flops(1.0) / attention.kv_read_bytes(1.0, "fp8")


def table_cells() -> tuple[Cell, ...]:
    """Returns every cell of Tables 2 to 7. The values of Table 4 are our accelerator facts."""
    return (
        *_work_table("Table 2", printed.TABLE_2, CONTEXTS["8K"]),
        *_work_table("Table 3", printed.TABLE_3, CONTEXTS["32K"]),
        *_table_4(),
        *_table_5(),
        *_table_6(),
        *_table_7(),
    )


def server_sparsity_floor(accelerator: Accelerator, model: ModelSpec, nic: float) -> float:
    """Returns the minimum S of section 5.4 for an FFN instance of one server.

    ``nic``: bytes/s per NIC. Like the report, this rounds 2/3 of 16.6 ms to 11.1 ms.
    """
    return sparsity_floor(
        accelerator.math_flops("fp8"),
        accelerator.memory_bandwidth,
        nic * accelerator.gpus_per_server,
        model.hidden,
        model.num_layers,
        comm_budget_s=11.1e-3 * 3 / 2,
    )


def _as_reported(attention: Attention) -> Attention:
    if isinstance(attention, Latent):
        return replace(attention, value_rank=attention.rank + attention.rope_dim)
    if isinstance(attention, Recurrent):
        return replace(attention, flops_per_state=10)
    return attention


def _work_table(where: str, rows: dict[str, str], context: int) -> list[Cell]:
    columns = (("KV", "bytes"), ("attention", "FLOP"), ("projections", "FLOP"), ("FFN", "FLOP"))
    return [
        Cell(where, name, column, text, value, unit)
        for name, texts in rows.items()
        for (column, unit), text, value in zip(
            columns, texts.split(), decode_work(load_model(name), context).columns, strict=True
        )
    ]


def _table_4() -> list[Cell]:
    cells = []
    for name, texts in printed.TABLE_4.items():
        accelerator = load_accelerator(name)
        values = (
            ("price", "USD/hour", accelerator.price_per_hour),
            ("BF16", "FLOP/s", accelerator.flops["bfloat16"]),
            ("FP8", "FLOP/s", accelerator.flops.get("fp8")),
            ("bandwidth", "bytes/s", accelerator.memory_bandwidth),
            ("roofline", "FLOP/byte", accelerator.roofline("fp8")),
        )
        for (column, unit, value), text in zip(values, texts.split(), strict=True):
            if text != "N/A" and value is not None:
                given = column != "roofline"
                cells.append(Cell("Table 4", name, column, text, value, unit, given))
    return cells


def _table_5() -> list[Cell]:
    cells = []
    for name, texts in printed.TABLE_5.items():
        accelerator = load_accelerator(name)
        flop, byte = texts.split()
        cells.append(
            Cell("Table 5", name, "USD per FLOP", flop, usd_per_flop(accelerator), "USD/FLOP")
        )
        cells.append(
            Cell("Table 5", name, "USD per byte", byte, usd_per_byte(accelerator), "USD/byte")
        )
    return cells


def _table_6() -> list[Cell]:
    cells = []
    for name, texts in printed.TABLE_6.items():
        model, text = load_model(name), iter(texts.split())
        for label, context in CONTEXTS.items():
            work = decode_work(model, context)
            for gpu in printed.ACCELERATORS:
                value = attention_usd(work, load_accelerator(gpu))
                column = f"attention {label}, {gpu}"
                cells.append(Cell("Table 6", name, column, next(text), value, "USD/Mtok"))
        for gpu in printed.ACCELERATORS:
            value = ffn_usd(work, load_accelerator(gpu))
            cells.append(Cell("Table 6", name, f"FFN, {gpu}", next(text), value, "USD/Mtok"))
    return cells


def _table_7() -> list[Cell]:
    model = load_model("step-3")
    cells = []
    for name, text in printed.TABLE_7.items():
        accelerator = load_accelerator(name)
        floor = server_sparsity_floor(accelerator, model, accelerator.nic_bandwidth)
        cells.append(Cell("Table 7", name, "minimum S", text, floor, "1"))
    return cells
