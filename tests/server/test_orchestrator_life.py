"""The life of a request when things go otherwise: cancel in every stage, faults, deadlines, full queues, drain, death.

Stages are reached by gates of the mock engine, never by waiting a while.
"""

import threading
import time

import pytest
from orchestrator_harness import WAIT, Clock, Recorder, letters, serving

from engine.api import SamplingParams
from engine.mock import Script, Table, digest, successor
from server.errors import Cancelled, InternalError, InvalidRequest, QueueFull, TimedOut, Unavailable

BYSTANDER = b"a bystander"


def freed(server) -> None:
    """Everything is given back, without further traffic. Prefixes return when the engine's call does."""
    assert server.gauges() == (0, 0, 0, 0)


def prefixes_are_back(server) -> None:
    """Every prefix can be acquired again: as many requests as there are prefixes run."""
    for index in range(server.engine.config.prefixes + 1):
        assert server.run(b"after %d" % index, 3).text() == letters(b"after %d" % index, 3)
    server.orchestrator.close()
    assert server.engine.prefixes_out == 0


# Cancel


def test_cancel_while_queued():
    with serving(slots=1) as server:
        gate = server.engine.gate("generate")
        running = server.submit(BYSTANDER, 6)[1]
        assert gate.arrived()
        ticket, queued = server.submit(b"queued", 6)
        assert server.gauges()[:2] == (1, 1)
        ticket.cancel()
        assert server.gauges()[:2] == (1, 0)
        assert isinstance(queued.wait().error, Cancelled)
        gate.open()
        assert running.ok().text() == letters(BYSTANDER, 6)
        assert server.outcomes() == {"ok": 1, "cancelled": 1}
        assert not [call for call in server.engine.calls if call.tokens == tuple(b"queued")]
        freed(server)


@pytest.mark.parametrize("chunk", [0, 16])
def test_cancel_in_prefill(chunk):
    with serving() as server:
        bystander = server.submit(BYSTANDER, 20)[1]
        gate = server.engine.gate("prefill", lambda call: len(call.tokens) == 16 and call.start == chunk)
        ticket, recorder = server.submit(b"x" * 40, 5)
        assert gate.arrived()
        ticket.cancel()
        bystander.ok()
        freed(server)
        assert isinstance(recorder.wait().error, Cancelled)
        gate.open()
        prefixes_are_back(server)
        assert not [call for call in server.engine.calls if call.start > chunk and call.tokens[:1] == (ord("x"),)]
        assert bystander.text() == letters(BYSTANDER, 20)


def test_cancel_while_the_first_token_is_read():
    with serving() as server:
        gate = server.engine.gate("read")
        ticket, recorder = server.submit(b"hello", 5)
        assert gate.arrived()
        ticket.cancel()
        freed(server)
        gate.open()
        assert isinstance(recorder.wait().error, Cancelled)
        assert recorder.deltas == []
        prefixes_are_back(server)


def test_cancel_between_prefill_and_insert():
    with serving() as server:
        hold = server.engine.gate("read", lambda call: call.step == 2)
        bystander = server.submit(BYSTANDER, 6)[1]
        assert hold.arrived()  # the owner is busy: an insert has to wait
        ticket, recorder = server.submit(b"hello", 5)
        assert recorder.first.wait(WAIT)  # its first token is out
        ticket.cancel()
        hold.open()
        assert bystander.ok().text() == letters(BYSTANDER, 6)
        assert isinstance(recorder.wait().error, Cancelled)
        freed(server)
        assert len([call for call in server.engine.calls if call.verb == "insert"]) == 1
        prefixes_are_back(server)


def test_cancel_in_insert():
    with serving() as server:
        gate = server.engine.gate("insert")
        ticket, recorder = server.submit(b"hello", 5)
        assert gate.arrived()
        ticket.cancel()
        freed(server)
        gate.open()
        assert isinstance(recorder.wait().error, Cancelled)
        prefixes_are_back(server)


