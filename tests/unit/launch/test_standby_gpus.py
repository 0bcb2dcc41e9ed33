"""What a process that waits does when an import has looked for GPUs."""

import os

import pytest

from afd_launch import standby_process
from afd_launch.standby_process import Order


def test_it_is_not_forked(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(standby_process, "unknown_threads", lambda: [])  # pytest may have some
    file = tmp_path / "nvidia-uvm"
    monkeypatch.setattr(standby_process, "_DEVICE_FILES", (str(file),))
    assert standby_process.obstacle() is None
    with file.open("w"):
        assert standby_process.obstacle() == f"uses {file}"
    assert standby_process.device_file() is None


@pytest.mark.parametrize(
    ("file", "gpus", "anew"), [(None, 8, False), ("/dev/kfd", 1, False), ("/dev/kfd", 2, True)]
)
def test_it_is_no_ffn_rank_where_it_has_seen_several_gpus(monkeypatch, file, gpus, anew) -> None:
    torch = pytest.importorskip("torch")
    from afd_launch import ffn_standby

    order = Order("role.json", {"HIP_VISIBLE_DEVICES": "1"})
    done = []

    def execve(_program, words, environment):
        done.append((words[-4:], environment))
        raise SystemExit

    monkeypatch.setattr("ffn_worker.moe.late_imports.import_all", lambda: None)
    monkeypatch.setattr(ffn_standby, "await_order", lambda: order)
    monkeypatch.setattr(ffn_standby, "device_file", lambda: file)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(ffn_standby, "load_role", lambda file: file)
    monkeypatch.setattr(ffn_standby, "run_role", lambda role, file: done.append(role))
    monkeypatch.setattr(ffn_standby, "end_at_once", lambda status: None)
    if anew:
        with pytest.raises(SystemExit):
            ffn_standby.main()
        assert done == [(["afd_launch.cli", "ffn", "--role-file", "role.json"], order.environment)]
    else:
        ffn_standby.main()
        assert done == ["role.json"]
