"""`afd ctl`: shows and changes a running deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from afd.control import operator
from afd.control.local_keys import operator_keys
from afd.control.messages import Members
from afd.depth import AUTO
from afd_launch.rebalance import Rebalance, rebalance

Action = Literal["status", "depth", "drain", "rebalance"]


def run_ctl(
    action: Action,
    address: str,
    keys_file: Path | None,
    depth: int | None,
    asked: Rebalance | None = None,
    *,
    undo: bool = False,
) -> int:
    """Runs one action, then prints the members. undo: the drain ends.

    Raises: ConfigError, DeadlineExceeded.
    """
    keys = operator_keys(address, keys_file)
    if asked is not None:
        return rebalance(address, keys, asked)
    if action == "depth":
        members = operator.set_depth(address, keys, depth=depth)
    elif action == "drain":
        members = operator.drain(address, keys, on=not undo)
    else:
        members = operator.status(address, keys)
    print(table(members))
    return 0


def table(members: Members) -> str:
    """One line per member, then the settings of the deployment. Pure."""
    rows = [("MEMBER", "STATE", "GENERATION", "PID", "URL")]
    rows += [
        (m.id, m.state, str(m.generation), str(m.pid), m.api_url or m.metrics_url or "-")
        for m in members.members
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    depth = "as configured" if members.depth is None else str(members.depth)
    if members.depth == AUTO:
        depth = "auto"
    if members.depths and members.depth in (None, AUTO):
        depth += f" ({', '.join(f'{d} up to {rows} rows' for rows, d in members.depths)})"
    lines.append(f"depth: {depth}{', draining' if members.draining else ''}")
    if members.moves:
        moved = f"experts: {len(members.moved)} layers moved since the start"
        left = f", {members.moves_left} to go" if members.moves_left else ""
        fault = f", stopped ({members.move_fault})" if members.move_fault else ""
        lines.append(moved + left + fault)
    return "\n".join(lines)
