"""`afd trace`: the last messages of all roles as one file for ui.perfetto.dev or chrome://tracing.

Each role serves the last messages of its transport as JSON at ``/trace``, beside ``/metrics``.
Times are CLOCK_MONOTONIC of the role's host. The transport converts peers' times to it (afd_comm's
PeerTrace), so times of one role are comparable within ``afd_wire_clock_error_seconds``. Roles of
different hosts are shown together but not aligned.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afd.errors import AfdError
from afd.wire.message import TraceEvent as Event

if TYPE_CHECKING:
    from afd.control.messages import Member


def chrome(roles: Mapping[str, Mapping[str, Sequence[Event]]]) -> dict[str, Any]:
    """Returns a trace in Chrome's Trace Event Format (phases X and M).

    One process per role. Per peer one thread for the wire, and one for the time that messages wait
    to be read.

    Args:
        roles: member id -> peer -> messages.
    """
    out: list[dict[str, Any]] = []
    for pid, (role, peers) in enumerate(sorted(roles.items()), start=1):
        out.append(label("process_name", pid, 0, role))
        for index, (peer, events) in enumerate(sorted(peers.items())):
            wire, waiting = 2 * index + 1, 2 * index + 2
            out.append(label("thread_name", pid, wire, f"from {peer}: on the wire"))
            out.append(label("thread_name", pid, waiting, f"from {peer}: waiting"))
            for posted, sent, arrived, consumed, layer, micro_batch, rows, nbytes in events:
                title = "leave" if layer < 0 else f"layer {layer} mb {micro_batch}"
                args = {"rows": rows, "bytes": nbytes, "posted to sent, us": (sent - posted) / 1e3}
                out.append(span(title, pid, wire, posted, arrived, args))
                out.append(span(title, pid, waiting, arrived, consumed, {}))
    return {"traceEvents": out, "displayTimeUnit": "ns"}


def collect(urls: Mapping[str, str], deadline_s: float = 5.0) -> dict[str, dict[str, list[Event]]]:
    """Fetch /trace of every role. Returns member id -> peer -> messages.

    Args:
        urls: by member id, the URL of its metrics page.
        deadline_s: per request.

    Raises:
        AfdError: no role has a trace, or a role does not respond.
    """
    roles = {}
    for member, url in urls.items():
        page = url.removesuffix("/metrics") + "/trace"
        try:
            with urllib.request.urlopen(page, timeout=deadline_s) as answer:
                roles[member] = json.load(answer)
        except (OSError, urllib.error.URLError, ValueError) as err:
            raise AfdError(
                f"cannot read the trace of {member} at {page} ({err}); check that it is running"
            ) from None
    if not any(roles.values()):
        raise AfdError(
            "no role has a trace; set metrics.enabled and transport.trace to true in the deployment"
        )
    return roles


def pages(members: Iterable[Member]) -> dict[str, str]:
    """Returns the metrics pages, by member id, of members that also serve a trace."""
    return {m.id: m.metrics_url for m in members if m.metrics_url and m.role != "gateway"}


def run_trace(address: str, keys_file: Path | None, out: Path) -> int:
    """Write the traces of all registered members to ``out``; returns 0. Raises AfdError."""
    from afd.control import operator
    from afd.control.local_keys import operator_keys

    members = operator.status(address, operator_keys(address, keys_file)).members
    trace = chrome(collect(pages(members)))
    out.write_text(json.dumps(trace), encoding="utf-8")
    spans = sum(event["ph"] == "X" for event in trace["traceEvents"])
    print(f"{out}: {spans} spans of {len(members)} members; open it at https://ui.perfetto.dev")
    return 0


def label(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    """Returns the event that names a process (kind process_name) or a thread (thread_name)."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def span(
    title: str, pid: int, tid: int, start: int, end: int, args: dict[str, Any]
) -> dict[str, Any]:
    """Returns the event of one time span. start, end: ns; end < start gives a duration of 0."""
    duration = max(0, end - start) / 1e3
    return {
        "ph": "X", "name": title, "pid": pid, "tid": tid, "ts": start / 1e3, "dur": duration,
        "args": args,
    }  # fmt: skip
