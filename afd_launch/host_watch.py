"""What the supervisor does about the other hosts: waits for them, and holds restarts without them.

A host that stops while the deployment serves does not end it here: this host waits until it is
back, because its own roles keep their state meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from afd.errors import ConfigError


class Hosts(Protocol):
    """See :class:`afd_launch.other_hosts.OtherHosts`. limit_s: longest wait at the start."""

    limit_s: float

    def turn(self) -> None: ...
    def waiting_for(self) -> str | None: ...
    def lacks_needed(self) -> bool: ...
    def never_came(self) -> str: ...
    def tell(self, fault: str) -> None: ...


class HostWatch:
    """Call :meth:`check_start` before the roles are ready and :meth:`follow` afterwards, often.

    holds_restarts: a host is away without which a role of this host would only fail.
    """

    def __init__(self, hosts: Hosts, say: Callable[[str], None]) -> None:
        self._hosts = hosts
        self._say = say
        self._serving = False
        self._said: str | None = None
        self.holds_restarts = False

    def check_start(self, waited_s: float = 0.0) -> str | None:
        """Returns the hosts that are missing, in words; None once all are there.

        Raises:
            ConfigError: this host must not take part, or the others did not come in time.
        """
        self._hosts.turn()
        missing = self._hosts.waiting_for()
        if missing is not None and waited_s > self._hosts.limit_s:
            raise ConfigError(self._hosts.never_came())
        return missing

    def follow(self) -> None:
        """Follows hosts that leave and come back while the deployment serves."""
        self._serving = True
        try:
            self._hosts.turn()
            missing = self._hosts.waiting_for()
        except ConfigError as error:  # such as a clock that was set: no reason to end what serves
            missing = f"the control plane, which says: {error}"
        self.holds_restarts = missing is not None and self._hosts.lacks_needed()
        if missing != self._said:
            self._say(f"waiting for {missing}" if missing else "every host is there again")
            self._said = missing

    def failed(self, reason: str) -> None:
        """Tells the other hosts why this one could not start."""
        if not self._serving:
            self._hosts.tell(reason)