@pytest.mark.parametrize("verb", ["generate", "read"])
def test_cancel_in_decode(verb):
    with serving() as server:
        hold = server.engine.gate("read", lambda call: call.step == 2)
        bystander = server.submit(BYSTANDER, 30)[1]
        assert hold.arrived()
        ticket, recorder = server.submit(b"hello", 40)
        assert recorder.first.wait(WAIT)  # inserted as soon as the owner goes on
        gate = server.engine.gate(verb, lambda call: call.slots == (0, 1) or call.step == 5)
        hold.open()
        assert gate.arrived()  # the first step with both rows is dispatched (it is read), or about to be
        ticket.cancel()
        freed_but_for = server.gauges()[:3]
        assert freed_but_for == (1, 0, 1)
        gate.open()
        assert isinstance(recorder.wait().error, Cancelled)
        assert letters(b"hello", 40).startswith(recorder.text())
        assert bystander.ok().text() == letters(BYSTANDER, 30)
        freed(server)
        prefixes_are_back(server)


def test_cancel_while_its_prefix_is_fetched():
    with serving() as server:
        server.run(b"shared beginning", 2)
        gate = server.engine.gate("fetch")
        ticket, recorder = server.submit(b"shared beginning, other end", 5)
        assert gate.arrived()
        ticket.cancel()
        freed(server)
        gate.open()
        assert isinstance(recorder.wait().error, Cancelled)
        prefixes_are_back(server)


def test_cancel_at_the_last_token_and_twice_and_after_the_end():
    with serving() as server:
        gate = server.engine.gate("read", lambda call: call.step == 5)  # 1 is prefill's, 5 the last of five tokens
        ticket, recorder = server.submit(b"hello", 5)
        assert gate.arrived()
        ticket.cancel()
        ticket.cancel()
        gate.open()
        assert isinstance(recorder.wait().error, Cancelled)
        ticket, recorder = server.submit(b"hello", 5)
        recorder.ok()
        ticket.cancel()
        assert server.outcomes() == {"ok": 1, "cancelled": 1}
        freed(server)


def test_cancel_from_a_sink():
    """A front door may cancel while it is told of a delta."""
    with serving() as server:
        ready = threading.Event()
        tickets = []

        class Leaving(Recorder):
            def delta(self, delta):
                super().delta(delta)
                assert ready.wait(WAIT)
                tickets[0].cancel()

        ticket, recorder = server.submit(b"hello", 50, sink=Leaving())
        tickets.append(ticket)
        ready.set()
        assert isinstance(recorder.wait().error, Cancelled)
        freed(server)


def test_cancelling_frees_all_samples_whatever_their_stages():
    with serving(slots=2) as server:
        gate = server.engine.gate("generate")
        ticket, recorder = server.submit(b"hello", 40, n=4)
        assert gate.arrived()  # one decodes, one is in prefill, two wait
        ticket.cancel()
        freed(server)
        gate.open()
        assert isinstance(recorder.wait().error, Cancelled)
        prefixes_are_back(server)


# Deadlines


def test_a_request_over_its_deadline_is_ended_in_decode():
    clock = Clock()
    with serving(clock=clock) as server:
        gate = server.engine.gate("generate")
        recorder = server.submit(b"hello", 40, deadline=clock.now + 0.01)[1]
        assert gate.arrived()
        clock.now += 1
        recorder.wait()
        assert isinstance(recorder.error, TimedOut)
        assert "0.01 s" in recorder.error.message
        freed(server)
        gate.open()
        assert server.outcomes() == {"error": 1}
        assert server.run(b"hello", 4, deadline=clock.now + 3600).text() == letters(b"hello", 4)


def test_a_request_over_its_deadline_in_the_queue():
    clock = Clock()
    with serving(slots=1, clock=clock) as server:
        gate = server.engine.gate("generate")
        running = server.submit(BYSTANDER, 3)[1]
        assert gate.arrived()
        later = server.submit(b"later", 3, deadline=clock.now + 3600)[1]
        sooner = server.submit(b"sooner", 3, deadline=clock.now + 0.01)[1]
        clock.now += 1
        assert isinstance(sooner.wait().error, TimedOut)
        gate.open()
        assert running.ok() and later.ok()


def test_a_deadline_that_is_over_already():
    with serving() as server:
        with pytest.raises(TimedOut):
            server.submit(b"hello", deadline=time.monotonic() - 1)
        assert server.outcomes() == {"error": 1}


