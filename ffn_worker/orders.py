"""How orders travel between the processes of the FFN pool: a ring of slots, one writer each."""

import logging

import numpy as np

from afd.control.messages import Member, Members, member_id
from afd.errors import PeerLost
from afd.resolve import Resolved
from afd.schedule import Position
from afd.topology import session
from afd.wire.layout import Kind
from afd.wire.orders import Order, order_slot_bytes, order_slots, read_order
from afd_comm import CommError, Link, Region, Status, VerbsOptions, make_flag

logger = logging.getLogger("afd.ffn")

_POST_TIMEOUT_US = 5_000_000


def _slots(resolved: Resolved) -> int:
    return order_slots(resolved.deployment.attention.instances, resolved.contract.max_depth)


def _verbs(resolved: Resolved) -> VerbsOptions | None:
    verbs = resolved.deployment.transport.verbs_keywords("ffn")
    return VerbsOptions(**verbs) if verbs else None


class OrderBox:
    """Where a process takes the orders of the one that it follows. In host memory on any device."""

    def __init__(self, resolved: Resolved, name: str, superior: tuple[int, int]) -> None:
        """superior: (instance, rank) of the process that is followed."""
        transport = resolved.deployment.transport
        self.superior = superior
        self.superior_id = member_id("ffn", *superior)
        self.region = Region(
            _slots(resolved),
            order_slot_bytes(resolved.deployment.attention.instances),
            name=f"{name} orders",
            tcp_host=None if transport.backend in ("shm", "ipc") else transport.host,
            verbs=_verbs(resolved),
        )
        self._session = 0
        self._taken = 0
        self.led = False

    def reconcile(self, members: Members, generation: int) -> None:
        """Begin a session anew where the superior, or this process, has a new generation."""
        member = members.find("ffn", *self.superior)
        number = session(member.generation, generation) if member else 0
        if number != self._session:
            self._session, self._taken = number, 0
            self._set_led(False)

    def wait(self, timeout_us: int) -> Order | str | None:
        """The next order, the text of a hello, or None: nothing came, or the wait was woken."""
        if not self._session:
            return None
        slot, flag = self._taken % self.region.slots, make_flag(self._session, self._taken + 1)
        if self.region.wait_any([slot], [flag], timeout_us) < 0:
            self._set_led(self.led and not self.region.gone(slot))
            return None
        self._taken += 1
        header = self.region.header(slot)
        payload = bytes(self.region.buffer(slot)[: header.nbytes])
        if header.kind == Kind.HELLO:
            self._set_led(True)
            return payload.decode()
        return read_order(header.kind, header.layer, header.micro_batch, payload)

    def close(self) -> None:
        self.region.close()

    def _set_led(self, led: bool) -> None:
        """led: the superior has said hello in this session and lives."""
        if led != self.led:
            logger.info("%s %s", "following" if led else "lost", self.superior_id)
        self.led = led


class _Follower:
    """The way to one follower. Raises CommError if it cannot be reached."""

    def __init__(self, resolved: Resolved, member: Member, number: int, hello: str) -> None:
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
        self._post(Kind.HELLO, Position(0, 0), hello.encode())

    def tell(self, order: Order) -> Status:
        return self._post(order.kind, order.position, order.payload())

    def close(self) -> None:
        self._link.close()

    def _post(self, kind: Kind, position: Position, payload: bytes) -> Status:
        slot, flag = self._sent % self._slots, make_flag(self.session, self._sent + 1)
        self._sent += 1
        data = np.frombuffer(payload, np.uint8)
        parts = [(0, data.ctypes.data, data.nbytes)] if payload else []
        layer, micro_batch = position.layer, position.micro_batch
        return self._link.post(slot, flag, layer, micro_batch, 0, 0, kind, 0, 0, parts)


class Followers:
    """Those that this process tells what to do: ranks of its instance, and heads of others."""

    def __init__(
        self,
        resolved: Resolved,
        places: tuple[tuple[int, int], ...],
        *,
        together: bool,
        hello: str = "",
    ) -> None:
        """places: (instance, rank) of each. together: they live and die with this process. hello:
        the text of the first message to each."""
        self._resolved = resolved
        self._places = places
        self._together = together
        self._hello = hello
        self._seen = (-1, -1)
        self._followers: dict[tuple[int, int], _Follower] = {}

    def reconcile(self, members: Members, generation: int) -> None:
        """Link to followers that are new, forget those that are gone."""
        if not self._places or (members.version, generation) == self._seen:
            return
        self._seen = (members.version, generation)
        for place in self._places:
            member, follower = members.find("ffn", *place), self._followers.get(place)
            number = session(generation, member.generation) if member else 0
            if follower is not None and follower.session != number:
                self._followers.pop(place).close()
                follower = None
            if member is not None and follower is None:
                self._link(place, member, number)

    def missing(self) -> list[str]:
        """Ids of those that are not linked."""
        return [member_id("ffn", *place) for place in self._places if place not in self._followers]

    def tell(self, order: Order) -> None:
        """Does not wait for anyone.

        Raises:
            PeerLost: a follower that must not miss anything is gone, or one that lives is cut off.
        """
        for follower in self._followers.values():
            status = follower.tell(order)
            if status == Status.PEER_GONE and not self._together:
                logger.warning("%s is gone", follower.id)  # it comes back with a new generation
            elif status != Status.OK:
                raise PeerLost(f"{follower.id} does not take orders ({status.name}); see its log")

    def close(self) -> None:
        for follower in self._followers.values():
            follower.close()
        self._followers.clear()

    def _link(self, place: tuple[int, int], member: Member, number: int) -> None:
        try:
            self._followers[place] = _Follower(self._resolved, member, number, self._hello)
        except CommError as error:
            # It may have died since; the next membership change settles it.
            logger.warning("cannot reach %s: %s", member.id, error)
            self._seen = (-1, -1)
