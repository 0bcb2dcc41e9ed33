"""Slots and doorbells between processes.

A receiver owns a ``Region`` of equal slots. A sender opens a ``Link`` to it, writes a
message straight into a slot and rings that slot's doorbell: a 64-bit flag, stored after payload and header. The
receiver waits for the exact flag it expects, so a late message of an earlier generation never counts as a new one.
A slot holds one message. The application decides when it may be overwritten, as with RDMA writes.

Set-up raises ``CommError``. On the hot path errors are ``Status`` values. Wrong arguments raise the usual
``IndexError``, ``ValueError`` and ``TypeError``.
"""

import enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

MAX_PARTS: int
"""Most parts of one message (8)."""

USER_BYTES: int
"""Bytes of a header that belong to the application (24)."""

def backends() -> tuple[str, ...]:
    """Names of all link backends, in the order in which backend "auto" tries them."""

class CommError(RuntimeError):
    """Set-up failed; the message names the cause and the remedy."""

class Status(enum.IntEnum):
    OK = 0
    DEADLINE = 1
    """Not finished in time, or woken early by ``Region.wake``: check the clock before dropping the peer."""
    PEER_GONE = 2
    """The other process ended, or closed its end."""
    BAD_HEADER = 3
    """A slot outside of the region or of the link's claim, or flag 0."""
    CAPACITY = 4
    """A part lies outside of the slot."""
    CLOSED = 5
    """This end is closed, or a newer link has claimed its slots."""

def make_flag(generation: int, seq: int) -> int:
    """Return ``generation << 32 | seq``; both in [0, 2**32), else TypeError. 0 is not a valid flag."""

