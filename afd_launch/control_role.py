"""Runs the control plane until a signal or an operator's shutdown."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType

from afd.config.contract import Contract
from afd.control.depths import FIXED_DEPTH, DepthPolicy
from afd.control.host_table import NO_HOSTS, HostRules
from afd.control.keys import CurveKeys
from afd.control.messages import Timing
from afd.control.server import ControlServer

_log = logging.getLogger(__name__)


def run_control(
    address: str,
    keys: CurveKeys,
    *,
    members: Iterable[str],
    timing: Timing | None = None,
    contract: Contract | None = None,
    depth: DepthPolicy = FIXED_DEPTH,
    hosts: HostRules = NO_HOSTS,
    attention: int = 0,
    ffn: int = 0,
    ready: Callable[[str], None] | None = None,
) -> int:
    """Serves until SIGTERM, SIGINT or an operator's shutdown; returns exit code 0.

    See :class:`ControlServer` for most arguments. ``ready`` is called once with the real address.
    On a signal, members are told that the control plane stops; they keep running. Call it on the
    main thread (signals).
    """
    server = ControlServer(
        address,
        keys,
        members=members,
        contract=contract,
        timing=timing,
        depth=depth,
        hosts=hosts,
        attention=attention,
        ffn=ffn,
    )
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
