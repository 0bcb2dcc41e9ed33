"""Decides whether a process may become a member. Pure."""

from __future__ import annotations

from afd.config.contract import Contract, compare, describe
from afd.control import messages as m
from afd.topology import member_id


def objection(
    hello: m.Hello, reference: tuple[str, Contract] | None, *, draining: bool, returns: bool
) -> str | None:
    """Returns why this member must not join, with the remedy; None if it may.

    Args:
        reference: the holder of the contract that all members must equal, and the contract; None
            while there is none.
        draining: only a role that was a member is accepted, because running requests may need it.
        returns: the role was a member of this deployment before, perhaps as another process.
    """
    name = member_id(hello.role, hello.index, hello.rank)
    if hello.protocol != m.PROTOCOL:
        return (
            f"{name} refused: it speaks control protocol {hello.protocol} but the server "
            f"speaks {m.PROTOCOL}; install the same version of afd everywhere"
        )
    if hello.role not in m.ROLES:
        return f"{name} refused: there is no role {hello.role!r}; use one of {', '.join(m.ROLES)}"
    if hello.index < 0:
        return f"{name} refused: index {hello.index} is negative; count from 0"
    if hello.role not in m.CONTRACT_ROLES:
        return None
    if hello.contract is None:
        return f"{name} refused: it sent no contract; every {hello.role} member needs one"
    if reference is not None:
        holder, contract = reference
        mismatches = compare(hello.contract, contract)
        if mismatches:
            return f"{name} refused: {describe(mismatches, holder)}"
    setting, instances = {
        "attention": ("attention.max_instances", hello.contract.attention_instances),
        "ffn": ("ffn.max_instances", hello.contract.ffn_instances),
    }[hello.role]
    if hello.index >= instances:
        return (
            f"{name} refused: index {hello.index} is out of range because {setting} is "
            f"{instances}; use an --index from 0 to {instances - 1}, or raise {setting} in the "
            "configuration of every role"
        )
    ranks = hello.contract.ffn_tp if hello.role == "ffn" else hello.contract.attention_tp
    if not 0 <= hello.rank < ranks:
        return (
            f"{name} refused: rank {hello.rank} is out of range because {hello.role} instances"
            f" have {ranks} here; use a --rank from 0 to {ranks - 1}, or change {hello.role}.tp in "
            "the configuration of every role"
        )
    if draining and not returns:
        return (
            f"{name} refused: the deployment is draining; end that with `afd ctl drain --undo`, "
            "or start this role again once all members have left"
        )
    return None


def member(hello: m.Hello, generation: int) -> m.Member:
    """Returns the public facts of an accepted member."""
    return m.Member(
        role=hello.role,
        index=hello.index,
        generation=generation,
        rank=hello.rank,
        addresses=hello.addresses,
        order_addresses=hello.order_addresses,
        api_url=hello.api_url,
        metrics_url=hello.metrics_url,
        pid=hello.pid,
        state=hello.state,
        host=hello.host,
        pid_space=hello.pid_space,
    )
