"""Traces of requests, with the exporter in memory that OpenTelemetry brings for tests."""

import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from orchestrator_harness import serving

from server.errors import StartError, TimedOut
from server.tracing import ENDPOINT, RequestTracer, open_tracer


@pytest.fixture
def spans():
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    exporter.tracer = provider.get_tracer("test")
    return exporter


def test_a_request_is_a_span_with_its_phases(spans):
    with serving(on_ended=RequestTracer(spans.tracer).record, opened=False) as server:
        server.run(b"of the proof", 3, proof=True)
        server.orchestrator.open()
        server.run(b"hello", 5, id="mine")
        assert server.orchestrator.drain(5)
    found = {span.name: span for span in spans.get_finished_spans()}
    assert sorted(found) == ["decode", "prefill", "preheat.request", "queue"]
    root = found["preheat.request"]
    assert dict(root.attributes) == {
        "preheat.request_id": "mine", "preheat.outcome": "ok", "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 5, "preheat.cached_tokens": 0, "preheat.put_back": 0,
    }  # fmt: skip
    assert all(found[name].parent.span_id == root.context.span_id for name in ("queue", "prefill", "decode"))
    times = [found["queue"].start_time, *(found[name].end_time for name in ("queue", "prefill", "decode"))]
    assert times == sorted(times)
    assert (times[0], times[-1]) == (root.start_time, root.end_time)
    assert [found["prefill"].start_time, found["decode"].start_time] == times[1:3]
    assert root.status.status_code is not StatusCode.ERROR


def test_a_request_that_ends_in_the_queue_has_no_other_phase(spans):
    with serving(on_ended=RequestTracer(spans.tracer).record, slots=1) as server:
        gate = server.engine.gate("generate")
        running = server.submit(b"running", 3)[1]
        assert gate.arrived()
        queued = server.submit(b"queued", 3, deadline=server.orchestrator._clock() + 0.01)[1]
        assert isinstance(queued.wait().error, TimedOut)
        gate.open()
        running.ok()
        assert server.orchestrator.drain(5)
    first = [span for span in spans.get_finished_spans()][:2]
    assert [span.name for span in first] == ["queue", "preheat.request"]
    assert first[1].status.status_code is StatusCode.ERROR


def test_a_tracer_that_fails_hurts_nobody(caplog):
    def broken(live):
        raise OSError("no collector")

    with serving(on_ended=broken) as server:
        server.run(b"hello", 2)
        server.run(b"hello", 2)
    assert "could not be traced" in caplog.text


def test_the_environment_decides(monkeypatch):
    assert open_tracer("tiny", {}) is None
    assert open_tracer("tiny", {ENDPOINT: ""}) is None
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(StartError, match=r"preheat\[otel\]"):
        open_tracer("tiny", {ENDPOINT: "http://127.0.0.1:4318"})
    with pytest.raises(StartError, match="http/protobuf"):
        open_tracer("tiny", {ENDPOINT: "http://127.0.0.1:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
