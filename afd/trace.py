"""`afd trace`: the last messages of every role as one file for ui.perfetto.dev or chrome://tracing.

Each role serves its transport's last messages as JSON beside its metrics (``/trace``). Times are by
the CLOCK_MONOTONIC of the role's host; a peer's times are turned into it by the transport (see
afd_comm's PeerTrace), so a role's rows are true to each other within
``afd_wire_clock_error_seconds``. Roles of different hosts are shown side by side but not aligned.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afd.errors import AfdError
from afd.wire_metrics import WireTrace

if TYPE_CHECKING:
    from afd.control.messages import Member

Event = tuple[int, int, int, int, int, int, int, int]


def events_of(traces: Mapping[str, WireTrace]) -> dict[str, list[Event]]:
    """What a role serves: by peer, (posted, sent, arrived, consumed: ns; layer, micro_batch, rows,
    nbytes) of each message that came from there."""
    return {peer: trace.events() for peer, trace in traces.items()}


def chrome(roles: Mapping[str, Mapping[str, Sequence[Event]]]) -> dict[str, Any]:
    """The data of a file in Chrome's Trace Event Format (phases X and M).

    A process per role; per peer one thread for the wire and one for messages that wait to be seen.
    Pure.
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
    """Fetch /trace of every role: member id -> peer -> events. urls: by member id, those of the
    metrics pages.

    Raises:
        AfdError: no role has a trace, or one does not answer.
    """
    roles = {}
    for member, url in urls.items():
        page = url.removesuffix("/metrics") + "/trace"
        try:
            with urllib.request.urlopen(page, timeout=deadline_s) as answer:
                roles[member] = json.load(answer)
        except (OSError, urllib.error.URLError, ValueError) as err:
            raise AfdError(f"{member} does not give its trace at {page}: {err}") from None
    if not any(roles.values()):
        raise AfdError(
            "no role has a trace; set metrics.enabled and transport.trace to true in the deployment"
        )
    return roles


def pages(members: Iterable[Member]) -> dict[str, str]:
    """Metrics pages of the members that have a trace beside it: all but the gateway."""
    return {m.id: m.metrics_url for m in members if m.metrics_url and m.role != "gateway"}


def run_trace(address: str, keys_file: Path | None, out: Path) -> int:
    """Ask the control plane who is there, and write the file. Raises AfdError."""
    from afd.control import operator
    from afd.control.keys import CurveKeys

    keys = CurveKeys.load(keys_file) if keys_file else None
    members = operator.status(address, keys).members
    trace = chrome(collect(pages(members)))
    out.write_text(json.dumps(trace), encoding="utf-8")
    spans = sum(event["ph"] == "X" for event in trace["traceEvents"])
    print(f"{out}: {spans} spans of {len(members)} members; open it at https://ui.perfetto.dev")
    return 0


def label(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    """What a process (kind process_name) or one of its threads (thread_name) is called."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def span(
    title: str, pid: int, tid: int, start: int, end: int, args: dict[str, Any]
) -> dict[str, Any]:
    """Something that took time. start, end: ns; an estimated offset may put the end first."""
    duration = max(0, end - start) / 1e3
    return {
        "ph": "X", "name": title, "pid": pid, "tid": tid, "ts": start / 1e3, "dur": duration,
        "args": args,
    }  # fmt: skip
