"""Every `afd` command of docs/operations.md runs against a deployment, as it stands there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from deployments import Host, Models
from helpers import Running, Stream, tokens_of
from roles import write_config

pytestmark = [pytest.mark.serve, pytest.mark.long]

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
COMMANDS = re.findall(r"^\$ afd (.*)$", PAGE.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def deployment(host: Host) -> Running:
    return host.serve("openai")


def test_every_command_of_the_page_works(
    deployment: Running, tiny_models: Models, tmp_path: Path
) -> None:
    assert len(COMMANDS) >= 8
    example: dict[str, object] = {"model": str(tiny_models("qwen3_moe")), "gateway": {"port": 0}}
    example["attention"] = {"port": 0, "kv_cache_gib": 0.1}
    file = write_config(tmp_path / "deployment.yaml", example)
    values = {"CONTROL": deployment.server.control, "FILE": file, "OUT": str(tmp_path)}
    stream = Stream(deployment.url, tokens_of("operations", 20), 900).start()
    printed = {}
    for command in COMMANDS:
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
        printed[command] = done.stdout
    top = next(text for command, text in printed.items() if command.startswith("top"))
    assert "attention-0" in top and "ffn-0" in top and "HEADROOM" in top
    slow = next(text for command, text in printed.items() if "why-slow" in command)
    assert "no member stands out" in slow and "waits for the other side" in slow
    assert (tmp_path / "trace.json").stat().st_size > 1000
    assert stream.join(120).error is None
