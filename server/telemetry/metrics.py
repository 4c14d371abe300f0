"""Every Prometheus metric of the server, in one object with a registry of its own.

Counters and histograms are moved where things happen (orchestrator, compile guard); gauges about the present are read
from the scheduler whenever somebody looks (`bind`), so they cannot be left behind by an abort.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

Outcome = Literal["ok", "error", "rejected", "cancelled", "invalid"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "error", "rejected", "cancelled", "invalid")
PHASES = ("startup", "serving")

# Seconds; from a hit on a small model to a long answer in a full queue.
LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

disable_created_metrics()  # the *_created series double the output and nobody reads them


class Metrics:
    """The metrics, by attribute; their names are what operators see."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(name, help, labels, registry=self.registry)

        def gauge(name: str, help: str, *labels: str) -> Gauge:
            return Gauge(name, help, labels, registry=self.registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, help, buckets=buckets, registry=self.registry)

        self.requests = counter("preheat_requests", "Requests received, by how they ended.", "outcome")
        self.prompt_tokens = counter("preheat_prompt_tokens", "Prompt tokens of requests that began.")
        self.prefilled_tokens = counter("preheat_prefilled_tokens", "Tokens actually computed by prefill.")
        self.cached_prompt_tokens = counter(
            "preheat_cached_prompt_tokens", "Tokens taken from the prefix cache, not computed."
        )
        self.generated_tokens = counter(
            "preheat_generated_tokens", "Tokens generated, final EOS and stop tokens included."
        )
        self.xla_compiles = counter("preheat_xla_compiles", "Programs compiled by XLA.", "phase")
        self.xla_traces = counter("preheat_xla_traces", "Functions traced by JAX.", "phase")

        self.requests_running = gauge("preheat_requests_running", "Requests with a sequence in prefill or decode.")
        self.requests_waiting = gauge("preheat_requests_waiting", "Requests of which no sequence has begun.")
        self.slots_used = gauge("preheat_slots_used", "Slots that hold a sequence.")
        self.kv_pages_used = gauge(
            "preheat_kv_pages_used", "KV pages held by sequences; cached pages in no use are free."
        )
        self.kv_pages_total = gauge("preheat_kv_pages_total", "KV pages that sequences can hold.")
        self.ready = gauge("preheat_ready", "1 when warmup is complete and requests are accepted.")
        self.startup_seconds = gauge("preheat_startup_seconds", "Time each stage of the start took.", "stage")

        self.time_to_first_token = histogram(
            "preheat_time_to_first_token_seconds", "From receiving a request to its first token.", LATENCY_BUCKETS
        )
        self.time_per_output_token = histogram(
            "preheat_time_per_output_token_seconds", "Mean gap between the tokens of a finished sequence.", STEP_BUCKETS
        )
        self.request_seconds = histogram(
            "preheat_request_seconds", "From receiving a request to its end.", LATENCY_BUCKETS
        )
        self.queue_seconds = histogram(
            "preheat_queue_seconds", "From receiving a request to its prefill.", LATENCY_BUCKETS
        )
        self.decode_step_seconds = histogram("preheat_decode_step_seconds", "Time of one decode step.", STEP_BUCKETS)
        self.batch_size = histogram("preheat_batch_size", "Rows that were active in a decode step.", BATCH_BUCKETS)

        for outcome in OUTCOMES:  # so that every series is there before its first event
            self.requests.labels(outcome=outcome)
        for phase in PHASES:
            self.xla_compiles.labels(phase=phase)
            self.xla_traces.labels(phase=phase)

    def outcome(self, outcome: Outcome) -> None:
        """Counts the end of one request. Each request received is counted exactly once; the front doors count what they
        refuse before it reaches the orchestrator (``invalid``)."""
        self.requests.labels(outcome=outcome).inc()

    def bind(
        self,
        *,
        running: Callable[[], float],
        waiting: Callable[[], float],
        slots_used: Callable[[], float],
        pages_used: Callable[[], float],
        pages_total: float,
        ready: Callable[[], float],
    ) -> None:
        """Connects the gauges about the present to where their values live; called by the orchestrator."""
        self.requests_running.set_function(running)
        self.requests_waiting.set_function(waiting)
        self.slots_used.set_function(slots_used)
        self.kv_pages_used.set_function(pages_used)
        self.kv_pages_total.set(pages_total)
        self.ready.set_function(ready)

    def render(self) -> str:
        """Everything in Prometheus' text format, version 0.0.4."""
        return generate_latest(self.registry).decode()

    def value(self, sample: str, **labels: str) -> float:
        """The present value of one series, by its exported name; for tests and the page for people."""
        value = self.registry.get_sample_value(sample, labels)
        if value is None:
            raise KeyError(f"no metric {sample} with labels {labels}")
        return value
