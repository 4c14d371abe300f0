"""What comes out of the orchestrator, on the mock engine: right tokens, in every way to ask for them."""

import itertools
import json
import logging
import math
import threading

import pytest
from orchestrator_harness import WAIT, Clock, Recorder, letters, serving

from engine.api import SamplingParams
from engine.mock import Script, Table, successor
from server.errors import InvalidRequest
from server.telemetry.logs import configure_logging

PROMPTS = [b"hello", b"hello world", b"hello world, once again", b"x", b"exactly sixteen!", b"exactly sixteen!+"]


def script(prompt: bytes, answer: bytes, end: int = 257) -> Script:
    return Script({tuple(prompt): answer}, end)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("max_tokens", [1, 2, 13])
def test_one_request(prompt, max_tokens):
    with serving() as server:
        recorder = server.run(prompt, max_tokens)
        assert recorder.text() == letters(prompt, max_tokens)
        assert bytes(recorder.tokens()).decode() == recorder.text()
        assert recorder.last().finish_reason == "length"
        assert (recorder.usage.prompt_tokens, recorder.usage.completion_tokens) == (len(prompt), max_tokens)
        assert server.gauges() == (0, 0, 0, 0)
        assert server.outcomes() == {"ok": 1}
        assert server.metrics.value("preheat_generated_tokens_total") == max_tokens
        assert recorder.thread == "preheat-detokenize"


def test_up_to_max_len():
    with serving(max_len=32, page_size=4) as server:
        assert server.run(b"ab", 30).text() == letters(b"ab", 30)
        assert server.run(b"a" * 31, 1).text() == letters(b"a" * 31, 1)


def test_four_clients_at_once_equal_one_after_another():
    with serving(slots=4) as server:
        recorders = [server.submit(prompt, 20)[1] for prompt in PROMPTS * 2]
        for prompt, recorder in zip(PROMPTS * 2, recorders, strict=True):
            assert recorder.ok().text() == letters(prompt, 20)
        assert server.outcomes() == {"ok": 12}


