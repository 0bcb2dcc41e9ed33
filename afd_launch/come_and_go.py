"""`afd ctl add`, `remove`, `restart` and `drain MEMBER`: instances come and go while others serve.

Each command tells the control plane what is wanted and waits until it is so. The supervisor of the
instance's host starts and ends the process. The experts of an FFN instance are moved to it once it
is ready, and away before it ends.
"""

from __future__ import annotations

import time
import urllib.error
from collections.abc import Callable

from afd.config.contract import Contract
from afd.control import operator
from afd.control.keys import ClientKeys
from afd.control.messages import Members, Wish
from afd.errors import ConfigError, DeadlineExceeded
from afd.placement.tables import Table, holders, spread
from afd_launch.readiness import DIRECT
from afd_launch.rebalance import wait_for_moves

LEADER = "ffn-0"
"""Gives the others their orders, so it stays."""
POLL_S = 0.25
SETTLE_S = 3.0
"""Seconds after which every gateway has found a new instance healthy."""


class Operator:
    """One operator at one control plane.

    Args:
        wait_s: seconds for each instance to do what it is told. say: gets one line per step.
    """

    def __init__(
        self, address: str, keys: ClientKeys, wait_s: float, say: Callable[[str], None] = print
    ) -> None:
        self._address = address
        self._keys = keys
        self._wait_s = wait_s
        self._say = say

    def add(self, asked: str) -> str:
        """Adds an attention or FFN instance; returns its id once it takes part.

        asked: "attention" or "ffn" for the first free one, or an id.

        Raises:
            ConfigError: there is no room. DeadlineExceeded: it did not become ready. AfdError: an
                instance could not read the experts that move.
        """
        before = {seat.id for seat in self._status().seats}
        wanted = operator.set_seat(self._address, self._keys, member=asked, wish="run")
        name = next((seat.id for seat in wanted.seats if seat.id not in before), asked)
        self._say(f"{name} starts")
        self._await(
            lambda members: is_ready(members, name),
            f"{name} did not become ready",
            "see the log of its host; without a supervisor there, start it with"
            f" `afd {name.partition('-')[0]}`",
        )
        if is_ffn(name):
            self._place_experts()
            self._say(f"{name} computes experts")
        else:
            self._say(f"{name} takes requests")
        return name

    def remove(self, name: str) -> None:
        """Lets an attention instance finish its requests and end; of an FFN instance, moves the
        experts away before.

        Raises:
            ConfigError: it cannot be removed. DeadlineExceeded: it did not end. AfdError: an
                instance could not read the experts that move.
        """
        if is_ffn(name):
            self.drain(name)
        operator.set_seat(self._address, self._keys, member=name, wish="remove")
        if not is_ffn(name):
            self._say(f"{name} leaves once its requests have finished")
        self._await(
            lambda members: members.seat(name) is None and not _has(members, name),
            f"{name} did not leave",
            "end its process yourself if no supervisor runs it (SIGTERM)",
        )
        self._say(f"{name} has left")

    def drain(self, name: str, *, undo: bool = False) -> None:
        """Keeps new requests away from an attention instance, and experts from an FFN instance, or
        ends that.

        Raises:
            ConfigError: it does not run, or the other FFN instances have no room for its experts.
            DeadlineExceeded, AfdError: as :meth:`add`, for the experts that move.
        """
        members = self._status()
        if undo and members.seat(name) is None:
            raise ConfigError(f"{name} does not run; see `afd ctl status`")
        contract = operator.contract(self._address, self._keys) if is_ffn(name) else None
        moves = contract is not None and contract.elastic
        if contract is not None and moves and not undo and name != LEADER:
            tables_without(name, members, contract)  # raises before anything has changed
        wish: Wish = "run" if undo else "drain"
        operator.set_seat(self._address, self._keys, member=name, wish=wish)
        if moves:
            self._say(f"the experts move {'to' if undo else 'away from'} {name}")
            self._place_experts()

    def restart(self, name: str) -> None:
        """Restarts an attention instance once its requests have finished, or an FFN instance.

        Raises:
            ConfigError: it is no member. DeadlineExceeded: it did not come back.
        """
        before = self._status()
        old = {m.id: m.generation for m in before.members if _instance(m.id) == name}
        operator.set_seat(self._address, self._keys, member=name, wish="restart")
        self._say(f"{name} restarts")

        def is_back(members: Members) -> bool:
            now = {m.id: m.generation for m in members.members if _instance(m.id) == name}
            newer = all(now.get(member, 0) > generation for member, generation in old.items())
            return newer and is_ready(members, name)

        self._await(is_back, f"{name} did not come back", "see the log of its host")
        self._say(f"{name} is back")

    def restart_all(self) -> None:
        """Restarts every attention and FFN instance, one after the other.

        Raises:
            ConfigError: only one attention instance runs. DeadlineExceeded: one did not come back.
        """
        members = self._status()
        attention = [member.id for member in members.of("attention") if not member.rank]
        if len(attention) < 2:
            raise ConfigError(
                "a rolling restart needs two attention instances; add one first"
                " (afd ctl add attention), or restart this one by name"
            )
        ffn = [member.id for member in members.of("ffn") if not member.rank]
        for name in [*attention, *ffn]:
            self.restart(name)
            time.sleep(SETTLE_S)

    def _place_experts(self) -> None:
        """Spreads the experts over the FFN instances that are to run, and waits until they have
        moved."""
        contract = operator.contract(self._address, self._keys)
        if contract is None:
            raise ConfigError("no member holds experts yet; wait until the deployment is up")
        tables = tables_without("", self._status(), contract)
        operator.move_experts(self._address, self._keys, tables=tables)
        wait_for_moves(self._address, self._keys, self._wait_s)

    def _status(self) -> Members:
        return operator.status(self._address, self._keys)

    def _await(self, done: Callable[[Members], bool], problem: str, remedy: str) -> None:
        end = time.monotonic() + self._wait_s
        while not done(self._status()):
            if time.monotonic() > end:
                raise DeadlineExceeded(f"{problem} within {self._wait_s:g} s; {remedy}")
            time.sleep(POLL_S)


