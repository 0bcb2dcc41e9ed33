"""A connection ends when the other host is gone: the kernel's probes notice it.

ZeroMQ's own heartbeats are not used. libzmq 4.3.5 aborts the process if one is due on a connection
that has ended while a full queue kept it from being read (libzmq issues 3937 and 4364).
"""

import zmq

_IDLE_S = 1
_INTERVAL_S = 1
_PROBES = 3


def probe_peer(connections: zmq.Socket[bytes]) -> None:
    """Ends a tcp connection whose peer's host answers nothing for 3 to 4 s; call before binding or
    connecting. Processes that are stopped are the registry's concern."""
    connections.setsockopt(zmq.TCP_KEEPALIVE, 1)
    connections.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _IDLE_S)
    connections.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _INTERVAL_S)
    connections.setsockopt(zmq.TCP_KEEPALIVE_CNT, _PROBES)
    # Without it, sent data that nobody acknowledges delays the end for minutes.
    connections.setsockopt(zmq.TCP_MAXRT, 1000 * _INTERVAL_S * _PROBES)
