"""The last messages of a role's transport, as plain values."""

from collections.abc import Mapping

from afd.metrics.wire import WireTrace
from afd.wire.message import TraceEvent, trace_event


def events_of(traces: Mapping[str, WireTrace]) -> dict[str, list[TraceEvent]]:
    """Returns what a role serves at /trace: the messages received, by member id of the sender.

    A message is (posted, sent, arrived, consumed: ns; layer, micro_batch, rows, nbytes).
    """
    return {peer: [trace_event(e) for e in trace.events()] for peer, trace in traces.items()}
