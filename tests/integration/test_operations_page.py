"""Every `afd` command of docs/operations.md runs against a deployment, as it stands there."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployments import Host, Models
from helpers import Running, Stream, all_begun, tokens_of
from roles import write_config

pytestmark = [pytest.mark.serve, pytest.mark.long]

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
COMMANDS = re.findall(r"^\$ afd (.*)$", PAGE.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def deployment(host: Host) -> Running:
    return host.serve("openai")


@contextlib.contextmanager
def load(url: str) -> Iterator[list[Exception | None]]:
    """Streams that follow one another while the block runs; how each has ended."""
    found: list[Exception | None] = []
    stopped = threading.Event()

    def run() -> None:
        while not stopped.is_set():
            stream = Stream(url, tokens_of(f"operations{len(found)}", 20), 200).start()
            found.append(stream.join(120).error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield found
    finally:
        stopped.set()
        thread.join()


def test_every_command_of_the_page_works(
    deployment: Running, tiny_models: Models, tmp_path: Path
) -> None:
    assert len(COMMANDS) >= 8
    example: dict[str, object] = {"model": str(tiny_models("qwen3_moe")), "gateway": {"port": 0}}
    example["attention"] = {"port": 0, "kv_cache_gib": 0.1}
    file = write_config(tmp_path / "deployment.yaml", example)
    values = {"CONTROL": deployment.server.control, "FILE": file, "OUT": str(tmp_path)}

    def output_of(command: str) -> str:
        filled = re.sub(r"\$(\w+)", lambda m: values[m[1]], command)
        done = subprocess.run(
            [sys.executable, "-m", "afd_launch.cli", *shlex.split(filled)],
            env={**os.environ, "TMPDIR": str(deployment.folder)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"afd {filled}\n{done.stdout}{done.stderr}"
        return done.stdout

    drains = [command for command in COMMANDS if "drain" in command]
    with load(deployment.url) as ended:
        printed = {c: output_of(c) for c in COMMANDS if c not in drains}
    assert ended and not [error for error in ended if error is not None]
    top = next(text for command, text in printed.items() if command.startswith("top"))
    assert "attention-0" in top and "ffn-0" in top and "HEADROOM" in top
    slow = next(text for command, text in printed.items() if "why-slow" in command)
    assert "no member stands out" in slow and "waits for the other side" in slow
    assert (tmp_path / "trace.json").stat().st_size > 1000

    running = Stream(deployment.url, tokens_of("drained", 20), 200).start()
    all_begun([running])
    first, *others = drains
    assert "draining" in output_of(first) and others
    assert running.join(120).error is None, "drain lets running requests finish"
    for command in others:
        assert "draining" not in output_of(command)
