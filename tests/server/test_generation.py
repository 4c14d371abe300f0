"""Which calls are made again elsewhere, and which upstream hears of what. The gRPC client is played: each upstream follows a script."""

from __future__ import annotations

import asyncio
import collections

import pytest

from protos import preheat_pb2
from protos.orchestrator_pb2 import DecodeRequest, DecodeResponse
from server import errors
from server.proxy import upstreams as module
from server.proxy.generation import Generation
from server.proxy.upstreams import Balancing, Upstreams

HANG = object()


def message(text):
    return DecodeResponse(stream_content={"samples": [{"text": text}]})


class Played:
    """A client. ``script[address]`` has what `start` does, call by call: raise an error, or give a stream of messages, errors and
    `HANG`; ``states[address]`` what it says of itself."""

    script: dict[str, list]
    states: dict[str, str]
    adapters: dict[str, list[str]]
    started: list[str]
    cancelled: list[str]

    def __init__(self, address, *, ca, server_name):
        self.address = address

    async def close(self):
        pass

    async def connect(self, timeout):
        return self.states[self.address] != "unconnected"

    async def start(self, request, *, metadata):
        self.started.append(self.address)
        steps = self.script[self.address].pop(0) if self.script[self.address] else ["ok"]
        if steps is HANG:
            await asyncio.Event().wait()
        if isinstance(steps, Exception):
            raise steps
        return PlayedCall(self, steps)

    async def call(self, method, request, *, timeout=None, metadata=()):
        class Names:
            def __getattr__(self, name):
                return name

        if method(Names()) == "ModelCard":
            return preheat_pb2.ModelCardResponse(name="m", adapters=self.adapters[self.address])
        if self.states[self.address] == "unreachable":
            raise errors.Unreachable("gone")
        return preheat_pb2.StateResponse(state=self.states[self.address], slots=8)


class PlayedCall:
    def __init__(self, client, steps):
        self._client, self._steps = client, steps

    async def __aiter__(self):
        for step in self._steps:
            if isinstance(step, Exception):
                raise step
            if step is HANG:
                await asyncio.Event().wait()
            yield message(step)

    def cancel(self):
        self._client.cancelled.append(self._client.address)


@pytest.fixture
def play(monkeypatch):
    """Runs requests through upstreams a, b, c; returns (their texts or errors, what the clients saw)."""

    def run(script, count=1, states=None, balancing=None, adapters=None, request=None, addresses=("a:1", "b:1", "c:1"), look=None):
        class Client(Played):
            started, cancelled = [], []

        Client.script = collections.defaultdict(list, script)
        Client.states = collections.defaultdict(lambda: "ready", states or {})
        Client.adapters = collections.defaultdict(list, adapters or {})
        monkeypatch.setattr(module, "AsyncClient", Client)

        async def all_of_it():
            upstreams = Upstreams(addresses, balancing=balancing)
            await upstreams.start()
            await upstreams.ask_states()
            answers = []
            for _ in range(count):
                generation = Generation(upstreams, [request or DecodeRequest()], ())
                try:
                    await generation.open()
                    answers.append("".join([m.stream_content.samples[0].text async for _, m in generation.messages()]))
                except errors.ServerError as error:
                    answers.append(error)
                finally:
                    await generation.close()
                await asyncio.sleep(0)
            if look:
                answers.append(await look(upstreams))
            assert all((upstream.sequences, upstream.unanswered) == (0, 0) for upstream in upstreams.all)
            await upstreams.stop()
            return answers, Client, {upstream.address: upstream for upstream in upstreams.all}

        return asyncio.run(all_of_it())

    return run


LOST = errors.Unreachable("connection reset")


def test_refused_is_tried_at_the_next(play):
    refusals = {"a:1": [errors.Unavailable("the server is draining")], "b:1": [errors.QueueFull("full", retry_after=7)]}
    (answer,), client, seen = play(refusals)
    assert (answer, client.started) == ("ok", ["a:1", "b:1", "c:1"])
    assert all(upstream.failures.total() == upstream.retries == 0 for upstream in seen.values())


def test_all_refuse_and_the_first_ones_words_are_answered(play):
    refusals = {name: [errors.QueueFull(name, retry_after=7)] for name in ("a:1", "b:1", "c:1")}
    (answer,), client, _ = play(refusals)
    assert (type(answer), answer.message, answer.retry_after) == (errors.QueueFull, "a:1", 7)
    assert client.started == ["a:1", "b:1", "c:1"]  # each once


@pytest.mark.parametrize("lost", [LOST, [LOST], [errors.Unavailable("the server ends")], [errors.Cancelled("aborted")]])
def test_lost_before_the_first_message_is_sent_elsewhere(play, lost):
    (answer,), client, seen = play({"a:1": [lost]})
    assert (answer, client.started) == ("ok", ["a:1", "b:1"])
    assert (seen["a:1"].retries, seen["a:1"].failures["lost"]) == (1, 1)
    assert seen["b:1"].failures.total() == 0


@pytest.mark.parametrize("error", [LOST, errors.Unavailable("the server ends")])
def test_nothing_is_sent_twice_once_something_was_answered(play, error):
    (answer,), client, seen = play({"a:1": [["half of an ans", error]]})
    assert answer is error
    assert client.started == ["a:1"] and seen["a:1"].retries == 0


