"""`afd ctl`: shows and changes a running deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from afd.control import operator
from afd.control.local_keys import operator_keys
from afd.control.messages import Members
from afd.depth import AUTO
from afd_launch.come_and_go import Operator
from afd_launch.rebalance import Rebalance, rebalance

Action = Literal["status", "depth", "drain", "rebalance", "add", "remove", "restart"]


def run_ctl(
    action: Action,
    address: str,
    keys_file: Path | None,
    depth: int | None,
    asked: Rebalance | None = None,
    *,
    undo: bool = False,
    member: str | None = None,
    wait_s: float = 0.0,
) -> int:
    """Runs one action, then prints the members.

    Args:
        undo: the drain ends. member: "attention-1"; None drains the deployment, and restarts every
            instance. wait_s: see :class:`afd_launch.come_and_go.Operator`.

    Raises: ConfigError, DeadlineExceeded.
    """
    keys = operator_keys(address, keys_file)
    if asked is not None:
        return rebalance(address, keys, asked)
    if action == "depth":
        members = operator.set_depth(address, keys, depth=depth)
    elif action == "drain" and member is None:
        members = operator.drain(address, keys, on=not undo)
    else:
        _instances(Operator(address, keys, wait_s), action, member, undo=undo)
        members = operator.status(address, keys)
    print(table(members))
    return 0


def _instances(instances: Operator, action: Action, member: str | None, *, undo: bool) -> None:
    match action, member:
        case "restart", None:
            instances.restart_all()
        case "restart", str():
            instances.restart(member)
        case "add", str():
            instances.add(member)
        case "remove", str():
            instances.remove(member)
        case "drain", str():
            instances.drain(member, undo=undo)


def table(members: Members) -> str:
    """One line per member, then the settings of the deployment. Pure."""
    rows = [("MEMBER", "STATE", "GENERATION", "PID", "URL")]
    wishes = {seat.id: seat.wish for seat in members.seats if seat.wish != "run"}
    rows += [
        (
            m.id,
            m.state + (f", to {wishes[m.id]}" if m.id in wishes else ""),
            str(m.generation),
            str(m.pid),
            m.api_url or m.metrics_url or "-",
        )
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
