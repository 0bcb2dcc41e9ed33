"""The two-shot kernel with all ranks on one GPU, one stream each, equals the reference bitwise."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from allreduce_rank import inputs, reference, same  # noqa: E402

from ffn_worker.allreduce import quickreduce_plan, quickreduce_triton  # noqa: E402
from ffn_worker.allreduce.base import row_shares  # noqa: E402
from ffn_worker.allreduce.formats_table import FORMATS, FP16, ReduceFormat  # noqa: E402
from ffn_worker.allreduce.quickreduce_plan import Tuning  # noqa: E402

pytestmark = pytest.mark.gpu
HIP = torch.version.hip is not None
HIDDEN = 7168
SPINS = 1 << 24
TUNINGS = (quickreduce_plan.HIP if HIP else quickreduce_plan.CUDA, Tuning(1, 4, 1, 4))


class Ranks:
    """``world`` ranks whose buffers are all on this GPU.

    Ranks wait for each other, so all their programs must fit on the GPU at the same time. All
    addresses have the same alignment, so that all ranks share one kernel: another kernel could not
    be loaded while a rank waits.
    """

    def __init__(
        self, world: int, fmt: ReduceFormat | None, segment_atoms: int, tuning: Tuning
    ) -> None:
        self.world, self.tuning = world, tuning
        self.exact, self.fmt = fmt is None, fmt or FP16
        self.buffer = quickreduce_plan.Buffer(world, segment_atoms, self.fmt.atom_bytes, 1)
        self.memory = torch.zeros((world, self.buffer.nbytes), dtype=torch.uint8, device="cuda")
        self.peers = torch.tensor([m.data_ptr() for m in self.memory], device="cuda")
        counters = (world, -(-segment_atoms // 4) * 4)
        self.sequences = torch.zeros(counters, dtype=torch.int32, device="cuda")
        self.late = torch.zeros((2, world, 4), dtype=torch.int32, device="cuda")
        self.streams = [torch.cuda.Stream() for _ in range(world)]
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        self.processors = processors // world

    def two_shot(self, xs: list[torch.Tensor], outs: list[torch.Tensor], *, gather: bool) -> None:
        """Sums xs, [rows, hidden] on the GPU, into outs."""
        world, b, fmt = self.world, self.buffer, self.fmt
        segments = quickreduce_plan.row_segments(*xs[0].shape, world)
        if gather:
            segments = quickreduce_plan.flat_segments(xs[0].numel(), world)
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream())
        for launch in quickreduce_plan.launches(segments, b, self.processors, self.tuning):
            for rank, (x, out, stream) in enumerate(zip(xs, outs, self.streams, strict=True)):
                with torch.cuda.stream(stream):
                    quickreduce_triton.two_shot_kernel[(launch.programs,)](
                        x, out, self.peers, self.sequences[rank],
                        self.late[0, rank], self.late[1, rank], x.numel(),
                        segments.unit, segments.base, segments.longer,
                        launch.first, launch.tiles, SPINS, rank,
                        b.segment_atoms, b.two_shot_inbox, b.segment_bytes,
                        FACTOR=fmt.factor, BITS=fmt.bits, FP4=fmt.is_fp4,
                        BF16=self.exact and x.dtype is torch.bfloat16,
                        TILE=launch.tile_atoms, ATOMS=launch.atoms, GATHER=gather,
                        WORLD=world, LANES=1 << (world - 1).bit_length(), AMD=HIP,
                        **self.tuning.options,
                    )  # fmt: skip
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("fmt", [None, *FORMATS.values()], ids=lambda f: f.name if f else "exact")
def test_sums_equal_the_reference_bit_for_bit(
    fmt: ReduceFormat | None, world: int, tuning: Tuning
) -> None:
    ranks = Ranks(world, fmt, 400, tuning)
    shapes = [(1, 64), (3, HIDDEN), (world * 16 + 1, HIDDEN), (1024, HIDDEN)]
    several = world == 2 and tuning is TUNINGS[0]  # each dtype compiles its own kernel
    for dtype in (torch.bfloat16, torch.float16, torch.float32)[: 2 + bool(fmt) if several else 1]:
        for seed, (rows, hidden) in enumerate(shapes[: 4 if dtype is torch.bfloat16 else 3]):
            xs = inputs(world, rows, hidden, dtype, seed)
            shares = row_shares(rows, world)
            outs = [xs[0].new_empty((end - start, hidden)).cuda() for start, end in shares]
            there = [x.cuda() for x in xs]
            ranks.two_shot(there, outs, gather=False)
            ranks.two_shot(there, there, gather=True)
            assert not ranks.late.any()
            for sums in there:
                same(sums, reference(xs, fmt, gather=True))
            for out, (start, end) in zip(outs, shares, strict=True):
                if end > start:
                    same(out, reference([x[start:end] for x in xs], fmt, gather=False))