@pytest.mark.parametrize("answer", [errors.InternalError("a fault"), errors.TimedOut("too long"), errors.InvalidRequest("no")])
@pytest.mark.parametrize("accepted", [False, True])
def test_an_answer_is_an_answer(play, answer, accepted):
    (heard,), client, _ = play({"a:1": [[answer] if accepted else answer]})
    assert heard is answer and client.started == ["a:1"]


def test_what_brings_down_its_upstream_is_not_sent_to_all_of_them(play):
    addresses = ("a:1", "b:1", "c:1", "d:1")
    script = {name: [[LOST]] for name in addresses}
    (answer,), client, seen = play(script, balancing=Balancing(retries=2), addresses=addresses)
    assert answer is LOST and client.started == ["a:1", "b:1", "c:1"]
    assert [seen[name].retries for name in addresses] == [1, 1, 0, 0]
    assert play({name: [[LOST]] for name in addresses}, balancing=Balancing(retries=0))[1].started == ["a:1"]


def test_what_was_never_sent_may_be_sent_to_all_of_them(play):
    unconnected = dict.fromkeys(("a:1", "b:1", "c:1"), "unconnected")
    script = {name: [errors.Unreachable("refused")] for name in unconnected}
    balancing = Balancing(retries=0)
    (answer,), client, _ = play(script, states=unconnected, balancing=balancing, addresses=("a:1", "b:1", "c:1", "d:1"))
    assert answer == "ok"
    assert client.started[-1] == "d:1"


def test_an_upstream_that_accepts_and_never_answers(play):
    (answer,), client, seen = play({"a:1": [[HANG]]}, balancing=Balancing(first_token_timeout=0.01))
    assert (answer, client.started, client.cancelled[0]) == ("ok", ["a:1", "b:1"], "a:1")
    assert seen["a:1"].failures == {"silent": 1}


def test_an_upstream_that_neither_accepts_nor_refuses(play):
    (answer,), client, seen = play({"a:1": [HANG]}, balancing=Balancing(accept_timeout=0.01))
    assert (answer, client.started) == ("ok", ["a:1", "b:1"])
    assert seen["a:1"].failures == {"silent": 1}
    (answer,), *_ = play({"a:1": [HANG]}, balancing=Balancing(accept_timeout=0.01), addresses=("a:1",))
    assert answer.message == "a:1 neither accepted nor refused the request within 0.01 s" and answer.status == 503


def test_the_unhealthy_one_is_left_out(play):
    async def look(upstreams):
        return [upstream.address for upstream in upstreams.by_preference()][-1]

    answers, client, seen = play({"a:1": [[LOST]] * 9}, count=30, look=look)
    assert answers == ["ok"] * 30 + ["a:1"]
    assert client.started.count("a:1") == 3  # ejected after three in a row
    assert seen["a:1"].ejection.count == 1


def test_faults_count_too_but_not_those_of_the_client(play):
    wrong = errors.InvalidRequest("no")
    _, client, seen = play({"a:1": [errors.InternalError("x")] * 9, "b:1": [wrong] * 9, "c:1": [wrong] * 9}, count=27)
    assert client.started.count("a:1") == 3 and client.started.count("b:1") == client.started.count("c:1") == 12
    assert seen["a:1"].failures == {"fault": 3} and not seen["b:1"].failures
    _, client, seen = play({"a:1": [[errors.InternalError("x")]] * 9, "b:1": [[wrong]] * 9}, count=27)
    assert client.started.count("a:1") == 3 and client.started.count("b:1") == 12
    assert seen["a:1"].failures == {"fault": 3} and not seen["b:1"].failures


def test_the_leaving_one_gets_nothing(play):
    answers, client, _ = play({}, count=9, states={"a:1": "draining"})
    assert answers == ["ok"] * 9 and "a:1" not in client.started
    (answer,), client, _ = play({}, states=dict.fromkeys(("a:1", "b:1", "c:1"), "draining"))
    assert answer.status == 503 and "draining" in answer.message and client.started == []


def test_an_adapter_that_is_not_everywhere(play):
    async def card(upstreams):
        return sorted((await upstreams.model_card(())).adapters)

    request = DecodeRequest(lora_adapter_id="poet")
    missing = errors.InvalidRequest("no adapter here", param="lora_adapter_id")
    (answer, names), client, _ = play({"a:1": [missing]}, request=request, adapters={"b:1": ["poet"], "c:1": ["lawyer"]}, look=card)
    assert (answer, names) == ("ok", ["lawyer", "poet"])
    assert client.started == ["a:1", "b:1"]


def test_a_state_is_not_older_than_the_question_and_one_who_leaves_takes_it_from_nobody():
    class Slow:
        """Answers with the state at the time of the question, when it is let."""

        def __init__(self):
            self.state, self.answers = "warming", []

        async def call(self, method, request, *, timeout):
            answer = preheat_pb2.StateResponse(state=self.state)
            self.answers.append(asyncio.Event())
            await self.answers[-1].wait()
            return answer

        async def close(self):
            pass

    async def all_of_it():
        client = Slow()
        upstream = module.Upstream(module.Address("a:1"), client, Balancing())
        early = asyncio.create_task(upstream.ask_state())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        client.state = "ready"
        late = asyncio.create_task(upstream.ask_state())
        await asyncio.sleep(0)
        early.cancel()
        client.answers[0].set()
        while len(client.answers) < 2:
            await asyncio.sleep(0)
        assert upstream.state == "warming" and not late.done()
        client.answers[1].set()
        await late
        assert upstream.state == "ready" and early.cancelled()
        await upstream.close()

    asyncio.run(asyncio.wait_for(all_of_it(), 10))
