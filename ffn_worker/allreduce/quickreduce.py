"""QuickReduce-style all-reduce over peer memory, with this project's kernels on CUDA and ROCm.

The crossover table selects the algorithm by message size: one exact shot for small messages, two
shots for large ones (in the lossy format or exact), NCCL or RCCL for those in between. Not run on
ROCm hardware: see docs/amd.md.

Peer memory is torch's symmetric memory, which supports CUDA and ROCm; NVLink multicast stays off.
"""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from afd.errors import ConfigError, DeadlineExceeded, PeerLost
from ffn_worker.allreduce import quickreduce_plan as plan
from ffn_worker.allreduce import quickreduce_triton as kernels
from ffn_worker.allreduce.base import Collective, Setup, row_shares
from ffn_worker.allreduce.crossover import Algorithm, Crossover, read_crossover, table_of
from ffn_worker.allreduce.formats_table import FP16, ReduceFormat
from ffn_worker.allreduce.nccl import NcclCollective
from ffn_worker.allreduce.quickreduce_plan import Launch, Segments

CAPACITY_BYTES = 256 << 20
"""Size of the two-shot inboxes on each GPU; larger messages take several launches."""
_ONE_SHOT_TILES = 1024
_PROBE_SPINS = 16_384
_MOST_SPINS = 1 << 30


class CannotMap(ConfigError):
    """The GPUs cannot map each other's memory. Either every rank raises it or none does."""


