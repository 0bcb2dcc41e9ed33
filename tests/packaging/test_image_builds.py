"""The Dockerfiles, unchanged, are built by buildah in a chroot, and what they make is run.

No registry can be reached, so the bases are stand-ins (image_store.py): Debian from its mirror for
the CPU image, which then serves the demo. For the images of GPUs, Debian with Python and pip; torch
and vLLM, which the real bases bring, are missing, so these only run what needs neither.
``AFD_IMAGE_STORE=DIR`` keeps the images for the next run.
"""

import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from image_store import DEBIAN, DOCKER, VLLM, Store, container_of, missing, uv_cache

from afd.host.ports import held_ports

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

CPU, GPUS = "Dockerfile", ("Dockerfile.cuda", "Dockerfile.rocm")
AFD = "/opt/afd/.venv/bin/afd"  # a script: the word after the interpreter
HEALTH = "/opt/afd/deploy/docker/health.sh"


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    if reason := missing():
        pytest.skip(reason)
    kept = os.environ.get("AFD_IMAGE_STORE")
    folder = Path(kept or "/var/tmp/afd-images")
    folder.mkdir(parents=True, exist_ok=True)
    yield Store(folder, uv_cache())
    if not kept:
        shutil.rmtree(folder)


def build(store: Store, name: str, base: str, health: str) -> str:
    """Builds the Dockerfile and checks how a container would start. Returns the image's name."""
    file, tag = DOCKER / name, f"localhost/afd-test-{name.lower().replace('.', '-')}"
    store.build(file, tag, base, file.with_name(f"{name}.dockerignore"))
    config = store.config_of(tag)
    assert config["User"] == "10001:10001"
    assert config["Healthcheck"]["Test"] == ["CMD", health]
    assert (config["Entrypoint"], config["Cmd"]) == (["afd"], ["doctor"])
    return tag


def test_the_cpu_image_serves_the_demo(store: Store) -> None:
    store.make_debian()
    tag = build(store, CPU, DEBIAN, HEALTH)
    with container_of(store, tag) as made, held_ports(["127.0.0.1"]) as (port,):
        assert made.run("id", "-u") == (0, "10001\n")
        assert made.run("sh", "-c", "command -v g++")[0] != 0, "compilers stay in the first stage"
        assert made.run("sh", "-c", "test -w . && test ! -w /opt/afd")[0] == 0
        status, printed = made.run("afd", "doctor")
        assert status == 0, printed
        demo = "/opt/afd/afd_launch/data/demo/demo.yaml"
        status, printed = made.run("afd", "serve", demo, "--check")
        assert status == 0 and "is good" in printed, printed
        asked = [f"AFD_HEALTH=127.0.0.1:{port}/health"]
        assert made.run(HEALTH, environment=asked)[0] != 0, "nothing serves yet"
        log = store.folder / "serve.log"
        command = ["afd", "serve", demo, "--set", f"gateway.port={port}"]
        with log.open("wb") as out:
            server = subprocess.Popen(made.argv(command), stdout=out, stderr=subprocess.STDOUT)
        try:
            ends = time.monotonic() + 150
            while made.run(HEALTH, environment=asked)[0] != 0:
                assert server.poll() is None and time.monotonic() < ends, log.read_text()[-4000:]
                time.sleep(1)
            answer = chat(f"http://127.0.0.1:{port}", "What is 14 plus 9?")
            assert "23" in answer, answer
        finally:
            supervisor(server.pid).terminate()
            status = server.wait(60)
        printed = log.read_text()
        assert status == 0 and "stopped" in printed.splitlines()[-1], printed[-4000:]


@pytest.mark.parametrize("name", GPUS)
def test_the_steps_of_a_gpu_image_work(store: Store, name: str) -> None:
    store.make_like_vllm()
    with container_of(store, build(store, name, VLLM, "afd-health")) as made:
        assert made.run("id", "-u") == (0, "10001\n")
        assert made.run("sh", "-c", "test -w . && test ! -e /wheels && test ! -e /src")[0] == 0
        status, printed = made.run("python3", "-c", "import afd_comm; print(afd_comm.backends())")
        assert status == 0 and "verbs" in printed, printed
        demo = made.run("python3", "-c", "import afd_launch.demo as d; print(d.CONFIG)")[1].strip()
        status, printed = made.run("afd", "serve", demo, "--check-file")
        assert status == 0, printed
        status, printed = made.run("afd", "doctor")
        assert status == 1 and "torch" in printed and "vllm" in printed, printed


def supervisor(buildah: int) -> psutil.Process:
    """The process of `afd serve`, which a runtime would signal, below buildah's own."""
    found = [(p, p.cmdline()[:3]) for p in psutil.Process(buildah).children(recursive=True)]
    return next(p for p, words in found if "python" in words[0] and words[1:] == [AFD, "serve"])


def chat(url: str, text: str) -> str:
    """The demo's answer to a question."""
    asked = {"model": "demo", "messages": [{"role": "user", "content": text}], "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])
