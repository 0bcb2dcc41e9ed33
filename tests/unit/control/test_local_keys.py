"""`afd ctl` without --keys finds the keys of this user's deployments on this host by address."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from afd.control import local_keys
from afd.control.keys import ClientKeys, CurveKeys
from afd.control.local_keys import announced, operator_keys
from afd.errors import ConfigError

ADDRESS = "tcp://127.0.0.1:5555"


@pytest.fixture(autouse=True)
def _no_other_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local_keys, "_folders", lambda: [tmp_path / "runtime"])


def saved(path: Path) -> ClientKeys:
    path.parent.mkdir(exist_ok=True)
    keys = CurveKeys.generate().operator
    keys.save(path)
    return keys


def test_keys_are_found_while_announced(tmp_path: Path) -> None:
    keys = saved(tmp_path / "run" / "operator.keys")
    with announced(ADDRESS, tmp_path / "run" / "operator.keys") as found:
        assert found
        assert operator_keys(ADDRESS) == operator_keys("tcp://localhost:5555") == keys
        with pytest.raises(ConfigError, match="pass --keys FILE"):
            operator_keys("tcp://127.0.0.1:5556")
        assert (tmp_path / "runtime").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="there are no keys for the control plane at tcp"):
        operator_keys(ADDRESS)
    assert list((tmp_path / "runtime").iterdir()) == []


def test_a_given_file_has_priority(tmp_path: Path) -> None:
    saved(tmp_path / "run" / "a.keys")
    other = CurveKeys.generate()
    other.save(tmp_path / "b.keys")
    with announced(ADDRESS, tmp_path / "run" / "a.keys"):
        assert operator_keys(ADDRESS, tmp_path / "b.keys") == other.operator


def test_links_of_killed_deployments_are_removed(tmp_path: Path) -> None:
    saved(tmp_path / "run" / "a.keys")
    with announced(ADDRESS, tmp_path / "run" / "a.keys"):
        (tmp_path / "run" / "a.keys").unlink()  # as the watchdog does
        with pytest.raises(ConfigError, match="no keys"):
            operator_keys(ADDRESS)
        saved(tmp_path / "run" / "b.keys")
        with announced("tcp://127.0.0.1:6666", tmp_path / "run" / "b.keys"):
            assert len(list((tmp_path / "runtime").iterdir())) == 1


def test_a_later_deployment_at_the_address_keeps_its_link(tmp_path: Path) -> None:
    saved(tmp_path / "run" / "a.keys")
    keys = saved(tmp_path / "run" / "b.keys")
    with announced(ADDRESS, tmp_path / "run" / "b.keys"):
        with announced(ADDRESS, tmp_path / "run" / "a.keys"):
            later = announced(ADDRESS, tmp_path / "run" / "b.keys")
            later.__enter__()
        assert operator_keys(ADDRESS) == keys


@pytest.mark.parametrize("how", ["readable", "link", "file"])
def test_a_folder_that_others_prepared_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    runtime = tmp_path / "runtime"
    if how == "readable":
        runtime.mkdir()
        runtime.chmod(0o755)
    elif how == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        runtime.symlink_to(tmp_path / "elsewhere")
    else:
        runtime.write_text("")
    saved(tmp_path / "run" / "a.keys")
    with announced(ADDRESS, tmp_path / "run" / "a.keys") as found:
        assert not found
        with pytest.raises(ConfigError, match="--keys FILE"):
            operator_keys(ADDRESS)


def test_a_folder_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = saved(tmp_path / "run" / "a.keys")
    with announced(ADDRESS, tmp_path / "run" / "a.keys"):
        assert operator_keys(ADDRESS) == keys
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        with pytest.raises(ConfigError, match="--keys FILE"):
            operator_keys(ADDRESS)
