"""The Dockerfiles: linted, and their steps executed in a chroot, because no image can be pulled.

The base of the CPU image is Debian, made with debootstrap. vLLM's images are stood in for by Debian
with a package named vllm: their own steps run, the GPU stack does not.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from image_steps import Image, build, give_network

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


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A minimal Debian. AFD_TEST_DEBIAN names one that was made before."""
    if os.geteuid():
        pytest.skip("a chroot needs root")
    if (made := os.environ.get("AFD_TEST_DEBIAN")) is not None:
        return Path(made)
    if (tool := shutil.which("debootstrap")) is None:
        pytest.skip("no debootstrap; apt-get install debootstrap")
    folder = tmp_path_factory.mktemp("debian")
    command = [tool, "--variant=minbase", "bookworm", str(folder / "root")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    return folder / "root"


def fits(image: Image) -> None:
    """The image runs `afd` as its user, and its healthcheck fails while nothing serves."""
    told = image.run(*image.entrypoint, "--version")
    assert told.stdout.startswith("afd "), told.stderr
    assert image.run("id", "-u").stdout.strip() == "10001"
    assert image.run(*image.healthcheck).returncode != 0
    assert image.run("sh", "-c", "command -v g++").returncode != 0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_steps_of_the_cpu_image(debian: Path, tmp_path: Path) -> None:
    image = build(DOCKER / "Dockerfile", ROOT, debian, tmp_path)
    fits(image)
    found = image.run("afd", "serve", "/opt/afd/afd_launch/data/demo/demo.yaml", "--check-file")
    assert " is good: " in found.stdout, found.stdout + found.stderr


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("device", ["cuda", "rocm"])
def test_steps_of_a_gpu_image(debian: Path, tmp_path: Path, device: str) -> None:
    base = tmp_path / "base"
    subprocess.run(["cp", "-a", str(debian), str(base)], check=True)
    stand_in = Image(base)
    give_network(base)
    stand_in.shell(
        "apt-get update -q && apt-get install -yq --no-install-recommends python3 python3-pip"
        " && rm -f /usr/lib/python3*/EXTERNALLY-MANAGED"
    )
    fits(build(DOCKER / f"Dockerfile.{device}", ROOT, base, tmp_path))