def is_ffn(name: str) -> bool:
    return name.startswith("ffn")


def tables_without(name: str, members: Members, contract: Contract) -> tuple[Table, ...]:
    """Returns the expert in every slot, per MoE layer, if the FFN instances that are to run share
    the experts evenly. Pure.

    name: of one that does not count; "": all count. Each gets as many copies of experts as at the
    start, if it has room. Raises ConfigError if the experts do not fit.
    """
    bounds, experts = contract.expert_slots, contract.num_experts
    started = len(holders(contract.expert_map, bounds))
    redundant = bounds[1] - bounds[0] - -(-experts // started)
    seats = [s for s in members.seats if is_ffn(s.id) and "." not in s.id and s.id != name]
    active = [int(s.id.partition("-")[2]) for s in seats if s.wish in ("run", "restart")]
    return (spread(experts, bounds, sorted(active), redundant),) * len(contract.moe_layers)


def is_ready(members: Members, name: str) -> bool:
    """Whether all ranks of an instance are ready, and its API server answers, if it has one."""
    own = [member for member in members.members if _instance(member.id) == name]
    ready = bool(own) and all(member.state == "ready" for member in own)
    return ready and all(_answers(member.api_url) for member in own if member.api_url)


def _answers(url: str) -> bool:
    try:
        with DIRECT.open(f"{url.rstrip('/')}/health", timeout=2):
            return True
    except (urllib.error.URLError, OSError, ValueError):
        return False


def _has(members: Members, name: str) -> bool:
    return any(member.id == name for member in members.members)


def _instance(member: str) -> str:
    """Returns "ffn-1" for "ffn-1.2"."""
    return member.partition(".")[0]
