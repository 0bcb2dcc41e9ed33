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
from afd_comm import CommError, Link, Region, Status, VerbsOptions, make_flag
from ffn_worker.pool.membership import MembershipWatch
from ffn_worker.pool.order_format import Order, order_slot_bytes, order_slots, read_order

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
        self._sent = 0
        self._link = Link(
            list(member.order_addresses),
            slots=(0, self._slots),
            timeout_us=_POST_TIMEOUT_US,
            verbs=_verbs(resolved),
        )
        self._post(Kind.HELLO, Position(0, 0), _Payload(hello.encode()))

    def tell(self, order: Order, payload: "_Payload") -> Status:
        """payload: of the order, made once for all links."""
        return self._post(order.kind, order.position, payload, order.settled)

    def close(self) -> None:
        self._link.close()

    def _post(
        self, kind: Kind, position: Position, payload: "_Payload", settled: int = 0
    ) -> Status:
        slot, flag = self._sent % self._slots, make_flag(self.session, self._sent + 1)
        self._sent += 1
        layer, micro_batch = position.layer, position.micro_batch
        order = message(
            slot,
            payload.parts,
            0,
            layer=layer,
            micro_batch=micro_batch,
            depth=0,
            kind=kind,
            moves=settled,
        )
        return self._link.post(order, flag)


class _Payload:
    """Bytes as the parts of a message; keeps them in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self.parts = [(0, self._data.ctypes.data, len(data))] if data else []


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
        """Sends an order to all. Does not wait for anyone.

        Raises:
            PeerLost: a rank of this instance is gone, or a process that is alive is cut off.
        """
        payload = _Payload(order.payload() if self._links else b"")
        for link in self._links.values():
            status = link.tell(order, payload)
            if status == Status.PEER_GONE and not self._same_instance:
                logger.warning("%s is gone; continuing without it", link.id)
            elif status != Status.OK:
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
