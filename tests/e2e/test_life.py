"""A server that is killed takes its own HTTP proxy along (one that was started by itself stays: ``test_end.py``)."""

import contextlib
import os
import pathlib
import signal
import socket
import sys
import threading

import httpx
import pytest
from conftest import OPTIONS, TINY
from server_process import serving, wait_until


def ended(pid: int) -> bool:
    """Gone, or dead and not yet collected by whoever adopted it."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return any(line.split()[1] == "Z" for line in status.splitlines() if line.startswith("State:"))


def refused(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    with contextlib.closing(socket.socket()) as caller:
        caller.settimeout(5)
        return caller.connect_ex((host, int(port))) != 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("streaming", [False, True], ids=["idle", "streaming"])
def test_a_killed_server_takes_its_proxy_along(cache, streaming):
    with serving(TINY, cache, *OPTIONS, "--warmup", "aot") as server:
        proxy = server.proxy_pid
        assert not ended(proxy) and not refused(server.http)
        begun, over = threading.Event(), threading.Event()

        def read():
            body = {"prompt": [1, 2, 3], "max_tokens": 150, "ignore_eos": True, "stream": True}
            with contextlib.suppress(httpx.HTTPError):
                while True:  # one stream after the other, so that there is one whenever the kill comes
                    with httpx.stream("POST", f"{server.http}/v1/completions", json=body, timeout=30) as answer:
                        answer.raise_for_status()
                        for _ in answer.iter_lines():
                            begun.set()
            over.set()

        if streaming:
            threading.Thread(target=read, daemon=True).start()
            assert begun.wait(30)
        server.process.kill()
        try:
            wait_until(lambda: ended(proxy), 10)
            assert refused(server.http)
        finally:
            with contextlib.suppress(ProcessLookupError):  # a failed test leaves no process behind
                os.kill(proxy, signal.SIGKILL)
        assert not streaming or over.wait(10)  # its client is not left hanging