def test_requests_that_ended_are_not_kept_for_their_deadline():
    with serving(slots=4) as server:
        for _ in range(200):
            server.run(b"a", 1, deadline=time.monotonic() + 3600)
        assert len(server.orchestrator._deadlines._heap) < 100


# Overload


def test_a_full_queue_refuses_at_once_and_loses_nothing():
    with serving(slots=2, max_queue=3) as server:
        gate = server.engine.gate("generate")
        accepted = [server.submit(b"%d" % index, 5)[1] for index in range(3)]
        assert gate.arrived()
        accepted.append(server.submit(b"two samples", 5, n=2)[1])
        with pytest.raises(QueueFull, match="5 sequences run or wait, at most 5") as caught:
            server.submit(b"too many", 5)
        assert caught.value.retry_after == 1.0
        gate.open()
        assert [recorder.ok().text() for recorder in accepted[:3]] == [letters(b"%d" % index, 5) for index in range(3)]
        assert accepted[3].ok().text(1) == letters(b"two samples", 5)
        assert server.outcomes() == {"ok": 4, "rejected": 1}
        freed(server)


def test_retry_after_follows_the_measured_rate():
    clock = Clock()
    with serving(slots=1, max_queue=1, clock=clock) as server:
        gate = server.engine.gate("generate")
        first = server.submit(b"a", 5)[1]
        assert gate.arrived()
        clock.now += 12.0  # the sequence takes 12 seconds in its slot
        gate.open()
        first.ok()
        gate = server.engine.gate("generate")
        accepted = [server.submit(b"a", 5)[1] for _ in range(2)]
        with pytest.raises(QueueFull) as caught:
            server.submit(b"a", 5, n=2)
        assert caught.value.retry_after == 24.0  # two have to end
        gate.open()
        assert all(recorder.ok() for recorder in accepted)


def test_priority_goes_first_and_equals_in_order():
    with serving(slots=1, prefixes=1) as server:
        gate = server.engine.gate("generate")
        server.submit(b"first", 3)
        assert gate.arrived()
        recorders = [server.submit(prompt, 3, priority=priority)[1]
                     for prompt, priority in [(b"b", 0), (b"c", 0), (b"d", 5), (b"a", -1)]]  # fmt: skip
        gate.open()
        for recorder in recorders:
            recorder.ok()
        order = bytes(
            call.tokens[0] for call in server.engine.calls if call.verb == "prefill" and len(call.tokens) == 1
        )
        assert order == b"abcd"


def test_put_back_under_page_pressure_gives_the_same_tokens():
    prompts = [bytes([97 + index]) * 7 for index in range(4)]
    with serving(slots=4, page_size=4, kv_pages=13, max_len=32, max_queue=8) as server:
        recorders = [Recorder() for _ in prompts]
        server.in_company(recorders[1:3])
        for prompt, recorder in zip(prompts, recorders, strict=True):
            server.submit(prompt, 22, sampling=SamplingParams(logprobs=True), sink=recorder)
        for prompt, recorder in zip(prompts, recorders, strict=True):
            assert recorder.ok().text() == letters(prompt, 22)
            assert recorder.usage.completion_tokens == 22
            assert sum(len(delta.logprobs) for delta in recorder.deltas) == 22
        # Three of them need 21 pages of the 12 there are, so generated tokens were prefilled.
        assert [call for call in server.engine.calls if call.verb == "prefill" and call.start + len(call.tokens) > 7]
        assert server.metrics.value("preheat_generated_tokens_total") == 88
        freed(server)


def test_put_back_keeps_penalties_and_min_tokens():
    rule = Table({}, otherwise={257: 0.5, **{97 + letter: 0.5 / 2 ** (letter + 1) for letter in range(20)}})
    sampling = SamplingParams(min_tokens=18, presence_penalty=0.9, frequency_penalty=0.3)

    def texts(**config) -> list[str]:
        with serving(rule, slots=3, page_size=4, max_len=32, max_queue=8, **config) as server:
            recorders = [Recorder() for _ in range(3)]
            server.in_company(recorders[1:])
            for index, recorder in enumerate(recorders):
                server.submit(bytes([65 + index]) * 6, 20, sampling=sampling, sink=recorder)
            found = [recorder.ok().text() for recorder in recorders]
            put_back = [
                call for call in server.engine.calls if call.verb == "prefill" and call.start + len(call.tokens) > 6
            ]
            assert bool(put_back) == bool(config)
            return found

    assert texts(kv_pages=11) == texts()
    assert all(len(text) >= 18 for text in texts())


