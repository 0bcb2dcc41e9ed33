"""Stage timestamps of a step: lifetime of events, and the time base."""

import weakref

import pytest

from afd.metrics.step_trace import StepTimestamps


class Moment:
    """Stands in for an event that a captured graph uses."""


class Clock:
    def __init__(self):
        self.made = []

    def stamp(self, *, copying=False):
        moment = Moment()
        self.made.append(weakref.ref(moment))
        return moment

    def elapsed_ns(self, first, then):
        return 1


def test_every_stamp_lives_as_long_as_the_timestamps():
    """Including stamps without a position, such as the waits after a step's last work."""
    clock = Clock()
    timestamps = StepTimestamps(clock)
    timestamps.begin()
    for micro_batch in range(3):
        timestamps.done(0, micro_batch, 8)
        timestamps.copied()
    for _ in range(3):
        timestamps.working()
    timestamps.end()
    assert len(clock.made) == 1 + 3 * 2 + 3 + 1
    assert all(moment() is not None for moment in clock.made)


class HostClock:
    def __init__(self, *times):
        self._times = iter(times)

    def stamp(self, *, copying=False):
        return next(self._times)

    def elapsed_ns(self, first, then):
        raise AssertionError("times of the host's clock must not be converted")


class Event:
    def __init__(self, ns):
        self.ns = ns


class DeviceClock(HostClock):
    def stamp(self, *, copying=False):
        return Event(super().stamp())

    def elapsed_ns(self, first, then):
        return then.ns - first.ns


@pytest.mark.parametrize(("clock", "shift"), [(HostClock, 0), (DeviceClock, -900)])
def test_only_device_times_are_relative_to_the_start_of_the_step(clock, shift):
    """Host times stay correct if the host is preempted before its first timestamp."""
    timestamps = StepTimestamps(clock(1000, 1010, 1020, 1030, 1040))
    timestamps.begin()
    timestamps.working()
    timestamps.done(0, 0, 8)
    timestamps.copied()
    timestamps.end()
    step = timestamps.read(100, replayed=False)
    (span,) = step.spans
    times = [span.started_ns, span.done_ns, span.copied_ns, step.ended_ns]
    assert times == [t + shift for t in (1010, 1020, 1030, 1040)]
    assert step.began_ns == 100
