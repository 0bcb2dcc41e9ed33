"""The control client of every role: one background thread; thread-safe."""

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

from afd.config.contract import Contract
from afd.control import messages as m
from afd.control.channel import Channel
from afd.control.hosts import host_name, pid_space
from afd.control.keys import ClientKeys
from afd.control.registration import Registration
from afd.errors import AfdError, DeadlineExceeded, HandshakeRefused, PeerLost
from afd.topology import member_id

_PROGRESS_S = 5.0
_CLOSE_S = 2.0
_BYE_LINGER_S = 0.2

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
Callback = Callable[[m.Members], None]
Progress = Callable[[str], None]


class ControlClient:
    """Keeps one process registered as a member of the deployment.

    After :meth:`join`, a thread sends heartbeats, receives the membership and registers again after
    the server restarted. While the server is away, the last snapshot stays, so the data plane
    continues. ``progress`` receives lines such as "waiting for ffn-0, ffn-1 (12 s)" every few
    seconds of a wait; by default they are logged.
    """

    def __init__(
        self,
        address: str,
        keys: ClientKeys,
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
        self.id = member_id(role, index, rank)
        self._keys = keys
        self._contract = contract
        self._timing = (timing or m.Timing()).checked()
        self._progress = progress or (lambda line: _log.info("%s: %s", self.id, line))
        self._changed = threading.Condition()  # guards everything below
        self._callbacks: list[Callback] = []
        self._registration = Registration(self._hello(), self._timing)
        self._thread: threading.Thread | None = None
        self._fault: str | None = None
        self._fault_is_final = False
        self._broken: str | None = None  # the exception that ended the thread
        self._closing = False
        self._changes = 0
        self._pid = os.getpid()
        self._wake_read = self._wake_write = -1

    # --- facts ----------------------------------------------------------------------------------

    @property
    def members(self) -> m.Members:
        """The latest snapshot; immutable, replaced as a whole."""
        return self._registration.members

    @property
    def generation(self) -> int:
        """Our generation, 0 before join. It grows when the server had dropped us, and after
        :meth:`renew`. Peers have dropped us then too, so links must be made anew."""
        return self._registration.generation

    @property
    def depth(self) -> int | None:
        """The runtime depth set by the operator; None: as configured."""
        return self.members.depth

    @property
    def draining(self) -> bool:
        """True while the operator drains the deployment."""
        return self.members.draining

    @property
    def stopping(self) -> bool:
        """True once the operator ended the deployment; then finish and leave."""
        return self._registration.stopping

    @property
    def connected(self) -> bool:
        """False while the server is silent or we are not registered."""
        return self._registration.joined and not self._registration.silent

    @property
    def refused(self) -> str | None:
        """Why the server refused us for good, possibly after a join."""
        return self._registration.refused

    # --- verbs ----------------------------------------------------------------------------------

    def on_change(self, callback: Callback) -> None:
        """Adds a callback. The client's thread calls it with every new snapshot and when
        ``stopping`` or ``refused`` is set. Add it before join; it must return quickly."""
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

        After a failure the client is closed and may join again.

        Raises:
            HandshakeRefused: the server or its CURVE handshake refused us.
            DeadlineExceeded: no reply within ``deadline_s`` seconds.
            ConfigError: the address is malformed.
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
        self._registration = Registration(hello, self._timing)
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

        ``what`` completes "waiting for ...".

        Raises:
            DeadlineExceeded: it names ``what`` and the registered members.
            HandshakeRefused, PeerLost: the wait cannot succeed any more.
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
        """Advances to "ready" or "draining"; ValueError on a step back. Does not block."""
        with self._changed:
            self._registration.set_state(state)
        self._wake()

    def report_move(self, number: int, fault: str = "") -> None:
        """Reports that all expert moves up to ``number`` are done here, and why the next one
        failed, if it did. Does not block."""
        with self._changed:
            self._registration.report_move(number, fault)
        self._wake()

    def report_work(self, work: Callable[[], m.Work]) -> None:
        """Makes every heartbeat carry the result of ``work``, which runs on the client's thread.
        Call it after :meth:`join`."""
        with self._changed:
            self._registration.work = work

    def renew(self) -> None:
        """Asks for a new generation, so that we and our peers make all links anew. Does not block;
        if the message is lost, nothing happens."""
        with self._changed:
            self._registration.renew()
        self._wake()

    def leave(self) -> None:
        """Tells the server that we leave; other members see it at once. The snapshot stays."""
        with self._changed:
            self._registration.left = True
        self._wake()

    def close(self) -> None:
        """Leaves and ends the thread, within 2 s. Idempotent; does nothing in a forked child."""
        thread = self._thread
        if thread is None or os.getpid() != self._pid:
            return
        with self._changed:
            self._registration.left = True
            self._closing = True
        self._wake()
        if thread is threading.current_thread():  # from a callback: the thread ends by itself
            return
        thread.join(_CLOSE_S)
        if thread.is_alive():
            _log.warning("%s: the control thread did not end within %g s", self.id, _CLOSE_S)
            return  # it owns the pipe: join() refuses until a later close() has ended it
        self._thread = None

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- waiting --------------------------------------------------------------------------------

    def _await_welcome(self, deadline_s: float) -> int:
        def check() -> int | None:
            if self._registration.joined:
                return self._registration.generation
            self._raise_if_over("at join")
            if self._fault is not None and self._fault_is_final:
                raise HandshakeRefused(f"control plane at {self.address}: {self._fault}")
            return None

        def late() -> AfdError:
            if self._registration.waiting is not None:
                return DeadlineExceeded(f"{self.id} not accepted: {self._registration.waiting}")
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
        if self._registration.refused is not None:
            raise HandshakeRefused(self._registration.refused)
        if self._broken is not None:
            raise PeerLost(f"{self.id}: the control thread failed {when}: {self._broken}")
        if self._registration.stopping:
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
        """Runs ``check`` after every change until it returns a value; raises ``late()`` at the end.

        ``check`` runs without the lock, so it may be slow and may use this client.
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
        except Exception as error:  # waiting threads must be told about any failure
            _log.exception("%s: the control thread failed", self.id)
            with self._changed:
                self._broken = f"{type(error).__name__}: {error}"
        finally:
            with self._changed:
                last_word = self._registration.due()
            if last_word is not None and channel.send(last_word):
                channel.poll(_BYE_LINGER_S)  # wait for the reply: closing earlier may lose the Bye
            channel.close(linger_s=_BYE_LINGER_S)
            with self._changed:
                os.close(self._wake_read)
                os.close(self._wake_write)
                self._wake_read = self._wake_write = -1
                self._notify()

    def _step(self, channel: Channel) -> None:
        with self._changed:
            message = self._registration.due()
            wait_s = self._registration.wait_s()
        if message is not None:
            channel.send(message)  # without a connection it is sent again later
        received = channel.poll(wait_s, self._wake_read)
        with self._changed:
            if received.connected:
                self._registration.speak_now()
            news = [self._registration.handle(message) for message in received.messages]
            self._registration.check_silence()
            fault = (channel.fault, channel.fault_is_final)
            if any(news) or fault != (self._fault, self._fault_is_final):
                self._fault, self._fault_is_final = fault
                self._notify()
            callbacks = tuple(self._callbacks) if any(news) else ()
            members = self._registration.members
        for callback in callbacks:
            try:
                callback(members)
            except Exception:  # an error in a callback must not end the membership
                _log.exception("%s: an on_change callback failed", self.id)

    def _notify(self) -> None:
        self._changes += 1
        self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            if self._wake_write >= 0:
                # A full pipe (BlockingIOError) wakes the thread, too.
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
