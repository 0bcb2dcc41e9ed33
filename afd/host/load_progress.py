"""How far the loading of weights is: a bar on a terminal, else a log line every two seconds."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

from afd.host.logs import say_phase

_EVERY_S = 2.0


@contextmanager
def loading(what: str, logger: logging.Logger) -> Iterator[Callable[[float, float], None]]:
    """Gives a function that takes the bytes read so far and the bytes of all.

    Lines are those of a phase, with the mean rate since its start, GB/s.
    """
    began = logged = time.monotonic()
    columns = "{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn()
    console = Console(stderr=True)
    say_phase(logger, f"reading {what}")
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what)

        def show(done: float, total: float) -> None:
            nonlocal logged
            bar.update(task, completed=done, total=total)
            now = time.monotonic()
            if bar.disable and (done >= total or now - logged > _EVERY_S):
                logged, rate = now, done / max(now - began, 1e-9)
                gigabytes = f"{done / 1e9:.3f} of {total / 1e9:.3f} GB, {rate / 1e9:.2f} GB/s"
                say_phase(logger, f"reading {what}: {gigabytes}")

        yield show