def test_clients_in_threads():
    texts: dict[int, str] = {}
    with serving(slots=2) as server:

        def client(index: int) -> None:
            recorder = Recorder()
            server.submit(PROMPTS[index % len(PROMPTS)], 9, sink=recorder)
            texts[index] = recorder.ok().text()

        threads = [threading.Thread(target=client, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert texts == {index: letters(PROMPTS[index % len(PROMPTS)], 9) for index in range(8)}


def test_step_n_plus_1_is_dispatched_before_step_n_is_read():
    with serving() as server:
        server.run(b"abc", 6)
        steps = [(call.verb, call.step) for call in server.engine.calls if call.verb in ("generate", "read")]
        place = {item: index for index, item in enumerate(steps)}
        generated = [step for verb, step in steps if verb == "generate"]
        assert len(generated) == 5  # the first of six tokens is prefill's; no row goes past max_tokens
        for this, following in itertools.pairwise(generated):
            assert place["generate", following] < place["read", this]


def test_only_active_rows_are_generated():
    with serving(slots=4) as server:
        server.run(b"abc", 4)
        assert all(len(call.slots) == 1 for call in server.engine.calls if call.verb == "generate")


@pytest.mark.parametrize("answer", [b"", b"h", b"hello"])
def test_eos_ends_also_as_the_first_token(answer):
    with serving(script(b"p", answer)) as server:
        recorder = server.run(b"p", 20)
        assert recorder.text() == answer.decode()
        assert recorder.tokens() == list(answer)
        assert (recorder.last().finish_reason, recorder.last().stop_reason) == ("stop", None)
        assert recorder.usage.completion_tokens == len(answer) + 1
        if not answer:
            assert not [call for call in server.engine.calls if call.verb in ("insert", "generate")]


def test_tokens_after_the_end_are_dropped_though_the_slot_goes_on():
    # The first request ends by EOS while its next step is dispatched; the second gets its slot at once.
    rule = Script({tuple(b"one"): b"1", tuple(b"two"): b"22222"})
    with serving(rule, slots=1) as server:
        first = server.submit(b"one", 20)[1]
        second = server.submit(b"two", 20)[1]
        assert (first.ok().text(), second.ok().text()) == ("1", "22222")


def test_ignore_eos_goes_on():
    with serving(script(b"p", b"ab")) as server:
        recorder = server.run(b"p", 5, ignore_eos=True)
        assert recorder.tokens() == [*b"ab", 257, 257, 257]
        assert recorder.text() == "ab"
        assert recorder.last().finish_reason == "length"


def test_end_of_turn_of_the_tokenizer_ends_too():
    with serving(script(b"p", b"ab", end=258)) as server:
        assert server.run(b"p", 9).text() == "ab"


def test_stop_token():
    with serving(successor) as server:
        recorder = server.run(b"a", 20, stop_token_ids=frozenset({ord("e")}))
        assert (recorder.text(), recorder.last().stop_reason) == ("bcd", ord("e"))
        assert recorder.usage.completion_tokens == 4


@pytest.mark.parametrize(("stop", "text"), [("b", ""), ("ef", "bcd"), ("i", "bcdefgh"), ("no", "bcdefghi")])
def test_stop_string(stop, text):
    with serving(successor) as server:
        recorder = server.run(b"a", 8, stop=(stop,))
        assert recorder.text() == text
        assert recorder.last().finish_reason == ("length" if stop == "no" else "stop")
        assert recorder.usage.completion_tokens == (8 if stop == "no" else len(text) + len(stop))
        assert server.gauges() == (0, 0, 0, 0)


def test_stop_string_in_the_prompt_does_not_count():
    with serving(successor) as server:
        assert server.run(b"abc", 3, stop=("c", "cd")).text() == "def"


def test_min_tokens_holds_back_what_would_end():
    rule = Table({}, otherwise={257: 0.9, ord("a"): 0.1})
    with serving(rule) as server:
        recorder = server.run(b"p", 9, sampling=SamplingParams(min_tokens=3))
        assert recorder.text() == "aaa"
        assert recorder.usage.completion_tokens == 4


def test_max_tokens_0_only_scores():
    rule = Table({ord("a"): {ord("b"): 0.75, ord("c"): 0.25}, ord("b"): {ord("c"): 1.0}})
    with serving(rule, prefill_chunk=4) as server:
        recorder = server.run(b"ababc", 0, prompt_logprobs=True, n=2)
        assert recorder.deltas[0].finish_reason == recorder.deltas[1].finish_reason == "length"
        assert recorder.tokens() == []
        assert recorder.usage.completion_tokens == 0
        assert recorder.prompt[0] is None
        assert [entry.token for entry in recorder.prompt[1:]] == list(b"babc")
        expected = [math.log(0.75), math.log(1e-9), math.log(0.75), 0.0]
        assert [entry.logprob for entry in recorder.prompt[1:]] == pytest.approx(expected, abs=1e-5)
        assert recorder.prompt[1].top[:2] == (
            (ord("b"), pytest.approx(math.log(0.75), abs=1e-5)),
            (ord("c"), pytest.approx(math.log(0.25), abs=1e-5)),
        )
        assert not [call for call in server.engine.calls if call.verb == "insert"]


def test_logprobs_of_every_token_the_first_included():
    rule = Table({ord("a"): {ord("b"): 0.75, ord("c"): 0.25}, ord("b"): {ord("a"): 0.6, ord("z"): 0.4}})
    with serving(rule) as server:
        recorder = server.run(b"a", 3, sampling=SamplingParams(logprobs=True))
        entries = [entry for delta in recorder.deltas for entry in delta.logprobs]
        assert [entry.token for entry in entries] == list(b"bab")
        assert [entry.logprob for entry in entries] == pytest.approx(
            [math.log(0.75), math.log(0.6), math.log(0.75)], abs=1e-5
        )
        assert all(len(entry.top) == 20 for entry in entries)
        assert server.run(b"a", 3).deltas[0].logprobs == ()


def test_no_text_where_none_is_wanted():
    with serving(successor) as server:
        recorder = server.run(b"a", 5, detokenize=False, stop=("e",))
        assert (recorder.text(), bytes(recorder.tokens())) == ("", b"bcd")


def test_samples_differ_and_a_seed_gives_the_same_again():
    rule = Table({}, otherwise={97 + letter: 1 / 26 for letter in range(26)})
    with serving(rule, slots=4) as server:
        sampling = SamplingParams(temperature=1.0, seed=5)
        texts = {}
        for attempt in range(2):
            recorder = server.run(b"a prompt of some length", 12, n=4, sampling=sampling)
            texts[attempt] = [recorder.text(sample) for sample in range(4)]
            assert recorder.usage.completion_tokens == 48
        assert texts[0] == texts[1]
        assert len(set(texts[0])) == 4
        alone = server.run(b"a prompt of some length", 12, sampling=sampling)
        assert alone.text() == texts[0][0]


def test_a_token_the_tokenizer_does_not_know_is_no_fault():
    with serving(script(b"p", (97, 300, 98))) as server:
        recorder = server.run(b"p", 9)
        assert recorder.tokens() == [97, 300, 98]
        assert recorder.text() == "ab"


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "options", "param", "message"),
    [
        (b"", 4, {}, "prompt", "no tokens"),
        ((97, 320), 4, {}, "prompt", "token id 320: ids are 0 to 319"),
        ((-1,), 4, {}, "prompt", "token id -1"),
        (b"a", -1, {}, "max_tokens", "at least 0"),
        (b"a" * 60, 5, {}, "max_tokens", "prompt of 60 tokens .* max_tokens 5 = 65 .* limit of 64"),
        (b"a", 4, {"n": 21}, "n", "1 to 20"),
        (
            b"a",
            4,
            {"sampling": SamplingParams(min_tokens=1), "stop_token_ids": frozenset(range(40))},
            "stop_token_ids",
            "32",
        ),
    ],
)
def test_what_no_server_like_this_could_do_is_invalid(prompt, max_tokens, options, param, message):
    with serving() as server:
        with pytest.raises(InvalidRequest, match=message) as caught:
            server.submit(prompt, max_tokens, **options)
        assert caught.value.param == param
        assert server.outcomes() == {"invalid": 1}


