"""Slots and doorbells between processes.

A receiver owns a ``Region`` of equal slots. A sender opens a ``Link`` to it, writes a message straight into a
slot and rings that slot's doorbell: a 64-bit flag, stored after payload and header. The receiver waits for
the exact flag it expects, so a late message of an earlier generation is never taken for a new one. A slot
holds one message; who may overwrite it when is the protocol of the two sides, as with RDMA writes.

Set-up raises ``CommError``. On the hot path errors are ``Status`` values. Wrong arguments raise the usual
``IndexError``, ``ValueError`` and ``TypeError``.
"""

import enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

MAX_PARTS: int
"""Most parts of one message (8)."""

class CommError(RuntimeError):
    """Set-up failed; the message names the cause and the remedy."""

class Status(enum.IntEnum):
    OK = 0
    DEADLINE = 1
    """Not finished in time, or woken early by ``Region.wake``: look at the clock before blaming the peer."""
    PEER_GONE = 2
    """The other process ended, or closed its end."""
    BAD_HEADER = 3
    """A slot outside of the region or of the link's claim, or flag 0."""
    CAPACITY = 4
    """A part lies outside of the slot."""
    CLOSED = 5
    """This end is closed, or a newer link has claimed its slots."""

def make_flag(generation: int, seq: int) -> int:
    """``generation << 32 | seq``, both in [0, 2**32); TypeError outside. 0 is no valid flag."""

