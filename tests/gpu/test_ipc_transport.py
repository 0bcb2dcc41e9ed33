"""afd_comm between GPU processes, on real GPUs. With one GPU, both processes share it."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")
from ipc_peer import TIMEOUT_US, Peer, peer, send, slots_of, wait  # noqa: E402
from slots_on import GPU, GPU_0, GPU_1  # noqa: E402

from afd_comm import Link, Message, Region, Status, make_flag  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GPUS = torch.cuda.device_count()
SLOT_BYTES = 2 << 20


@pytest.fixture(
    params=[
        GPU_0,
        pytest.param(
            GPU_1,
            marks=[
                pytest.mark.multi_gpu,
                pytest.mark.skipif(GPUS < 2, reason="needs two NVIDIA GPUs"),
            ],
        ),
    ]
)
def there(request: pytest.FixtureRequest) -> str:
    """Returns the peer's device; ours is cuda:0."""
    torch.cuda.set_device(0)
    torch.zeros(8, device="cuda").add_(1).random_().ne(0).sum().item()  # loads the kernels
    return str(request.param)


def connect(other: Peer, slots: int, device: str = GPU_0) -> tuple[Region, Link]:
    region = Region(slots, SLOT_BYTES, name="attention", device=device)
    link = Link(other.read(), slots=(0, slots), timeout_us=TIMEOUT_US, device=GPU_0)
    other.write(region.addresses)
    return region, link


def finish(region: Region, slots: list[int], flags: list[int], ms: int = 20_000) -> list[Status]:
    stream = torch.cuda.current_stream().cuda_stream
    return region.guard(stream, slots, flags).wait(ms * 1000)


def random_sizes(count: int) -> list[int]:
    """Returns message sizes: mostly small, some full slots, odd sizes included."""
    generator = torch.Generator().manual_seed(4)
    exponents = torch.rand(count, generator=generator) * 21
    return [min(SLOT_BYTES, max(1, int(2**e))) for e in exponents.tolist()]


def test_random_payloads_come_back(there: str) -> None:
    sizes, slots = random_sizes(300), 6
    with peer("echo", device=there, slots=slots, slot_bytes=SLOT_BYTES, sizes=sizes) as other:
        region, link = connect(other, slots)
        memory, wrong = slots_of(region), torch.zeros((), dtype=torch.int64, device="cuda")
        data = torch.empty(slots, SLOT_BYTES, dtype=torch.uint8, device="cuda")
        for i, size in enumerate(sizes):
            slot, flag = i % slots, make_flag(1, i + 1)
            data[slot, :size].random_()
            send(link, slot, flag, data[slot, :size])
            wait(region, [slot], [flag])
            wrong += (memory[slot, :size] != data[slot, :size] + 1).sum()
        assert finish(region, [0], [make_flag(1, len(sizes))])[0] == Status.OK
        assert wrong.item() == 0


