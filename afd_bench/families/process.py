"""Makes the checkpoints of :mod:`.cases` and runs :mod:`.engines` on them, a process per side."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from afd.errors import AfdError
from afd_bench.families.cases import Model
from afd_bench.families.engines import Case, Result
from afd_bench.python_path import python_path
from afd_demo.published.eagle import make_eagle
from afd_demo.published.make import make_published
from afd_demo.sizes import Sizes

_ROOT = Path(__file__).parents[2]


def write_checkpoint(model: Model, root: Path, sizes: Sizes, seed: int) -> None:
    """Writes ``root/NAME``, and ``root/twin/NAME`` that vLLM alone can read.

    The twin is unquantised and has no image encoder.
    """
    twin, folder = root / "twin" / model.name, root / model.name
    make_published(
        model.layout,
        folder,
        sizes,
        stored_as=model.stored_as,
        twin=twin,
        seed=seed,
        likely=4 if model.drafts else 0,
    )
    if model.method != "mtp":
        make_eagle(model.method, head_of(folder), sizes, seed=seed)
    if model.text_twin:
        make_published(model.text_twin, twin, sizes, seed=seed)
    elif model.stored_as == "plain":
        twin.parent.mkdir(exist_ok=True)
        twin.symlink_to(folder)


def head_of(folder: Path) -> Path:
    """Returns the folder of the EAGLE head of a checkpoint."""
    return folder.with_name(f"{folder.name}-head")


class Engines:
    """Starts a process for a side when it is first asked for.

    folder: gets the files of the processes. cases: by side, "remote" and "colocated".
    """

    def __init__(
        self, folder: Path, cases: Mapping[str, Sequence[Case]], wait_s: float = 280.0
    ) -> None:
        self._folder = folder
        self._cases = cases
        self._wait_s = wait_s
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, side: str) -> None:
        if side in self._running:
            return
        cases, results = self._folder / f"{side}.json", self._folder / f"{side}-results.json"
        cases.write_text(json.dumps([asdict(case) for case in self._cases[side]]))
        argv = [sys.executable, "-m", "afd_bench.families.engines", side, str(cases), str(results)]
        with (self._folder / f"{side}.log").open("wb") as log:
            self._running[side] = subprocess.Popen(
                argv,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **python_path(_ROOT)},
            )

    def result(self, side: str, name: str) -> Result:
        """Returns what a side found for a case; its ``error`` is set if the engine failed.

        Raises:
            AfdError: the process ended, or took too long, before it came to this case.
        """
        self.start(side)
        process, until = self._running[side], time.monotonic() + self._wait_s
        while True:
            ended = process.poll() is not None
            found = self._read(side)
            if name in found:
                return found[name]
            if ended:
                log = (self._folder / f"{side}.log").read_text(errors="replace")
                raise AfdError(f"the engines ({side}) ended before {name}: {log[-2000:]}")
            if time.monotonic() > until:
                raise AfdError(f"the engines ({side}) took more than {self._wait_s:.0f} s")
            time.sleep(0.2)

    def _read(self, side: str) -> dict[str, Result]:
        results = self._folder / f"{side}-results.json"
        entries = json.loads(results.read_text()) if results.is_file() else []
        return {entry["name"]: Result(**entry) for entry in entries}

    def close(self) -> None:
        """Ends the processes."""
        for process in self._running.values():
            process.kill()
            process.wait()
