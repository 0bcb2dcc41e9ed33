"""The progress of loading: a bar on a terminal, log lines elsewhere."""

import io
import logging

import pytest

from afd.host import load_progress
from afd.host.load_progress import loading

GB = 10**9


def load(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(load_progress.time, "monotonic", lambda: float(next(clock)))
    with loading("experts", logging.getLogger("afd.test")) as show:
        for done in range(1, 7):
            show(done * GB, 6 * GB)


def test_lines_of_a_pipe(monkeypatch, caplog) -> None:
    """About every two seconds, and at the end; the rate is the mean since the start."""
    caplog.set_level(logging.INFO)
    load(monkeypatch)
    assert caplog.messages == [
        "afd: start-up: reading experts",
        "afd: start-up: reading experts: 3.000 of 6.000 GB, 1.00 GB/s",
        "afd: start-up: reading experts: 6.000 of 6.000 GB, 1.00 GB/s",
    ]


def test_bar_of_a_terminal(monkeypatch, caplog) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    caplog.set_level(logging.INFO)
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    load(monkeypatch)
    drawn = terminal.getvalue()
    assert "experts" in drawn and "6.0/6.0 GB" in drawn and "/s" in drawn
    assert caplog.messages == ["afd: start-up: reading experts"]
