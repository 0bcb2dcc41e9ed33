"""afd.wire.message: the header fields between attention and FFN instances."""

import pytest

from afd.wire.layout import Kind, Tag
from afd.wire.message import message, received, trace_event
from afd_comm import Link, PeerTrace, Region, Status, make_flag

EXTREMES = (
    {"layer": 61, "micro_batch": 2, "depth": 3, "kind": Kind.DATA, "tag": Tag.E2M1, "step": 2**62},
    {"layer": -1, "micro_batch": -1, "depth": 1, "kind": Kind.LEAVE, "tag": 0, "step": 0},
    {"layer": 2**15 - 1, "micro_batch": 0, "depth": 127, "kind": 1, "tag": 5, "step": -1},
    {"layer": 0, "micro_batch": 0, "depth": 1, "kind": 2, "moves": 2**32 - 1, "receivers": 2**31},
)


@pytest.mark.parametrize("fields", EXTREMES)
def test_header_fields_survive_the_transport(fields: dict[str, int]) -> None:
    region = Region(1, 64, name="fields")
    link = Link(region.addresses, timeout_us=1000)
    assert link.post(message(0, [], 7, **fields), make_flag(1, 1)) == Status.OK
    got = received(region.header(0))
    assert {name: getattr(got, name) for name in fields} == fields
    assert (got.rows, got.nbytes, got.answer_to.count) == (7, 0, 7)


def test_trace_events_name_the_position() -> None:
    region, trace = Region(1, 64, name="traced"), PeerTrace()
    region.trace((0, 1), trace)
    link = Link(region.addresses, timeout_us=1000, trace=True)
    request = message(0, [], 3, layer=9, micro_batch=1, depth=2, kind=Kind.DATA)
    flag = make_flag(1, 1)
    assert link.post(request, flag) == Status.OK
    assert region.wait_all([0], [flag], 1_000_000) == [Status.OK]
    (event,) = trace.events()
    assert trace_event(event) == (*event[:4], 9, 1, 3, 0)
