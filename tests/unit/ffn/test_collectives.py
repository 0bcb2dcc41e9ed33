"""Collectives among CPU ranks, one process each: sums, formats, lost and late ranks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import FileStore

from afd.errors import AfdError, ConfigError, DeadlineExceeded, PeerLost
from afd.host.ports import held_ports
from ffn_worker.allreduce import formats_numpy
from ffn_worker.allreduce.base import Collective, row_shares
from ffn_worker.allreduce.formats_table import ATOM_VALUES, FORMATS, REDUCE_FORMATS
from ffn_worker.allreduce.rendezvous import open_store
from ffn_worker.allreduce.selection import make_collective
from ffn_worker.allreduce.watch import PeerWatch

CUDA = torch.device("cuda", 0)
HIDDEN = 96
DEADLINE_S = 1.0
Answer = tuple[str, torch.Tensor | str]


def rows_of(rank: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + rows)
    return torch.randn(rows, HIDDEN, generator=generator).to(dtype)


def serve(
    pipe: Connection,
    name: str,
    fmts: list[str],
    rank: int,
    world: int,
    folder: str,
    deadline_s: float,
) -> None:
    """Runs one rank: one collective per format; executes (format, method, rows, dtype) requests
    until the pipe closes."""
    torch.set_num_threads(1)
    made: dict[str, Collective] = {
        fmt: make_collective(
            name, fmt, rank, world, f"file://{folder}/{fmt}", deadline_s=deadline_s, start_s=60
        )
        for fmt in fmts
    }
    pipe.send(("ready", ""))
    while True:
        try:
            fmt, method, rows, dtype = pipe.recv()
        except EOFError:
            return
        collective, x = made[fmt], rows_of(rank, rows, dtype)
        try:
            if method == "all_gather":
                start, end = row_shares(rows, world)[rank]
                out = collective.all_gather(rows_of(0, rows, dtype)[start:end].contiguous(), rows)
            else:
                run: Callable[[torch.Tensor], torch.Tensor] = {
                    "all_reduce": collective.all_reduce,
                    "reduce_scatter": collective.reduce_scatter,
                }[method]
                out = run(x)
            pipe.send(("ok", out.float().numpy()))
        except AfdError as err:
            pipe.send((type(err).__name__, str(err)))


class Ranks:
    def __init__(
        self, name: str, fmts: list[str], world: int, folder: Path, deadline_s: float
    ) -> None:
        # Its server has one thread. A fork of the test process can hang: a lock that another of its
        # threads holds at that moment stays locked in the child.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["ffn_worker.allreduce.gloo"])
        self.world, self.pipes, self.processes = world, [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            args = (theirs, name, fmts, rank, world, str(folder), deadline_s)
            process = context.Process(target=serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        for rank in range(world):
            assert self.answer(rank)[0] == "ready"

    def answer(self, rank: int) -> tuple:
        assert self.pipes[rank].poll(60), f"rank {rank} did not answer within 60 s"
        return self.pipes[rank].recv()

    def ask(self, rank: int, *what: object) -> None:
        self.pipes[rank].send(what)

    def __call__(self, *what: object) -> list[np.ndarray]:
        for rank in range(self.world):
            self.ask(rank, *what)
        answers = [self.answer(rank) for rank in range(self.world)]
        assert [kind for kind, _ in answers] == ["ok"] * self.world, answers
        return [out for _, out in answers]


@contextmanager
def ranks(
    fmts: list[str], world: int, folder: Path, deadline_s: float = DEADLINE_S
) -> Iterator[Ranks]:
    started = Ranks("gloo", fmts, world, folder, deadline_s)
    try:
        yield started
    finally:
        for process in started.processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module", params=[2, 3])
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    # Its tests compare values. A busy machine can keep a rank from its core for a second.
    folder = tmp_path_factory.mktemp("ranks")
    with ranks(list(REDUCE_FORMATS), request.param, folder, deadline_s=60) as started:
        yield started


def reference(parts: list[torch.Tensor], fmt: str, *, again: bool) -> torch.Tensor:
    """Returns the sum by the numpy reference; ``again`` adds the rounding of the second shot."""
    dtype, shape = parts[0].dtype, parts[0].shape
    if fmt == "exact" or not parts[0].numel():
        total = torch.zeros(shape)
        for part in parts:
            total += part.float()
        return total.to(dtype).float()
    form, n = FORMATS[fmt], parts[0].numel()
    padded = [np.pad(p.half().numpy().reshape(-1), (0, -n % ATOM_VALUES)) for p in parts]
    total = formats_numpy.decode_sum(
        np.stack([formats_numpy.encode(p, form) for p in padded]), form
    )
    if again:
        total[n:] = 0
        total = formats_numpy.decode(formats_numpy.encode(total, form), form)
    return torch.from_numpy(total[:n].copy()).view(shape).to(dtype).float()


@pytest.mark.parametrize("fmt", REDUCE_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_reduce_equals_the_reference_bit_for_bit(group: Ranks, fmt: str, dtype: torch.dtype):
    for rows in (0, 1, 37):
        parts = [rows_of(rank, rows, dtype) for rank in range(group.world)]
        want = reference(parts, fmt, again=True).numpy()
        for got in group(fmt, "all_reduce", rows, dtype):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("fmt", REDUCE_FORMATS)
def test_reduce_scatter_gives_each_rank_its_rows(group: Ranks, fmt: str):
    for rows in (0, 1, 2, 43):  # fewer rows than ranks, and an uneven split
        parts = [rows_of(rank, rows, torch.bfloat16) for rank in range(group.world)]
        got = group(fmt, "reduce_scatter", rows, torch.bfloat16)
        for (start, end), mine in zip(row_shares(rows, group.world), got, strict=True):
            want = reference([p[start:end] for p in parts], fmt, again=False)
            np.testing.assert_array_equal(mine, want.numpy())


@pytest.mark.parametrize("fmt", ["exact", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_gather_keeps_every_bit(group: Ranks, fmt: str, dtype: torch.dtype):
    for rows in (0, 1, 43):
        want = rows_of(0, rows, dtype).float().numpy()
        for got in group(fmt, "all_gather", rows, dtype):
            np.testing.assert_array_equal(got, want)


def test_a_killed_rank_is_an_error_at_once(tmp_path: Path):
    with ranks(["exact"], 2, tmp_path) as group:
        group.processes[1].kill()
        start = time.monotonic()
        group.ask(0, "exact", "all_reduce", 4, torch.float32)
        kind, message = group.answer(0)
        assert kind == PeerLost.__name__ and "another rank is gone" in message
        assert time.monotonic() - start < DEADLINE_S


def test_a_stopped_rank_is_an_error_within_the_deadline(tmp_path: Path):
    with ranks(["int8"], 2, tmp_path) as group:
        os.kill(group.processes[1].pid, signal.SIGSTOP)
        start = time.monotonic()
        group.ask(0, "int8", "all_reduce", 4, torch.float32)
        kind, message = group.answer(0)
        assert kind == DeadlineExceeded.__name__ and f"within {DEADLINE_S:g} s" in message
        assert DEADLINE_S * 0.9 < time.monotonic() - start < DEADLINE_S + 5


def test_a_rank_that_never_joins(tmp_path: Path):
    with pytest.raises((DeadlineExceeded, PeerLost), match="rank 0 of 2"):
        make_collective("gloo", "exact", 0, 2, f"file://{tmp_path}/store", start_s=0.5)


def test_one_rank_needs_no_peers():
    alone = make_collective("auto", "int4", 0, 1, "")
    x = rows_of(0, 3, torch.bfloat16)
    assert alone.all_reduce(x) is x and alone.reduce_scatter(x) is x and alone.capturable
    alone.check()
    alone.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("auto", "int5", 0, 2, "file:///x"), "format 'int5' is not known; use one of exact, fp16"),
        (("ring", "int8", 0, 2, "file:///x"), "backend 'ring' is not known; use one of auto"),
        (("auto", "int8", 2, 2, "file:///x"), "rank 2 of 2 does not exist"),
        (("nccl", "exact", 0, 2, "file:///x"), "nccl runs on GPUs, not on cpu; use gloo"),
        (("nccl", "int4", 0, 2, "file:///x", CUDA), "nccl has no all-reduce format int4"),
        (
            ("quickreduce", "int4", 0, 2, "file:///x"),
            "quickreduce runs on GPUs, not on cpu; use gloo",
        ),
        (("gloo", "int4", 0, 2, "file:///x", CUDA), "gloo runs on CPUs, not on cuda"),
        (
            ("aiter_quickreduce", "fp4", 0, 2, "file:///x", CUDA),
            "aiter_quickreduce has no .* format fp4",
        ),
        (
            ("aiter_quickreduce", "int4", 0, 2, "file:///x", CUDA),
            "aiter_quickreduce cannot run: the package",
        ),
        (("auto", "int8", 0, 2, "somewhere"), "cannot meet at 'somewhere'; give file:///PATH"),
    ],
)
def test_invalid_arguments_give_one_sentence(arguments: tuple, message: str):
    with pytest.raises(ConfigError, match=message):
        make_collective(*arguments)


def test_ranks_rendezvous_at_a_held_port():
    with held_ports(["127.0.0.1"]) as (port,), ThreadPoolExecutor(2) as pool:
        meeting = [pool.submit(open_store, f"tcp://127.0.0.1:{port}", r, 2, 20.0) for r in (0, 1)]
        first, second = (each.result() for each in meeting)
    first.set("word", "here")  # and afterwards
    assert second.get("word") == b"here"


def test_a_watched_process_that_ends_is_named(tmp_path: Path):
    store = FileStore(str(tmp_path / "store"), 3)
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    for rank, child in enumerate(children, start=1):
        store.set(f"process/{rank}", str(child.pid))
    watch = PeerWatch(store, 0, 3)
    try:
        assert watch.lost() is None
        children[1].kill()
        children[1].wait()
        assert watch.lost() == 2
    finally:
        watch.close()
        children[0].kill()
        children[0].wait()
    with pytest.raises(PeerLost, match="of rank 1 cannot be watched"):
        PeerWatch(store, 0, 3)


def test_row_shares():
    assert row_shares(7, 3) == ((0, 3), (3, 5), (5, 7))
    assert row_shares(1, 3) == ((0, 1), (1, 1), (1, 1))
    for rows in range(20):
        for world in range(1, 6):
            shares = row_shares(rows, world)
            assert [r for start, end in shares for r in range(start, end)] == list(range(rows))
