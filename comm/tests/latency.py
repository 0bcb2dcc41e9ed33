"""One-way latency of a post between two processes, each pinned to its own core: half a round trip.

``python comm/tests/latency.py [--spin US] [--rounds N] [--unpinned]``
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
from afd_comm import Link, Region, Status, make_flag

SIZES = (8, 64 * 1024, 896 * 1024)
TIMEOUT_US = 5_000_000


def post(link: Link, seq: int, parts: list[tuple[int, int, int]]) -> None:
    status = link.post(0, make_flag(1, seq), 0, 0, 0, 1, 0, 0, seq, parts)
    if status != Status.OK:
        raise SystemExit(f"post {seq}: {status!r}")


def wait(region: Region, seq: int) -> None:
    status = region.wait_all([0], [make_flag(1, seq)], TIMEOUT_US)[0]
    if status != Status.OK:
        raise SystemExit(f"wait {seq}: {status!r}")


def answer(region: Region, to: list[str], backend: str, nbytes: int, rounds: int) -> None:
    data = np.ones(nbytes, np.uint8)
    link = Link(to, backend=backend, slots=(0, 1), timeout_us=TIMEOUT_US)
    for seq in range(1, rounds + 1):
        wait(region, seq)
        post(link, seq, [(0, data.ctypes.data, nbytes)])


def measure(backend: str, nbytes: int, rounds: int, spin_us: int | None, pin: bool) -> np.ndarray:
    """Half round trips in us, shape [rounds]."""
    # Made before the fork, so that both sides have the addresses. The regions' threads stay here.
    near, far = (Region(1, nbytes, name=n, tcp_host="127.0.0.1") for n in ("near", "far"))
    for region in (near, far):
        if spin_us is not None:
            region.set_spin_us(spin_us)
    cores = sorted(os.sched_getaffinity(0))
    child = os.fork()
    if pin:
        os.sched_setaffinity(0, {cores[0] if child else cores[-1]})
    if child == 0:
        answer(far, near.addresses, backend, nbytes, rounds)
        os._exit(0)
    data = np.ones(nbytes, np.uint8)
    link = Link(far.addresses, backend=backend, slots=(0, 1), timeout_us=TIMEOUT_US)
    times = np.zeros(rounds)
    for seq in range(1, rounds + 1):
        start = time.perf_counter_ns()
        post(link, seq, [(0, data.ctypes.data, nbytes)])
        wait(near, seq)
        times[seq - 1] = (time.perf_counter_ns() - start) / 2000
    os.waitpid(child, 0)
    os.sched_setaffinity(0, set(cores))
    return times[rounds // 10 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spin", type=int, default=None, help="us; default: the library's")
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--unpinned", action="store_true")
    args = parser.parse_args()
    print("backend    bytes      p50      p90      p99  (us, one way)")
    for backend in ("shm", "tcp"):
        for nbytes in SIZES:
            times = measure(backend, nbytes, args.rounds, args.spin, not args.unpinned)
            p50, p90, p99 = np.percentile(times, (50, 90, 99))
            print(f"{backend:7} {nbytes:8} {p50:8.2f} {p90:8.2f} {p99:8.2f}", flush=True)


if __name__ == "__main__":
    main()
