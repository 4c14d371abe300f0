"""Traces of requests, with the exporter in memory that OpenTelemetry brings for tests."""

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from orchestrator_harness import serving

from engine.api import SamplingParams
from server.errors import StartError, TimedOut
from server.orchestrator.live_request import LiveRequest
from server.orchestrator.request import GenerateRequest
from server.orchestrator.tracing import ENDPOINT, RequestTracer, open_tracer


@pytest.fixture
def spans():
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    exporter.provider = provider
    return exporter


def test_a_request_is_a_span_with_its_phases(spans):
    with serving(on_ended=RequestTracer(spans.provider).record, opened=False) as server:
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
    with serving(on_ended=RequestTracer(spans.provider).record, slots=1) as server:
        gate = server.engine.gate("generate")
        running = server.submit(b"running", 3)[1]
        assert gate.arrived()
        queued = server.submit(b"queued", 3, deadline=server.orchestrator._clock() + 0.01)[1]
        assert isinstance(queued.wait().error, TimedOut)
        gate.open()
        running.ok()
        assert server.orchestrator.drain(5)
    first = list(spans.get_finished_spans())[:2]
    assert [span.name for span in first] == ["queue", "preheat.request"]
    assert first[1].status.status_code is StatusCode.ERROR


@pytest.mark.parametrize(
    ("began", "first_token", "want"),
    [
        (1.0, 3.0, {"queue": (0, 1), "prefill": (1, 2), "decode": (2, 2)}),  # cancelled with a token on its way
        (1.0, 2.0, {"queue": (0, 1), "prefill": (1, 2), "decode": (2, 2)}),
        (3.0, None, {"queue": (0, 2), "prefill": (2, 2)}),
        (None, None, {"queue": (0, 2)}),
    ],
)
def test_no_phase_outlasts_its_request(spans, began, first_token, want):
    request = GenerateRequest("mine", (97,), (SamplingParams(),), 5)
    live = LiveRequest(1, request, None, [], [], received=0.0, began=began, first_token=first_token)
    live.ended, live.outcome = 2.0, "cancelled"
    RequestTracer(spans.provider, clock=lambda: 0.0).record(live)
    found = {span.name: span for span in spans.get_finished_spans()}
    zero = found["preheat.request"].start_time
    seconds = {name: ((span.start_time - zero) / 1e9, (span.end_time - zero) / 1e9) for name, span in found.items()}
    assert seconds == want | {"preheat.request": (0, 2)}


DEAD_COLLECTOR = """
import sys, threading, types
from opentelemetry.sdk.trace.export import SpanExporter

class OTLPSpanExporter(SpanExporter):
    def export(self, spans):
        print("exporting", flush=True)
        threading.Event().wait()  # for ever

module = types.ModuleType("opentelemetry.exporter.otlp.proto.http.trace_exporter")
module.OTLPSpanExporter = OTLPSpanExporter
sys.modules[module.__name__] = module
from server.orchestrator.tracing import ENDPOINT, open_tracer
tracer = open_tracer("tiny", {ENDPOINT: "http://127.0.0.1:4318"})
tracer._tracer.start_span("preheat.request").end()
print(tracer.close(0.2), flush=True)
"""


def test_the_end_of_the_process_does_not_wait_for_a_dead_collector():
    """OpenTelemetry's own hook would wait for 30 s."""
    done = subprocess.run([sys.executable, "-c", DEAD_COLLECTOR], capture_output=True, text=True, timeout=25)
    assert (done.returncode, done.stdout.split()) == (0, ["exporting", "False"]), done.stderr


def test_what_is_left_is_sent_at_the_end(spans):
    provider = TracerProvider(shutdown_on_exit=False)
    processor = BatchSpanProcessor(spans, schedule_delay_millis=10**6)
    provider.add_span_processor(processor)
    tracer = RequestTracer(provider)
    provider.get_tracer("test").start_span("last").end()
    assert spans.get_finished_spans() == () and tracer.close(10)
    assert [span.name for span in spans.get_finished_spans()] == ["last"]
    processor.shutdown()


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
