"""Marks of a step: what they keep alive."""

import weakref

from afd.step_trace import StepMarks


class Moment:
    """In the place of an event that a captured graph refers to."""


class Clock:
    def __init__(self):
        self.made = []

    def stamp(self, *, copying=False):
        moment = Moment()
        self.made.append(weakref.ref(moment))
        return moment

    def elapsed_ns(self, first, then):
        return 1


def test_every_stamp_lives_as_long_as_the_marks():
    """Also those that no position needs: the waits behind a step's last work."""
    clock = Clock()
    marks = StepMarks(clock)
    marks.begin()
    for micro_batch in range(3):
        marks.done(0, micro_batch, 8)
        marks.copied()
    for _ in range(3):
        marks.working()
    marks.end()
    assert len(clock.made) == 1 + 3 * 2 + 3 + 1
    assert all(moment() is not None for moment in clock.made)
