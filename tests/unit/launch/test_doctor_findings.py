"""What `afd doctor --active` makes of its measurements: limits, containers, files. Pure."""

import os
from pathlib import Path

import pytest

from afd.errors import ConfigError
from afd_launch import cli, parity
from afd_launch.findings import KINDS, Measured, compared_with_bare, judged, limits_of, worst
from afd_launch.gpu_facts import scale_up_gbytes
from afd_launch.host_facts import room_compared
from afd_launch.model_files import files_row, hashes
from afd_launch.rails import Rails, shared_gbits


def measured(kind: str, *turns: float, limit: float | None = None) -> Measured:
    return Measured(kind, "here", turns, limit)


def test_a_limit_is_the_users_or_the_hardwares_or_the_default() -> None:
    slow = measured("rdma_gbits", 300.0, 310.0, 305.0, limit=360.0)
    row = judged(slow, {})
    assert row.level == "bad" and "rate 305 Gb/s" in row.found and "at least 360" in row.expected
    assert "lspci" in row.remedy
    assert judged(slow, {"rdma_gbits": 300.0}).level == "ok"
    assert judged(measured("rdma_us", 12.0), {}).level == "ok"
    assert judged(measured("rdma_us", 14.0), {}).level == "bad"
    unknown = judged(measured("tcp_gbits", 3.0), {})
    assert unknown.level == "ok" and "--expect tcp_gbits=VALUE" in unknown.expected
    assert all(kind.remedy for kind in KINDS.values())


def test_limits_are_read() -> None:
    assert limits_of(["rdma_us=4.5", "parity=0.95"]) == {"rdma_us": 4.5, "parity": 0.95}
    with pytest.raises(ConfigError, match="there is no limit 'rdma'; use one of tcp_gbits"):
        limits_of(["rdma=3"])
    with pytest.raises(ConfigError, match="'fast' is no number"):
        limits_of(["rdma_us=fast"])


def test_a_container_reaches_bare_metal_or_not() -> None:
    bare = [measured("rdma_gbits", 390.0, 392.0, 391.0), measured("tcp_us", 20.0, 21.0, 22.0)]
    same = [measured("rdma_gbits", 386.0, 391.0, 388.0), measured("tcp_us", 20.5, 21.0, 23.0)]
    assert [row.level for row in compared_with_bare(bare, same, {})] == ["ok", "ok"]
    slow = [measured("rdma_gbits", 200.0, 210.0, 205.0), measured("tcp_us", 60.0, 61.0, 62.0)]
    rate, latency = compared_with_bare(bare, slow, {})
    assert rate.level == latency.level == "bad" and "LD_PRELOAD" in rate.remedy
    assert "0.52 of it" in rate.found and "--network host" in latency.remedy
    assert worst([rate]) == 1 and worst(compared_with_bare(bare, slow, {"parity": 0.3})) == 0


def test_noise_is_a_note() -> None:
    bare, here = [measured("all_reduce_gbytes", 5, 9, 10)], [measured("all_reduce_gbytes", 4, 7, 8)]
    assert compared_with_bare(bare, here, {})[0].level == "note"


def test_what_one_side_measured_is_a_note() -> None:
    (row,) = compared_with_bare([measured("copy_gbytes", 9.0)], [], {})
    assert row.level == "note" and "bare metal only" in row.found


def test_what_a_container_takes_away_has_a_remedy() -> None:
    bare = {"cores": 64.0, "gpus": 8.0, "rdma ports": 8.0, "/dev/shm MiB": 9e5, "locked MiB": -1.0}
    assert [row.level for row in room_compared(bare, {**bare, "/dev/shm MiB": 16384.0})] == ["ok"]
    docker = {**bare, "rdma ports": 0.0, "/dev/shm MiB": 64.0, "locked MiB": 8.0}
    rows = {row.what: row for row in room_compared(bare, docker)}
    assert set(rows) == {"rdma ports", "/dev/shm MiB", "locked MiB"}
    assert "/dev/infiniband" in rows["rdma ports"].remedy
    assert rows["locked MiB"].found == "8 here, no limit on bare metal"


def test_measurements_are_saved_and_compared(tmp_path: Path) -> None:
    file = tmp_path / "bare.json"
    parity.save(file, [measured("copy_gbytes", 300.0, 310.0)])
    room, rate = parity.against(file, [measured("copy_gbytes", 298.0, 305.0)], {})
    assert (room.level, rate.level) == ("ok", "ok")
    file.write_text('{"form": 0}')
    with pytest.raises(ConfigError, match="of another version; write it on bare metal"):
        parity.against(file, [], {})


def test_fewer_cores_in_the_container_are_bad(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("needs two cores")
    words = ["doctor", "--active", "--device", "cpu", "--only", "slots", "--expect", "parity=0.001"]
    file = str(tmp_path / "bare.json")
    assert cli.main([*words, "--save", file]) == 0
    assert cli.main([*words, "--against", file]) == 0
    try:
        os.sched_setaffinity(0, {min(cores)})
        assert cli.main([*words, "--against", file]) == 1
    finally:
        os.sched_setaffinity(0, cores)
    said = capsys.readouterr().out
    assert "slots on cpu rate" in said and "no --cpuset-cpus" in said


def test_files_are_compared_by_name_and_content(tmp_path: Path) -> None:
    for name in ("a", "b", ".hidden"):
        (tmp_path / name).write_text(name)
    big = tmp_path / "big"
    big.write_bytes(bytes(20 << 20))
    before = hashes(tmp_path, whole=False)
    assert set(before) == {"a", "b", "big"}
    assert files_row(before, before, whole=True).level == "ok"
    with big.open("r+b") as stream:
        stream.seek(70_000)  # between two samples
        stream.write(b"x")
    assert hashes(tmp_path, whole=False) == before
    whole = hashes(tmp_path, whole=True)
    with big.open("r+b") as stream:
        stream.truncate((20 << 20) - 1)
    assert hashes(tmp_path, whole=False) != before
    row = files_row({**whole, "c": "1"}, {**whole, "a": "2", "d": "3"}, whole=True)
    assert row.found.endswith("3 of 5 differ: a, c (only here), d (only there)")
    with pytest.raises(ConfigError, match="is no folder"):
        hashes(tmp_path / "none", whole=True)


def test_the_speed_of_a_rail_is_that_of_its_slower_end() -> None:
    assert shared_gbits(400.0, 200.0) == 200.0
    assert shared_gbits(None, 10.0) == 10.0 and shared_gbits(None, None) is None
    rails = Rails(("mlx5_0",)).at("127.0.0.1")
    assert rails.addresses == ("127.0.0.1",) and rails.verbs_host == "127.0.0.1"
    assert Rails((), ("10.0.0.1", "10.1.0.1")).at("127.0.0.1").tcp()[1].gbits is None


def test_links_between_gpus_are_known_from_data_sheets() -> None:
    assert scale_up_gbytes(("NVIDIA H200", "NVIDIA H200")) == 450.0
    assert scale_up_gbytes(("gfx942",)) == pytest.approx(448.0, rel=0.01)
    assert scale_up_gbytes(("NVIDIA H200", "Quadro")) is None and scale_up_gbytes(()) is None
