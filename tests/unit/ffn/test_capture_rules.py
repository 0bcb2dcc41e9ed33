"""The streams of a step obey CUDA's rules for graph capture, checked on fake torch streams."""

import itertools
import threading
from contextlib import contextmanager

import pytest
import torch
from remote_support import Deployed, reference_model
from test_stream_steps import run_on_streams

from afd.wire.streams_torch import CudaStreams
from attention_worker.remote.stream import StreamExperts

_OPERATIONS = itertools.count()


class Event:
    def __init__(self, stream):
        self.done, self.captured = frozenset(stream.done), stream.captured


class Stream:
    """Tracks which operations precede its next one. A stream joins a capture when it waits for a
    captured stream. Enqueuing to, or waiting for, a stream outside the capture is an error."""

    def __init__(self, device=None, priority=0):
        self.done, self.captured = set(), False

    @property
    def cuda_stream(self):
        assert self.captured, "an operation on a stream that is not in the capture"
        self.done.add(next(_OPERATIONS))
        return 0

    def record_event(self):
        return Event(self)

    def wait_event(self, event):
        assert event.captured, "dependency created on uncaptured work in another stream"
        self.captured = True
        self.done |= event.done

    def wait_stream(self, other):
        self.wait_event(other.record_event())


class Here(threading.local):
    """The current stream of each thread; the initial stream is captured."""

    def __init__(self):
        self.stream = Stream()
        self.stream.captured = True


_HERE = Here()


def current(device=None):
    return _HERE.stream


@contextmanager
def on(stream):
    if stream is None:  # torch keeps the current one
        yield
        return
    before, _HERE.stream = current(), stream
    assert stream.cuda_stream == 0  # stands for the kernels that are launched inside the block
    yield
    _HERE.stream = before


class Captured(CudaStreams):
    """Each step is one capture; join() ends it."""

    def __init__(self, ended, depth):
        super().__init__(torch.device("cpu"), depth)
        self.ended = ended

    def join(self):
        super().join()
        for stream in (self._copy, *self._own):
            assert stream.done <= current().done, "unjoined work"
            stream.captured = False
        self.ended.append(self)


@pytest.mark.parametrize("x,y", [(1, 1), (1, 2)])
def test_every_stream_of_a_step_is_forked_and_joined(tiny_models, monkeypatch, x, y):
    ended = []
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(
        "ffn_worker.loop.make_streams", lambda device, depth: Captured(ended, depth)
    )
    deployed = Deployed(tiny_models("deepseek_v3"), x, y, transport={"backend": "ipc"})
    try:
        client = deployed.clients[0]
        stream = StreamExperts(
            deployed.resolved, 0, client._region, Captured(ended, 0), client.expert_slots
        )
        expected = reference_model(tiny_models("deepseek_v3"))
        for restart in (False, True):
            if restart:  # ends the session and its graphs, so everything is captured again
                deployed.stop_ffn(0)
                deployed.start_ffn(0)
            for depth in (1, 2, 3):
                run_on_streams(client, stream, deployed.resolved, expected, 7, depth, depth)
    finally:
        deployed.close()
    assert len(ended) == 6 * (1 + y)  # steps of attention and of each FFN instance


def test_a_step_of_depth_1_uses_one_stream(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(torch.cuda, "stream", on)
    streams = CudaStreams(torch.device("cpu"), 1)
    for depth in (1, 2):
        streams.begin_step(depth)
        before = current()
        with streams.apart(0):
            assert (current() is before) == (depth == 1)
            streams.fork()
            with streams.copying():
                assert (current() is before) == (depth == 1)
        streams.join()
        assert streams._copy.captured == (depth == 2)
