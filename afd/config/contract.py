"""The contract: facts that all attention and FFN members must share, and how two of them differ.

Each role derives its contract from its deployment file and checkpoint. The control plane compares
contracts at registration. Members with equal contracts have the same slots, steps and experts.
"""

from __future__ import annotations

from typing import Any

import msgspec

_SAME_FILE = "start every role from the same deployment file"
_SAME_MODEL = "give every role the same checkpoint (key model)"

REMEDIES: dict[str, str] = {
    "model_hash": _SAME_MODEL,
    "dtype": _SAME_FILE,
    "wire": _SAME_FILE,
    "hidden": _SAME_MODEL,
    "num_layers": _SAME_MODEL,
    "moe_layers": _SAME_MODEL,
    "num_experts": _SAME_MODEL,
    "top_k": _SAME_MODEL,
    "capacity_rows": _SAME_FILE,
    "max_depth": _SAME_FILE,
    "attention_instances": _SAME_FILE,
    "attention_tp": _SAME_FILE,
    "ffn_instances": _SAME_FILE,
    "ffn_tp": _SAME_FILE,
    "elastic": _SAME_FILE,
    "reduce": _SAME_FILE,
    "dispatch": _SAME_FILE,
    "shared_experts": _SAME_FILE,
    "expert_slots": _SAME_FILE,
    "graph_buckets": _SAME_FILE,
    "expert_map": "give every role the same file (ffn.placement)",
}
"""What the user should do about a difference, per field of :class:`Contract`."""


class Contract(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Facts that attention and FFN members share.

    model_hash: fingerprint of the checkpoint, hex.
    dtype: serving dtype ("bfloat16", ...). wire: format of the rows ("fp8", "mxfp4 e4m3fnuz", ...).
    capacity_rows: rows per slot. max_depth: largest number of micro-batches per step.
    attention_instances, ffn_instances: how many can run at a time. attention_tp: ranks of each.
    elastic: FFN instances come and go, so some may hold no experts (``ffn.max_instances`` is set).
    ffn_tp: ranks per FFN instance. reduce: format of their partial results ("exact", "int4", ...).
    dispatch, shared_experts: the deployment file's values, with ``auto`` resolved.
    expert_slots: FFN instance j holds the expert slots [expert_slots[j], expert_slots[j + 1]).
    expert_map: the expert in each slot, per MoE layer (afd/placement/tables.py).
    graph_buckets: rows of the FFN graphs, by depth (afd/graph_sizes.py); () without graphs.
    """

    model_hash: str
    dtype: str
    wire: str
    hidden: int
    num_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    capacity_rows: int
    max_depth: int
    attention_instances: int
    attention_tp: int
    ffn_instances: int
    ffn_tp: int
    elastic: bool
    reduce: str
    dispatch: str
    shared_experts: str
    expert_slots: tuple[int, ...]
    expert_map: tuple[tuple[int, ...], ...]
    graph_buckets: tuple[tuple[int, ...], ...]


class Mismatch(msgspec.Struct, frozen=True):
    """One field in which two contracts differ: both values, and the remedy."""

    field: str
    ours: Any
    theirs: Any
    remedy: str


def compare(ours: Contract, theirs: Contract) -> list[Mismatch]:
    """Returns every field in which the contracts differ, in field order; [] if they are equal."""
    left, right = msgspec.structs.asdict(ours), msgspec.structs.asdict(theirs)
    return [
        Mismatch(name, left[name], right[name], REMEDIES[name])
        for name in Contract.__struct_fields__
        if left[name] != right[name]
    ]


def describe(mismatches: list[Mismatch], holder: str) -> str:
    """Returns one sentence for the member with the values ``ours``; ``holder`` has ``theirs``."""
    differences = ", ".join(
        f"{m.field} is {_short(m.ours)} here but {_short(m.theirs)} on {holder}" for m in mismatches
    )
    remedies = dict.fromkeys(m.remedy for m in mismatches)  # unique, in order
    return f"{differences}; {' and '.join(remedies)}"


def _short(value: Any) -> str:
    """Cuts long values (hashes, layer lists), so that the error fits on one line."""
    text = str(value)
    return text if len(text) <= 64 else f"{text[:61]}..."
