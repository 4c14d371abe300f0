"""Optional OpenTelemetry traces: one span for each request, with children for what it waited for and what was computed.

::

    preheat.request     from receiving it to its outcome; attributes: id, outcome, tokens
      queue             until its first sequence left the queue
      prefill           until its first token
      decode            until its end

Spans are made when a request has ended, from the times it carries anyway (`server.orchestrator.live_request.LiveRequest`), so
tracing adds nothing to the threads that serve. `open_tracer` is asked once, at the start; where
``OTEL_EXPORTER_OTLP_ENDPOINT`` is not set there is no tracer. The packages are the extra ``otel``; the exporter reads
the other ``OTEL_*`` variables itself. When the server ends it gives the collector a moment (`RequestTracer.close`), and
does not wait for one that is dead.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from server.errors import StartError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from server.orchestrator.live_request import LiveRequest

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


class RequestTracer:
    """Makes the spans of requests that have ended.

    Args:
        provider: of OpenTelemetry's SDK.
        clock: the orchestrator's, seconds; the wall clock is read beside it, once, to translate.
    """

    def __init__(self, provider: TracerProvider, clock: Callable[[], float] = time.monotonic):
        self._provider = provider
        self._tracer = provider.get_tracer("preheat")
        self._offset = time.time_ns() - int(clock() * 1e9)

    def record(self, live: LiveRequest) -> None:
        """Called once for each request, by whoever said its last word."""
        from opentelemetry import trace

        assert live.ended is not None
        usage = live.usage
        attributes: dict[str, str | int] = {
            "preheat.request_id": live.request.id,
            "preheat.outcome": str(live.outcome),
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "preheat.cached_tokens": usage.cached_tokens,
            "preheat.put_back": sum(sequence.put_back for sequence in live.sequences),
        }
        root = self._tracer.start_span("preheat.request", start_time=self._ns(live.received), attributes=attributes)
        if live.outcome == "error":
            root.set_status(trace.StatusCode.ERROR)
        context = trace.set_span_in_context(root)
        bounds = (live.received, live.began, live.first_token, None)
        for name, begin, end in zip(("queue", "prefill", "decode"), bounds, bounds[1:], strict=False):
            if begin is None:
                break
            # A token that was on its way when another thread ended the request may be later than that end.
            span = self._tracer.start_span(name, context, start_time=self._ns(min(begin, live.ended)))
            span.end(self._ns(live.ended if end is None else min(end, live.ended)))
        root.end(self._ns(live.ended))

    def close(self, seconds: float) -> bool:
        """Sends what is left; False: the collector did not take it within ``seconds``, and it is lost."""
        # The SDK takes a time limit too, and ignores it: its exporters retry until theirs is over.
        flush = threading.Thread(target=self._provider.force_flush, name="flush-traces", daemon=True)
        flush.start()
        flush.join(seconds)
        return not flush.is_alive()

    def _ns(self, seconds: float) -> int:
        return self._offset + int(seconds * 1e9)


def open_tracer(service_name: str, environment: Mapping[str, str] = os.environ) -> RequestTracer | None:
    """The tracer that the environment asks for.

    Raises:
        StartError: the endpoint is set and the packages are missing, or the protocol is one we do not bring.
    """
    if not environment.get(ENDPOINT):
        return None
    protocol = environment.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    if protocol != "http/protobuf":
        raise StartError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}: traces are sent as http/protobuf only; unset it or set it to that"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise StartError(
            f"{ENDPOINT} is set, but {error.name} is not installed: install preheat[otel], or unset the variable"
        ) from None
    resource = Resource.create({"service.name": environment.get("OTEL_SERVICE_NAME") or f"preheat-{service_name}"})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # that hook would wait for a dead collector
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return RequestTracer(provider)
