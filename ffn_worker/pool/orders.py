"""How orders travel between the processes of the FFN pool: through a ring of slots per receiver."""

import logging

import numpy as np

from afd.config.resolve import Resolved
from afd.control.messages import Member, Members
from afd.errors import PeerLost
from afd.schedule import Position
from afd.topology import member_id, session
from afd.wire.layout import Kind
from afd.wire.message import message, received
from afd_comm import CommError, Link, Message, Region, Status, VerbsOptions, make_flag
from ffn_worker.pool.membership import MembershipWatch
from ffn_worker.pool.order_format import (
    Order,
    gets,
    order_slot_bytes,
    order_slots,
    read_order,
)

logger = logging.getLogger("afd.ffn")

_POST_TIMEOUT_US = 5_000_000


def _slots(resolved: Resolved) -> int:
    return order_slots(resolved.slots.attention_ranks, resolved.contract.max_depth)


def _verbs(resolved: Resolved) -> VerbsOptions | None:
    verbs = resolved.deployment.transport.verbs_keywords("ffn")
    return VerbsOptions(**verbs) if verbs else None


class OrderInbox:
    """Where a process receives orders. In host memory on any device.

    connected: the sender has said hello in this session and is alive.
    """

    def __init__(self, resolved: Resolved, name: str, sender: tuple[int, int]) -> None:
        """sender: (instance, rank) of the process whose orders this one executes."""
        transport = resolved.deployment.transport
        self.sender = sender
        self.sender_id = member_id("ffn", *sender)
        self.region = Region(
            _slots(resolved),
            order_slot_bytes(resolved.slots.attention_ranks),
            name=f"{name} orders",
            tcp_host=None if transport.backend in ("shm", "ipc") else transport.host,
            verbs=_verbs(resolved),
        )
        self._session = 0
        self._taken = 0
        self.connected = False

    def reconcile(self, members: Members, generation: int) -> None:
        """Begins a new session if the sender, or this process, has a new generation."""
        member = members.find("ffn", *self.sender)
        number = session(member.generation, generation) if member else 0
        if number != self._session:
            self._session, self._taken = number, 0
            self._set_connected(False)

    def wait(self, timeout_us: int) -> Order | str | None:
        """Returns the next order, the text of a hello, or None: nothing came, or woken early."""
        if not self._session:
            return None
        slot, flag = self._taken % self.region.slots, make_flag(self._session, self._taken + 1)
        if self.region.wait_any([slot], [flag], timeout_us) < 0:
            self._set_connected(self.connected and not self.region.gone(slot))
            return None
        self._taken += 1
        header = received(self.region.header(slot))
        payload = bytes(self.region.buffer(slot)[: header.nbytes])
        if header.kind == Kind.HELLO:
            self._set_connected(True)
            return payload.decode()
        return read_order(header.kind, header.layer, header.micro_batch, header.moves, payload)

    def close(self) -> None:
        self.region.close()

    def _set_connected(self, connected: bool) -> None:
        if connected != self.connected:
            logger.info("%s %s", "following" if connected else "lost", self.sender_id)
        self.connected = connected


class _OrderLink:
    """Sends orders to one process. Raises CommError if it cannot be reached."""

    def __init__(self, resolved: Resolved, member: Member, number: int, hello: str) -> None:
        """number: of the session."""
        self.id = member.id
        self.session = number
        self._slots = _slots(resolved)
        self._slot, self._flag = 0, make_flag(number, 1)  # of the next order
        self._link = Link(
            list(member.order_addresses),
            slots=(0, self._slots),
            timeout_us=_POST_TIMEOUT_US,
            verbs=_verbs(resolved),
        )
        self.post(_Said(Kind.HELLO, Position(0, 0), hello.encode()))

    def post(self, said: "_Said") -> Status:
        slot, flag = self._slot, self._flag
        self._slot, self._flag = (slot + 1) % self._slots, flag + 1
        return self._link.post(said.in_slot(slot), flag)

    def close(self) -> None:
        self._link.close()


class _Said:
    """An order or a hello, to several processes."""

    def __init__(self, kind: Kind, position: Position, payload: bytes, settled: int = 0) -> None:
        self._kind, self._position, self._settled = kind, position, settled
        self._data = np.frombuffer(payload, np.uint8)  # keeps the bytes in memory
        self._slot = -1
        self._message: Message

    def in_slot(self, slot: int) -> Message:
        """Returns the message for a slot. Made once for all rings that are at the same slot, as
        most are."""
        if slot != self._slot:
            size = len(self._data)
            self._message = message(
                slot,
                [(0, self._data.ctypes.data, size)] if size else [],
                0,
                layer=self._position.layer,
                micro_batch=self._position.micro_batch,
                depth=0,
                kind=self._kind,
                moves=self._settled,
            )
            self._slot = slot
        return self._message


class OrderLinks:
    """Sends orders to several processes: the followers of this instance, or the other heads."""

    def __init__(
        self,
        resolved: Resolved,
        places: tuple[tuple[int, int], ...],
        *,
        same_instance: bool,
        hello: str = "",
    ) -> None:
        """places: (instance, rank) of each. same_instance: they restart together with this process.
        hello: the text of the first message to each."""
        self._resolved = resolved
        self._places = places
        self._same_instance = same_instance
        self._hello = hello
        self._watch = MembershipWatch()
        self._links: dict[tuple[int, int], _OrderLink] = {}

    def reconcile(self, members: Members, generation: int) -> None:
        """Links to processes that are new, forgets those that are gone."""
        if not self._places or not self._watch.has_news(members.version, generation):
            return
        for place in self._places:
            member, link = members.find("ffn", *place), self._links.get(place)
            number = session(generation, member.generation) if member else 0
            if link is not None and link.session != number:
                self._links.pop(place).close()
                link = None
            if member is not None and link is None:
                self._connect(place, member, number)

    def missing(self) -> list[str]:
        """Returns the ids of the processes that are not linked."""
        return [member_id("ffn", *place) for place in self._places if place not in self._links]

    def tell(self, order: Order) -> None:
        """Sends an order to all that get a request of it. Does not wait for anyone.

        Raises:
            PeerLost: a rank of this instance is gone, or a process that is alive is cut off.
        """
        if not self._links:
            return
        said = _Said(order.kind, order.position, order.payload(), order.settled)
        receivers = order.receivers
        for (instance, _), link in self._links.items():
            # The ring of slots has room for orders that the receiver's answers keep in check.
            if receivers and not gets(receivers, instance):
                continue
            status = link.post(said)
            if status == Status.OK:
                continue
            if status == Status.PEER_GONE and not self._same_instance:
                logger.warning("%s is gone; continuing without it", link.id)
            else:
                raise PeerLost(f"{link.id} does not take orders ({status.name}); see its log")

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _connect(self, place: tuple[int, int], member: Member, number: int) -> None:
        try:
            self._links[place] = _OrderLink(self._resolved, member, number, self._hello)
        except CommError as error:
            self._watch.failed(member.id, str(error))
        else:
            self._watch.reached(member.id)
