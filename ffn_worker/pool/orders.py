"""How orders travel between the processes of the FFN pool: through a ring of slots per receiver."""

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from afd.config.resolve import Resolved
from afd.control.messages import Member, Members
from afd.errors import PeerLost
from afd.schedule import Position
from afd.topology import member_id, session
from afd.wire.layout import Kind
from afd.wire.message import message, received
from afd_comm import (
    CommError,
    Link,
    Message,
    Region,
    Status,
    VerbsOptions,
    make_flag,
    post_each,
)
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
    """A link to one process. Raises CommError if it cannot be reached."""

    def __init__(self, resolved: Resolved, member: Member, number: int, hello: str) -> None:
        """number: of the session."""
        self.id = member.id
        self.session = number
        self.sent = 1  # messages
        self.link = Link(
            list(member.order_addresses),
            slots=(0, _slots(resolved)),
            timeout_us=_POST_TIMEOUT_US,
            verbs=_verbs(resolved),
        )
        text = np.frombuffer(hello.encode(), np.uint8)
        self.link.post(_said(Kind.HELLO, Position(0, 0), text), make_flag(number, 1))


def _said(kind: Kind, position: Position, data: npt.NDArray[np.uint8], settled: int = 0) -> Message:
    """Returns an order or a hello for slot 0. ``data`` has to live until it is posted."""
    return message(
        0,
        [(0, data.ctypes.data, len(data))] if len(data) else [],
        0,
        layer=position.layer,
        micro_batch=position.micro_batch,
        depth=0,
        kind=kind,
        moves=settled,
    )


class _Rings:
    """The slot and the flag of the next order in each ring, as arrays: with dozens of receivers,
    one call posts to all of them."""

    def __init__(self, links: Sequence[tuple[int, _OrderLink]], slots: int) -> None:
        """links: the receiver's instance, and the link."""
        self._order_links = [link for _, link in links]
        self._links = [link.link for link in self._order_links]
        self._instances = [instance for instance, _ in links]
        self._count = slots
        self._slots = np.array([link.sent % slots for link in self._order_links], np.uint32)
        self._flags = np.array(
            [make_flag(link.session, link.sent + 1) for link in self._order_links], np.uint64
        )

    def post(self, said: Message, receivers: int) -> list[tuple[_OrderLink, Status]]:
        """Posts to those that get the order. Returns those that did not take it, and why."""
        slots, flags, order_links = self._slots, self._flags, self._order_links
        if receivers:
            to = [i for i, instance in enumerate(self._instances) if gets(receivers, instance)]
            order_links = [order_links[i] for i in to]
            failed = post_each([self._links[i] for i in to], said, slots[to], flags[to])
            slots[to] += 1
            flags[to] += 1
        else:
            failed = post_each(self._links, said, slots, flags)
            slots += 1
            flags += 1
        slots %= self._count
        return [(order_links[i], status) for i, status in failed]

    def note_sent(self) -> None:
        """Notes in each link how many messages it has sent."""
        for link, flag in zip(self._order_links, self._flags, strict=True):
            link.sent = int(flag) - make_flag(link.session, 1)


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
        self._rings = _Rings([], _slots(resolved))

    def reconcile(self, members: Members, generation: int) -> None:
        """Links to processes that are new, forgets those that are gone."""
        if not self._places or not self._watch.has_news(members.version, generation):
            return
        self._rings.note_sent()
        for place in self._places:
            member, link = members.find("ffn", *place), self._links.get(place)
            number = session(generation, member.generation) if member else 0
            if link is not None and link.session != number:
                self._links.pop(place).link.close()
                link = None
            if member is not None and link is None:
                self._connect(place, member, number)
        self._line_up()

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
        data = np.frombuffer(order.payload(), np.uint8)
        said = _said(order.kind, order.position, data, order.settled)
        # A ring of slots has room for orders that the receiver's answers keep in check.
        for link, status in self._rings.post(said, order.receivers):
            if status == Status.PEER_GONE and not self._same_instance:
                logger.warning("%s is gone; continuing without it", link.id)
            else:
                raise PeerLost(f"{link.id} does not take orders ({status.name}); see its log")

    def close(self) -> None:
        for link in self._links.values():
            link.link.close()
        self._links.clear()
        self._line_up()

    def _line_up(self) -> None:
        links = [(instance, link) for (instance, _), link in self._links.items()]
        self._rings = _Rings(links, _slots(self._resolved))

    def _connect(self, place: tuple[int, int], member: Member, number: int) -> None:
        try:
            self._links[place] = _OrderLink(self._resolved, member, number, self._hello)
        except CommError as error:
            self._watch.failed(member.id, str(error))
        else:
            self._watch.reached(member.id)
