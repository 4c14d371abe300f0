"""What the commands do, put together: ``serve``, ``generate``, ``plan``, ``build``, ``cache``.

The life of ``preheat serve``::

    main thread     opens both ports, starts the proxy, then waits for what ends the server: a signal, a failed start, a dead
                    thread, a dead proxy
    start thread    model -> warm engine (server/start/warm_engine.py) -> orchestrator -> proof -> ready

The ports answer from the first second, with 503 / UNAVAILABLE until ready. Before ready a signal ends the process at once
(128 + signal); afterwards the first one drains, the second one ends at once.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Sequence

from server.client import Client
from server.config.commands import ServeConfig, resolve_max_queue
from server.errors import StartError
from server.grpc.server import PROOF_METADATA, GrpcServer
from server.orchestrator.orchestrator import Orchestrator
from server.orchestrator.tracing import open_tracer
from server.proxy import process as proxy_process
from server.start.proof import prove
from server.start.warm_engine import WarmEngine, open_model, warm_engine
from server.telemetry.logs import configure_logging
from server.telemetry.metrics import Metrics
from warmup.guard import Guard, Kind, Phase
from warmup.report import WarmupReport

logger = logging.getLogger("preheat")

PROGRESS_SECONDS = 5.0  # between lines on how far warming is
LAST_SPANS = 2.0  # seconds that a collector of traces has to take what is left
LAST_ANSWERS = 2.0  # seconds for answers on their way, health's among them, before the process ends


def serve(config: ServeConfig, started: float) -> int:
    """Serves until a signal; returns the exit code. ``started`` is when the process began, `time.monotonic` seconds."""
    return Server(config, started).run()


def rehearse(config: ServeConfig) -> tuple[WarmEngine, WarmupReport]:
    """Fills the warmup cache as a start in mode aot does, the proof included, and serves nobody.

    Raises:
      StartError: as a start.
    """
    private = dataclasses.replace(
        config, warmup="aot", host="127.0.0.1", grpc_port=0, no_http=True, metrics_port=None, api_key=()
    )
    server = Server(private, time.monotonic())
    return server.rehearse(), server.report


class Server:
    """One server process. See the module."""

    def __init__(self, config: ServeConfig, started: float):
        configure_logging(config.log_format)
        self.config = config
        self.tracer = open_tracer(config.served_model_name)
        self.metrics = Metrics()
        self.guard = Guard(strict=config.strict_compiles, on_event=self._count)
        self.report = WarmupReport(config.warmup, guard=self.guard, started=started)
        self.report.set_stage("import", time.monotonic() - started)
        self.grpc = GrpcServer(
            config.served_model_name,
            metrics=self.metrics,
            host=config.host,
            port=config.grpc_port,
            slots=config.slots,
            warmup_report=self.report.snapshot,
            api_keys=config.api_key,
            tls=_read_tls(config),
            request_timeout=config.request_timeout,
            on_death=lambda error: self._ends.put(error),
        )
        self.orchestrator: Orchestrator | None = None
        self.proxy: proxy_process.ProxyProcess | None = None
        self._ready = False
        self._signalled = False
        self._started = threading.Event()  # the start has ended, well or not
        self._ends: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()  # a signal, or what went wrong

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            self.grpc.start()
            if not self.config.no_http:
                self.proxy = proxy_process.start(self.config, self.grpc.local_address)
                threading.Thread(target=self._watch_proxy, name="watch-proxy", daemon=True).start()
            if self.config.metrics_port is not None:
                _serve_metrics(self.config, self.config.metrics_port, self.metrics)
            logger.info("serving %sgRPC on %s; loading %s", self._http_part(), self.grpc.address, self.config.model)
            threading.Thread(target=self._start, name="start", daemon=True).start()
            threading.Thread(target=self._log_progress, name="progress", daemon=True).start()
            return self._wait()
        finally:
            if self.proxy is not None:
                self.proxy.stop()
            self.grpc.stop()
            if self.tracer is not None and not self.tracer.close(LAST_SPANS):
                logger.warning("the last traces are lost: their collector did not answer within %g s", LAST_SPANS)

    def rehearse(self) -> WarmEngine:
        """All of a start up to the proof, with nothing open but gRPC, and the end. What the start stored has been proven then, so the
        next one needs a single request."""
        with self.guard:
            try:
                self.grpc.start()
                return self._warm_up()
            finally:
                if self.orchestrator is not None:
                    self.orchestrator.close()
                self.grpc.stop(grace=0.0)

    # The start

    def _start(self) -> None:
        try:
            self._make_ready()
        except BaseException as error:
            self.report.fail(str(error))
            self.grpc.fail(str(error))
            self._ends.put(error)
        finally:
            self._started.set()

    def _log_progress(self) -> None:
        while not self._started.wait(PROGRESS_SECONDS):
            if line := self.report.progress():
                logger.info("warming: %s", line)

    def _warm_up(self) -> WarmEngine:
        opened = open_model(self.config)
        warm = warm_engine(self.config, opened, self.report, self.guard)
        self.orchestrator = Orchestrator(
            warm.engine,
            opened.tokenizer,
            metrics=self.metrics,
            max_queue=resolve_max_queue(self.config),
            on_death=self._ends.put,
            on_ended=self.tracer.record if self.tracer else None,
        )
        self.orchestrator.start()
        self.grpc.attach(
            self.orchestrator,
            opened.tokenizer,
            opened.limits(self.config.served_model_name, warm.engine.config.max_len),
            self.config.tool_format,
        )
        if self.config.warmup != "none":
            self._prove(warm, [adapter.name for adapter in opened.adapters])
        return warm

    def _make_ready(self) -> None:
        warm = self._warm_up()
        assert self.orchestrator is not None
        self.guard.ready()
        self.report.ready()
        self.orchestrator.open()
        self._ready = True
        self.grpc.prepare_guides()
        startup = self.report.snapshot()["startup"]
        for stage, seconds in startup.items():
            self.metrics.startup_seconds.labels(stage=stage.removeprefix("seconds_")).set(seconds or 0.0)
        for line in warm.engine.explain().splitlines():
            logger.info("%s", line)
        if (model := self.grpc.model) is not None and model.tool_use is not None:
            logger.info("%s", model.tool_use.explain())
        logger.info("programs of this server, times in seconds, sizes in MiB:\n%s", self.report.table())
        logger.info(
            "ready after %.1f s (imports %.1f, weights %.1f, programs %.1f, proof %.1f): %s%s on gRPC %s",
            startup["seconds_total"] or 0.0, startup["seconds_import"] or 0.0, startup["seconds_weights"] or 0.0,
            startup["seconds_programs"] or 0.0, startup["seconds_proof"] or 0.0, self._http_part(),
            self.config.served_model_name, self.grpc.address,
        )  # fmt: skip

    def _prove(self, warm: WarmEngine, adapters: Sequence[str]) -> None:
        key = ((PROOF_METADATA, self.grpc.proof_key),)
        api_key = self.config.api_key[0] if self.config.api_key else None
        with self.report.stage("proof"), Client(self.grpc.local_address, api_key=api_key, metadata=key) as client:
            began = time.monotonic()
            sent = prove(
                client, warm.engine.config, warm.engine.model.vocab_size, self.guard,
                full=not warm.prepared.unchanged, adapters=adapters,
            )  # fmt: skip
            seconds = time.monotonic() - began
        if not warm.prepared.unchanged:
            warm.prepared.record_proof(seconds, sent)
        logger.info("proof: %d requests through the whole path in %.2f s, nothing traced or compiled", sent, seconds)

    def _count(self, kind: Kind, phase: Phase) -> None:
        counter = {"trace": self.metrics.xla_traces, "compile": self.metrics.xla_compiles}.get(kind)
        if counter is not None:
            counter.labels(phase=phase).inc()

    # The end

    def _on_signal(self, number: int, frame: object) -> None:
        if not self._ready or self._signalled:
            self._end_now(number)
        self._signalled = True
        self._ends.put(number)

    def _end_now(self, number: int) -> None:
        if self.proxy is not None:
            self.proxy.kill()
        self.grpc.remove_folder()
        os._exit(128 + number)

    def _wait(self) -> int:
        """Waits for what ends the server, and ends it; returns the exit code."""
        end = self._ends.get()
        if isinstance(end, int):
            logger.info("%s: draining for at most %g s", signal.Signals(end).name, self.config.drain_timeout)
            assert self.orchestrator is not None  # signals before ready do not come here
            drained = self.orchestrator.drain(self.config.drain_timeout)
            if not drained and self.orchestrator.state != "failed":  # a thread's death is in the log already
                logger.warning("--drain-timeout is over: the requests still running were cut off")
            self.orchestrator.close()
            return 0 if drained else 1
        if isinstance(end, StartError):
            raise end
        reason = str(end) or type(end).__name__
        if "RESOURCE_EXHAUSTED" in reason:
            reason = f"the device ran out of memory ({reason}); lower --memory, --slots or --max-len"
        logger.error("the server ends: %s", reason, exc_info=end)
        self.report.fail(reason)
        self.grpc.fail(reason)
        if self.orchestrator is not None:
            self.orchestrator.close()  # what still runs ends with an error
        time.sleep(LAST_ANSWERS)  # those in flight hear of it, and whoever asks for health
        return 1

    def _watch_proxy(self) -> None:
        assert self.proxy is not None
        code = self.proxy.wait()
        self._ends.put(RuntimeError(f"the HTTP proxy ended with code {code}"))

    def _http_part(self) -> str:
        return f"HTTP on {proxy_process.url(self.config, self.proxy.port)}, " if self.proxy else ""


def _read_tls(config: ServeConfig) -> tuple[bytes, bytes] | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    return config.tls_cert.read_bytes(), config.tls_key.read_bytes()


def _serve_metrics(config: ServeConfig, port: int, metrics: Metrics) -> None:
    import prometheus_client

    try:
        server, _ = prometheus_client.start_http_server(port, config.host, metrics.registry)
    except OSError as error:
        raise StartError(
            f"--metrics-port {port}: cannot listen on {config.host}: {error.strerror}; choose another port"
        ) from None
    logger.info("metrics on http://%s:%d/metrics", config.host, server.server_port)
