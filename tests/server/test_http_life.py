"""The proxy's life: starting, draining, clients that leave or do not read, keys, TLS, several upstreams, death of its
server."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from front_doors import NAME, open_doors

from engine.mock import Table
from server.config.commands import ServeConfig
from server.errors import StartError
from server.proxy import process
from server.proxy.metrics import merge

TIMEOUT = 20.0
TLS = Path(__file__).with_name("tls")
ROOT = Path(__file__).resolve().parents[2]


def until(condition, timeout=TIMEOUT):
    """Waits for what another process does; there is no event to wait on from out here."""
    deadline, pause = time.monotonic() + timeout, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        pause.wait(0.01)


def outcome(doors, name):
    return doors.metrics.value("preheat_requests_total", outcome=name)


def test_starting_then_ready_then_draining():
    with open_doors(ready=False) as doors, httpx.Client(base_url=doors.http, timeout=TIMEOUT) as http:
        assert http.get("/health").status_code == 200
        early = http.get("/ready")
        assert (early.status_code, early.json()["state"]) == (503, "warming")
        refused = http.post("/generate", json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        doors.orchestrator.open()
        assert http.get("/ready").status_code == 200
        assert http.post("/generate", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        doors.orchestrator.drain(0)
        late = http.get("/ready")
        assert (late.status_code, late.json()["state"]) == (503, "draining")
        assert http.get("/health").status_code == 200
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        doors.grpc.fail("a thread died")
        dead = http.get("/health")
        assert dead.status_code == 503 and "a thread died" in dead.json()["error"]["message"]


def test_an_upstream_that_is_not_there():
    with socket.socket() as unused:  # bound, never listening
        unused.bind(("127.0.0.1", 0))
        proxy = process.start(ServeConfig(http_port=0), f"127.0.0.1:{unused.getsockname()[1]}")
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{proxy.port}", timeout=TIMEOUT) as http:
                assert http.get("/health").json() == {"status": "ok", "state": "connecting"}  # it may still come
                assert http.get("/ready").json()["state"] == "connecting"
                for answer in (
                    http.post("/generate", json={"prompt": "a"}),
                    http.get("/v1/models"),
                    http.get("/metrics"),
                    http.get("/warmup"),
                ):
                    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
                    assert "retry-after" in answer.headers
        finally:
            proxy.stop()
        assert proxy.poll() == 0


def test_a_server_that_went_away_is_dead():
    with open_doors() as doors, httpx.Client(base_url=doors.http, timeout=TIMEOUT) as http:
        assert http.get("/health").status_code == 200
        doors.grpc.stop(0)
        assert http.get("/health").status_code == 503
        assert http.post("/generate", json={"prompt": "a"}).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_a_client_that_leaves_cancels(doors_for_cancel, path, stream):
    doors = doors_for_cancel
    before = outcome(doors, "cancelled")
    calls = 2 if path == "/v1/completions" else 1  # one for each prompt
    gate = doors.engine.gate("generate")
    asked: dict[str, Any] = {"prompt": ["a", "b"] if path == "/v1/completions" else "a"}
    if path == "/v1/chat/completions":
        asked = {"messages": [{"role": "user", "content": "a"}]}
    body = asked | {"max_tokens": 20, "stream": stream}
    with httpx.Client(base_url=doors.http, timeout=TIMEOUT) as http:
        if stream:
            with http.stream("POST", path, json=body) as answer:
                assert answer.status_code == 200
                assert gate.arrived()
                until(lambda: doors.orchestrator.load[0] == calls)
        else:
            sent = json.dumps(body).encode()
            host, port = doors.http.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(sent)}\r\n\r\n".encode() + sent)
                assert gate.arrived()
                until(lambda: doors.orchestrator.load[0] == calls)
    until(lambda: doors.orchestrator.load[0] == 0)
    gate.open()
    assert outcome(doors, "cancelled") == before + calls


@pytest.fixture(scope="module")
def doors_for_cancel():
    with open_doors() as doors:
        yield doors


def test_an_error_after_the_first_byte_is_an_event():
    with open_doors() as doors, httpx.Client(base_url=doors.http, timeout=TIMEOUT) as http:
        doors.engine.fault("generate", RuntimeError("the device is gone"))
        answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 9, "stream": True})
        assert answer.status_code == 200
        blocks = answer.text.split("\n\n")
        assert blocks[-2] == "data: [DONE]"
        error = json.loads(blocks[-3].removeprefix("data: "))["error"]
        assert set(error) == {"message", "type", "code", "param"} and "Traceback" not in error["message"]


def test_a_full_queue():
    with open_doors(slots=1, max_queue=0) as doors, httpx.Client(base_url=doors.http, timeout=TIMEOUT) as http:
        gate = doors.engine.gate("generate")
        with http.stream("POST", "/generate", json={"prompt": "a", "max_tokens": 9, "stream": True}) as running:
            assert gate.arrived()
            refused = http.post("/generate", json={"prompt": "b"})
            assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
            assert int(refused.headers["retry-after"]) >= 1
            gate.open()
            assert (
                "".join(json.loads(line[6:])["response"] for line in running.iter_lines() if line.startswith("data: {"))
                == "bcdefghij"
            )
        gate = doors.engine.gate("generate")
        # Of two prompts only one fits: neither runs.
        assert http.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 9}).status_code == 429
        until(lambda: doors.orchestrator.load[0] == 0)
        gate.open()


def test_a_timeout():
    with open_doors(request_timeout=0.2) as doors, httpx.Client(base_url=doors.http, timeout=TIMEOUT) as http:
        gate = doors.engine.gate("generate")
        answer = http.post("/generate", json={"prompt": "a", "max_tokens": 9})
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
        gate.open()


def test_a_reader_that_does_not_read_holds_nobody_up():
    with (
        open_doors(Table({97: {98: 1.0}, 98: {97: 1.0}})) as doors,
        httpx.Client(base_url=doors.http, timeout=TIMEOUT) as http,
    ):
        body = json.dumps({"prompt": [[97]] * 8, "max_tokens": 60, "logprobs": 5, "stream": True, "n": 2}).encode()
        host, port = doors.http.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(
                f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
            )
            until(lambda: outcome(doors, "ok") == 8)
            assert http.post("/generate", json={"prompt": "a", "max_tokens": 1}).json() == {"response": "b"}


def test_api_keys_over_http():
    with open_doors(api_key=("k1", "k2")) as doors, httpx.Client(base_url=doors.http, timeout=TIMEOUT) as http:
        for path in ("/health", "/ready", "/metrics", "/warmup", "/"):
            assert http.get(path).status_code == 200
        for key in ("Bearer k1", "bearer k2"):
            headers = {"authorization": key}
            assert http.post("/generate", json={"prompt": "a", "max_tokens": 1}, headers=headers).status_code == 200
            assert http.get("/v1/models", headers=headers).status_code == 200
        for headers in (
            {},
            {"authorization": "k1"},
            {"authorization": "Bearer k"},
            {"authorization": "Bearer k11"},
            {"authorization": "Basic k1"},
            {"authorization": "Bearer"},
            {"authorization": b"Bearer \xff"},
        ):
            for answer in (
                http.post("/generate", content=b"{", headers=headers),
                http.get("/v1/models", headers=headers),
            ):
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"


def test_tls_over_http():
    options = {"tls_cert": TLS / "test_cert.pem", "tls_key": TLS / "test_key.pem"}
    trust = ssl.create_default_context(cafile=str(TLS / "test_cert.pem"))
    with open_doors(config=options) as doors, httpx.Client(base_url=doors.http, timeout=TIMEOUT, verify=trust) as http:
        assert http.post("/generate", json={"prompt": "a", "max_tokens": 1}).json() == {"response": "b"}


def test_a_taken_port():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StartError, match=f"--http-port {port}"):
            process.start(ServeConfig(http_port=port), "127.0.0.1:1")


def test_several_upstreams_share_the_load_and_stand_in():
    with open_doors(http=False) as one, open_doors(http=False) as two:
        command = [
            sys.executable,
            "-m",
            "server",
            "proxy",
            "--http-port",
            "0",
            "--upstream",
            f"{one.grpc.address},{two.grpc.address}",
        ]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as proxy:
            try:
                line = next(line for line in proxy.stderr if "serving HTTP on" in line)
                url = next(word for word in line.split() if word.startswith("http://"))
                with httpx.Client(base_url=url, timeout=TIMEOUT) as http:
                    assert http.get("/ready").status_code == 200
                    gates = [doors.engine.gate("generate") for doors in (one, two)]
                    with (
                        http.stream("POST", "/generate", json={"prompt": "a", "max_tokens": 3, "stream": True}),
                        http.stream("POST", "/generate", json={"prompt": "a", "max_tokens": 3, "stream": True}),
                    ):
                        assert all(gate.arrived() for gate in gates)  # one each
                        for gate in gates:
                            gate.open()
                    texts = http.get("/metrics").text
                    assert f'preheat_ready{{upstream="{one.grpc.address}"}} 1.0' in texts
                    assert texts.count("# TYPE preheat_ready gauge") == 1
                    one.orchestrator.drain(TIMEOUT)
                    for _ in range(4):
                        assert http.post("/generate", json={"prompt": "a", "max_tokens": 1}).json() == {"response": "b"}
                    assert http.get("/ready").status_code == 200
                    two.orchestrator.drain(TIMEOUT)
                    assert http.post("/generate", json={"prompt": "a", "max_tokens": 1}).status_code == 503
            finally:
                proxy.send_signal(signal.SIGTERM)
                proxy.wait(TIMEOUT)
            assert proxy.returncode == 0


def test_a_proxy_finds_an_orchestrator_that_comes_back():
    with open_doors(http=False) as doors:
        port = doors.grpc.port
        command = [sys.executable, "-m", "server", "proxy", "--http-port", "0", "--upstream", f"127.0.0.1:{port}"]
        proxy = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        line = next(line for line in proxy.stderr if "serving HTTP on" in line)
        url = next(word for word in line.split() if word.startswith("http://"))
        assert httpx.post(f"{url}/generate", json={"prompt": "a", "max_tokens": 1}).json() == {"response": "b"}
    try:
        assert httpx.post(f"{url}/generate", json={"prompt": "a"}).status_code == 503
        assert httpx.get(f"{url}/health").json()["state"] == "unreachable"
        with open_doors(http=False, port=port):
            until(lambda: httpx.get(f"{url}/ready").status_code == 200)
            assert httpx.get(f"{url}/health").status_code == 200
            assert httpx.post(f"{url}/generate", json={"prompt": "a", "max_tokens": 1}).json() == {"response": "b"}
    finally:
        with proxy:
            proxy.terminate()
    assert proxy.returncode == 0


def test_the_proxy_ends_when_its_server_is_killed():
    program = (
        "import sys, time\n"
        "from server.config.commands import ServeConfig\n"
        "from server.proxy import process\n"
        "proxy = process.start(ServeConfig(http_port=0), '127.0.0.1:1')\n"
        "print(proxy.port, proxy.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        port, pid = server.stdout.readline().split()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT) as http:
            assert http.get("/health").status_code == 200
        server.kill()
    until(lambda: not alive(int(pid)))


def alive(pid):
    """A process that has ended may wait for its adoptive parent to collect it."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False


def test_secrets_are_not_on_the_command_line():
    proxy = process.start(ServeConfig(http_port=0, api_key=("hunter2",)), "127.0.0.1:1")
    try:
        command = Path(f"/proc/{proxy.pid}/cmdline")
        if command.exists():  # Linux
            assert b"hunter2" not in command.read_bytes()
    finally:
        proxy.stop()


def test_merged_metrics_say_whose_they_are():
    text = '# HELP a_total of a\n# TYPE a_total counter\na_total{x="1"} 2.0\n'
    assert merge({"h:1": text}, labelled=False) == text
    assert merge({"h:1": text, "h:2": text}, labelled=True).splitlines() == [
        "# HELP a_total of a",
        "# TYPE a_total counter",
        'a_total{upstream="h:1",x="1"} 2.0',
        'a_total{upstream="h:2",x="1"} 2.0',
    ]


def test_the_served_name_is_what_clients_see():
    with open_doors() as doors:
        assert httpx.get(f"{doors.http}/v1/models", timeout=TIMEOUT).json()["data"][0]["id"] == NAME
