"""OpenTelemetry traces, sent with OTLP over HTTP (docs/traces.md).

The packages are an extra. They are imported only where ``metrics.otlp`` is set.
"""

from __future__ import annotations

import threading
from importlib.util import find_spec
from typing import TYPE_CHECKING

from afd.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

PARENT = "afd_trace"
"""Key in ``vllm_xargs``: the traceparent under which a request's steps are shown."""
PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
VLLM_PACKAGES = (*PACKAGES, "opentelemetry.exporter.otlp.proto.grpc")
"""vLLM imports both exporters, and uses the one for HTTP here."""
_EXPORT_S = 2.0  # for one batch
_SHUTDOWN_S = 3.0  # a process that ends waits no longer for a collector
_QUEUE = 16384  # spans; further ones are dropped


def check_packages(packages: tuple[str, ...] = PACKAGES) -> None:
    """Raises ConfigError if a package for traces is missing."""
    for name in packages:
        try:
            missing = find_spec(name) is None
        except ModuleNotFoundError:  # a parent package
            missing = True
        if missing:
            raise ConfigError(
                f"metrics.otlp is set, but the package {name.replace('.', '-')} is missing;"
                " install the extra: pip install 'afd[otel]', or remove metrics.otlp"
            )


def make_provider(endpoint: str, service: str, share: float = 1.0) -> TracerProvider:
    """Returns a provider whose spans a thread of its own sends to ``endpoint``.

    Args:
        service: service.name of the spans.
        share: of the traces that begin here; others keep their caller's decision.

    Raises:
        ConfigError: a package is missing.
    """
    check_packages()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    made = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(share)),
        resource=Resource.create({"service.name": service, "service.namespace": "afd"}),
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(endpoint, timeout=_EXPORT_S)
    made.add_span_processor(
        BatchSpanProcessor(exporter, max_queue_size=_QUEUE, schedule_delay_millis=1000)
    )
    return made


def shutdown(provider: TracerProvider) -> None:
    """Sends what is left, for at most 3 s. May be called again."""
    # The SDK would wait 30 s.
    ending = threading.Thread(target=provider.shutdown, name="afd-spans-end", daemon=True)
    ending.start()
    ending.join(_SHUTDOWN_S)
