"""The control client that every role embeds: one background thread, thread-safe to use."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import msgspec

from afd.control import messages as m
from afd.control.channel import Channel
from afd.control.contract import Contract
from afd.control.hosts import host_name, pid_space
from afd.control.keys import CurveKeys
from afd.control.session import Session
from afd.errors import AfdError, DeadlineExceeded, HandshakeRefused, PeerLost

_PROGRESS_S = 5.0
_CLOSE_S = 2.0
_BYE_LINGER_S = 0.2

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
Callback = Callable[[m.Members], None]
Progress = Callable[[str], None]


class ControlClient:
    """Keeps one process a member of the deployment.

    After :meth:`join`, a thread sends heartbeats, follows the membership and registers again by
    itself after the server restarted. While the server is away the last snapshot stays, so the data
    plane goes on. ``progress`` receives a line such as "waiting for ffn-0, ffn-1 (12 s)" every few
    seconds of a wait; by default the log does.
    """

    def __init__(
        self,
        address: str,
        keys: CurveKeys | None = None,
        *,
        role: str,
        index: int,
        rank: int = 0,
        contract: Contract | None = None,
        timing: m.Timing | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.address = address
        self.role = role
        self.index = index
        self.rank = rank
        self.id = m.member_id(role, index, rank)
        self._keys = keys
        self._contract = contract
        self._timing = (timing or m.Timing()).checked()
        self._progress = progress or (lambda line: _log.info("%s: %s", self.id, line))
        self._changed = threading.Condition()  # guards everything below
        self._callbacks: list[Callback] = []
        self._session = Session(self._hello(), self._timing)
        self._thread: threading.Thread | None = None
        self._fault: str | None = None
        self._fault_is_final = False
        self._broken: str | None = None  # why the thread ended on its own
        self._closing = False
        self._changes = 0
        self._pid = os.getpid()
        self._wake_read = self._wake_write = -1

    # --- facts ----------------------------------------------------------------------------------

    @property
    def members(self) -> m.Members:
        """The latest snapshot; immutable, replaced as a whole."""
        return self._session.members

    @property
    def generation(self) -> int:
        """Our generation, 0 before join. It grows if the server gave us up and took us back, or
        after :meth:`renew`: then our peers have dropped us too, and links must be made anew."""
        return self._session.generation

    @property
    def depth(self) -> int | None:
        """The runtime depth set by the operator; None: the configured one holds."""
        return self.members.depth

    @property
    def draining(self) -> bool:
        """True while the operator drains the deployment."""
        return self.members.draining

    @property
    def stopping(self) -> bool:
        """True once the operator ended the deployment: finish and leave."""
        return self._session.stopping

    @property
    def connected(self) -> bool:
        """False while the server is silent or does not have us as a member."""
        return self._session.joined and not self._session.silent

    @property
    def refused(self) -> str | None:
        """Why the server refused us for good, also after a join (another process took our id)."""
        return self._session.refused

    # --- verbs ----------------------------------------------------------------------------------

    def on_change(self, callback: Callback) -> None:
        """Calls back on the client's thread with every new snapshot (members, depth, draining) and
        when ``stopping`` or ``refused`` are set. Register before join to miss nothing; be quick."""
        with self._changed:
            self._callbacks.append(callback)

    def join(
        self,
        *,
        addresses: tuple[str, ...] | list[str] = (),
        order_addresses: tuple[str, ...] | list[str] = (),
        api_url: str = "",
        metrics_url: str = "",
        deadline_s: float,
    ) -> int:
        """Registers this process and returns its generation (u32, larger than any before).

        HandshakeRefused if the server (or its CURVE handshake) says no, DeadlineExceeded if it says
        nothing within ``deadline_s``, ConfigError if the address is malformed. After a failure the
        client is closed and may join again.
        """
        self._check_process()
        if self._thread is not None:
            raise AfdError(f"{self.id} has joined already; close() the client first")
        channel = Channel(self.address, self._keys, uuid.uuid4().hex.encode("ascii"))
        hello = msgspec.structs.replace(
            self._hello(),
            addresses=tuple(addresses),
            order_addresses=tuple(order_addresses),
            api_url=api_url,
            metrics_url=metrics_url,
        )
        self._session = Session(hello, self._timing)
        self._fault, self._broken, self._closing = None, None, False
        self._fault_is_final = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(
            target=self._run, args=(channel,), name=f"afd-control-{self.id}", daemon=True
        )
        self._thread.start()
        try:
            return self._await_welcome(deadline_s)
        except BaseException:
            self.close()
            raise

    def wait_for(
        self, predicate: Callable[[m.Members], bool], *, deadline_s: float, what: str
    ) -> m.Members:
        """Waits until the snapshot satisfies the predicate and returns that snapshot.

        ``what`` completes "waiting for ..."; DeadlineExceeded names it and who is there.
        HandshakeRefused or PeerLost if the wait has become pointless.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("wait_for would wait for itself on the client's own thread")

        def check() -> m.Members | None:
            members = self.members
            if predicate(members):
                return members
            self._raise_if_over(f"while waiting for {what}")
            return None

        def late() -> AfdError:
            there = ", ".join(f"{x.id} ({x.state})" for x in self.members.members) or "nobody"
            return DeadlineExceeded(
                f"{what} did not come within {deadline_s:g} s; registered now: {there}; "
                "look at the log of what is missing"
            )

        return self._wait(check, deadline_s, what, late)

    def set_state(self, state: m.State) -> None:
        """Moves on to "ready" or "draining"; ValueError on a step back. Does not block."""
        with self._changed:
            self._session.set_state(state)
        self._wake()

    def report_move(self, number: int, fault: str = "") -> None:
        """Says that all moves of experts up to ``number`` are made here, and why the next one
        cannot be, if it cannot. Does not block."""
        with self._changed:
            self._session.report_move(number, fault)
        self._wake()

    def report_work(self, work: Callable[[], m.Work]) -> None:
        """Every heartbeat from now on carries what ``work`` answers; it is called on the client's
        thread. After :meth:`join`."""
        with self._changed:
            self._session.work = work

    def renew(self) -> None:
        """Asks for a new generation, with which we and our peers make all links anew. Does not
        block; where the message is lost, nothing happens."""
        with self._changed:
            self._session.renew()
        self._wake()

    def leave(self) -> None:
        """Tells the server that we go; the others see it at once. The snapshot stays."""
        with self._changed:
            self._session.left = True
        self._wake()

    def close(self) -> None:
        """Leaves and ends the thread, within 2 s. Idempotent; does nothing in a forked child."""
        thread = self._thread
        if thread is None or os.getpid() != self._pid:
            return
        with self._changed:
            self._session.left = True
            self._closing = True
        self._wake()
        if thread is threading.current_thread():  # from a callback: the thread ends by itself
            return
        thread.join(_CLOSE_S)
        if thread.is_alive():
            _log.warning("%s: the control thread did not end within %g s", self.id, _CLOSE_S)
        self._thread = None

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- waiting --------------------------------------------------------------------------------

    def _await_welcome(self, deadline_s: float) -> int:
        def check() -> int | None:
            if self._session.joined:
                return self._session.generation
            self._raise_if_over("at join")
            if self._fault is not None and self._fault_is_final:
                raise HandshakeRefused(f"control plane at {self.address}: {self._fault}")
            return None

        def late() -> AfdError:
            if self._session.waiting is not None:
                return DeadlineExceeded(f"{self.id} not accepted: {self._session.waiting}")
            if self._fault is not None:
                return DeadlineExceeded(
                    f"control plane at {self.address} did not let us in within "
                    f"{deadline_s:g} s: {self._fault}"
                )
            return DeadlineExceeded(
                f"control plane at {self.address} did not answer within {deadline_s:g} s; "
                "is `afd control` running, and is the address reachable from this host?"
            )

        return self._wait(check, deadline_s, f"the control plane at {self.address}", late)

    def _raise_if_over(self, when: str) -> None:
        if self._session.refused is not None:
            raise HandshakeRefused(self._session.refused)
        if self._broken is not None:
            raise PeerLost(f"{self.id}: the control thread failed {when}: {self._broken}")
        if self._session.stopping:
            raise PeerLost(f"{self.id}: the operator ended the deployment {when}")
        if self._closing or self._thread is None:
            raise PeerLost(f"{self.id}: the control client is closed {when}; join() first")

    def _wait(
        self,
        check: Callable[[], _T | None],
        deadline_s: float,
        what: str,
        late: Callable[[], AfdError],
    ) -> _T:
        """Runs ``check`` after every change until it gives something; raises ``late()`` in the end.

        ``check`` runs without the lock: it may take its time, and may use this client.
        """
        start = time.monotonic()
        end, next_line = start + deadline_s, start + _PROGRESS_S
        while True:
            with self._changed:
                seen = self._changes
            result = check()
            if result is not None:
                return result
            now = time.monotonic()
            if now >= end:
                raise late()
            if now >= next_line:
                self._progress(f"waiting for {what} ({now - start:.0f} s)")
                next_line += _PROGRESS_S
            with self._changed:
                self._changed.wait_for(
                    partial(self._has_changed_since, seen), max(0.0, min(end, next_line) - now)
                )

    def _has_changed_since(self, seen: int) -> bool:
        return self._changes != seen

    # --- the thread -----------------------------------------------------------------------------

    def _run(self, channel: Channel) -> None:
        try:
            while not self._closing:
                self._step(channel)
        except Exception as error:  # the waiting threads must hear of it, whatever it is
            _log.exception("%s: the control thread failed", self.id)
            with self._changed:
                self._broken = f"{type(error).__name__}: {error}"
        finally:
            with self._changed:
                last_word = self._session.due()
            if last_word is not None and channel.send(last_word):
                channel.poll(_BYE_LINGER_S)  # for the answer: closing earlier may lose the word
            channel.close(linger_s=_BYE_LINGER_S)
            with self._changed:
                os.close(self._wake_read)
                os.close(self._wake_write)
                self._wake_read = self._wake_write = -1
                self._notify()

    def _step(self, channel: Channel) -> None:
        with self._changed:
            message = self._session.due()
            wait_s = self._session.wait_s()
        if message is not None:
            channel.send(message)  # if there is no connection: again when there is one
        received = channel.poll(wait_s, self._wake_read)
        with self._changed:
            if received.connected:
                self._session.speak_now()
            news = [self._session.handle(message) for message in received.messages]
            self._session.check_silence()
            fault = (channel.fault, channel.fault_is_final)
            if any(news) or fault != (self._fault, self._fault_is_final):
                self._fault, self._fault_is_final = fault
                self._notify()
            callbacks = tuple(self._callbacks) if any(news) else ()
            members = self._session.members
        for callback in callbacks:
            try:
                callback(members)
            except Exception:  # a fault of the role must not cost it its membership
                _log.exception("%s: an on_change callback failed", self.id)

    def _notify(self) -> None:
        self._changes += 1
        self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            if self._wake_write >= 0:
                # A full pipe (BlockingIOError) wakes the thread as well as one more byte would.
                with suppress(BlockingIOError):
                    os.write(self._wake_write, b"w")

    def _hello(self) -> m.Hello:
        return m.Hello(
            role=self.role,
            index=self.index,
            rank=self.rank,
            contract=self._contract,
            pid=os.getpid(),
            host=host_name(),
            pid_space=pid_space(),
        )

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise AfdError(
                f"{self.id}: this control client was made in process {self._pid} and does not "
                "survive a fork; make it after forking"
            )
