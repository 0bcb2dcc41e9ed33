"""The entry of ``afd control``: a server that runs until it is told to stop."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType

from afd.control.contract import Contract
from afd.control.depths import FIXED_DEPTH, DepthPolicy
from afd.control.keys import CurveKeys
from afd.control.messages import Timing
from afd.control.server import ControlServer

_log = logging.getLogger(__name__)


def run_control(
    address: str,
    keys: CurveKeys | None = None,
    *,
    timing: Timing | None = None,
    contract: Contract | None = None,
    depth: DepthPolicy = FIXED_DEPTH,
    ready: Callable[[str], None] | None = None,
) -> int:
    """Serves until SIGTERM, SIGINT or an operator's shutdown; returns the exit code 0.

    ``ready`` is called once with the real address. On a signal the members are told that the
    control plane goes away, and keep running. Must be called on the main thread (signals).
    """
    server = ControlServer(address, keys, contract=contract, timing=timing, depth=depth)
    stop = threading.Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        _log.info("control plane stops on %s", signal.Signals(number).name)
        stop.set()

    previous = {s: signal.signal(s, on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        _log.info("control plane listens on %s", server.address)
        if ready is not None:
            ready(server.address)
        server.run(stop)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 0
