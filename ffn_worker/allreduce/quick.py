"""Quantised all-reduce over peer memory, portable: our kernels on CUDA and ROCm.

Small messages take one exact shot, large ones two shots, in the lossy format or exact, those
between NCCL or RCCL; the crossover table says where. Not run on ROCm hardware: see docs/amd.md.

Peer memory is torch's symmetric memory, which knows CUDA and ROCm; NVLink multicast stays off.
"""

import os

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from afd.errors import ConfigError, DeadlineExceeded, PeerLost
from afd.reduce_crossover import Crossover, Way
from ffn_worker.allreduce import quick_plan, quick_triton
from ffn_worker.allreduce.base import Collective, Setup, row_shares
from ffn_worker.allreduce.formats import FP16, ReduceFormat
from ffn_worker.allreduce.nccl import NcclCollective
from ffn_worker.allreduce.quick_plan import Launch, Segments

CAPACITY_BYTES = 256 << 20
"""Of the inboxes of two shots, on each GPU; larger messages take several launches."""
_ONE_SHOT_TILES = 1024
_PROBE_SPINS = 16_384
_MOST_SPINS = 1 << 30


class CannotMap(ConfigError):
    """The GPUs cannot map each other's memory. Every rank raises it, or none."""


class QuickCollective(Collective):
    """See :class:`Collective`. ``check`` says whether a rank was lost or late; the result of the
    call in which it was is worthless, and so are all later ones.

    Args:
        setup: its format is that of two shots; without one everything is exact, and float32
            takes no two shots. Its dtype is compiled and tried at the start, other types at their
            first call.
        crossover: which way a message goes, by its size.
        library: for what does not go through peer memory; closed with this one.
        room: the format that the inboxes are laid out for; None: the setup's. Other formats of at
            most its size may be given to the methods that take one.
        capacity_bytes: about what the inboxes of two shots take.

    Raises:
        CannotMap: the library is still of use.
        ConfigError: the kernels do not add up.
    """

    name = "quick"
    capturable = True

    def __init__(
        self,
        setup: Setup,
        crossover: Crossover,
        library: NcclCollective,
        *,
        room: ReduceFormat | None = None,
        capacity_bytes: int = CAPACITY_BYTES,
    ) -> None:
        rank, world, fmt, device = setup.rank, setup.world, setup.fmt, setup.device
        super().__init__(rank, world)
        self._library = library
        self._fmt = fmt
        self._crossover = crossover
        self._deadline_s = setup.deadline_s
        atom_bytes = (room or fmt or FP16).atom_bytes
        atoms = capacity_bytes // (2 * world * atom_bytes)
        self._buffer = quick_plan.Buffer(world, atoms, atom_bytes, _ONE_SHOT_TILES)
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._hip = torch.version.hip is not None
        self.tuning = quick_plan.HIP if self._hip else quick_plan.CUDA
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        # A rank's own GPU is device 0 of its process (afd.topology: gpu_order), which torch takes
        # for one GPU in all ranks.
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        fault: RuntimeError | None = None
        try:
            self._memory = symmetric.empty(self._buffer.nbytes, dtype=torch.uint8, device=device)
            self._handle = symmetric.rendezvous(self._memory, dist.group.WORLD)
        except RuntimeError as err:
            fault = err
        faults = library.all_reduce(torch.full((1, 1), float(fault is not None), device=device))
        if faults.item():
            reason = str(fault).splitlines()[0] if fault else "another rank says why"
            raise CannotMap(f"the GPUs cannot map each other's memory ({reason})") from fault
        self._memory.zero_()
        bases = list(self._handle.buffer_ptrs)
        within = self._memory.data_ptr() - bases[rank]  # the same on every rank
        self._peers = torch.tensor([base + within for base in bases], device=device)
        counters = torch.zeros((2, max(atoms, _ONE_SHOT_TILES)), dtype=torch.int32, device=device)
        self._two_shot_sequence, self._one_shot_sequence = counters
        self._late = torch.zeros(1, dtype=torch.int32, device=device)
        self._note = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._noted: np.ndarray = self._note.numpy()
        torch.cuda.synchronize(device)
        dist.barrier()  # all buffers are zero before anyone writes to one
        spin_us = self._spin_us()
        self._spins = _spins(setup.start_s, spin_us)
        self._try_out(setup.dtype)
        self._spins = _spins(setup.deadline_s, spin_us)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.check()
        way = self._way(x)
        if not x.numel():
            return x
        if way is Way.LIBRARY:
            return self._library.all_reduce(x)
        if way is Way.ONE_SHOT:
            return self.one_shot(x)
        return self.two_shot(x, self._fmt)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        self.check()
        if self._way(x) is Way.TWO_SHOT and x.numel():
            return self.two_shot_scatter(x, self._fmt)
        if self._way(x) is Way.ONE_SHOT and x.numel():
            start, end = row_shares(len(x), self.world)[self.rank]
            return self.one_shot(x.clone())[start:end]
        return self._library.reduce_scatter(x)

    def all_gather(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        self.check()
        return self._library.all_gather(x, rows)

    def check(self) -> None:
        self._library.check()
        late = int(self._noted[0]) - 1
        if late < 0:
            return
        who = f"rank {self.rank} of {self.world}"
        if self._library.watch.lost() == late:
            raise PeerLost(f"{who}: the process of rank {late} ended; restart the instance")
        raise DeadlineExceeded(
            f"{who}: rank {late} did not take part in a reduction within {self._deadline_s:g} s; "
            "look at that rank's log"
        )

    def close(self) -> None:
        self._library.close()

    @staticmethod
    def fits_one_shot(x: torch.Tensor) -> bool:
        return x.numel() <= _ONE_SHOT_TILES * quick_plan.ONE_SHOT_BLOCK

    def one_shot(self, x: torch.Tensor) -> torch.Tensor:
        """The exact sum, in place, of a message that fits_one_shot."""
        n, b = x.numel(), self._buffer
        quick_triton.one_shot_kernel[(-(-n // quick_plan.ONE_SHOT_BLOCK),)](
            x,
            x,
            self._peers,
            self._one_shot_sequence,
            self._late,
            self._note,
            n,
            self._spins,
            self.rank,
            b.one_shot_tiles,
            b.one_shot_flags,
            b.one_shot_inbox,
            BLOCK=quick_plan.ONE_SHOT_BLOCK,
            **self._ranks(),
        )
        return x

    def two_shot(self, x: torch.Tensor, fmt: ReduceFormat | None) -> torch.Tensor:
        """The sum in a lossy format, or the exact one of values of 16 bits, in place."""
        segments = quick_plan.flat_segments(x.numel(), self.world)
        for launch in quick_plan.launches(segments, self._buffer, self._processors, self.tuning):
            self._two_shot(x, x, segments, launch, fmt, gather=True)
        return x

    def two_shot_scatter(self, x: torch.Tensor, fmt: ReduceFormat | None) -> torch.Tensor:
        """This rank's rows of the sum after the first shot."""
        rows, hidden = x.shape
        start, end = row_shares(rows, self.world)[self.rank]
        out = x.new_empty((end - start, hidden))
        segments = quick_plan.row_segments(rows, hidden, self.world)
        for launch in quick_plan.launches(segments, self._buffer, self._processors, self.tuning):
            self._two_shot(x, out, segments, launch, fmt, gather=False)
        return out

    def _way(self, x: torch.Tensor) -> Way:
        way = self._crossover.way(x.nbytes)
        fits = self._has_two_shots(x.dtype) and x.numel() <= quick_plan.MOST_VALUES
        if way is Way.TWO_SHOT and not fits:
            return Way.LIBRARY
        if way is Way.ONE_SHOT and not self.fits_one_shot(x):
            return Way.LIBRARY
        return way

    def _has_two_shots(self, dtype: torch.dtype) -> bool:
        """Exact ones carry values of 16 bits as they are."""
        return self._fmt is not None or dtype.itemsize == 2

    def _ranks(self) -> dict[str, int | bool]:
        lanes = 1 << (self.world - 1).bit_length()
        return {"WORLD": self.world, "LANES": lanes, "AMD": self._hip}

    def _two_shot(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        segments: Segments,
        launch: Launch,
        fmt: ReduceFormat | None,
        *,
        gather: bool,
    ) -> None:
        assert fmt is not None or x.element_size() == 2
        b = self._buffer
        bf16 = fmt is None and x.dtype is torch.bfloat16
        fmt = fmt or FP16
        quick_triton.two_shot_kernel[(launch.programs,)](
            x,
            out,
            self._peers,
            self._two_shot_sequence,
            self._late,
            self._note,
            x.numel(),
            segments.unit,
            segments.base,
            segments.longer,
            launch.first,
            launch.tiles,
            self._spins,
            self.rank,
            b.segment_atoms,
            b.two_shot_inbox,
            b.segment_bytes,
            FACTOR=fmt.factor,
            BITS=fmt.bits,
            FP4=fmt.is_fp4,
            BF16=bf16,
            TILE=launch.tile_atoms,
            ATOMS=launch.atoms,
            GATHER=gather,
            **self.tuning.options,
            **self._ranks(),
        )

    def _spin_us(self) -> float:
        """What one look at the flags of a wait costs on this device."""
        flags, late = torch.zeros((2, 2), dtype=torch.int32, device=self._library.device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(2):  # the first one compiles
            start.record()
            quick_triton.spin_kernel[(1,)](flags, _PROBE_SPINS, late, late)
            end.record()
            end.synchronize()
            late.zero_()
        return start.elapsed_time(end) * 1000 / _PROBE_SPINS

    def _try_out(self, dtype: torch.dtype) -> None:
        """Compiles every kernel before a deadline counts, and sees that the ranks add up.

        Raises:
            ConfigError: they do not.
        """
        for tile, atoms in self.tuning.cuts if self._has_two_shots(dtype) else ():
            x = torch.ones((64 * self.world, 2048), dtype=dtype, device=self._library.device)
            flat = quick_plan.flat_segments(x.numel(), self.world)
            rows = quick_plan.row_segments(*x.shape, self.world)
            out = x.new_empty((64, 2048))
            launch = Launch(0, -(-rows.atoms // tile), tile, atoms, 1)
            self._two_shot(x, out, rows, launch, self._fmt, gather=False)
            self._two_shot(x, x, flat, launch, self._fmt, gather=True)
            self._expect(out)
            self._expect(x)
        self._expect(self.one_shot(torch.ones((1, 4096), dtype=dtype, device=self._library.device)))

    def _expect(self, total: torch.Tensor) -> None:
        most = (total.float() - self.world).abs().max().item()
        self.check()
        if most > self.world * 2.0**-6:
            raise ConfigError(
                f"rank {self.rank} of {self.world}: ones of all ranks do not add up to "
                f"{self.world} in the all-reduce quick; use nccl, and report this"
            )


def _spins(deadline_s: float, spin_us: float) -> int:
    """Looks at a flag in a deadline: a multiple of 16, so that no other kernel is compiled."""
    return min(_MOST_SPINS, int(deadline_s * 1e6 / spin_us) // 16 * 16 + 16)