class QuickReduceCollective(Collective):
    """See :class:`Collective`. ``check`` raises if a rank was lost or late; the result of that call
    and of all later ones is then undefined.

    Args:
        setup: its format applies to two-shot sums. Without a format everything is exact, and
            float32 does not use two shots. Kernels for its dtype are compiled and tested at the
            start, those for other dtypes at their first call.
        crossover: selects the algorithm by message size.
        library: carries what does not go through peer memory; closed with this object.
        room: format that the inboxes are sized for; None: the setup's. Methods with a ``fmt``
            argument accept any format that encodes to at most this size.
        capacity_bytes: approximate size of the two-shot inboxes.

    Raises:
        CannotMap: see there; the library stays usable.
        ConfigError: the kernels compute wrong sums.
    """

    name = "quickreduce"
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
        self._buffer = plan.Buffer(world, atoms, atom_bytes, _ONE_SHOT_TILES)
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._hip = torch.version.hip is not None
        self.tuning = plan.HIP if self._hip else plan.CUDA
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        # Every rank sees its own GPU as device 0 (afd.topology: gpu_order). Without this, torch
        # assumes that all ranks use the same GPU.
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        fault: RuntimeError | None = None
        try:
            self._memory = symmetric.empty(self._buffer.nbytes, dtype=torch.uint8, device=device)
            group = dist.group.WORLD
            assert group is not None  # made by the library
            self._handle = symmetric.rendezvous(self._memory, group)
        except RuntimeError as err:
            fault = err
        faults = library.all_reduce(torch.full((1, 1), float(fault is not None), device=device))
        if faults.item():
            reason = str(fault).splitlines()[0] if fault else "see the log of another rank"
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
        dist.barrier()  # every buffer is zero before a rank writes to it
        spin_us = self._spin_us()
        self._spins = _spins(setup.start_s, spin_us)
        self._self_test(setup.dtype)
        self._spins = _spins(setup.deadline_s, spin_us)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.check()
        algorithm = self._algorithm(x)
        if not x.numel():
            return x
        if algorithm is Algorithm.LIBRARY:
            return self._library.all_reduce(x)
        if algorithm is Algorithm.ONE_SHOT:
            return self.one_shot(x)
        return self.two_shot(x, self._fmt)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        self.check()
        if self._algorithm(x) is Algorithm.TWO_SHOT and x.numel():
            return self.two_shot_scatter(x, self._fmt)
        if self._algorithm(x) is Algorithm.ONE_SHOT and x.numel():
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
        return x.numel() <= _ONE_SHOT_TILES * plan.ONE_SHOT_BLOCK

    def one_shot(self, x: torch.Tensor) -> torch.Tensor:
        """Sums in place, exactly. Requires ``fits_one_shot(x)``."""
        n, b = x.numel(), self._buffer
        kernels.one_shot_kernel[(-(-n // plan.ONE_SHOT_BLOCK),)](
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
            BLOCK=plan.ONE_SHOT_BLOCK,
            **self._ranks(),
        )
        return x

    def two_shot(self, x: torch.Tensor, fmt: ReduceFormat | None) -> torch.Tensor:
        """Sums in place, in a lossy format or, for 16-bit dtypes and fmt None, exactly."""
        segments = plan.flat_segments(x.numel(), self.world)
        for launch in plan.launches(segments, self._buffer, self._processors, self.tuning):
            self._two_shot(x, x, segments, launch, fmt, gather=True)
        return x

    def two_shot_scatter(self, x: torch.Tensor, fmt: ReduceFormat | None) -> torch.Tensor:
        """Returns this rank's rows of the sum, which needs only the first shot."""
        rows, hidden = x.shape
        start, end = row_shares(rows, self.world)[self.rank]
        out = x.new_empty((end - start, hidden))
        segments = plan.row_segments(rows, hidden, self.world)
        for launch in plan.launches(segments, self._buffer, self._processors, self.tuning):
            self._two_shot(x, out, segments, launch, fmt, gather=False)
        return out

    def _algorithm(self, x: torch.Tensor) -> Algorithm:
        algorithm = self._crossover.algorithm(x.nbytes)
        fits = self._has_two_shots(x.dtype) and x.numel() <= plan.MOST_VALUES
        if algorithm is Algorithm.TWO_SHOT and not fits:
            return Algorithm.LIBRARY
        if algorithm is Algorithm.ONE_SHOT and not self.fits_one_shot(x):
            return Algorithm.LIBRARY
        return algorithm

    def _has_two_shots(self, dtype: torch.dtype) -> bool:
        """Exact two-shot sums send values as they are, which must have 16 bits."""
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
        kernels.two_shot_kernel[(launch.programs,)](
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
        """Microseconds that a wait takes per poll of its flags on this device."""
        flags, late = torch.zeros((2, 2), dtype=torch.int32, device=self._library.device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(2):  # the first one compiles
            start.record()
            kernels.spin_kernel[(1,)](flags, _PROBE_SPINS, late, late)
            end.record()
            end.synchronize()
            late.zero_()
        elapsed_ms: float = start.elapsed_time(end)
        return elapsed_ms * 1000 / _PROBE_SPINS

    def _self_test(self, dtype: torch.dtype) -> None:
        """Compiles every kernel, before deadlines apply, and checks the sums of all ranks.

        Raises:
            ConfigError: a sum is wrong.
        """
        for tile, atoms in self.tuning.cuts if self._has_two_shots(dtype) else ():
            x = torch.ones((64 * self.world, 2048), dtype=dtype, device=self._library.device)
            flat = plan.flat_segments(x.numel(), self.world)
            rows = plan.row_segments(len(x), x.shape[1], self.world)
            out = x.new_empty((64, 2048))
            launch = Launch(0, -(-rows.atoms // tile), tile, atoms, 1)
            self._two_shot(x, out, rows, launch, self._fmt, gather=False)
            self._two_shot(x, x, flat, launch, self._fmt, gather=True)
            self._check_sum(out)
            self._check_sum(x)
        self._check_sum(
            self.one_shot(torch.ones((1, 4096), dtype=dtype, device=self._library.device))
        )

    def _check_sum(self, total: torch.Tensor) -> None:
        most = (total.float() - self.world).abs().max().item()
        self.check()
        if most > self.world * 2.0**-6:
            raise ConfigError(
                f"rank {self.rank} of {self.world}: the all-reduce quickreduce computed a wrong "
                f"sum of ones, not {self.world}; use nccl, and report this"
            )


def make(setup: Setup, table: Path | None) -> Collective:
    """See :class:`ffn_worker.allreduce.registry.Make`."""
    table = table or table_of(torch.cuda.get_device_name(setup.device))
    crossover = read_crossover(table, setup.world, setup.dtype_name, setup.fmt_name)
    library = NcclCollective(replace(setup, fmt=None))
    try:
        return QuickReduceCollective(setup, crossover, library)
    except CannotMap as err:
        library.close()
        remedy = "set ffn.reduce to exact, whose sums can go through NCCL"
        raise ConfigError(f"{err}; {remedy}") from err


def _spins(deadline_s: float, spin_us: float) -> int:
    """Polls of a flag within a deadline; a multiple of 16, so that Triton compiles one kernel."""
    return min(_MOST_SPINS, int(deadline_s * 1e6 / spin_us) // 16 * 16 + 16)
