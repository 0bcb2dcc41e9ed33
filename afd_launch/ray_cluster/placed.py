"""One instance on the cluster, as the driver sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from afd.config.sections import Restart
from afd.control.messages import Members
from afd.errors import ConfigError
from afd_launch.orders import RoleWish
from afd_launch.ray_cluster.plan import Instance
from afd_launch.restarts import backoff_s
from afd_launch.role_log import say

BURY_S = 2.0
RETRY_S = 1.0
"""Seconds until an actor that Ray has not placed is called again."""


@dataclass(frozen=True)
class Surroundings:
    """What all instances of a deployment share.

    files: what an instance's processes read, by name. feed: gets the output of a member. error_of:
    the error sentence in it; "" if there is none. control: address of the control plane.
    """

    ray: Any
    files: Callable[[Instance], Mapping[str, str]]
    feed: Callable[[str, bytes], None]
    error_of: Callable[[str], str]
    control: str
    restart: Restart


class Placed:
    """An instance, its actor, and the call of the actor that runs now. No method waits."""

    def __init__(
        self, around: Surroundings, instance: Instance, actor: Any, leave_s: float
    ) -> None:
        """leave_s: seconds to finish requests and end, when an operator wants that."""
        self.instance, self.actor = instance, actor
        self._around, self._leave_s = around, leave_s
        self._due: float | None = 0.0  # when to start it (time.monotonic()); None: it runs
        self._call: tuple[str, Any] | None = None
        self._deaths: list[float] = []
        self._ended = ("", "")  # a member whose process has ended, and how
        self._told = False  # that Ray has not placed the actor

    def turn(self, now: float, wish: RoleWish, *, serving: bool) -> None:
        """Takes the result of the last call and begins the next one.

        Args:
            wish: what operators want. serving: the deployment was ready once; before that, a
                process that ends is an error.

        Raises:
            ConfigError: a process ended too often.
        """
        if self._call is None:
            self._begin(now, wish)
            return
        kind, reference = self._call
        ray = self._around.ray
        done, _ = ray.wait([reference], timeout=0)
        if not done:
            return
        self._call = None
        try:
            found = ray.get(reference)
        except ray.exceptions.RayActorError:
            self._lost(kind, now)
            return
        self._take(kind, found, now, serving=serving)

    def _begin(self, now: float, wish: RoleWish) -> None:
        if self._due is None and wish == "run":
            self._call = ("poll", self.actor.poll.remote())
        elif self._due is None:
            say(f"{self.instance.name} is asked to leave once its requests have finished")
            self._call = ("leave", self.actor.stop.remote(self._leave_s))
        elif wish == "run" and now >= self._due:
            files, control = self._around.files(self.instance), self._around.control
            self._call = ("start", self.actor.start.remote(files, control))

    def _take(self, kind: str, found: Any, now: float, *, serving: bool) -> None:
        if kind == "start":
            self._due, self._told = None, False
            say(f"{self.instance.name} starts on {found}")
            return
        output, ended = found if kind == "poll" else (found, None)
        for member, data in output.items():
            self._around.feed(member, data)
        if ended is not None:
            self._ended = ended
            self._call = ("bury", self.actor.stop.remote(BURY_S))
        elif kind == "leave":
            say(f"{self.instance.name} has left")
            self._due = now
        elif kind == "bury":
            member, how = self._ended
            if not serving:
                raise ConfigError(self._around.error_of(member) or f"{member} {how} at its start")
            self._died(f"{member} {how}", now)

    def _lost(self, kind: str, now: float) -> None:
        """Ray moves the actor to another node, or waits until there is one."""
        if kind != "start":
            self._died(f"the node of {self.instance.name} or its actor is gone", now)
            return
        if not self._told:
            self._told = True
            say(f"{self.instance.name} waits until Ray has placed it again")
        self._due = now + RETRY_S

    def _died(self, text: str, now: float) -> None:
        self._deaths.append(now)
        restart = self._around.restart
        wait_s = backoff_s(self._deaths, now, restart.max_restarts, restart.window_s)
        if wait_s is None:
            raise ConfigError(
                f"{text}, more than restart.max_restarts = {restart.max_restarts} times within"
                f" {restart.window_s:g} s; its last lines are above"
            )
        say(f"{text}; starting {self.instance.name} again in {wait_s:g} s")
        self._due = now + wait_s


def wish_for(members: Members, instance: Instance) -> RoleWish:
    """What operators want of an instance (`afd ctl restart`, `remove`, `add`). Pure."""
    seat = members.seat(instance.name)
    if seat is None:
        return "away"
    if seat.wish == "restart":
        member = members.find(instance.role, instance.index)
        asked = member is not None and member.generation == seat.generation
        return "leave" if asked else "run"
    return "leave" if seat.wish == "remove" else "run"
