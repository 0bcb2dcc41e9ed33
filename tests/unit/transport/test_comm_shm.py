"""afd_comm over shared memory: memory ownership, addresses, cleanup."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from comm_peer import TIMEOUT_US, peer, post
from leftovers import shared_memory

from afd_comm import CommError, Link, Region, Status, make_flag

FLAG = make_flag(1, 1)
DATA = np.arange(64, dtype=np.uint8)


def replaced(address: str, field: int, value: str) -> str:
    fields = address.split(":")
    fields[field] = value
    return ":".join(fields)


def shm_address(region: Region) -> str:
    return region.addresses[0]


def test_auto_prefers_shared_memory() -> None:
    region = Region(1, 64, name="auto", tcp_host="127.0.0.1")
    assert Link(region.addresses, timeout_us=TIMEOUT_US).backend == "shm"
    assert Link(region.addresses[1:], timeout_us=TIMEOUT_US).backend == "tcp"


def test_auto_falls_back_where_memory_cannot_be_shared() -> None:
    region = Region(1, 64, name="elsewhere", tcp_host="127.0.0.1")
    elsewhere = replaced(shm_address(region), 1, "0123.4567")
    assert Link([elsewhere, region.addresses[1]], timeout_us=TIMEOUT_US).backend == "tcp"
    with pytest.raises(CommError, match=r"another machine or in another PID namespace.*tcp"):
        Link([elsewhere], timeout_us=TIMEOUT_US)
    with pytest.raises(CommError, match="offers no address"):
        Link([elsewhere], backend="tcp", timeout_us=TIMEOUT_US)


@pytest.mark.parametrize("field, value", [(3, "0"), (4, "8192000"), (5, "0" * 32)])
def test_address_of_something_else_is_refused(field: int, value: str) -> None:
    """A reused pid or descriptor number must not be written to."""
    region = Region(1, 64, name="mine")
    with pytest.raises(CommError, match="no longer owns that region"):
        Link([replaced(shm_address(region), field, value)], timeout_us=TIMEOUT_US)


def test_descriptor_of_another_file_is_refused(tmp_path: Path) -> None:
    region = Region(1, 64, name="mine")
    target = tmp_path / "file"
    target.write_bytes(bytes(1 << 16))
    with target.open("r+b") as file:
        address = replaced(shm_address(region), 3, str(file.fileno()))
        with pytest.raises(CommError, match="no longer owns that region"):
            Link([address], timeout_us=TIMEOUT_US)
    assert target.read_bytes() == bytes(1 << 16)


def test_dead_or_closed_owner_is_named() -> None:
    region = Region(1, 64, name="closing")
    region.close()
    with pytest.raises(CommError, match="has ended or closed its region"):
        Link(region.addresses, timeout_us=TIMEOUT_US)
    with peer("own", slots=1, slot_bytes=64, tcp=False) as owner:
        addresses = owner.read()
    with pytest.raises(CommError, match="has ended or closed its region"):
        Link(addresses, timeout_us=TIMEOUT_US)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_other_user_gets_a_remedy() -> None:
    region = Region(1, 64, name="private")
    code = (
        "import os, sys\nfrom afd_comm import CommError, Link\nos.setuid(65534)\n"
        "try:\n    Link([sys.argv[1]], timeout_us=1000)\nexcept CommError as e:\n    print(e)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, shm_address(region)], capture_output=True, text=True
    )
    assert "permission denied" in out.stdout and "transport.backend: tcp" in out.stdout


def test_nothing_is_left_behind() -> None:
    def nothing_new() -> None:
        end = time.monotonic() + 3.0  # another process may still be removing its memory
        while (left := shared_memory() - before) and time.monotonic() < end:
            time.sleep(0.05)
        assert not left

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:afd:scratch")

    gc.collect()  # frees the leftovers of earlier tests before the count
    before = shared_memory()
    descriptors = len(os.listdir("/proc/self/fd"))
    region = Region(2, 1 << 16, name="scratch", tcp_host="127.0.0.1")
    links = [Link(region.addresses, backend=b, timeout_us=TIMEOUT_US) for b in ("shm", "tcp")]
    assert mappings() == 2
    with peer("own", slots=1, slot_bytes=64, tcp=False) as owner:
        owner.read()
        owner.kill()
        nothing_new()
    region.close()
    for link in links:
        link.close()
    del region, links, link
    gc.collect()
    assert mappings() == 0
    assert len(os.listdir("/proc/self/fd")) == descriptors
    nothing_new()


def test_descriptors_of_dead_writers_are_closed() -> None:
    """Each restarted writer takes over the slots before the receiver checks for a dead writer."""
    region = Region(1, 64, name="outlives")
    descriptors = []
    for seq in range(1, 5):
        flag = make_flag(1, seq)
        arguments = {"addresses": region.addresses, "backend": "shm", "slots": (0, 1)}
        with peer("send", flag=flag, value=seq, **arguments) as writer:
            assert writer.read() == "posted"
            assert region.wait_all([0], [flag + 1], 100_000) == [Status.DEADLINE]
        descriptors.append(len(os.listdir("/proc/self/fd")))
    assert descriptors == descriptors[:1] * 4


def test_memory_cannot_be_shrunk_under_a_peer() -> None:
    region = Region(1, 1 << 16, name="sealed")
    fd = int(shm_address(region).split(":")[3])
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)


def test_forked_child_does_not_end_the_parents_region() -> None:
    region = Region(1, 64, name="forked", tcp_host="127.0.0.1")
    link = Link(region.addresses, backend="shm", slots=(0, 1), timeout_us=TIMEOUT_US)
    child = os.fork()
    if child == 0:
        region.close()
        link.close()
        del region, link
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not region.closed and not region.gone(0)
    assert post(link, 0, FLAG, DATA) == Status.OK
    assert region.wait_all([0], [FLAG], TIMEOUT_US) == [Status.OK]
    assert Link(region.addresses, backend="tcp", timeout_us=TIMEOUT_US).backend == "tcp"


def test_buffers_are_aligned_views() -> None:
    region = Region(3, 100, name="views")
    for slot in range(3):
        view = region.buffer(slot)
        assert view.shape == (100,) and view.dtype == np.uint8 and view.flags.writeable
        assert view.ctypes.data % 64 == 0
        assert region.buffer(slot).ctypes.data == view.ctypes.data
    a, b = region.buffer(0), region.buffer(1)
    a[:] = 1
    assert not b.any()


def test_shm_copies_registered_memory_before_post_returns() -> None:
    region = Region(1, 64, name="plain")
    link = Link(region.addresses, timeout_us=TIMEOUT_US)
    data = np.zeros(64, np.uint8)
    link.register_memory(data.ctypes.data, 64)
    assert link.wait_sent(0, 0) == Status.OK and link.notes == ""
