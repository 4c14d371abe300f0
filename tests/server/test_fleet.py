"""A proxy over three upstreams, by HTTP: one that dies, all of them restarted one after the other, a list that changes, one that
hangs. The upstreams are whole servers on the mock engine, whose gates hold requests where a test wants them: behind the first token
(gate "generate") or before it (gate "prefill"). ``successor`` continues "a" with "bcd"."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import re
import socket
import threading

import httpx
import pytest
from front_doors import Doors, open_doors, proxy_process
from test_http_life import until

from server.client import AsyncClient
from server.errors import Unreachable

TIMEOUT = 20.0
TOKENS = 9
ANSWERS = {first: "".join(chr(ord(first) + step) for step in range(1, TOKENS + 1)) for first in "abcdefghijkl"}


class Stream(threading.Thread):
    """One streaming client. ``begun`` once it has some of the answer."""

    def __init__(self, url: str, prompt: str):
        super().__init__()
        self.prompt, self.text, self.error = prompt, "", None
        self.begun = threading.Event()
        self._url = url
        self.start()

    def run(self) -> None:
        body = {"prompt": self.prompt, "max_tokens": TOKENS, "stream": True}
        with httpx.stream("POST", f"{self._url}/generate", json=body, timeout=TIMEOUT) as answer:
            if answer.status_code != 200:
                self.error = json.loads(answer.read())["error"]
                return
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    self.error = event.get("error", self.error)
                    self.text += event.get("response", "")
                    if self.text:
                        self.begun.set()

    def whole(self) -> bool:
        self.join(TIMEOUT)
        assert not self.is_alive()
        return self.error is None and self.text == ANSWERS[self.prompt[-1]]


def metric(url: str, name: str, **labels: str) -> float:
    """The sum over upstreams."""
    found = re.findall(rf"^preheat_proxy_upstream_{name}\{{(.*)\}} (\S+)$", httpx.get(f"{url}/metrics", timeout=TIMEOUT).text, re.MULTILINE)
    return sum(float(value) for where, value in found if all(f'{key}="{label}"' in where for key, label in labels.items()))


def running(doors: Doors) -> int:
    return doors.orchestrator.load[0]


@pytest.fixture
def three():
    with contextlib.ExitStack() as stack:
        fleet = [stack.enter_context(open_doors(http=False)) for _ in range(3)]
        yield fleet
        for doors in fleet:
            doors.engine.open_gates()


def upstreams(fleet):
    return "--upstream", ",".join(doors.grpc.address for doors in fleet)


def test_one_is_killed_under_load(three):
    with proxy_process(*upstreams(three)) as url:
        until(lambda: metric(url, "state", state="ready") == 3)
        gates = [doors.engine.gate("generate") for doors in three]
        begun = []
        for letter in "abc":  # one each, each with its first token
            begun.append(Stream(url, letter))
            assert begun[-1].begun.wait(TIMEOUT)
        late = []
        for letter in "def":  # one each, none with its first token: nobody takes it up while the others stand
            late.append(Stream(url, letter))
            until(lambda: sum(running(doors) for doors in three) == 3 + len(late))
        assert [running(doors) for doors in three] == [2, 2, 2]
        victim, *others = three
        (lost,) = [stream for stream in begun if ord(stream.prompt) in asked(victim)]
        victim.grpc.stop(0)
        until(lambda: [running(doors) for doors in others] in ([3, 2], [2, 3]))  # the late one has moved
        for gate in gates:
            gate.open()
        assert [stream.whole() for stream in begun] == [stream is not lost for stream in begun]
        assert lost.error["code"] == "unavailable" and lost.text == ANSWERS[lost.prompt][0]
        assert all(stream.whole() for stream in late)
        assert metric(url, "retries_total") == metric(url, "retries_total", upstream=victim.grpc.address) == 1
        assert all(metric(url, "failures_total", upstream=doors.grpc.address) == 0 for doors in others)
        until(lambda: metric(url, "state", state="unreachable", upstream=victim.grpc.address) == 1)
        assert metric(url, "sequences") == metric(url, "unanswered_tokens") == 0


def asked(doors: Doors) -> set[int]:
    """The last tokens of the prompts that were computed there."""
    return {call.tokens[-1] for call in doors.engine.calls if call.verb == "prefill"}


def test_a_rolling_restart_under_load_loses_nothing():
    ended = threading.Event()
    with contextlib.ExitStack() as stack:
        life = [contextlib.ExitStack() for _ in range(3)]
        fleet = [each.enter_context(open_doors(http=False)) for each in life]
        url = stack.enter_context(proxy_process(*upstreams(fleet)))
        until(lambda: metric(url, "state", state="ready") == 3)

        def load() -> list[bool]:
            with httpx.Client(timeout=TIMEOUT) as http:
                done = []
                while not ended.is_set():
                    letter = "abcdefgh"[len(done) % 8]
                    answer = http.post(f"{url}/generate", json={"prompt": letter, "max_tokens": TOKENS})
                    done.append(answer.status_code == 200 and answer.json() == {"response": ANSWERS[letter]})
                return done

        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(3))
        clients = [pool.submit(load) for _ in range(3)]
        stack.callback(ended.set)
        for number, old in enumerate(fleet):
            gate = old.engine.gate("generate")
            assert gate.arrived()  # something is in flight there
            drained = threading.Thread(target=old.orchestrator.drain, args=(TIMEOUT,))
            drained.start()
            until(lambda old=old: metric(url, "state", state="draining", upstream=old.grpc.address) == 1)
            gate.open()
            drained.join(TIMEOUT)
            assert running(old) == 0
            life[number].close()
            fleet[number] = life[number].enter_context(open_doors(http=False, port=old.grpc.port))
            until(lambda old=old: metric(url, "state", state="ready", upstream=old.grpc.address) == 1)
        before = [metric(url, "requests_total", upstream=doors.grpc.address) for doors in fleet]
        until(lambda: all(
            metric(url, "requests_total", upstream=doors.grpc.address) > count for doors, count in zip(fleet, before, strict=True)
        ))  # fmt: skip
        ended.set()
        done = [answer for client in clients for answer in client.result()]
        assert len(done) > 20 and all(done)
        assert metric(url, "ejections_total") == metric(url, "failures_total") == 0
        for each in life:
            each.close()


def test_the_list_is_read_again(three, tmp_path):
    one, two, three_ = three
    file = tmp_path / "upstreams"
    file.write_text(one.grpc.address)
    with proxy_process("--upstream-file", str(file), "--upstream-refresh", "0.05") as url:
        until(lambda: httpx.get(f"{url}/ready", timeout=TIMEOUT).status_code == 200)
        gate = one.engine.gate("generate")
        stream = Stream(url, "a")
        assert stream.begun.wait(TIMEOUT)
        file.write_text(f"{two.grpc.address}\n{three_.grpc.address}\n")
        until(lambda: metric(url, "state", state="ready") == 2)
        assert one.grpc.address not in httpx.get(f"{url}/metrics").text
        for letter in "bcd":
            assert Stream(url, letter).whole()
        gate.open()
        assert stream.whole()  # what was on its way there is not cut off
        assert asked(one) == {ord("a")}


def test_one_that_takes_connections_and_says_nothing(three):
    with socket.socket() as mute, socket.socket() as nothing:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        nothing.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in (mute, nothing)]

        async def connect(address: str) -> bool:
            async with AsyncClient(address) as client:
                return await client.connect(0.2)

        with pytest.raises(Unreachable, match="no connection to .* within 0.2 s") as raised:
            asyncio.run(connect(addresses[0]))
        assert raised.value.reason == "unreachable"
        assert not asyncio.run(connect(addresses[1]))
        assert asyncio.run(connect(three[0].grpc.address))
        with proxy_process("--upstream", addresses[0], *upstreams(three[:1])) as url:
            until(lambda: httpx.get(f"{url}/ready", timeout=TIMEOUT).status_code == 200)
            for letter in "abcd":
                assert Stream(url, letter).whole()
            assert metric(url, "state", upstream=addresses[0], state="ready") == 0
            assert metric(url, "requests_total", upstream=addresses[0]) == 0


def test_the_same_beginning_goes_to_the_same_upstream(three):
    with proxy_process(*upstreams(three)) as url:
        until(lambda: metric(url, "state", state="ready") == 3)
        beginnings = [[*range(first, first + 40)] for first in (10, 60, 110, 160)]
        with httpx.Client(timeout=TIMEOUT) as http:
            for question in range(3):
                for beginning in beginnings:
                    body = {"prompt": [*beginning, question], "max_tokens": 2}
                    assert http.post(f"{url}/v1/completions", json=body).status_code == 200
        asked = [[call.tokens for call in doors.engine.calls if call.verb == "prefill" and call.start == 0] for doors in three]
        homes = {first: [number for number, calls in enumerate(asked) if any(c[0] == first for c in calls)] for first in (10, 60, 110, 160)}
        assert all(len(home) == 1 for home in homes.values()), homes
        assert metric(url, "matched_tokens_total") == 4 * 2 * 32
        assert metric(url, "prompt_tokens_total") == 4 * 3 * 41