class Message:
    """What is sent, whoever gets it: a slot, the payload, and the header's contents. Immutable.

    One message can be posted many times and to many peers. Flag and ``answer_to`` differ from post to post, so
    ``Link.post``, ``Link.enqueue`` and ``Group`` take them as arguments of their own.
    """

    def __init__(
        self,
        slot: int,
        parts: list[tuple[int, int, int]],
        user: bytes = b"",
        count: int = 0,
        whole: int = 0,
    ) -> None:
        """Describe a message for ``slot``.

        ``parts``: at most ``MAX_PARTS`` of (offset in the slot, address, nbytes). Each is contiguous memory. The
        message only refers to it, so it must stay valid until the message is sent. ``user``: at most
        ``USER_BYTES`` bytes that travel in the header, padded with zeros. afd_comm never interprets them.
        ``count``: number of items in the message, in [0, 2**32). ``whole``: so many of the last parts are sent whole
        where ``Link.enqueue`` gets a count. Raises ValueError and TypeError for arguments of
        the wrong form, and never looks at the region: posting checks slot and offsets.
        """
    @property
    def slot(self) -> int: ...
    @property
    def parts(self) -> list[tuple[int, int, int]]: ...
    @property
    def user(self) -> bytes:
        """``USER_BYTES`` bytes."""
    @property
    def count(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """Sum of the parts, bytes."""

class Header:
    """What the receiver knows about a message besides its payload; read only."""

    @property
    def user(self) -> bytes:
        """The sender's ``Message.user``, ``USER_BYTES`` bytes."""
    @property
    def count(self) -> int:
        """Number of items in the message. After ``Group.scatter``: the items of this link."""
    @property
    def nbytes(self) -> int:
        """Sum of the parts, bytes."""
    @property
    def t_posted(self) -> int:
        """Start of ``post``; ns, CLOCK_MONOTONIC of the sender's host.

        All four times are 0 for a message whose link does not trace.
        """
    @property
    def t_sent(self) -> int:
        """The first byte was sent (shm: all bytes were copied); ns, clock of the sender's host.

        Over shm it equals ``t_posted`` for messages of up to 1 KiB.
        """
    @property
    def t_arrived(self) -> int:
        """Complete, just before the doorbell; ns, clock of the receiver's host.

        Do not subtract the sender's times from it; ``PeerTrace`` converts between clocks.
        """
    @property
    def t_consumed(self) -> int:
        """A wait saw the doorbell; ns, clock of the receiver's host; 0 where the region does not trace."""

class Histogram:
    """Counts of times, in buckets at most 1/16 of their value wide; a snapshot."""

    @property
    def count(self) -> int: ...
    @property
    def total_ns(self) -> int: ...
    @property
    def max_ns(self) -> int: ...
    def quantile_ns(self, fraction: float) -> int:
        """Return the time that ``fraction`` of the counts do not exceed, or 0 without counts.

        Raises ValueError for a fraction outside [0, 1].
        """
    def cumulative(self, bounds_ns: list[int]) -> list[int]:
        """Return, for each bound, the counts in buckets that end at or below it. Bounds must not decrease."""

class PeerTrace:
    """Measures where one peer's messages spend their time, without synchronised clocks; see ``Region.trace``.

    An answer posted with ``answer_to`` echoes two times of the message it answers. Let t0 be the request's post and
    t3 the answer's arrival by this host's clock, t1 the request's arrival and t2 the answer's post by the peer's
    clock. Then the round trip on the wire is (t3 - t0) - (t2 - t1), and the peer's clock is ahead by
    ((t1 - t0) - (t3 - t2)) / 2, wrong by at most half the round trip (as in NTP, RFC 5905 section 8). The sample with
    the smallest error bound is used; the bound grows by 100 us per second of age, since two quartz clocks drift apart
    more slowly. Answers that were held for more than 100 ms are not used. Between processes of one host the offset is
    0, and every time is exact.
    """

    def __init__(self) -> None: ...
    @property
    def inbound(self) -> Histogram:
        """From the peer's ``post`` to arrival here."""
    @property
    def outbound(self) -> Histogram:
        """From our ``post`` to arrival there, known from answers."""
    @property
    def round_trip(self) -> Histogram:
        """Both directions, without the time the peer took to answer."""
    @property
    def waiting(self) -> Histogram:
        """From arrival here until a wait saw the message."""
    def events(self) -> list[tuple[int, int, int, int, bytes, int, int]]:
        """The last 4096 messages, oldest first: (posted, sent, arrived, consumed, user, count, nbytes).

        Times in ns of this host's CLOCK_MONOTONIC; the peer's times are converted with ``offset_ns``. Messages
        from before the offset was known are left out.
        """
    @property
    def offset_ns(self) -> int:
        """By how much the peer's clock is ahead of ours, ns; 0 while unknown."""
    @property
    def offset_error_ns(self) -> int:
        """Largest error of ``offset_ns`` and of every one-way time, ns; -1 while unknown."""

class VerbsOptions:
    """Options of backend verbs (RDMA); read only. Each end of a link has its own."""

    def __init__(
        self,
        *,
        ports: list[str],
        host: str = "",
        port: int = 0,
        qps_per_port: int = 2,
        gid_index: int = -1,
        traffic_class: int = 0,
        service_level: int = 0,
        timeout: int = 14,
        retry: int = 6,
        spin_us: int = -1,
        stripe_bytes: int = 65536,
        library: str = "libibverbs.so.1",
    ) -> None:
        """``ports``: 1 to 8 of "device:port" (port 1 may be left out), in rail order: port i of one
        end talks to port i of the other end, over ``qps_per_port`` connections.

        ``host``, ``port`` (region only): where it listens for the handshake, a TCP connection that stays open as long
        as the link. ``gid_index`` -1: the port's first RoCE v2 address. ``traffic_class``,
        ``service_level``: of the packets. ``timeout``: 4.096 us << timeout until an unacknowledged packet is
        sent again, ``retry`` (0 to 6) times. ``spin_us``: polling before the progress thread sleeps; -1: 50,
        on at most two usable CPUs 5. ``stripe_bytes``: payloads of twice this and more use several
        connections. ``library``: the libibverbs to load. Raises CommError for values out of range; devices
        are opened when a region or link is made.
        """

def post_each(
    links: list[Link],
    message: Message,
    slots: npt.NDArray[np.uint32],
    flags: npt.NDArray[np.uint64],
) -> list[tuple[int, Status]]:
    """Post one message to several links, ``slots[i]`` and ``flags[i]`` over ``links[i]``, as ``Link.post``.

    Returns the index and the status of each that failed; the others are posted all the same. With many links this
    takes a fraction of the time of as many calls. Raises ValueError for different lengths.
    """

def plan_stripes(nbytes: int, alive: int, turn: int, least: int) -> list[tuple[int, int, int]]:
    """Return how verbs divides a payload: (connection, offset, length) of each stripe. Pure; for tests.

    ``alive``: bit set of the usable connections, at most 16. ``turn``: which of them leads. ``least``: smallest size
    of a stripe, bytes. Raises ValueError for an empty set.
    """

def plan_staged(nbytes: int, alive: int, turn: int) -> list[tuple[int, int, int]]:
    """``plan_stripes`` of a message that is copied through host memory. Pure; for tests."""

def stripe_length(nbytes: int, count: int, unit: int) -> int:
    """Return the bytes of each stripe but the last, a multiple of ``unit``. Pure; for tests."""

class Region:
    """Memory of ``slots`` slots of ``slot_bytes`` bytes each that peers write into."""

    def __init__(
        self,
        slots: int,
        slot_bytes: int,
        *,
        name: str,
        tcp_host: str | None = None,
        tcp_port: int = 0,
        verbs: VerbsOptions | None = None,
        payloads: int | None = None,
        device: str = "cpu",
    ) -> None:
        """Reserve the memory; with ``tcp_host`` also listen there, with ``verbs`` register it for RDMA.

        ``name`` appears in error messages and in /proc. ``tcp_host`` is one address of this host that peers can reach
        (not a wildcard); ``tcp_port`` 0 lets the kernel choose. ``device``: where the payloads are: "cpu",
        "cuda:N" or "hip:N" (zeroed, contiguous); doorbells and headers are always in host memory. ``payloads``: their
        number, which must divide ``slots``; slot i writes into payload i % payloads. None: one per slot. Peers that
        share a payload write at different offsets of one batch; afd_comm does not keep them from overwriting each
        other. Raises CommError.
        """
    @property
    def name(self) -> str: ...
    @property
    def slots(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def addresses(self) -> list[str]:
        """The addresses that a ``Link`` needs. They contain the region's secret token: do not log them."""
    @property
    def closed(self) -> bool: ...
    @property
    def payloads(self) -> int: ...
    @property
    def slot_stride(self) -> int:
        """Bytes from one payload to the next: ``slot_bytes`` rounded up to 64."""
    @property
    def device(self) -> str:
        """Where the payloads are."""
    def buffer(self, slot: int) -> npt.NDArray[np.uint8]:
        """Return the slot's payload as a writable array [slot_bytes], 64-byte aligned, no copy.

        The array keeps the Region object alive and stays valid after ``close``. Raises CommError for payloads on a
        device.
        """
    def view(self, slot: int, count: int = 1) -> DeviceArray:
        """Return ``count`` payloads from that of ``slot`` on: uint8 [count, slot_stride], no copy, on any device.

        For ``torch.from_dlpack`` and similar functions. The view keeps the Region object alive. Raises IndexError.
        """
    def pin(self, device: str) -> None:
        """Let streams of ``device`` wait for this region's doorbells and copy from its slots.

        For a region in host memory whose consumer is a GPU and whose peers are on CPUs. Regions on a device need no
        pin. Call it once. Raises CommError.
        """
    def reset(self, slots: list[int]) -> None:
        """Set doorbells to 0, so that the same flags can be awaited again. For the consumer of their messages."""
    def ring(self, slots: list[int], flags: list[int]) -> None:
        """Set doorbells in place of a peer that will not ring: streams that wait for these flags go on. For the
        consumer of their messages."""
    def enqueue_wait(
        self, stream: int, slots: list[int], flags: list[int], reset: bool = False
    ) -> None:
        """Make ``stream`` (address of a CUstream or hipStream_t) wait until every ``slots[i]`` shows ``flags[i]``.

        One driver call for all of them, without a kernel or the host (HIP: one wave, see README). With ``reset`` the
        stream then sets the doorbells to 0. May be captured in a graph, under these rules:

        - Flags are constants of the graph. A wait must not be satisfied by the previous message in its slot. So two
          messages that follow each other in a slot need different flags, also the last of a replay and the first of
          the next. If a graph uses a slot once, pass ``reset``: it costs 0.6 to 1.4 us per wait.
        - With or without reset, a slot's next message may be sent only when its consumer is past the wait. An answer
          that is enqueued behind the wait proves that.
        - Capture sends and waits in an order in which both sides could run them one by one: branches of a
          graph may share a hardware queue.
        - Load kernels (run them once, or CUDA_MODULE_LOADING=EAGER) and make streams before the first wait:
          the driver may want an idle device for both.

        A stream has no deadline: watch it with ``guard``. Raises CommError, IndexError, ValueError.
        """
    def guard(
        self, stream: int, slots: list[int], flags: list[int], hold: Hold | None = None
    ) -> Guard:
        """Watch the work given to ``stream`` so far; ``slots`` and ``flags``: those of its waits here, in order.

        With ``hold``, what the stream is given later runs only while the hold is open. Call it after enqueueing the
        work, or after the launch of a graph, and not during a capture. Raises CommError.
        """
    def header(self, slot: int) -> Header:
        """Return the header of the last message written to the slot."""
    def ready(self, slot: int, flag: int) -> bool:
        """Return whether the slot's doorbell shows exactly ``flag``."""
    def gone(self, slot: int) -> bool:
        """Return whether the link that claimed the slot was closed or its process ended. Asks the kernel."""
    def wait_all(self, slots: list[int], flags: list[int], timeout_us: int) -> list[Status]:
        """Wait until every ``slots[i]`` shows ``flags[i]``; one status per slot.

        OK; DEADLINE, also for a slot that no link has claimed; PEER_GONE within about 100 ms of the writer's death,
        while the wait for the other slots continues; CLOSED. The GIL is released. Signal handlers run, and their
        exceptions are raised here. Raises IndexError, and ValueError for different lengths or flag 0.
        """
    def wait_any(self, slots: list[int], flags: list[int], timeout_us: int) -> int:
        """Wait until one ``slots[i]`` shows ``flags[i]`` and return the lowest such i.

        Returns -1 at the deadline, on ``wake`` or ``close``, and as soon as all writers of the slots are gone.
        """
    def wait_any_of(
        self, slots: npt.NDArray[np.uint32], flags: npt.NDArray[np.uint64], timeout_us: int
    ) -> int:
        """``wait_any`` for many slots; the arrays have one entry per slot."""
    def read_headers(
        self,
        slots: npt.NDArray[np.uint32],
        flags: npt.NDArray[np.uint64],
        ahead: int,
        into: npt.NDArray[np.uint64],
    ) -> int:
        """Read the headers of the messages that have arrived, in one call; return their number.

        A message of slot i counts if its flag is ``flags[i]`` or one of the ``ahead`` - 1 flags behind it. Fills row i
        of ``into`` [slots, 6]: number of that flag, from 1; the three words of ``Message.user``; count; nbytes. Word 0
        is 0 for a slot without such a message, and the rest of its row is not changed.
        """
    def trace(self, slots: tuple[int, int], into: PeerTrace | None) -> None:
        """Record the messages of ``slots`` = (first, count), all of one peer, in ``into``; None ends it.

        Applies to messages that waits see from now on. A message counts once, and only if its link traces. Raises
        CommError for slots outside of the region.
        """
    def wake(self) -> None:
        """Make the waits now in progress return early (DEADLINE, -1). Later waits are not affected."""
    @property
    def nics_write_alone(self) -> bool:
        """Whether streams see what NICs write here without a call of the device's driver by this process."""
    def set_spin_us(self, us: int) -> None:
        """How long a wait spins before it sleeps; default 50, on at most two usable CPUs 5.

        A wait that spins for less than 50 us then keeps looking until 50 us, letting other threads run in between.
        0: it sleeps at once.
        """
    def close(self) -> None:
        """End connections and waits; peers get PEER_GONE. Idempotent."""

class DeviceArray(Protocol):
    """Device memory for other libraries, through the array API's DLPack protocol."""

    def __dlpack__(self, **options: object) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class Hold:
    """Stops a stream behind a step in which a peer died, so that nothing uses what it computed.

    For one stream; give it to the guard of each step, one step at a time. While it is closed, calls of the driver that
    wait for an idle device do not return: first use of a kernel, captures, unmapping and freeing memory.
    """

    def __init__(self, device: str) -> None:
        """device: "cpu", "cuda:N" or "hip:N". Raises CommError."""
    def open(self) -> None:
        """Let the stream go on. Idempotent."""
    @property
    def closed(self) -> bool: ...

class Guard:
    """Enforces a deadline on a stream's waits; from ``Region.guard``."""

    @property
    def done(self) -> bool:
        """Whether the stream has finished; asks the driver."""
    def wait(self, timeout_us: int) -> list[Status]:
        """Wait until the stream has finished; one status per (slot, flag) of the guard.

        OK. PEER_GONE: the slot's writer ended, and the wait was released within about 10 ms. DEADLINE: the stream did
        not finish in time, and all its waits were released; which peer was late is not known. After anything but OK
        the slot's doorbell is 0, and the stream's results must be discarded. The flags must not be used again, since
        the late message may still arrive: continue with a new generation (graphs: capture again). Its hold is closed
        then; with a hold, a step whose messages all came in time is OK although a writer ended. The GIL is
        released, so a thread can wait while others work. Raises CommError if the stream is still busy 10 s after its
        waits were released.
        """

class Recording:
    """The messages that one capture enqueued on a link; from ``Link.record``.

    It keeps what their tickets name. Release it when no graph that holds them will run again, so that memory does not
    grow with every capture. What is captured without a recording lives as long as the link.
    """

    def release(self) -> None:
        """Free the messages. Idempotent; the end of the object does it too."""

class StepPlan:
    """What a stream sends in a step of a ``StepGate``: the constants of a graph. Immutable."""

    def __init__(self, positions: list[tuple[int, Message]], *, lanes: int, stride: int) -> None:
        """Describe a step.

        ``positions``: lane and answer of each, in the order in which peers send their requests. Each part of an answer
        is an array of items: (offset in the slot, address of item 0, bytes of one item), and the items of peer i begin
        at item i * ``stride``. The memory must not change until the lane's next position. Raises CommError for no
        positions, or a lane outside of [0, ``lanes``).
        """
    def __len__(self) -> int: ...

class StepGate:
    """Lets a stream wait for one word per position of a step, while a thread waits for the peers' doorbells.

    A step has positions, numbered from 1. Each belongs to a lane, which alternates: the requests of a position are
    awaited, the stream works, the answers are sent. A peer that is absent, gone or late is not waited for and its
    doorbell is not rung, so a captured graph holds nothing that changes from step to step. One thread at a time.
    """

    def __init__(self, region: Region, *, peers: int, lanes: int) -> None:
        """Make the gate of the region in which requests arrive. Raises CommError."""
    def set_peer(self, peer: int, link: Link, *, first_slot: int, first_flag: int) -> None:
        """State where a peer's requests arrive and how it is answered.

        Those of lane m arrive in slot ``first_slot`` + m. Their flags count up from ``first_flag``, in the order in
        which the peer sends within a step; an answer has the flag of its request. Not within a step.
        """
    def clear_peer(self, peer: int) -> None:
        """Forget a peer, and its link. Not within a step."""
    def enqueue_wait(self, stream: int, lane: int, number: int) -> None:
        """Make the stream wait until the requests of a position are here. May be captured. Raises CommError."""
    def enqueue_ticket(self, stream: int, lane: int, number: int) -> None:
        """State, in stream order, that a position's answers may be sent. May be captured. Raises CommError."""
    def begin(
        self,
        plan: StepPlan,
        depths: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32],
        late_us: int,
        firsts: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Begin a step; call it before the stream gets the step.

        ``depths`` [peers]: number of lanes that each peer takes part in, the first ones; 0: absent. ``counts``
        [peers, lanes]: items of each answer. ``late_us``: how long a peer may take for a request once all that it
        depends on is answered. ``firsts`` [peers, lanes]: the item of the request that is the answer's first one; then
        an answer has no item beyond those that the request's header counts, so the requests must come by a backend that
        writes headers (not ipc). Raises CommError if a peer that takes part is not set.
        """
    def wait(self, stream: int) -> dict[int, Status]:
        """Wait until the stream has finished and all answers are sent. Return the status of each peer that did not keep
        up, by its number.

        PEER_GONE: the peer ended. DEADLINE: it was late. CLOSED and others: its answer could not be sent. What
        such a peer got is not an answer. The GIL is released. Raises CommError if the stream is busy with one position
        for 10 s.
        """
    def cancel(self) -> None:
        """End a step whose stream has failed; sends nothing more."""

class Link:
    """A connection to one peer's region, open from construction to ``close``."""

    def __init__(
        self,
        addresses: list[str],
        *,
        backend: str = "auto",
        slots: tuple[int, int] | None = None,
        timeout_us: int,
        trace: bool = False,
        device: str = "cpu",
        zero_copy_from: int = -1,
        tcp_connections: int = 0,
        verbs: VerbsOptions | None = None,
    ) -> None:
        """Connect to the region with these ``addresses``.

        ``device``: where the caller's parts and streams are. With "cuda:N" or "hip:N", "auto" means ipc for a region
        on this host, in host memory or on a device of the same kind, else verbs, else tcp.

        ``backend``: one of ``backends()``, or "auto": shm if both processes share a machine and a PID namespace; else
        verbs if both ends have ``verbs`` options and a path between their ports works; else tcp. ``slots`` = (first,
        count) claims the slots that this link writes: an older claim on them ends, posts to other slots are refused,
        and the receiver gets PEER_GONE if this process dies. Without a claim the link may write every slot, and the
        receiver does not notice its death. ``timeout_us`` limits connecting and, on tcp, each post. ``trace``: see the
        property. ``zero_copy_from`` (tcp): parts of registered memory of at least this many bytes are sent without a
        copy into the kernel; -1: from 64 KiB, but not to this host, where the kernel copies anyway.
        ``tcp_connections``: 1 to 8, over which messages of more than 256 KiB are spread; 0: one per 4 usable CPUs, at
        most 4. Raises CommError.
        """
    @property
    def trace(self) -> bool:
        """Whether messages carry times, at the cost of three clock readings and one cache line. May be set any time."""
    @trace.setter
    def trace(self, on: bool) -> None: ...
    @property
    def backend(self) -> str:
        """Name of the backend in use, one of ``backends()``."""
    @property
    def notes(self) -> str:
        """Deviations from what was requested, such as a port that is down, then what failed since: paths, and why
        the link ended. "" if there is nothing.
        """
    @property
    def sends_alone(self) -> bool:
        """Whether messages leave without a call of the device's driver by a thread of this process. If not, they may be
        stuck behind a call of another thread that waits for the device."""
    def register_memory(self, ptr: int, nbytes: int, device: str = "cpu") -> None:
        """Send parts within this memory without a copy, on backends that can.

        verbs registers it with its NICs, which takes milliseconds; tcp notes it (see ``zero_copy_from``); shm does
        nothing. The memory must stay valid until the link is destroyed. ``device``: "cpu", or the accelerator that it
        is on, such as "cuda:0". Raises CommError, which names the limit to raise if locked memory is limited.
        """
    def wait_sent(self, slot: int, timeout_us: int) -> Status:
        """Wait until the registered memory of the slot's last message may be changed again.

        OK: at once on shm; on tcp when the peer's kernel has acknowledged the message; on verbs when the peer's NIC
        has. DEADLINE: it is still on its way. PEER_GONE, CLOSED: it will not arrive, and the memory may be changed.
        ``post`` copies memory that is not registered, so that needs no wait.
        """
    def post(self, message: Message, flag: int, answer_to: Header | None = None) -> Status:
        """Write the parts, then the header, then the doorbell ``flag``.

        The memory of the parts may be reused on return, unless it is registered (``wait_sent``). Nothing is
        written unless all parts fit into the slot. ``answer_to``: header of the message that this one answers, for
        the peer's ``PeerTrace``. Safe from several threads for distinct slots. Returns:

        - OK: handed over. shm: visible to the receiver; tcp: in the kernel; verbs: in the NIC; ipc: copied.
        - PEER_GONE: the region's process ended or closed it; on verbs also: no path is left.
        - DEADLINE: tcp: not sent in time, and CLOSED from then on if the message was partly sent. verbs: the
          slot's previous message is still on its way. ipc: not copied yet, so the parts must stay unchanged.
        - BAD_HEADER, CAPACITY, CLOSED: see ``Status``.
        """
    def enqueue(self, stream: int, message: Message, flag: int, count: int = 0) -> Status:
        """Like ``post``, but in stream order and without waiting (backends ipc, verbs and tcp).

        The parts are in memory of the link's device. They are read when the stream reaches this point, or later: they
        must not change before the message is answered. No kernel is launched. May be captured in a graph, under the
        rules of ``Region.enqueue_wait``. Link and region must outlive the stream's work and every graph that captured
        them. A graph is void once the link or the peer's region is replaced.

        ipc: a copy engine copies the parts, and a stream write behind the copies rings the doorbell. For a region on a
        device no header is written, since its streams cannot read one: ``Region.header`` keeps showing the last
        ``post``. For a region in host memory the header is written, without times.

        verbs, tcp: the stream writes a ticket into page-locked memory, and a thread of this process sends the message,
        header included. Parts that the NIC cannot read in place, and all parts of a device over tcp, are copied through
        host memory by that thread (``notes`` says so). If sending fails, nothing rings: the peer's guard acts, and
        ``status`` and the next ``enqueue`` return why. Messages enqueued at the same time for different slots may
        arrive in either order.

        ``count``: 0, or the address of a 32-bit word of page-locked host memory that earlier work of the stream
        writes. Then every part but the last ``message.whole`` ones is an array of ``message.count`` items, of which only
        the first ``word`` are sent when the stream has come by; the receiver's header holds their number and the bytes
        sent. A word above ``message.count`` ends the link with BAD_HEADER. ipc sends all items whatever the word says,
        because only a kernel could read it.

        Returns OK if enqueued. After PEER_GONE, BAD_HEADER (also for parts that are no arrays of ``message.count``
        items), CAPACITY and CLOSED nothing was enqueued. Raises CommError for backend shm, and if the driver refuses;
        ValueError for a word that is not aligned.
        """
    @property
    def status(self) -> Status:
        """OK, or why an enqueued message was not sent or none can be sent (verbs and tcp; ipc: always OK)."""
    def record(self) -> Recording:
        """Make what captures enqueue from now on belong to the returned recording, until the next call."""
    def close(self) -> None:
        """Release the claim; the receiver sees PEER_GONE. Idempotent."""

class Group:
    """Sends one message, or one array of items, to many peers in one call. For one thread at a time."""

    def __init__(self, links: list[Link], *, timeout_us: int) -> None:
        """Make a group of these links, in this order; to replace a link, make a new group.

        ``timeout_us`` limits one call, over all links together. Raises CommError if a link occurs twice.
        """
    def __len__(self) -> int: ...
    def broadcast(
        self,
        message: Message,
        flags: list[int],
        answer_to: list[Header | None] | None = None,
    ) -> tuple[Status, ...]:
        """``Link.post`` to every link; ``flags`` and ``answer_to`` have one entry per link.

        Flag 0 skips a link; its status is OK. Returns one status per link. A slow peer does not delay the others:
        the rest of a message that does not fit into a socket is sent while the other links are served. Nothing is
        allocated unless a post fails. Raises ValueError for a list of the wrong length.
        """
    def scatter(
        self,
        message: Message,
        flags: list[int],
        counts: list[int],
        answer_to: list[Header | None] | None = None,
    ) -> tuple[Status, ...]:
        """Like ``broadcast``, but link i gets ``counts[i]`` items: those after the items of links 0 to i - 1.

        Here a part of the message is (offset in the slot, address of item 0, bytes per item), with contiguous
        items. The header that link i's peer receives holds its own count. The items of a link with flag 0 are
        skipped. Raises ValueError for a list of the wrong length, and for counts outside [0, 2**31).
        """

def ping_pong(
    region: Region,
    link: Link,
    data: npt.NDArray[np.uint8],
    generation: int,
    starts: bool,
    times: npt.NDArray[np.int64],
) -> None:
    """Benchmark: bounce messages between slot 0 of two regions, without Python in the loop.

    Posts ``data`` [nbytes] in each of ``len(times)`` rounds, with flags of ``generation``. Fills ``times`` (ns) with
    round-trip times on the side that ``starts``, and with the times between two messages on the other side. The GIL
    is released. Raises CommError after 10 s without a message.
    """

def memcpy_ping_pong(
    shared: npt.NDArray[np.uint8],
    data: npt.NDArray[np.uint8],
    starts: bool,
    times: npt.NDArray[np.int64],
) -> None:
    """Benchmark: the same with memcpy and a flag on plain shared memory, as the limit of what is possible.

    ``shared`` [4096 + 2 * n]: zeroed, 64-byte aligned, mapped by both processes. ``data``: at most n bytes.
    """