class Header:
    """What came with a message; read only."""

    @property
    def layer(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def depth(self) -> int:
        """Number of micro-batches of the sender's step."""
    @property
    def kind(self) -> int:
        """The application's tag."""
    @property
    def dtype(self) -> int:
        """The application's tag of the payload type."""
    @property
    def nbytes(self) -> int:
        """Sum of the parts, bytes."""
    @property
    def step(self) -> int: ...
    @property
    def t_posted(self) -> int:
        """Start of ``post``; ns, CLOCK_MONOTONIC of the sender's host. All four times are 0 for a message
        whose link does not trace."""
    @property
    def t_sent(self) -> int:
        """The first byte was handed to the wire (shm: all were copied); ns, clock of the sender's host. Over
        shm it equals ``t_posted`` up to 1 KiB."""
    @property
    def t_arrived(self) -> int:
        """Complete, just before the doorbell; ns, clock of the receiver's host. Never subtract the sender's
        times from it: see ``PeerTrace``."""
    @property
    def t_consumed(self) -> int:
        """A wait saw the doorbell; ns, clock of the receiver's host; 0 where the region does not trace."""

class Histogram:
    """Counts of times in buckets at most 1/16 of their value wide, as of the moment it was taken."""

    @property
    def count(self) -> int: ...
    @property
    def total_ns(self) -> int: ...
    @property
    def max_ns(self) -> int: ...
    def quantile_ns(self, fraction: float) -> int:
        """The time that ``fraction`` of the counts do not exceed; 0 without counts. ValueError outside [0, 1]."""
    def cumulative(self, bounds_ns: list[int]) -> list[int]:
        """How many counts lie in buckets that end at or below each bound. Bounds must not fall."""

class PeerTrace:
    """Where one peer's messages spend their time, without synchronised clocks; see ``Region.trace``.

    An answer posted with ``answer_to`` echoes two times of the message it answers. With t0 asked and t3
    answer arrived by this host's clock, t1 arrived and t2 answered by the peer's, the round trip on the wire
    is (t3 - t0) - (t2 - t1), and the peer's clock is ahead by ((t1 - t0) - (t3 - t2)) / 2, wrong by at most
    half the round trip (as in NTP, RFC 5905 section 8). The sample with the smallest error bound is used,
    where the bound grows by 100 us per second of age: two quartz clocks drift apart by less. Answers that
    were held for more than 100 ms are not used. Between processes of one host the offset is 0, and every
    time is exact.
    """

    def __init__(self) -> None: ...
    @property
    def inbound(self) -> Histogram:
        """The peer's ``post`` to arrival here."""
    @property
    def outbound(self) -> Histogram:
        """Our ``post`` to arrival there, learned from answers."""
    @property
    def round_trip(self) -> Histogram:
        """Both ways on the wire, without the time the peer took to answer."""
    @property
    def waiting(self) -> Histogram:
        """Arrived here, but no wait had looked yet."""
    def events(self) -> list[tuple[int, int, int, int, int, int, int, int]]:
        """The last 4096 messages, oldest first: (posted, sent, arrived, consumed, layer, micro_batch, rows,
        nbytes). Times in ns by this host's CLOCK_MONOTONIC, the peer's being turned into it by ``offset_ns``;
        messages from before the offset was known are left out."""
    @property
    def offset_ns(self) -> int:
        """How far the peer's clock is ahead of ours; 0 while unknown."""
    @property
    def offset_error_ns(self) -> int:
        """``offset_ns`` and every one-way time are wrong by at most this; -1 while unknown."""

class VerbsOptions:
    """How backend verbs (RDMA) is used; read only. Both ends of a link have their own."""

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
        """``ports``: 1 to 8 of "device:port" (port 1 may be left out), in rail order: the i-th of one end talks
        to the i-th of the other, over ``qps_per_port`` connections.

        ``host``, ``port`` (a region's only): where it listens for the handshake, a TCP connection that stays
        open beside the link. ``gid_index`` -1: the port's first RoCE v2 address. ``traffic_class``,
        ``service_level``: of the packets. ``timeout``: 4.096 us << timeout until an unacknowledged packet is
        sent again, ``retry`` (0 to 6) times. ``spin_us``: polling before the progress thread sleeps; -1: 50,
        on at most two usable CPUs 5. ``stripe_bytes``: payloads of twice this and more use several
        connections. ``library``: the libibverbs to load. Raises CommError for values out of range; devices
        are looked at when a region or link is made.
        """

def plan_stripes(nbytes: int, alive: int, turn: int, least: int) -> list[tuple[int, int, int]]:
    """How verbs cuts a payload: (connection, offset, length) of each stripe. Pure; for tests.

    ``alive``: bit set of usable connections, of 16. ``turn``: which of them leads. ``least``: bytes below
    which a stripe is not worth it. Raises ValueError for an empty set.
    """

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

        ``name`` is for messages and for /proc. ``tcp_host`` is one address of this host that peers can reach
        (not a wildcard); ``tcp_port`` 0 lets the kernel choose. ``device``: where the payloads are: "cpu",
        "cuda:N" or "hip:N" (zeroed, contiguous); doorbells and headers are in host memory in any case.
        ``payloads``: how many there are; it divides ``slots``, and slot i writes into payload i % payloads.
        None: one per slot. With one payload per micro-batch the rows of all peers lie in one batch, each peer
        writing at offsets of its own; nothing keeps peers from each other's rows. Raises CommError.
        """
    @property
    def name(self) -> str: ...
    @property
    def slots(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def addresses(self) -> list[str]:
        """What a ``Link`` needs, one per backend. They hold the region's secret token: do not log them."""
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
        """The slot's payload as a writable array of shape [slot_bytes], 64-byte aligned, no copy.

        It keeps the Region object alive and stays valid after ``close``. CommError for payloads on a device.
        """
    def view(self, slot: int, count: int = 1) -> DeviceArray:
        """``count`` payloads from that of ``slot`` on, uint8 [count, slot_stride], no copy, on any device.

        For ``torch.from_dlpack`` and its like; it keeps the Region object alive. Raises IndexError.
        """
    def pin(self, device: str) -> None:
        """Let streams of ``device`` wait for this region's doorbells and copy from its slots.

        For a region in host memory whose consumer is a GPU while its peers are not (an FFN on the CPU).
        Regions on a device are so from the start. Once. Raises CommError.
        """
    def enqueue_wait(
        self, stream: int, slots: list[int], flags: list[int], reset: bool = False
    ) -> None:
        """Make ``stream`` (address of a CUstream or hipStream_t) wait until every ``slots[i]`` shows ``flags[i]``.

        One driver call for all of them; no kernel and no host on the way (HIP: one wave, see README). With
        ``reset`` the stream then sets the doorbells to 0. May be captured in a graph, and then:

        - Flags are constants of the graph. A wait must not be satisfied by the message before the one it is
          for, so two messages that follow each other in a slot need different flags, also the last of a
          replay and the first of the next. Where a graph uses a slot once, pass ``reset``: it costs 0.6 to
          1.4 us per wait.
        - Reset or not, a slot's next message may be sent only when its consumer is past the wait. An answer
          that is enqueued behind the wait says so.
        - Capture sends and waits in an order in which both sides could run them one by one: branches of a
          graph may share a hardware queue.
        - Load kernels (run them once, or CUDA_MODULE_LOADING=EAGER) and make streams before the first wait:
          the driver may want an idle device for both.

        A stream has no deadline: watch it by ``guard``. Raises CommError, IndexError, ValueError.
        """
    def guard(self, stream: int, slots: list[int], flags: list[int]) -> Guard:
        """Watch what ``stream`` was given so far; ``slots`` and ``flags``: of its waits here, in order.

        To be called behind a step, or behind the launch of a graph, not during a capture. Raises CommError.
        """
    def header(self, slot: int) -> Header:
        """The header of the message last written to the slot."""
    def ready(self, slot: int, flag: int) -> bool:
        """Whether the slot's doorbell shows exactly ``flag``."""
    def gone(self, slot: int) -> bool:
        """Whether the slot was claimed by a link whose process ended or that was closed. Asks the kernel."""
    def wait_all(self, slots: list[int], flags: list[int], timeout_us: int) -> list[Status]:
        """Wait until every ``slots[i]`` shows ``flags[i]``; one status per slot.

        OK; DEADLINE (also for a slot nobody has claimed yet); PEER_GONE within about 100 ms of the writer's
        death, the other slots being waited for still; CLOSED. The GIL is released. Signal handlers run, and
        what they raise is raised here. Raises IndexError, ValueError (lengths differ, flag 0).
        """
    def wait_any(self, slots: list[int], flags: list[int], timeout_us: int) -> int:
        """Wait until one ``slots[i]`` shows ``flags[i]`` and return the lowest such i.

        -1 at the deadline, on ``wake`` or ``close``, and as soon as all the slots' writers are gone.
        """
    def trace(self, slots: tuple[int, int], into: PeerTrace | None) -> None:
        """Note the messages of ``slots`` = (first, count), all of one peer, in ``into``; None ends it.

        Takes effect for waits that see a message from now on; messages count once, and only if their link
        traces. Raises CommError for slots outside of the region.
        """
    def wake(self) -> None:
        """Make the waits now in progress return early (DEADLINE, -1). Later waits are not affected."""
    def set_spin_us(self, us: int) -> None:
        """How long a wait spins before it sleeps; default 50, on at most two usable CPUs 5.

        After less than 50 us it goes on looking until then, but lets other threads run in between. 0: it
        sleeps at once.
        """
    def close(self) -> None:
        """End connections and waits; peers get PEER_GONE. Idempotent."""

class DeviceArray(Protocol):
    """Memory of a device for other libraries, by the array API's DLPack protocol."""

    def __dlpack__(self, **options: object) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class Guard:
    """Keeps one deadline over a stream's waits; from ``Region.guard``."""

    @property
    def done(self) -> bool:
        """Whether the stream is through; asks the driver."""
    def wait(self, timeout_us: int) -> list[Status]:
        """Wait until the stream is through; one status per (slot, flag) it was made of.

        OK. PEER_GONE: the slot's writer ended, and the wait was released within about 10 ms. DEADLINE: the
        stream was not through in time, all its waits were released, and whose fault it was is not known.
        After anything but OK the slot's doorbell is 0, what the stream computed is garbage to be dropped, and
        the flags are void: the late message may still come, so go on with a new generation (graphs: capture
        again). The GIL is released, so a thread may do this beside the step. Raises CommError when the stream
        is still busy 10 s after its waits were released.
        """

class Link:
    """The way to one peer's region. Open from construction to ``close``."""

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
        verbs: VerbsOptions | None = None,
    ) -> None:
        """Connect to the region with these ``addresses``.

        ``device``: where the caller's parts and streams are; with "cuda:N" or "hip:N" auto takes ipc for a
        region of this host, on a device or in host memory, else verbs.

        ``backend`` is "ipc", "shm", "verbs", "tcp" or "auto" (shm where both processes share a machine and a PID
        namespace, else verbs where both ends have ``verbs`` options and a path between their ports works,
        else tcp). ``slots`` = (first, count) claims the slots this link writes: an older claim on them ends,
        posts elsewhere are refused, and the receiver learns PEER_GONE if this process dies. Without it any
        slot may be written and nobody watches. ``timeout_us`` bounds connecting and, on tcp, each post.
        ``trace``: see the property. ``zero_copy_from`` (tcp): parts of registered memory of so many bytes and
        more are sent without a copy into the kernel; -1: from 64 KiB, but not to this host, where the kernel
        copies in any case. Raises CommError.
        """
    @property
    def trace(self) -> bool:
        """Whether messages carry their times: three clock readings and one cache line. May be set at any time."""
    @trace.setter
    def trace(self, on: bool) -> None: ...
    @property
    def backend(self) -> str:
        """The backend in use: "ipc", "shm", "verbs" or "tcp"."""
    @property
    def notes(self) -> str:
        """What works, but not as it was asked for, such as a port that is down; "" when all is well."""
    def register_memory(self, ptr: int, nbytes: int, device: str = "cpu") -> None:
        """Parts that lie within this memory are sent from there without a copy, by backends that can.

        verbs registers it with its NICs (milliseconds: set-up, not the hot path); tcp notes it (see
        ``zero_copy_from``); shm does nothing. It must stay valid until the link is gone. ``device``: "cpu", or the accelerator it is on, such as
        "cuda:0". Raises CommError, with what to raise where locked memory is limited.
        """
    def wait_sent(self, slot: int, timeout_us: int) -> Status:
        """Wait until registered memory that the slot's last message came from may be changed again.

        OK: at once on shm, on tcp when the peer's kernel has acknowledged it, on verbs when the peer's NIC has acknowledged all of it. DEADLINE: still
        on its way. PEER_GONE, CLOSED: it will not arrive, and the memory may be changed. Memory that is not
        registered has been copied by ``post`` and needs no wait.
        """
    def post(
        self,
        slot: int,
        flag: int,
        layer: int,
        micro_batch: int,
        rows: int,
        depth: int,
        kind: int,
        dtype: int,
        step: int,
        parts: list[tuple[int, int, int]],
        answer_to: Header | None = None,
    ) -> Status:
        """Write ``parts``, then the header, then the doorbell.

        Each part is (offset in the slot, address, nbytes) of contiguous host memory that stays valid during
        the call and may be reused after it, unless it is registered (``wait_sent``); at most ``MAX_PARTS``.
        Nothing is written unless all parts fit.

        OK: handed over (shm: visible; tcp: in the kernel's hands; verbs: in the NIC's). PEER_GONE: the
        region's process ended or closed it (verbs: or no path is left). DEADLINE: tcp: not sent in time, and
        if it was partly sent, the link is then CLOSED; verbs: the slot's previous message is still on its way.
        ipc: returns once the bytes are there; DEADLINE: they are not yet, and the parts must stay as they are.
        BAD_HEADER, CAPACITY, CLOSED: see ``Status``. ``answer_to``: header of the message this one answers, for
        the peer's ``PeerTrace``. Safe from several threads for distinct slots.
        """
    def enqueue(
        self,
        stream: int,
        slot: int,
        flag: int,
        layer: int,
        micro_batch: int,
        rows: int,
        depth: int,
        kind: int,
        dtype: int,
        step: int,
        parts: list[tuple[int, int, int]],
    ) -> Status:
        """As ``post``, but in order behind what ``stream`` was given, and without waiting (backend ipc).

        The parts are memory of the link's device; they are read when the stream gets there and must not
        change before. The copies run on a copy engine, the doorbell behind them is a stream write; no kernel
        is launched. May be captured in a graph; the rules are with ``Region.enqueue_wait``. Link and region must
        outlive the stream's work and the graphs that captured them, and graphs are void when the peer's region
        is replaced: they hold its addresses. Into a region on a device no header is written: its streams cannot
        read one, and ``header`` keeps showing the last ``post``. Messages into host memory have one, without
        times.

        OK: enqueued. PEER_GONE, BAD_HEADER, CAPACITY, CLOSED: nothing was enqueued. Raises CommError for
        other backends and when the driver refuses.
        """
    def close(self) -> None:
        """Give the claim back; the receiver sees PEER_GONE. Idempotent."""