def test_a_prompt_that_can_never_fit_the_pages():
    with serving(slots=1, page_size=4, kv_pages=4) as server:
        with pytest.raises(InvalidRequest, match="needs 4 KV pages"):
            server.submit(b"a" * 12, 2)
        assert server.run(b"a" * 12, 1).text() == letters(b"a" * 12, 1)


def test_a_line_in_the_log_for_each_request(caplog):
    with caplog.at_level(logging.INFO, "preheat.request"), serving(slots=1, max_queue=0) as server:
        server.run(b"hello", 3, id="my-id")
        with pytest.raises(InvalidRequest):
            server.submit(b"", id="other")
    done, refused = (record for record in caplog.records if record.name == "preheat.request")
    assert done.request["id"] == "my-id"
    assert done.request["outcome"] == "ok"
    assert (done.request["prompt_tokens"], done.request["completion_tokens"]) == (5, 3)
    assert 0 <= done.request["queue_seconds"] <= done.request["first_token_seconds"] <= done.request["seconds"]
    assert done.request["finish_reasons"] == ["length"]
    assert "request my-id ok" in done.getMessage()
    assert (refused.request["id"], refused.request["outcome"]) == ("other", "invalid")


def test_histograms_count_requests_and_steps():
    with serving() as server:
        server.run(b"hello", 5)
        once = ("time_to_first_token", "time_per_output_token", "request", "queue")
        counts = {f"{name}_seconds": 1 for name in once} | {"decode_step_seconds": 4, "batch_size": 4}
        for name, count in counts.items():
            assert server.metrics.value(f"preheat_{name}_count") == count
        assert server.metrics.value("preheat_batch_size_sum") == 4


def test_the_proof_moves_no_client_facing_metric():
    with serving(opened=False) as server:
        server.run(b"proof", 5, proof=True)
        server.orchestrator.open()
        for name in ("time_to_first_token_seconds", "queue_seconds", "request_seconds", "decode_step_seconds", "batch_size"):
            assert server.metrics.value(f"preheat_{name}_count") == 0
        for name in ("prompt_tokens", "prefilled_tokens", "generated_tokens", "cached_prompt_tokens"):
            assert server.metrics.value(f"preheat_{name}_total") == 0
        server.run(b"hello", 5)
        assert server.metrics.value("preheat_batch_size_count") == 4


@pytest.mark.parametrize("layout", ["text", "json"])
def test_log_lines_tell_who_how_long_and_how_it_ended(layout, capsys, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)
    configure_logging(layout)
    clock = Clock()
    with serving(slots=1, clock=clock) as server:
        server.run(b"hello", 3, id="the-good")
        gate = server.engine.gate("generate")
        late = server.submit(b"hello", 9, id="the-late", deadline=clock.now + 1.5)[1]
        assert gate.arrived()
        clock.now += 2
        late.wait()
        gate.open()
        assert server.orchestrator.drain(WAIT)
    lines = [line for line in capsys.readouterr().err.splitlines() if "request the-" in line]
    good, failed = (line for line in lines if "the-good ok" in line or "the-late error" in line)
    if layout == "json":
        found = json.loads(good)["request"]
        assert found == {"id": "the-good", "outcome": "ok", "prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 0,
                "queue_seconds": 0.0, "first_token_seconds": 0.0, "seconds": 0.0, "finish_reasons": ["length"],
                "put_back": 0}  # fmt: skip
        found = json.loads(failed)["request"]
        assert (found["id"], found["outcome"], found["seconds"]) == ("the-late", "error", 2.0)
        assert "not finished within its 1.5 s" in found["error"]
    else:
        assert "prompt_tokens=5 completion_tokens=3" in good and "seconds=0.0" in good
        assert "seconds=2.0" in failed and "not finished within its 1.5 s" in failed
