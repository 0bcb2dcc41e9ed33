"""afd_comm when the system refuses a resource or a peer is stopped: one clear error, in time."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from comm_peer import TIMEOUT_US, peer, post

from afd_comm import CommError, Link, Region, Status, make_flag

FLAG = make_flag(1, 1)
DATA = np.arange(64, dtype=np.uint8)

MAKE_REGION = """
import resource, sys
from afd_comm import CommError, Region
{prepare}
try:
    Region(4, {slot_bytes}, name="big")
    print("made")
except CommError as error:
    print("CommError:", error)
"""


def make_region(slot_bytes: int, prepare: str = "", *, before: tuple[str, ...] = ()) -> str:
    """Returns the output of a fresh process that creates a Region; the process must not crash."""
    code = MAKE_REGION.format(prepare=prepare, slot_bytes=slot_bytes)
    run = subprocess.run(
        [*before, sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_a_region_larger_than_host_memory_is_refused() -> None:
    with pytest.raises(CommError, match=r"only \d+ are left of the .*lower the number or size"):
        Region(4, 1 << 40, name="huge")


@pytest.mark.parametrize(
    "limit, nbytes, cause",
    [
        ("RLIMIT_AS", 1 << 30, "cannot map .* Cannot allocate memory; free memory"),
        ("RLIMIT_FSIZE", 1 << 20, "File too large; raise the file-size limit"),
        ("RLIMIT_NOFILE", 3, "Too many open files; raise the open-files limit"),
    ],
)
def test_limits_of_the_process(limit: str, nbytes: int, cause: str) -> None:
    prepare = f"resource.setrlimit(resource.{limit}, ({nbytes}, {nbytes}))"
    said = make_region(1 << 28, prepare)
    assert said.startswith("CommError:")
    assert re.search(cause, said), said


@contextlib.contextmanager
def memory_cgroup(nbytes: int) -> Iterator[Path]:
    """Yields cgroup.procs of a new group limited to ``nbytes``; skips where none can be created."""
    for root, name in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / f"afd-comm-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / name).exists():
                (group / name).write_text(str(nbytes))
                yield group / "cgroup.procs"
                return
        finally:
            with contextlib.suppress(OSError):
                group.rmdir()
    pytest.skip("this process may not create memory cgroups")


def test_the_cgroup_limit_is_checked() -> None:
    """Region checks the limit first; otherwise the kernel would kill the process in the call."""
    with memory_cgroup(256 << 20) as procs:
        join = f"import os; open({str(procs)!r}, 'w').write(str(os.getpid()))"
        assert "of the cgroup memory limit of 268435456 bytes" in make_region(100 << 20, join)
        assert make_region(1 << 20, join) == "made\n"


def test_a_full_dev_shm_does_not_matter() -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-m", "true"], capture_output=True).returncode:
        pytest.skip("this process may not create mount namespaces")
    fill = "mount -t tmpfs -o size=4k none /dev/shm && head -c 4096 /dev/zero >/dev/shm/full && "
    before = (unshare, "-m", "sh", "-c", fill + 'exec "$@"', "sh")
    assert make_region(1 << 20, before=before) == "made\n"


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_stopped_sender_is_late_not_gone(backend: str) -> None:
    region = Region(1, 4096, name="patient", tcp_host="127.0.0.1")
    with peer(
        "send", addresses=region.addresses, backend=backend, slots=(0, 1), flag=FLAG, value=1
    ) as sender:
        assert sender.read() == "posted"
        os.kill(sender.process.pid, signal.SIGSTOP)
        start = time.monotonic()
        assert region.wait_all([0], [make_flag(1, 2)], 150_000) == [Status.DEADLINE]
        assert region.wait_any([0], [make_flag(1, 2)], 50_000) == -1
        assert time.monotonic() - start < 1.0
        assert not region.gone(0)
        sender.kill()  # SIGKILL also ends a stopped process
        assert region.wait_all([0], [make_flag(1, 2)], TIMEOUT_US) == [Status.PEER_GONE]


def test_posts_to_a_stopped_owner_over_shm_succeed() -> None:
    """The sender writes the memory itself, so the owner only has to be alive."""
    with peer("own", slots=1, slot_bytes=64, tcp=False) as owner:
        link = Link(owner.read(), slots=(0, 1), timeout_us=TIMEOUT_US)
        os.kill(owner.process.pid, signal.SIGSTOP)
        for seq in range(1, 100):
            assert post(link, 0, make_flag(1, seq), DATA) == Status.OK
        owner.kill()
        end = time.monotonic() + 1.0
        while post(link, 0, FLAG, DATA) == Status.OK:
            assert time.monotonic() < end


def test_a_late_message_of_a_replaced_sender_is_ignored() -> None:
    """The replaced sender posts after its successor has taken over the slot."""
    region = Region(1, 4096, name="epochs", tcp_host="127.0.0.1")
    for backend in ("shm", "tcp"):
        old = Link(region.addresses, backend=backend, slots=(0, 1), timeout_us=TIMEOUT_US)
        new = Link(region.addresses, backend=backend, slots=(0, 1), timeout_us=TIMEOUT_US)
        flag = make_flag(2, 1)
        assert post(new, 0, flag, DATA) == Status.OK
        assert region.wait_all([0], [flag], TIMEOUT_US) == [Status.OK]
        post(old, 0, make_flag(1, 7), DATA[::-1].copy())
        time.sleep(0.02)
        assert region.ready(0, flag) and np.array_equal(region.buffer(0)[:64], DATA)
