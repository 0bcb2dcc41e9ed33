"""The links of one FFN rank to the rest of the pool: whose orders it executes, and who its own."""

import logging
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack

from afd.config.resolve import Resolved
from afd.control.client import ControlClient
from afd.control.messages import Members
from afd.errors import DeadlineExceeded, PeerLost
from afd.host.logs import say_phase
from afd.host.ports import held_ports
from afd.topology import FfnPlace, member_id
from ffn_worker.allreduce.base import Alone, Collective
from ffn_worker.pool.order_format import Order
from ffn_worker.pool.orders import OrderInbox, OrderLinks

logger = logging.getLogger("afd.ffn")

_SLICE_US = 50_000

MakeCollective = Callable[[str], Collective]
"""Called with the address at which the ranks of an instance meet."""


class PoolLinks:
    """This rank among the others of the pool (:class:`afd.topology.FfnPlace`).

    The ranks of an instance live and die together: each sum needs all of them, and they hold
    nothing that a restart would lose. Instances survive each other.

    inbox: where this rank receives orders; None for the leader.
    collective: adds up over the ranks of this instance.
    """

    def __init__(self, resolved: Resolved, place: FfnPlace, control: ControlClient) -> None:
        self.place = place
        self.collective: Collective = Alone()
        name = member_id("ffn", place.instance, place.rank)
        sender = place.follows
        self.inbox = None if sender is None else OrderInbox(resolved, name, sender)
        self._held = ExitStack()
        self._meeting = ""
        self._folders = ExitStack()
        if place.followers and resolved.deployment.hosts:
            # All ranks are on this host, so they need no port, which every host could reach.
            folder = tempfile.TemporaryDirectory(prefix="afd-ranks-")
            self._meeting = f"file://{self._folders.enter_context(folder)}/store"
        elif place.followers:
            # Held until the ranks have met: they read their weights first.
            host = resolved.deployment.transport.host
            (port,) = self._held.enter_context(held_ports([host]))
            self._meeting = f"tcp://{host}:{port}"
        self._followers = OrderLinks(
            resolved, place.followers, same_instance=True, hello=self._meeting
        )
        self._heads = OrderLinks(resolved, place.heads, same_instance=False)
        self._control = control
        self._generations: dict[str, int] = {}

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where this process receives orders."""
        return () if self.inbox is None else tuple(self.inbox.region.addresses)

    def meet(self, make: MakeCollective, deadline_s: float) -> None:
        """Finds the other ranks of this instance, then the leader, or the heads that it leads.

        Raises:
            DeadlineExceeded: names the processes that did not come.
        """
        end = time.monotonic() + deadline_s
        if self.place.tp > 1:
            say_phase(logger, "connecting to the ranks of its instance")
            self._meet_ranks(make, end)
        if self.inbox is None:
            # Present heads have to hear of every step from now on. A head that starts later is not
            # ready before it has heard the leader's hello.
            self.reconcile()
        elif not self.place.rank:
            say_phase(
                logger, f"connecting to {self.inbox.sender_id}, which leads the FFN instances"
            )
            self._await_hello(end)

    def reconcile(self) -> None:
        """Follows the membership. Raises PeerLost when a rank of this instance is gone."""
        members, generation = self._control.members, self._control.generation
        gone = self.lost_rank(members)
        if gone is not None:
            raise PeerLost(gone)
        if self.inbox is not None:
            self.inbox.reconcile(members, generation)
        self._heads.reconcile(members, generation)

    def lost_rank(self, members: Members) -> str | None:
        """Returns a sentence that names a rank of this instance that is gone, or None."""
        for rank, (name, generation) in enumerate(self._generations.items()):
            member = members.find("ffn", self.place.instance, rank)
            if member is None or member.generation != generation:
                return f"{name}, a rank of the same instance, is gone; all its ranks restart"
        return None

    def tell(self, order: Order) -> None:
        """Passes an order on to the processes that execute this one's orders."""
        self._followers.tell(order)
        self._heads.tell(order)

    def wake(self) -> None:
        """Ends a wait for orders early; any thread."""
        if self.inbox is not None:
            self.inbox.region.wake()

    def close(self) -> None:
        self._held.close()
        self.collective.close()
        self._folders.close()
        self._followers.close()
        self._heads.close()
        if self.inbox is not None:
            self.inbox.close()

    def _meet_ranks(self, make: MakeCollective, end: float) -> None:
        names = [member_id("ffn", *place) for place in self.place.ranks]

        def all_start(members: Members) -> bool:
            # A rank of the previous generation is still "ready" and about to end.
            found = [members.find("ffn", *place) for place in self.place.ranks]
            return all(member is not None and member.state == "starting" for member in found)

        left_s = max(0.0, end - time.monotonic())
        members = self._control.wait_for(all_start, deadline_s=left_s, what=", ".join(names))
        address = self._meeting
        if self.place.rank:
            address = self._await_hello(end)
        else:
            self._followers.reconcile(members, self._control.generation)
            if missing := self._followers.missing():
                raise PeerLost(f"{', '.join(missing)} cannot be reached; all ranks restart")
        self.collective = make(address)
        self._held.close()
        members = self._control.members
        for name, place in zip(names, self.place.ranks, strict=True):
            member = members.find("ffn", *place)
            self._generations[name] = member.generation if member else -1

    def _await_hello(self, end: float) -> str:
        """Waits for the hello of the process whose orders this one executes; returns its text."""
        inbox = self.inbox
        assert inbox is not None
        logger.info("waiting for %s", inbox.sender_id)
        while time.monotonic() < end:
            inbox.reconcile(self._control.members, self._control.generation)
            text = inbox.wait(_SLICE_US)
            if isinstance(text, str):
                return text
            time.sleep(0.005)  # without a sender the wait returns at once
        raise DeadlineExceeded(f"{inbox.sender_id} has not said hello; look at its log")
