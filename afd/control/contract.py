"""What every member must agree on before it may take part, and how two contracts differ.

A contract is made from the configuration and the checkpoint by each role on its own; the control
plane only compares. Equal contracts mean equal slots, equal steps and the same experts.
"""

from __future__ import annotations

from typing import Any

import msgspec

_SAME_FILE = "start every role from the same configuration file"
_SAME_MODEL = "give every role the same checkpoint (model.path)"

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
    "ffn_instances": _SAME_FILE,
    "ffn_tp": _SAME_FILE,
    "reduce": _SAME_FILE,
    "expert_map": _SAME_FILE,
}
"""What the user does about a difference, per field of :class:`Contract`."""


class Contract(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Facts that attention and FFN members share.

    ``model_hash`` is the checkpoint's fingerprint in hex, ``dtype`` the model's ("bfloat16", ...),
    ``wire`` the codec of the rows ("exact", "fp8", "mxfp4 e4m3fnuz"). ``capacity_rows`` is the
    number of rows of one slot, ``max_depth`` the largest number of micro-batches of a step.
    An FFN instance is ``ffn_tp`` ranks, whose partial results are added up as ``reduce`` says
    ("exact", "int4", ...). ``expert_map[j]`` is the half-open range of global expert ids that FFN
    instance ``j`` holds.
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
    ffn_instances: int
    ffn_tp: int
    reduce: str
    expert_map: tuple[tuple[int, int], ...]


class Mismatch(msgspec.Struct, frozen=True):
    """One field in which two contracts differ, with both values and what to do about it."""

    field: str
    ours: Any
    theirs: Any
    remedy: str


def compare(ours: Contract, theirs: Contract) -> list[Mismatch]:
    """Every field in which the two contracts differ, in the order of the fields; [] if equal."""
    left, right = msgspec.structs.asdict(ours), msgspec.structs.asdict(theirs)
    return [
        Mismatch(name, left[name], right[name], REMEDIES[name])
        for name in Contract.__struct_fields__
        if left[name] != right[name]
    ]


def describe(mismatches: list[Mismatch], holder: str) -> str:
    """One sentence for the member whose values are ``ours``; ``holder`` has ``theirs``."""
    differences = ", ".join(
        f"{m.field} is {_short(m.ours)} here but {_short(m.theirs)} on {holder}" for m in mismatches
    )
    remedies = dict.fromkeys(m.remedy for m in mismatches)  # keeps the order, drops repetitions
    return f"{differences}; {' and '.join(remedies)}"


def _short(value: Any) -> str:
    """Long values (hashes, layer lists) are cut: an error stays one readable line."""
    text = str(value)
    return text if len(text) <= 64 else f"{text[:61]}..."
