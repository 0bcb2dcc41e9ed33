"""What the gateway processes of one port inherit: the listener, counts, and kept answers."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from afd_gateway.counts import make_shared
from afd_gateway.kept_answers import make_answers
from afd_gateway.listener import bind_port

_VARIABLE = "AFD_GATEWAY_DESCRIPTORS"


@dataclass(frozen=True)
class Inherited:
    """Descriptors. listener: of the bound port. counts, answers: see counts.py, kept_answers.py."""

    listener: int
    counts: int
    answers: int

    @property
    def descriptors(self) -> tuple[int, ...]:
        return self.listener, self.counts, self.answers

    def environment(self) -> dict[str, str]:
        return {_VARIABLE: " ".join(map(str, self.descriptors))}


def inherited(environment: Mapping[str, str] = os.environ) -> Inherited | None:
    """Returns what this process inherited; None if it was started by hand."""
    text = environment.get(_VARIABLE)
    return None if text is None else Inherited(*map(int, text.split()))


class HeldPort:
    """A bound port that outlives the processes that serve it.

    The gateway processes begin to listen; from then on, connections wait while none of them lives.
    """

    def __init__(self, listener: socket.socket, counts: int, answers: int) -> None:
        self._listener = listener
        self.inherited = Inherited(listener.fileno(), counts, answers)

    def refuse(self) -> None:
        """Refuses connections from now on, also in the processes. A second call does nothing."""
        with contextlib.suppress(OSError):  # nobody listens
            self._listener.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def held_port(host: str, port: int, processes: int) -> Iterator[HeldPort]:
    """Raises ConfigError if the address cannot be used."""
    with bind_port(host, port) as listener:
        counts, answers = make_shared(processes), make_answers(processes)
        try:
            yield HeldPort(listener, counts, answers)
        finally:
            os.close(counts)
            os.close(answers)
