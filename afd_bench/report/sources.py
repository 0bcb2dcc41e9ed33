"""Which code a benchmark measures, and whether that code has changed since a record was made."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

_SERVER = ("afd", "afd_gateway", "attention_worker", "ffn_worker", "comm/src", "comm/include")

CODE_OF = {
    "allreduce": ("ffn_worker/allreduce",),
    "amd": ("afd_bench/amd",),
    "attention": ("attention_worker/kernels",),
    "comm": ("comm/src", "comm/include"),
    "cpu": _SERVER,
    "eval": _SERVER,
    "faults": (*_SERVER, "afd_launch"),
    "finetuning": ("training",),
    "fused": ("afd_bench/step3",),
    "gateway": ("afd_gateway", "afd_bench/gateway"),
    "gpu": _SERVER,
    "hf": _SERVER,
    "host": _SERVER,
    "identity": _SERVER,
    "load": ("ffn_worker/experts", "ffn_worker/moe/stored.py"),
    "moe": ("ffn_worker/moe", "ffn_worker/kernels"),
    "operate": ("afd", "afd_gateway", "afd_bench/operate"),
    "paper": ("afd_planner",),
    "pd": _SERVER,
    "planner": ("afd_planner", "afd_bench/planner"),
    "prefill": _SERVER,
    "rounding": ("training", "afd/wire"),
    "routing": ("afd_gateway/routing.py", "afd_gateway/kv_load.py"),
    "scale": _SERVER,
    "simulator": (*_SERVER, "afd_planner/simulate"),
    "soak": (*_SERVER, "afd_launch"),
    "speculation": _SERVER,
    "step3": (*_SERVER, "afd_bench/step3"),
    "training": ("training",),
    "versions": (*_SERVER, "tests/integration", "tests/identity"),
    "wire_gpu": ("comm/src", "comm/include", "comm/tests/fake_ibverbs.cc"),
}
"""Paths that decide a benchmark's numbers. A benchmark that is missing here depends on all code."""


class Checkout:
    """The git history around this package. Outside of a checkout nothing is known."""

    def __init__(
        self, root: Path, run: Callable[[Sequence[str]], str | None] | None = None
    ) -> None:
        """run: a git command's output, None where it fails; for tests."""
        self._root = root
        self._run = run or self._git
        self._changed: dict[tuple[str, str], bool | None] = {}

    def changed(self, bench: str, commit: str) -> bool | None:
        """Whether the code of ``bench`` differs between ``commit`` and the working tree.

        None: the commit is not known here.
        """
        key = bench, commit
        if key not in self._changed:
            self._changed[key] = self._differs(CODE_OF.get(bench, ()), commit)
        return self._changed[key]

    def _differs(self, paths: Sequence[str], commit: str) -> bool | None:
        if commit.endswith("-dirty"):
            return True
        if self._run(["cat-file", "-e", f"{commit}^{{commit}}"]) is None:
            return None
        found = self._run(["diff", "--name-only", commit, "--", *paths])
        return None if found is None else bool(found.strip())

    def _git(self, arguments: Sequence[str]) -> str | None:
        done = subprocess.run(
            ["git", *arguments], cwd=self._root, capture_output=True, text=True, check=False
        )
        return done.stdout if done.returncode == 0 else None