def test_a_long_prompt_delays_running_streams_by_one_chunk_at_most():
    with serving(max_len=256, prefill_chunk=16) as server:
        hold = server.engine.gate("read", lambda call: call.step == 2)
        stream = server.submit(BYSTANDER, 100)[1]
        assert hold.arrived()
        long = server.submit(b"z" * 200, 3)[1]
        hold.open()
        stream.ok(), long.ok()
        calls = [call for call in server.engine.calls if call.verb in ("prefill", "generate")]
        steps_of_stream = [index for index, call in enumerate(calls) if 0 in call.slots][:99]
        while_it_ran = " ".join(call.verb for call in calls[steps_of_stream[0] : steps_of_stream[-1]])
        assert "prefill prefill" not in while_it_ran
        assert sum(call.verb == "prefill" for call in calls) == 1 + 13


# Faults


class Faults:
    """A fault hook that raises in one stage, for one prompt or for the thread."""

    def __init__(self, stage: str, prompt: bytes | None):
        self.stage = stage
        self.prompt = prompt
        self.armed = True

    def __call__(self, stage, request) -> None:
        if (
            self.armed
            and stage == self.stage
            and (request.prompt == tuple(self.prompt) if request else self.prompt is None)
        ):
            self.armed = self.prompt is not None
            raise RuntimeError("a secret detail")


@pytest.mark.parametrize("stage", ["prefill", "insert", "decode", "detokenize"])
def test_a_fault_in_one_request_ends_that_one(stage, caplog):
    with serving(fault_hook=Faults(stage, b"unlucky")) as server:
        bystander = server.submit(BYSTANDER, 30)[1]
        unlucky = server.submit(b"unlucky", 9)[1]
        assert isinstance(unlucky.wait().error, InternalError)
        assert stage in unlucky.error.message
        assert "secret" not in unlucky.error.message
        assert bystander.ok().text() == letters(BYSTANDER, 30)
        assert server.outcomes() == {"ok": 1, "error": 1}
        assert server.orchestrator.state == "ready"
        freed(server)
        prefixes_are_back(server)
    assert "a secret detail" in caplog.text


@pytest.mark.parametrize("verb", ["prefill", "insert", "fetch", "read", "read_prompt"])
def test_a_fault_of_the_engine_for_one_request(verb, caplog):
    with serving() as server:
        server.run(b"unlucky one", 3)
        scoring = verb == "read_prompt"
        server.engine.fault(verb, RuntimeError("RESOURCE_EXHAUSTED: out of memory allocating 1 byte"))
        unlucky = server.submit(b"unlucky one", 1 if scoring else 9, prompt_logprobs=scoring)[1]
        assert isinstance(unlucky.wait().error, InternalError)
        assert "ran out of memory" in unlucky.error.message
        assert server.run(b"lucky", 5).text() == letters(b"lucky", 5)
        freed(server)
        prefixes_are_back(server)


@pytest.mark.parametrize("call", ["delta", "finish"])
def test_a_sink_that_raises_hurts_nobody_else(call, caplog):
    class Broken(Recorder):
        def delta(self, delta):
            super().delta(delta)
            if call == "delta":
                raise ValueError("broken sink")

        def finish(self, usage):
            if call == "finish":
                raise ValueError("broken sink")

    with serving() as server:
        broken = server.submit(b"broken", 3, sink=Broken())[1]
        assert isinstance(broken.wait().error, InternalError)
        assert server.run(b"hello", 3).text() == letters(b"hello", 3)
        assert server.orchestrator.drain(WAIT) is True


