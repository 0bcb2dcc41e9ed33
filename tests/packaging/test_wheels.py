"""The wheels as a user gets them: built, installed into an empty environment, used elsewhere.

The environment first gets afd, afd-comm and their own dependencies. torch and vLLM (2 GiB) are
added later through a path to the tests' environment.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = (
    "afd", "afd_bench", "afd_demo", "afd_gateway", "afd_launch", "afd_planner", "attention_worker",
    "ffn_worker",
)  # fmt: skip
PINS = ROOT / "requirements" / "pins.txt"
COMMAND_S = 120.0
READY_S = 240.0
STOP_S = 60.0

pytestmark = pytest.mark.serve


def uv(*arguments: str | Path) -> None:
    command = shutil.which("uv", path=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")
    if command is None:
        pytest.skip("uv is not installed; ./run test installs it")
    done = subprocess.run([command, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds sdist and wheel of afd and afd-comm; afd's wheel is built from its sdist.

    The builds use copies of the sources: a build writes into its source folder, and leftovers
    there would end up in the next wheel.
    """
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    without = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    for name in (*ROOMS, "comm"):
        shutil.copytree(ROOT / name, source / name, ignore=without)
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source / name)
    options = ("--quiet", "--python", sys.executable, "--build-constraints", PINS, "-o", dist)
    uv("build", *options, source)
    built = wheel_of_setup()
    uv("build", *(("--sdist",) if built else ()), *options, source / "comm")
    if built:
        shutil.copy(built, dist)
    return dist


def wheel_of_setup() -> Path | None:
    """Returns the afd-comm wheel that ./run built, or None if the sources have changed since.

    Building it again would take 45 s of one core.
    """
    wheels = list((Path(sys.prefix) / "wheels").glob("afd_comm-*.whl"))
    sources = [
        path.stat().st_mtime
        for path in (ROOT / "comm").rglob("*")
        if path.is_file()
        and not any(
            part in ("build", "__pycache__") or part.startswith(".")  # of tools, such as ruff
            for part in path.relative_to(ROOT).parts
        )
    ]
    return wheels[0] if wheels and wheels[0].stat().st_mtime > max(sources) else None


@dataclass(frozen=True)
class Environment:
    """A virtual environment outside of the checkout, and a folder to run its commands in."""

    folder: Path

    @property
    def site_packages(self) -> Path:
        return next(self.folder.glob("lib/python*/site-packages"))

    @property
    def cwd(self) -> Path:
        cwd = self.folder / "cwd"
        cwd.mkdir(exist_ok=True)
        return cwd

    @property
    def variables(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
        return {**kept, "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "PYTHONUNBUFFERED": "1"}

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.folder / "bin" / command[0], *command[1:]],
            cwd=self.cwd,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )

    def output(self, *command: str | Path) -> str:
        done = self.run(*command)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def plain(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """afd and afd-comm with their own dependencies: no torch, no vLLM."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    uv("venv", "--quiet", "--python", sys.executable, folder)
    python = folder / "bin" / "python"
    uv("pip", "install", "--quiet", "--python", python, "--constraints", PINS, *dist.glob("*.whl"))
    return Environment(folder)


@pytest.fixture(scope="module")
def full(plain: Environment) -> Environment:
    """The same environment plus torch and vLLM. Tests that use only ``plain`` must run before."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("the package vllm is not installed; ./run test installs it")
    # A folder named in a .pth file supplies packages, but its own .pth files (here the checkout's
    # editable install) are not read.
    (plain.site_packages / "torch_and_vllm.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return plain


def test_package_descriptions_pass_twine(dist: Path) -> None:
    files = sorted(path for path in dist.iterdir() if path.name.endswith((".whl", ".tar.gz")))
    assert len(files) == 4, files
    twine = [sys.executable, "-m", "twine", "check", "--strict"]
    done = subprocess.run([*twine, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_has_every_module_and_data_file(dist: Path) -> None:
    with zipfile.ZipFile(next(dist.glob("afd-*.whl"))) as wheel:
        packed = set(wheel.namelist())
    there = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert there - packed == set()
    assert {name for name in packed if name.startswith(tuple(f"{r}/" for r in ROOMS))} == there


def test_afd_needs_its_own_version_of_afd_comm(plain: Environment) -> None:
    (folder,) = plain.site_packages.glob("afd-*.dist-info")
    needs = importlib.metadata.PathDistribution(folder).requires or []
    assert f"afd-comm=={importlib.metadata.PathDistribution(folder).version}" in needs
    assert list(folder.glob("licenses/LICENSE"))
    (comm,) = plain.site_packages.glob("afd_comm-*.dist-info")
    assert list(comm.glob("licenses/LICENSE"))


def test_without_vllm_the_error_names_the_install_command(plain: Environment) -> None:
    assert not (plain.site_packages / "vllm").exists()
    doctor = plain.run("afd", "doctor")
    assert doctor.returncode == 1
    assert re.search(r"^bad +vllm +not installed; run: pip install vllm", doctor.stdout, re.M)
    plain.output("afd", "examples", "unserved")
    for command in (("demo",), ("serve", "unserved/one-host.yaml")):
        refused = plain.run("afd", *command)
        assert refused.returncode == 2
        assert re.match(r"afd: error: vLLM is not installed; run: pip install vllm", refused.stderr)


def test_plan(plain: Environment) -> None:
    text = plain.output("afd", "plan", "qwen3-235b-a22b", "--accelerators", "h800")
    assert "qwen3-235b-a22b" in text.lower()


def test_examples_can_be_served_from_where_they_are_copied(plain: Environment) -> None:
    written = plain.output("afd", "examples", "examples").split()
    assert "examples/one-host.yaml" in written
    assert "examples/dashboards/grafana/afd.json" in written
    for name in ("one-host", "float32"):
        text = plain.output("afd", "serve", f"examples/{name}.yaml", "--check-file")
        assert f"examples/{name}.yaml is good: model afd-tiny-chat" in text
    again = plain.run("afd", "examples", "examples")
    assert again.returncode == 2 and "exists; name another folder" in again.stderr


def test_doctor(full: Environment) -> None:
    text = full.output("afd", "doctor")
    assert re.search(r"^ok +vllm +0\.", text, re.M) and re.search(r"^ok +vllm plugin", text, re.M)


@contextlib.contextmanager
def served(environment: Environment, *arguments: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """Starts `afd demo`; yields its URL and process once ready; kills it if it still runs."""
    log = environment.folder / "demo.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [environment.folder / "bin" / "afd", "demo", *arguments],
            cwd=environment.cwd,
            env=environment.variables,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + READY_S
        while not (ready := re.search(r"ready after \d+ s: (\S+)/v1 ", log.read_text())):
            running = process.poll() is None and time.monotonic() < end
            assert running, "\n".join(log.read_text().splitlines()[-60:])
            time.sleep(0.1)
        yield ready[1], process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_demo(full: Environment) -> None:
    question = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is 14 plus 9?"}],
        "max_tokens": 20,
        "temperature": 0,
    }
    with served(full, "--port", "0", "--set", "attention.port=0") as (url, process):
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(question).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=COMMAND_S) as response:
            answer = json.load(response)
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_S) == 130
    assert "23" in answer["choices"][0]["message"]["content"]
