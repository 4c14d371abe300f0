"""Starting, restarting, failing to start, and ending, as an operator sees it."""

import pathlib
import signal
import socket

import httpx
import pytest
from conftest import OPTIONS, TINY
from server_process import PRODUCTION, ServerProcess, serving, wait_until

from tests.golden import known


def codes(server):
    return httpx.get(f"{server.http}/health").status_code, httpx.get(f"{server.http}/ready").status_code


def test_not_ready_until_ready_then_a_second_start_makes_nothing(tmp_path):
    cache = tmp_path / "cache"
    options = ("--slots", "2", "--max-len", "64", "--prefill-buckets", "16", "--warmup", "aot")
    server = ServerProcess(TINY, cache, *options, environment=PRODUCTION)
    try:
        server.wait_listening()
        wait_until(lambda: httpx.get(f"{server.http}/health").status_code == 200)
        response = httpx.get(f"{server.http}/ready")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "unavailable"
        assert httpx.post(f"{server.http}/generate", json={"prompt": "a", "max_tokens": 1}).status_code == 503
        assert server.warmup()["state"] in ("loading", "warming")
        server.wait_ready()
        assert codes(server) == (200, 200)
        cold = server.warmup()
        answer = httpx.post(f"{server.http}/generate", json={"prompt": "hello", "max_tokens": 20}).json()
        assert server.stop() == 0
    finally:
        server.kill()
    with serving(TINY, cache, *options, environment=PRODUCTION) as server:
        warm = server.warmup()
        assert {program["source"] for program in cold["programs"]} == {"compiled"}
        assert {program["source"] for program in warm["programs"]} == {"aot"}, server.log
        assert server.metric('preheat_xla_compiles_total{phase="startup"}') == 0
        assert server.metric('preheat_xla_traces_total{phase="startup"}') == 0
        assert httpx.post(f"{server.http}/generate", json={"prompt": "hello", "max_tokens": 20}).json() == answer
        server.assert_nothing_compiled()


def test_a_second_manual_start_compiles_nothing(cache):
    options = ("--slots", "1", "--max-len", "64", "--prefill-buckets", "16", "--warmup", "manual")
    with serving(TINY, cache, *options):
        pass
    with serving(TINY, cache, *options) as server:
        assert {program["source"] for program in server.warmup()["programs"]} == {"cache"}
        assert server.metric('preheat_xla_compiles_total{phase="startup"}') == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_ready_ends_at_once(tmp_path, number, short_folder):
    server = ServerProcess(TINY, tmp_path / "cache", *OPTIONS, environment={"TMPDIR": str(short_folder)})
    try:
        server.wait_listening()
        assert list(short_folder.glob("preheat-serve-*/grpc.sock"))
        server.process.send_signal(number)
        assert server.wait(10) == 128 + number
        assert not list(short_folder.glob("preheat-serve-*"))
    finally:
        server.kill()


def failed_start(tmp_path, model, *options) -> str:
    server = ServerProcess(model, tmp_path / "cache", *options)
    try:
        assert server.wait(60) == 1
        assert "Traceback" not in server.log
        return server.log
    finally:
        server.kill()


def test_port_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"--http-port {port}" in failed_start(tmp_path, TINY, "--http-port", port)
        assert f"--grpc-port {port}" in failed_start(tmp_path, TINY, "--grpc-port", port)


def test_missing_weights_are_named(tmp_path):
    model = tmp_path / "model"
    known.make(model, known.spread(1))
    (model / "model.safetensors").unlink()
    assert "safetensors" in failed_start(tmp_path, model)


def test_too_large_for_the_budget_says_what_fits(tmp_path):
    log = failed_start(tmp_path, TINY, "--memory", "3MiB", "--slots", "64", "--max-len", "512")
    assert "budget is 3.00 MiB" in log
    assert "--slots" in log


def test_unknown_model(tmp_path):
    assert "nowhere" in failed_start(tmp_path, pathlib.Path("/nowhere/at/all"))