@pytest.mark.parametrize("thread", ["prefill", "generate", "detokenize"])
def test_a_dead_thread_fails_everything_and_nobody_hangs(thread, caplog):
    faults = Faults(thread, None)
    faults.armed = False
    deaths = []
    died = threading.Event()

    def on_death(error):
        deaths.append(error)
        died.set()

    with serving(slots=2, fault_hook=faults, on_death=on_death) as server:
        gate = server.engine.gate("generate")
        recorders = [server.submit(prompt, 40)[1] for prompt in (b"a", b"b", b"c", b"d")]
        assert gate.arrived()
        faults.armed = True
        gate.open()
        for recorder in recorders:
            recorder.wait()
            if thread != "prefill":
                assert isinstance(recorder.error, InternalError)
        assert died.wait(WAIT)
        assert server.orchestrator.state == "failed"
        assert [str(error) for error in deaths] == ["a secret detail"]
        with pytest.raises(Unavailable, match="failed"):
            server.submit(b"too late")
        freed(server)
        assert sum(server.outcomes().values()) == 5
        assert server.orchestrator.drain(1) is False
        assert server.metrics.value("preheat_ready") == 0


@pytest.mark.parametrize("verb", ["generate", "read"])
def test_a_fault_of_the_device_in_a_decode_step_is_named(verb, caplog):
    died = threading.Event()
    with serving(on_death=lambda error: died.set()) as server:
        server.engine.fault(verb, RuntimeError("RESOURCE_EXHAUSTED: 2 GiB"), when=lambda call: call.step > 2)
        recorder = server.submit(b"hello", 9)[1]
        assert "RESOURCE_EXHAUSTED" in recorder.wait().error.message
        assert died.wait(WAIT)
        assert server.orchestrator.state == "failed"


# Start, drain, end


def test_requests_are_refused_before_open_but_for_the_proof():
    with serving(opened=False) as server:
        assert server.orchestrator.state == "warming"
        with pytest.raises(Unavailable, match="warming up") as caught:
            server.submit(b"early")
        assert caught.value.retry_after
        assert server.run(b"proof of the path", 3, proof=True).text() == letters(b"proof of the path", 3)
        assert server.outcomes() == {"rejected": 1}
        assert server.metrics.value("preheat_generated_tokens_total") == 0
        server.orchestrator.open()
        assert server.orchestrator.state == "ready"
        assert server.metrics.value("preheat_ready") == 1
        assert server.run(b"proof of the path", 3).usage.cached_tokens == 0  # what the proof cached is gone


def test_drain_lets_running_and_queued_requests_finish():
    with serving(slots=1) as server:
        gate = server.engine.gate("generate")
        running = server.submit(b"running", 6)[1]
        assert gate.arrived()
        queued = server.submit(b"queued", 6)[1]
        answers = []
        thread = threading.Thread(target=lambda: answers.append(server.orchestrator.drain(WAIT)))
        thread.start()
        while server.orchestrator.state != "draining":
            thread.join(0.001)
        with pytest.raises(Unavailable, match="shutting down"):
            server.submit(b"new")
        gate.open()
        assert running.ok().text() == letters(b"running", 6)
        assert queued.ok().text() == letters(b"queued", 6)
        thread.join(WAIT)
        assert answers == [True]
        assert server.outcomes() == {"ok": 2, "rejected": 1}


def test_drain_cuts_off_at_its_timeout():
    with serving(slots=1) as server:
        gate = server.engine.gate("generate")
        running = server.submit(b"running", 6)[1]
        assert gate.arrived()
        queued = server.submit(b"queued", 6)[1]
        assert server.orchestrator.drain(0.05) is False
        assert isinstance(running.wait().error, Unavailable)
        assert isinstance(queued.wait().error, Unavailable)
        freed(server)
        assert server.outcomes() == {"error": 2}
        gate.open()


def test_drain_of_an_idle_server():
    with serving() as server:
        assert server.orchestrator.drain(0) is True


def test_close_ends_what_runs():
    with serving() as server:
        gate = server.engine.gate("generate")
        recorder = server.submit(b"running", 6)[1]
        assert gate.arrived()
        thread = threading.Thread(target=server.orchestrator.close)
        thread.start()
        assert isinstance(recorder.wait().error, Unavailable)
        gate.open()
        thread.join(WAIT)
        server.orchestrator.close()


