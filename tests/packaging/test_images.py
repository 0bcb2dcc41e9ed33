"""The Dockerfiles: linted. No image can be pulled here, so none was built."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
FILES = sorted(path for path in DOCKER.glob("Dockerfile*") if path.suffix != ".dockerignore")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    if (tool := shutil.which("hadolint")) is None:
        pytest.skip("hadolint is not installed; ./run test installs it")
    done = subprocess.run([tool, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_image_is_small_and_not_root(path: Path) -> None:
    """Compilers stay in the first stage; the last one has a user, a healthcheck and no sources."""
    last = path.read_text().split("\nFROM ")[-1]
    assert "USER 10001:10001" in last and "HEALTHCHECK" in last
    assert "g++" not in last and "rm -rf" in last
    assert path.with_name(f"{path.name}.dockerignore").exists()
