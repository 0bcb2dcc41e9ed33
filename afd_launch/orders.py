"""What operators want of the roles of this host (`afd ctl add`, `remove`, `restart`)."""

from __future__ import annotations

from typing import Literal, Protocol

RoleWish = Literal["run", "leave", "away"]
"""run: it should run. leave: this process should leave, and be asked again. away: it should not
run."""


class Orders(Protocol):
    """See :class:`afd_launch.readiness.Readiness`."""

    def wish(self, name: str, group: int) -> RoleWish | None:
        """What is wanted of a role; None if nothing is, or if it is not known now.

        group: process group of the running process; 0 if there is none.
        """
        ...

    def give_up(self, name: str) -> None:
        """Says that a role that was added cannot be started; it is then not wanted any more."""
        ...


class _NoOrders:
    def wish(self, name: str, group: int) -> RoleWish | None:
        return None

    def give_up(self, name: str) -> None:
        pass


NO_ORDERS: Orders = _NoOrders()