class Group:
    """One message, or one batch of rows, to many peers in one call. One thread at a time may use it."""

    def __init__(self, links: list[Link], *, timeout_us: int) -> None:
        """Keep the links, in this order, for good; make a new group where one of them is replaced.

        ``timeout_us`` bounds a call, over all links together. Raises CommError for a link named twice.
        """
    def __len__(self) -> int: ...
    def broadcast(
        self,
        slot: int,
        flags: list[int],
        layer: int,
        micro_batch: int,
        rows: int,
        depth: int,
        kind: int,
        dtype: int,
        step: int,
        parts: list[tuple[int, int, int]],
        answer_to: list[Header | None] | None = None,
    ) -> tuple[Status, ...]:
        """``Link.post`` to every link whose flag is not 0; one status per link (OK where the flag is 0).

        Each link has its own outcome, and a slow peer does not hold up the others: what does not fit into a
        socket at once is sent while the others are served. Nothing is allocated unless a post fails. Raises
        ValueError (a list is not as long as the group).
        """
    def scatter(
        self,
        slot: int,
        flags: list[int],
        layer: int,
        micro_batch: int,
        rows: list[int],
        depth: int,
        kind: int,
        dtype: int,
        step: int,
        parts: list[tuple[int, int, int]],
        answer_to: list[Header | None] | None = None,
    ) -> tuple[Status, ...]:
        """Like ``broadcast``, but link i gets ``rows[i]`` rows: those after the rows of links 0 to i - 1.

        A part is (offset in the slot, address of row 0, bytes per row), rows contiguous. A link with flag 0
        skips its rows. Raises ValueError (lengths, rows outside [0, 2**31)).
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

    Posts ``data`` [nbytes] in each of ``len(times)`` rounds, with flags of ``generation``. The side that
    ``starts`` gets the round-trip times, ns; the other's are the times between two messages. The GIL is
    released. Raises CommError after 10 s without a message.
    """

def memcpy_ping_pong(
    shared: npt.NDArray[np.uint8],
    data: npt.NDArray[np.uint8],
    starts: bool,
    times: npt.NDArray[np.int64],
) -> None:
    """Benchmark, the limit of shared memory: the same with memcpy and a flag on bare ``shared`` memory.

    ``shared`` [4096 + 2 * n] is zero at first, 64-byte aligned and mapped by both processes; ``data`` [<= n].
    """
