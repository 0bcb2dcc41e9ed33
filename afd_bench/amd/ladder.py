"""The climb to rung 6 on a host with AMD GPUs: its steps, and the result file that they write."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from afd.errors import AfdError
from afd.host.amd_gpus import architectures, rocm_version
from afd.records import current_commit, machine, today
from afd_launch.installation import installed_version

FILE = Path(__file__).with_name("ladder.json")
STEP_S = 1800.0
_TAIL = 25
_PACKAGES = ("afd", "afd-comm", "torch", "vllm", "triton", "aiter", "amd-aiter")


@dataclass(frozen=True)
class Step:
    """One step. gpus: how many it needs. tools: programs, modules: Python modules, settings:
    options of the climb that it needs."""

    name: str
    what: str
    gpus: int
    command: tuple[str, ...]
    tools: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    def missing(self, gpus: int, settings: Mapping[str, str]) -> str | None:
        """Why the step cannot run on this host; None if it can."""
        if gpus < self.gpus:
            return f"needs {self.gpus} AMD GPUs, this host has {gpus}"
        for tool in self.tools:
            if shutil.which(tool) is None:
                return f"needs the program {tool}"
        for module in self.modules:
            if find_spec(module) is None:
                return f"needs the Python package {module}"
        for setting in self.settings:
            if not settings.get(setting):
                return f"needs the option --{setting}"
        return None


@dataclass(frozen=True)
class Outcome:
    """status: "passed", "failed" or "skipped". text: the reason, or the last lines of output."""

    name: str
    status: str
    seconds: float
    text: str


@dataclass(frozen=True)
class Result:
    """What one climb saw. arch: LLVM's name of the GPUs; "none" without them."""

    arch: str
    machine: str
    rocm: str
    versions: Mapping[str, str]
    commit: str
    date: str
    outcomes: tuple[Outcome, ...]

    @property
    def passed(self) -> frozenset[str]:
        return frozenset(o.name for o in self.outcomes if o.status == "passed")

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def read_result(path: Path) -> Result:
    """Reads a result file. Raises AfdError if it is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        outcomes = tuple(Outcome(**entry) for entry in data.pop("outcomes"))
        return Result(**data, outcomes=outcomes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AfdError(f"{path} is no result of afd bench amd --climb ({error!r})") from None


def read_steps(path: Path = FILE) -> tuple[Step, ...]:
    rows = json.loads(path.read_text(encoding="utf-8"))["steps"]
    lists = ("command", "tools", "modules", "settings")
    return tuple(
        Step(**{**row, **{key: tuple(row[key]) for key in lists if key in row}}) for row in rows
    )


def climb(
    steps: Sequence[Step],
    settings: Mapping[str, str],
    *,
    seen: Sequence[str] | None = None,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> Result:
    """Runs every step that this host can run, one after the other; a failure ends none of the rest.

    Args:
        settings: values of {out} and {peer} in commands. seen: this host's GPUs; None: looks.
    """
    gpus = architectures() if seen is None else tuple(seen)
    outcomes = []
    for step in steps:
        outcome = _run(step, len(gpus), settings)
        outcomes.append(outcome)
        on_outcome(outcome)
    versions = {name: version for name in _PACKAGES if (version := installed_version(name))}
    return Result(
        gpus[0] if gpus else "none",
        machine(),
        rocm_version() or "none",
        versions,
        current_commit(),
        today(),
        tuple(outcomes),
    )


def _run(step: Step, gpus: int, settings: Mapping[str, str]) -> Outcome:
    reason = step.missing(gpus, settings)
    if reason is not None:
        return Outcome(step.name, "skipped", 0.0, reason)
    afd = f"{sys.executable} -m afd_launch.cli"
    words: list[str] = []
    for word in step.command:
        if word == "{afd}":
            words += afd.split()
        else:
            words.append(word.replace("{python}", sys.executable).format(**settings))
    began = time.monotonic()
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=STEP_S,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
        )
        output, good = done.stdout + done.stderr, done.returncode == 0
    except subprocess.TimeoutExpired:
        output, good = f"not done within {STEP_S:g} s", False
    text = scrubbed("\n".join(output.strip().splitlines()[-_TAIL:]))
    if good and all_skipped(text):
        return Outcome(step.name, "skipped", time.monotonic() - began, text)
    return Outcome(step.name, "passed" if good else "failed", time.monotonic() - began, text)


def all_skipped(text: str) -> bool:
    """Whether pytest ran no test: it exits with 0 if all of them were skipped."""
    summary = text.splitlines()[-1] if text else ""
    return "skipped" in summary and "passed" not in summary


def scrubbed(text: str) -> str:
    """The text without this host's name and folders, so that it can be sent."""
    places = {str(Path.cwd()): ".", str(Path.home()): "~", socket.gethostname(): "HOST"}
    for place, name in places.items():
        if len(place) > 1:
            text = text.replace(place, name)
    return re.sub(r"\b\d{1,3}(\.\d{1,3}){3}\b", "ADDRESS", text)