def test_counters_add_up_after_mixed_traffic():
    rule = Script({tuple(b"short"): b"ab"})
    with serving(rule, slots=2, max_queue=2, fault_hook=Faults("prefill", b"unlucky")) as server:
        received = 0

        def send(prompt: bytes, **options):
            nonlocal received
            received += 1
            try:
                return server.submit(prompt, 4, **options)
            except (QueueFull, InvalidRequest):
                return None

        for _ in range(6):
            gate = server.engine.gate("prefill")
            sent = [send(prompt) for prompt in (b"short", b"unlucky", b"gone", b"", b"queued", b"over", b"over")]
            if sent[2] is not None:
                sent[2][0].cancel()
            gate.open()
            for entry in sent:
                if entry is not None:
                    entry[1].wait()
        assert sum(server.outcomes().values()) == received
        assert server.outcomes() == {"ok": 12, "error": 6, "cancelled": 6, "invalid": 6, "rejected": 12}
        freed(server)
        server.orchestrator.close()
        assert server.engine.prefixes_out == 0


# The prefix cache


def run_twice(prefix_cache: bool) -> tuple[list[str], list[int], float]:
    system = b"You are a helpful assistant. "
    with serving(digest, max_len=128, prefix_cache=prefix_cache) as server:
        recorders = [server.run(system + question, 9) for question in (b"Who?", b"What?", b"Why?")]
        return (
            [recorder.text() for recorder in recorders],
            [recorder.usage.cached_tokens for recorder in recorders],
            server.metrics.value("preheat_prefilled_tokens_total"),
        )


def test_a_shared_beginning_is_computed_once_and_changes_no_token():
    system = b"You are a helpful assistant. "  # 29 tokens: 7 full pages of 4
    texts, cached, prefilled = run_twice(True)
    plain, uncached, all_prefilled = run_twice(False)
    assert texts == plain == [letters(system + question, 9) for question in (b"Who?", b"What?", b"Why?")]
    assert (cached, uncached) == ([0, 28, 28], [0, 0, 0])
    assert (prefilled, all_prefilled) == (33 + 6 + 5, 33 + 34 + 33)


def test_a_conversation_goes_on_from_its_last_answer():
    with serving(max_len=128) as server:
        question = b"tell me something"  # 17 tokens
        answer = server.run(question, 15).text().encode()
        following = question + answer + b" and then?"
        recorder = server.run(following, 5)
        assert recorder.text() == letters(following, 5)
        assert recorder.usage.cached_tokens == 28  # 31 of 32 tokens were written: 7 full pages


def test_samples_share_the_prompt():
    with serving(slots=4) as server:
        recorder = server.run(b"a prompt of 20 bytes", 5, n=4)
        assert [recorder.text(sample) for sample in range(4)] == [letters(b"a prompt of 20 bytes", 5)] * 4
        assert server.metrics.value("preheat_prefilled_tokens_total") == 20 + 3 * 4
        assert server.metrics.value("preheat_cached_prompt_tokens_total") == 3 * 16
        assert (recorder.usage.prompt_tokens, recorder.usage.cached_tokens) == (20, 0)
        assert server.metrics.value("preheat_prompt_tokens_total") == 20


def test_prompt_logprobs_bypass_the_cache():
    with serving(successor) as server:
        server.run(b"abcdefghijkl", 2)
        recorder = server.run(b"abcdefghijkl", 2, prompt_logprobs=True)
        assert len(recorder.prompt) == 12
        assert recorder.usage.cached_tokens == 0


def test_one_token_answers_fill_the_cache_too():
    with serving() as server:
        assert server.run(b"sixteen bytes it", 1).usage.cached_tokens == 0
        recorder = server.run(b"sixteen bytes it", 1)
        assert recorder.usage.cached_tokens == 12
        assert recorder.text() == letters(b"sixteen bytes it", 1)
        freed(server)


def test_idle_cached_pages_never_stand_in_the_way():
    with serving(slots=1, page_size=4, kv_pages=9, max_len=32) as server:
        for index in range(12):
            prompt = b"%02d, a prompt of its own" % index
            assert server.run(prompt, 8).text() == letters(prompt, 8)
