"""How real processes end, and what those who are connected then hear; clients that leave or do not read."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from conftest import OPTIONS, TINY
from server_process import ROOT, ServerProcess, wait_until

from server.client import Client
from server.errors import InternalError, Unavailable

SLOW = str(pathlib.Path(__file__).with_name("slow_server.py"))
LONG = 120  # tokens of a request that runs for seconds on a slow server
PROMPT = [1, 2, 3]
GAUGES = ("preheat_requests_running", "preheat_requests_waiting", "preheat_slots_used", "preheat_kv_pages_used")


@contextlib.contextmanager
def slow_server(cache, *options, step=0.02, **environment):
    """A ready server whose decode steps take a while."""
    environment = {"PYTHONPATH": str(ROOT), "TEST_STEP_SECONDS": str(step), **environment}
    server = ServerProcess(
        TINY, cache, *OPTIONS, "--warmup", "aot", *options, environment=environment, program=(SLOW,)
    )
    try:
        yield server.wait_ready()
    finally:
        server.kill()


class HttpStream(threading.Thread):
    """Reads a stream to its end."""

    def __init__(self, url, **body):
        super().__init__(daemon=True)
        self.url, self.body = url, {"prompt": PROMPT, "max_tokens": LONG, "ignore_eos": True, "temperature": 0, **body}
        self.begun = threading.Event()
        self.events = []
        self.start()

    def run(self):
        body = {**self.body, "stream": True}
        with (
            contextlib.suppress(httpx.RemoteProtocolError),  # a server that ends at once says nothing
            httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self.events.append(line[6:])
                    self.begun.set()

    def result(self):
        """(tokens seen or not, error message or None); the stream has ended as every stream does."""
        self.join(60)
        assert self.events[-1] == "[DONE]"
        events = [json.loads(event) for event in self.events[:-1]]
        errors = [event["error"]["message"] for event in events if "error" in event]
        reasons = [choice["finish_reason"] for event in events for choice in event.get("choices", ())]
        return reasons[-1] if reasons else None, errors[0] if errors else None


def grpc_stream(server, begun):
    """Reads a stream to its end, over gRPC; returns how many tokens came."""
    with Client(server.grpc) as client:
        count = 0
        for piece in client.stream(PROMPT, max_tokens=LONG, ignore_eos=True):
            count += len(piece.token_ids)
            begun.set()
        return count


@contextlib.contextmanager
def running(server):
    """A stream over HTTP, one over gRPC and a whole answer, all begun."""
    begun = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        over_http = HttpStream(server.http)
        over_grpc = threads.submit(grpc_stream, server, begun)
        body = {"prompt": PROMPT, "max_tokens": LONG, "ignore_eos": True}
        whole = threads.submit(httpx.post, f"{server.http}/v1/completions", json=body, timeout=60)
        assert over_http.begun.wait(30) and begun.wait(30)
        wait_until(lambda: server.metric("preheat_slots_used") == 3)
        yield over_http, over_grpc, whole


def idle(server):
    return not any(server.metric(name) for name in GAUGES)


def test_clients_that_leave_free_everything_and_sigterm_lets_the_others_finish(cache):
    with slow_server(cache, step=0.03) as server:
        with running(server):  # so that leaving is seen beside others
            used = server.metric("preheat_kv_pages_used")
            body = {"prompt": "left", "max_tokens": LONG, "ignore_eos": True}
            with httpx.stream("POST", f"{server.http}/generate", json={**body, "stream": True}) as answer:
                lines = answer.iter_lines()
                next(lines)
                assert server.metric("preheat_slots_used") == 4
            wait_until(lambda: server.metric("preheat_slots_used") == 3, 2)
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{server.http}/generate", json=body, timeout=0.3)
            wait_until(lambda: server.metric("preheat_slots_used") == 3, 2)
            with Client(server.grpc) as client:
                stream = client.stream("left", max_tokens=LONG, ignore_eos=True)
                next(stream)
                stream.close()
            wait_until(lambda: server.metric("preheat_slots_used") == 3, 2)
            assert server.metric('preheat_requests_total{outcome="cancelled"}') == 3
            assert server.metric("preheat_kv_pages_used") <= used + 12  # what the others have grown by
        wait_until(lambda: idle(server), 2)

        with running(server) as (over_http, over_grpc, whole):
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("SIGTERM: draining", 10)
            assert httpx.get(f"{server.http}/ready").json()["state"] == "draining"
            assert httpx.get(f"{server.http}/health").status_code == 200
            refused = httpx.post(f"{server.http}/generate", json={"prompt": "a"})
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            with Client(server.grpc) as client, pytest.raises(Unavailable, match="draining"):
                client.generate("a", max_tokens=1)
            assert over_http.is_alive() and not over_grpc.done() and not whole.done()
            assert over_http.result() == ("length", None)
            assert over_grpc.result(60) == LONG
            assert whole.result(60).json()["usage"]["completion_tokens"] == LONG
        assert server.wait() == 0
        assert "Traceback" not in server.log


def test_what_the_drain_timeout_cuts_off_gets_an_error(cache):
    with slow_server(cache, "--drain-timeout", "0.3", step=0.1) as server:
        with running(server) as (over_http, over_grpc, whole):
            server.process.send_signal(signal.SIGINT)
            assert "shutting down" in over_http.result()[1]
            with pytest.raises(Unavailable, match="shutting down"):
                over_grpc.result(60)
            assert whole.result(60).status_code == 503
        assert server.wait() == 1
        assert "cut off" in server.log


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(cache, second):
    with slow_server(cache, step=0.1) as server:
        stream = HttpStream(server.http)
        assert stream.begun.wait(30)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("SIGTERM: draining", 10)
        server.process.send_signal(second)
        assert server.wait(5) == 128 + second


def test_a_device_out_of_memory_ends_the_server_and_everybody_hears_it(cache, tmp_path):
    trigger = tmp_path / "now"
    with slow_server(cache, step=0.05, TEST_EXHAUSTED=str(trigger)) as server:
        with running(server) as (over_http, over_grpc, whole), httpx.Client(base_url=server.http) as watcher:
            assert watcher.get("/health").status_code == 200
            began = time.monotonic()
            trigger.touch()
            wait_until(lambda: watcher.get("/health").status_code == 503, 5)
            assert time.monotonic() - began < 5
            dead = watcher.get("/health").json()
            assert "RESOURCE_EXHAUSTED" in dead["error"]["message"]
            assert server.metric('preheat_requests_total{outcome="error"}') == 3
            assert watcher.post("/generate", json={"prompt": "a"}).status_code == 503
            assert "the device ran out of memory" in (heard := over_http.result()[1]) and "RESOURCE_EXHAUSTED" in heard
            with pytest.raises(InternalError, match="RESOURCE_EXHAUSTED"):
                over_grpc.result(60)
            answer = whole.result(60)
            assert answer.status_code == 500 and "RESOURCE_EXHAUSTED" in answer.json()["error"]["message"]
        assert server.wait(20) == 1
        assert "the generate thread died" in server.log
        assert "the server ends: the device ran out of memory (RESOURCE_EXHAUSTED" in server.log


def test_a_killed_proxy_ends_the_server(cache):
    with slow_server(cache, step=0.05) as server:
        begun = threading.Event()
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            over_grpc = threads.submit(grpc_stream, server, begun)
            assert begun.wait(30)
            os.kill(server.proxy_pid, signal.SIGKILL)
            with pytest.raises(Unavailable, match="shutting down"):
                over_grpc.result(60)
        assert server.wait(20) == 1
        assert "the HTTP proxy ended with code -9" in server.log


def test_a_killed_orchestrator_is_seen_by_its_proxies(cache):
    with slow_server(cache, "--no-http", step=0.05) as server:
        command = [sys.executable, "-m", "server", "proxy", "--http-port", "0", "--upstream", server.grpc]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as proxy:
            try:
                line = next(line for line in proxy.stderr if "serving HTTP on" in line)
                url = next(word for word in line.split() if word.startswith("http://"))
                wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200)
                stream = HttpStream(url)
                assert stream.begun.wait(30)
                server.process.kill()
                assert stream.result()[1]
                refused = httpx.post(f"{url}/generate", json={"prompt": "a"})
                assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
                health = httpx.get(f"{url}/health")
                assert (health.status_code, health.json()["state"]) == (503, "unreachable")
                assert httpx.get(f"{url}/ready").status_code == 503
            finally:
                proxy.send_signal(signal.SIGTERM)
                assert proxy.wait(20) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_server_takes_its_own_proxy_along(cache):
    """One that was started by itself stays, see above. Whoever reads a stream then is not left hanging."""
    with slow_server(cache, step=0.05) as server:
        proxy = server.proxy_pid
        stream = HttpStream(server.http)
        assert stream.begun.wait(30) and not ended(proxy)
        server.process.kill()
        try:
            wait_until(lambda: ended(proxy), 10)
        finally:
            with contextlib.suppress(ProcessLookupError):  # a failed test leaves no process behind
                os.kill(proxy, signal.SIGKILL)
        stream.join(10)
        assert not stream.is_alive()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.http}/health")


def ended(pid: int) -> bool:
    """Gone, or dead and not yet collected by whoever adopted it."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return any(line.split()[1] == "Z" for line in status.splitlines() if line.startswith("State:"))


def test_readers_that_never_read_hold_nobody_up_and_little_memory(server):
    """Their requests run to the end, others are served, and what waits for them is small."""
    host, port = server.http.removeprefix("http://").split(":")
    options = {"max_tokens": 150, "ignore_eos": True, "logprobs": 5, "n": 2, "stream": True}
    body = json.dumps({"prompt": [[7, 8]] * 4, **options})
    request = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
    done = 'preheat_requests_total{outcome="ok"}'
    before, rss = server.metric(done), resident(server)
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            silent = stack.enter_context(socket.socket())
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.connect((host, int(port)))
            silent.sendall(request)
        wait_until(lambda: server.metric(done) == before + 24, 120)
        assert httpx.post(f"{server.http}/generate", json={"prompt": "a", "max_tokens": 3}).status_code == 200
        assert resident(server) - rss < 100 * 2**20
    wait_until(lambda: idle(server))


def resident(server) -> int:
    """Bytes of the server and its proxy."""
    both = (server.process.pid, server.proxy_pid)
    pages = [int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in both]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")
