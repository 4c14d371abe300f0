"""A device that runs out of memory in a decode step, in JAX's own words: who hears of it, and how soon."""

from __future__ import annotations

import threading
import time

import httpx
import jax
import pytest
from front_doors import open_doors

from server.client import Client
from server.errors import InternalError

WAIT = 20.0
HEALTH_SECONDS = 5.0


def test_out_of_memory_in_a_decode_step_is_named_to_all_and_ends_the_server(caplog, monkeypatch):
    deaths, died = [], threading.Event()
    heard = []
    with open_doors() as doors, Client(doors.grpc.address, timeout=WAIT) as client:

        def on_death(error):
            deaths.append(error)
            died.set()

        doors.orchestrator.on_death = on_death
        error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.")
        gate = doors.engine.gate("generate")
        accepted, submit = threading.Semaphore(0), doors.orchestrator.submit

        def counted_submit(*arguments, **keywords):
            ticket = submit(*arguments, **keywords)
            accepted.release()
            return ticket

        monkeypatch.setattr(doors.orchestrator, "submit", counted_submit)

        def ask(prompt):
            with pytest.raises(InternalError) as caught:
                client.generate(prompt, max_tokens=20)
            heard.append(caught.value.message)

        threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in ("abc", "xyz")]
        for thread in threads:
            thread.start()
        assert gate.arrived() and all(accepted.acquire(timeout=WAIT) for _ in threads)
        doors.engine.fault("generate", error, when=lambda call: call.step > 0)
        began = time.monotonic()
        gate.open()
        assert died.wait(HEALTH_SECONDS)
        with httpx.Client(base_url=doors.http) as http:
            health = http.get("/health", timeout=HEALTH_SECONDS)
        assert health.status_code == 503 and time.monotonic() - began < HEALTH_SECONDS
        for thread in threads:
            thread.join(WAIT)
        assert doors.metrics.value("preheat_requests_total", outcome="error") == 2
    assert deaths == [error]
    assert len(heard) == 2 and all("the device ran out of memory" in m and "RESOURCE_EXHAUSTED" in m for m in heard)
    assert "the generate thread died" in caplog.text
    assert "RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes." in caplog.text