def test_many_slots_in_flight(there: str) -> None:
    """All messages of a round are sent before the first wait for an answer."""
    slots, rounds = 24, 20
    sizes = [SLOT_BYTES // 8] * (slots * rounds)
    with peer("echo", device=there, slots=slots, slot_bytes=SLOT_BYTES, sizes=sizes) as other:
        region, link = connect(other, slots)
        memory, wrong = slots_of(region), torch.zeros((), dtype=torch.int64, device="cuda")
        data = torch.empty(slots, sizes[0], dtype=torch.uint8, device="cuda")
        for r in range(rounds):
            flags = [make_flag(1, r * slots + slot + 1) for slot in range(slots)]
            data.random_()
            for slot in range(slots):
                send(link, slot, flags[slot], data[slot])
            wait(region, list(range(slots)), flags)  # one call for all of them
            wrong += (memory[:, : sizes[0]] != data + 1).sum()
        assert set(finish(region, list(range(slots)), flags)) == {Status.OK}
        assert wrong.item() == 0


class Replayed:
    """Counterpart of the peer's mode graph: sends a slot, waits for its answer, counts errors."""

    def __init__(self, other: Peer, slots: int, positions: int) -> None:
        self.region, self.link = connect(other, slots)
        assert other.read() == "captured"
        self.memory = slots_of(self.region)
        self.data = torch.empty_like(self.memory)
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.slots = [p % slots for p in range(positions)]
        self.flags = [make_flag(1, p + 1) for p in range(positions)]
        self.wrong += (self.memory[0] != self.data[0] + 1).sum()
        self.wrong.zero_()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for slot, flag in zip(self.slots, self.flags, strict=True):
                send(self.link, slot, flag, self.data[slot])
                wait(self.region, [slot], [flag])
                self.wrong += (self.memory[slot] != self.data[slot] + 1).sum()

    def replay(self) -> None:
        self.data.random_()
        self.graph.replay()

    def finish(self, ms: int) -> list[Status]:
        return finish(self.region, self.slots, self.flags, ms)


def test_thousands_of_graph_replays(there: str) -> None:
    # On one GPU the two processes are time-sliced, about a millisecond each.
    replays, positions, slots = 50 if there == GPU_0 else 2000, 6, 3
    arguments = {"positions": positions, "replays": replays, "slot_bytes": SLOT_BYTES}
    with peer("graph", device=there, slots=slots, **arguments) as other:
        ours = Replayed(other, slots, positions)
        for _ in range(replays):
            ours.replay()
        assert set(ours.finish(60_000)) == {Status.OK}
        assert ours.wrong.item() == 0


def test_a_wedged_peer_costs_one_deadline(there: str) -> None:
    """The peer stops during a replay: our stream is released at the deadline and stays usable."""
    arguments = {"positions": 6, "replays": 5, "slot_bytes": SLOT_BYTES}
    with peer("graph", device=there, slots=3, **arguments) as other:
        ours = Replayed(other, 3, 6)
        for _ in range(5):
            ours.replay()
        assert set(ours.finish(20_000)) == {Status.OK}
        ours.replay()
        start = time.monotonic()
        assert set(ours.finish(300)) == {Status.DEADLINE}
        assert 0.3 <= time.monotonic() - start < 1.3
        assert torch.ones(4, device="cuda").sum().item() == 4


def test_a_killed_peer_is_noticed_before_the_deadline(there: str) -> None:
    arguments = {"positions": 6, "replays": 5, "slot_bytes": SLOT_BYTES}
    with peer("graph", device=there, slots=3, **arguments) as other:
        ours = Replayed(other, 3, 6)
        for _ in range(3):
            ours.replay()
        assert set(ours.finish(20_000)) == {Status.OK}
        other.process.kill()
        other.process.wait()
        start = time.monotonic()
        ours.graph.replay()  # its copies go into memory whose owner is dead
        assert set(ours.finish(30_000)) == {Status.PEER_GONE}
        assert time.monotonic() - start < 2
        assert torch.ones(4, device="cuda").sum().item() == 4


def test_attention_on_gpu_ffn_on_cpu() -> None:
    """A mixed pair: answers arrive in page-locked host memory, and our stream copies them."""
    torch.cuda.set_device(0)
    sizes, slots = random_sizes(200), 3
    with peer("cpu", slots=slots, slot_bytes=SLOT_BYTES, sizes=sizes) as other:
        region = Region(slots, SLOT_BYTES, name="attention")
        region.pin(GPU_0)
        link = Link(other.read(), slots=(0, slots), timeout_us=TIMEOUT_US, device=GPU_0)
        assert link.backend == "ipc"
        other.write(region.addresses)
        memory, wrong = slots_of(region), torch.zeros((), dtype=torch.int64, device="cuda")
        data = torch.empty(slots, SLOT_BYTES, dtype=torch.uint8, device="cuda")
        back = torch.empty_like(data)
        back[0].copy_(memory[0, :SLOT_BYTES], non_blocking=True)
        wrong += (back[0] != data[0] + 1).sum()
        wrong.zero_()
        for i, size in enumerate(sizes):
            slot, flag = i % slots, make_flag(1, i + 1)
            data[slot, :size].random_()
            send(link, slot, flag, data[slot, :size])
            wait(region, [slot], [flag])
            back[slot, :size].copy_(memory[slot, :size], non_blocking=True)
            wrong += (back[slot, :size] != data[slot, :size] + 1).sum()
        assert finish(region, [0], [make_flag(1, len(sizes))])[0] == Status.OK
        assert wrong.item() == 0


def test_one_constant_flag_with_reset() -> None:
    """A graph that uses a slot once: the wait resets the doorbell, so each replay waits again."""
    torch.cuda.set_device(0)
    region = Region(1, SLOT_BYTES, name="ffn", device=GPU_0)
    link = Link(region.addresses, slots=(0, 1), timeout_us=TIMEOUT_US, device=GPU_0)
    memory, data = slots_of(region), torch.empty(SLOT_BYTES, dtype=torch.uint8, device="cuda")
    out, streams = torch.empty_like(data), [torch.cuda.Stream(), torch.cuda.Stream()]
    out.copy_(data.fill_(1))
    sender, receiver = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(sender, stream=streams[0]):
        send(link, 0, 5, data)
    with torch.cuda.graph(receiver, stream=streams[1]):
        region.enqueue_wait(streams[1].cuda_stream, [0], [5], reset=True)
        out.copy_(memory[0, :SLOT_BYTES])
    torch.cuda.synchronize()
    for value in range(200):
        with torch.cuda.stream(streams[1]):
            receiver.replay()
        with torch.cuda.stream(streams[0]):
            data.fill_(value)
            sender.replay()
        torch.cuda.synchronize()
        assert (out == value).all().item(), value


@pytest.mark.multi_gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two NVIDIA GPUs")
def test_two_gpus_of_one_process() -> None:
    region = Region(1, SLOT_BYTES, name="ffn", device=GPU_1)
    link = Link(region.addresses, slots=(0, 1), timeout_us=TIMEOUT_US, device=GPU_0)
    data = torch.randint(0, 256, (SLOT_BYTES,), dtype=torch.uint8, device="cuda:0")
    with torch.cuda.device(0):
        send(link, 0, 7, data)
    assert region.wait_all([0], [7], TIMEOUT_US) == [Status.OK]
    assert torch.equal(slots_of(region)[0, :SLOT_BYTES].cpu(), data.cpu())
    # post() needs no stream and returns after the copy, from host or GPU memory.
    host = torch.arange(64, dtype=torch.uint8)
    parts = [(0, host.data_ptr(), 64), (64, data.data_ptr(), 64)]
    assert link.post(Message(0, parts), 8) == Status.OK
    arrived = slots_of(region)[0, :128].cpu()
    assert torch.equal(arrived, torch.cat([host, data[:64].cpu()]))


@pytest.mark.skipif(GPU == "hip", reason="HIP's waits are kernels: afd_bench.amd.waves counts them")
def test_no_kernel_runs(there: str) -> None:
    """The transport uses no SM: the profiler sees only copies in 50 round trips."""
    sizes, slots = [SLOT_BYTES] * 60, 3
    with peer("echo", device=there, slots=slots, slot_bytes=SLOT_BYTES, sizes=sizes) as other:
        region, link = connect(other, slots)
        data = torch.empty(SLOT_BYTES, dtype=torch.uint8, device="cuda")

        def round_trip(i: int) -> None:
            slot, flag = i % slots, make_flag(1, i + 1)
            send(link, slot, flag, data)
            wait(region, [slot], [flag])

        for i in range(10):
            round_trip(i)
        torch.cuda.synchronize()
        cuda = torch.profiler.ProfilerActivity.CUDA
        with torch.profiler.profile(activities=[cuda]) as profile:
            for i in range(10, 60):
                round_trip(i)
            torch.cuda.synchronize()
        names = [
            event.name
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        kernels = [n for n in names if not n.startswith(("Memcpy", "Context", "Event", "Stream"))]
        assert kernels == [] and sum(n.startswith("Memcpy") for n in names) == 50
