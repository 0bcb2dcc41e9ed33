"""The Dockerfiles, unchanged, are built by buildah in a chroot, and their images serve the demo.

No registry can be reached, so the bases are stand-ins (image_store.py): Debian from its mirror for
the CPU image, and the same with torch and vLLM for CPUs for the images of GPUs. What the real bases
bring, and GPUs, are not tested here. ``AFD_IMAGE_STORE=DIR`` keeps the images for the next run.
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

# file, its base, where `afd` and health.sh are in the image
IMAGES = {
    "Dockerfile": (DEBIAN, "/opt/afd/.venv/bin/python", "/opt/afd/deploy/docker/health.sh"),
    "Dockerfile.cuda": (VLLM, "/usr/bin/python3", "afd-health"),
    "Dockerfile.rocm": (VLLM, "/usr/bin/python3", "afd-health"),
}
FOLDER = "import afd_launch.demo as d; print(d.CONFIG)"


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


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_is_built_and_serves_the_demo(store: Store, name: str) -> None:
    base, python, health = IMAGES[name]
    file, tag = DOCKER / name, f"localhost/afd-test-{name.lower().replace('.', '-')}"
    store.make_debian() if base == DEBIAN else store.make_like_vllm()
    ignore = file.with_name(f"{name}.dockerignore")
    store.build(file, tag, base, ignore)

    config = store.config_of(tag)
    assert config["User"] == "10001:10001"
    assert config["Healthcheck"]["Test"] == ["CMD", health]
    assert (config["Entrypoint"], config["Cmd"]) == (["afd"], ["doctor"])
    with container_of(store, tag) as made, held_ports(["127.0.0.1"]) as (port,):
        assert made.run("id", "-u") == (0, "10001\n")
        assert made.run("sh", "-c", "! command -v g++ && test ! -w / && test -w .")[0] == (
            0 if base == DEBIAN else 1  # vLLM's images bring a compiler
        )
        status, printed = made.run("afd", "doctor")
        assert status == 0, printed
        demo = made.run(python, "-c", FOLDER)[1].strip()
        status, printed = made.run("afd", "serve", demo, "--check")
        assert status == 0 and "is good" in printed, printed
        asked = [f"AFD_HEALTH=127.0.0.1:{port}/health"]
        assert made.run(health, environment=asked)[0] != 0, "nothing serves yet"
        command = [*config["Entrypoint"], "serve", demo, "--set", f"gateway.port={port}"]
        log = store.folder / f"{name}.log"
        with log.open("wb") as out:
            server = subprocess.Popen(made.argv(command), stdout=out, stderr=subprocess.STDOUT)
        try:
            ends = time.monotonic() + 150
            while made.run(health, environment=asked)[0] != 0:
                assert server.poll() is None and time.monotonic() < ends, log.read_text()[-4000:]
                time.sleep(1)
            answer = chat(f"http://127.0.0.1:{port}", "What is 14 plus 9?")
            assert "23" in answer, answer
        finally:
            supervisor(server.pid).terminate()
            status = server.wait(60)
        assert status == 0 and "stopped" in log.read_text().splitlines()[-1], log.read_text()[
            -4000:
        ]


def supervisor(buildah: int) -> psutil.Process:
    """The process of `afd serve`, which a runtime would signal, below buildah's."""
    found = psutil.Process(buildah).children(recursive=True)
    return next(p for p in found if any(word.endswith("/afd") for word in p.cmdline()[:2]))


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
