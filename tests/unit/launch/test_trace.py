"""afd_launch.trace: builds one trace file from the trace pages of all roles."""

from __future__ import annotations

import pytest
from fake_trace import FakeTrace

from afd.control.messages import Member
from afd.errors import AfdError
from afd.metrics.role import RoleMetrics
from afd.metrics.server import serve_metrics
from afd.metrics.trace import events_of
from afd_launch.trace import chrome, collect, pages


def test_spans_of_a_role() -> None:
    trace = chrome({"ffn-0": events_of({"attention-0": FakeTrace()}), "attention-0": {}})
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    names = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"
    }
    assert names[1, 0] == "attention-0" and names[2, 0] == "ffn-0"
    wire, waiting = spans[:2]
    assert (wire["name"], wire["ts"], wire["dur"]) == ("layer 7 mb 1", 1.0, 2.0)
    assert wire["args"] == {"rows": 5, "bytes": 640, "posted to sent, us": 0.1}
    assert (waiting["ts"], waiting["dur"]) == (3.0, 1.0)
    assert names[2, wire["tid"]] == "from attention-0: on the wire"
    assert names[2, waiting["tid"]] == "from attention-0: waiting"
    assert spans[2]["name"] == "leave"


def test_the_gateway_has_no_trace() -> None:
    """The gateway registers a metrics page but serves no trace."""
    members = [
        Member("ffn", 0, 1, metrics_url="http://h:1/metrics"),
        Member("attention", 0, 1),  # has metrics turned off
        Member("gateway", 0, 1, metrics_url="http://h:2/metrics"),
    ]
    assert pages(members) == {"ffn-0": "http://h:1/metrics"}


def test_pages_of_running_roles() -> None:
    ffn, attention = RoleMetrics("ffn"), RoleMetrics("attention")
    ffn.wire_traces["attention-0"] = FakeTrace()
    servers = {"ffn-0": serve_metrics(ffn), "attention-0": serve_metrics(attention)}
    urls = {member: server.url for member, server in servers.items()}
    try:
        trace = collect(urls)
        assert trace["attention-0"] == {} and len(trace["ffn-0"]["attention-0"]) == 2
        assert sum(e["ph"] == "X" for e in chrome(trace)["traceEvents"]) == 4
        with pytest.raises(AfdError, match=r"metrics.enabled and transport.trace"):
            collect({"attention-0": urls["attention-0"]})
    finally:
        for server in servers.values():
            server.close()
    with pytest.raises(AfdError, match="cannot read the trace of ffn-0 at http"):
        collect(urls)
