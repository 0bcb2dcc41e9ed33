"""How far the loading of weights is: a bar on a terminal, else a log line every two seconds."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

_EVERY_S = 2.0


@contextmanager
def loading(what: str, logger: logging.Logger) -> Iterator[Callable[[float, float], None]]:
    """Gives a function that takes the bytes read so far and the bytes of all.

    Lines have the mean rate since the start, GB/s. Roles of `afd serve` write to a pipe.
    """
    began = logged = time.monotonic()
    columns = "{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what)

        def show(done: float, total: float) -> None:
            nonlocal logged
            bar.update(task, completed=done, total=total)
            now = time.monotonic()
            if bar.disable and (done >= total or now - logged > _EVERY_S):
                logged, rate = now, done / max(now - began, 1e-9)
                text = "%s: %.3f of %.3f GB read, %.2f GB/s"
                logger.info(text, what, done / 1e9, total / 1e9, rate / 1e9)

        yield show
