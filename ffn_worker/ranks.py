"""The processes of the FFN pool among themselves: who leads whom, and how they find each other."""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack

from afd.control.client import ControlClient
from afd.control.messages import Members, member_id
from afd.errors import DeadlineExceeded, PeerLost
from afd.launch.ports import held_ports
from afd.resolve import Resolved
from afd.topology import FfnPlace
from afd.wire.orders import Order
from ffn_worker.allreduce.base import Alone, Collective
from ffn_worker.orders import Followers, OrderBox

logger = logging.getLogger("afd.ffn")

_SLICE_US = 50_000

MakeCollective = Callable[[str], Collective]
"""Called with the address at which the ranks of an instance meet."""


class Ranks:
    """This process among those of the pool (:class:`afd.topology.FfnPlace`).

    The ranks of an instance live and die together: sums go on only with all of them, and they hold
    nothing that a restart would lose. Instances survive each other.
    """

    def __init__(self, resolved: Resolved, place: FfnPlace, control: ControlClient) -> None:
        self.place = place
        self.collective: Collective = Alone()
        name = member_id("ffn", place.instance, place.rank)
        superior = place.superior
        self.box = None if superior is None else OrderBox(resolved, name, superior)
        self._held = ExitStack()
        self._meeting = ""
        if place.mates:
            # Held until the ranks have met: weights are read in between.
            host = resolved.deployment.transport.host
            (port,) = self._held.enter_context(held_ports([host]))
            self._meeting = f"tcp://{host}:{port}"
        self._mates = Followers(resolved, place.mates, together=True, hello=self._meeting)
        self._heads = Followers(resolved, place.heads, together=False)
        self._control = control
        self._generations: dict[str, int] = {}

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where this process takes orders."""
        return () if self.box is None else tuple(self.box.region.addresses)

    def meet(self, make: MakeCollective, deadline_s: float) -> None:
        """Find the other ranks of this instance, then the leader, or the heads that it leads.

        Raises:
            DeadlineExceeded: names who did not come.
        """
        end = time.monotonic() + deadline_s
        if self.place.tp > 1:
            self._meet_ranks(make, end)
        if self.box is None:
            # Heads that are there have to hear of every step from now on. Those that are not yet
            # there are not ready before they have heard of us.
            self.reconcile()
        elif not self.place.rank:
            self._hello(end)

    def reconcile(self) -> None:
        """Follow the membership. Raises PeerLost when a rank of this instance is gone."""
        members, generation = self._control.members, self._control.generation
        gone = self.lost_rank(members)
        if gone is not None:
            raise PeerLost(gone)
        if self.box is not None:
            self.box.reconcile(members, generation)
        self._heads.reconcile(members, generation)

    def lost_rank(self, members: Members) -> str | None:
        """Which rank of this instance is gone, in a sentence, or None."""
        for rank, (name, generation) in enumerate(self._generations.items()):
            member = members.find("ffn", self.place.instance, rank)
            if member is None or member.generation != generation:
                return f"{name}, a rank of the same instance, is gone; all its ranks start again"
        return None

    def tell(self, order: Order) -> None:
        """Pass an order on to those that follow this process."""
        self._mates.tell(order)
        self._heads.tell(order)

    def wake(self) -> None:
        """End a wait for orders early; any thread."""
        if self.box is not None:
            self.box.region.wake()

    def close(self) -> None:
        self._held.close()
        self.collective.close()
        self._mates.close()
        self._heads.close()
        if self.box is not None:
            self.box.close()

    def _meet_ranks(self, make: MakeCollective, end: float) -> None:
        names = [member_id("ffn", *place) for place in self.place.ranks]

        def all_start(members: Members) -> bool:
            # A rank of the life before this is "ready" and about to end.
            found = [members.find("ffn", *place) for place in self.place.ranks]
            return all(member is not None and member.state == "starting" for member in found)

        left_s = max(0.0, end - time.monotonic())
        members = self._control.wait_for(all_start, deadline_s=left_s, what=", ".join(names))
        address = self._meeting
        if self.place.rank:
            address = self._hello(end)
        else:
            self._mates.reconcile(members, self._control.generation)
            if missing := self._mates.missing():
                raise PeerLost(f"{', '.join(missing)} cannot be reached; all ranks start again")
        self.collective = make(address)
        self._held.close()
        members = self._control.members
        for name, place in zip(names, self.place.ranks, strict=True):
            member = members.find("ffn", *place)
            self._generations[name] = member.generation if member else -1

    def _hello(self, end: float) -> str:
        """Wait for the hello of the process that this one follows; answers its text."""
        box = self.box
        assert box is not None
        logger.info("waiting for %s", box.superior_id)
        while time.monotonic() < end:
            box.reconcile(self._control.members, self._control.generation)
            text = box.wait(_SLICE_US)
            if isinstance(text, str):
                return text
            time.sleep(0.005)  # without a superior the wait returns at once
        raise DeadlineExceeded(f"{box.superior_id} has not said hello; look at its log")
