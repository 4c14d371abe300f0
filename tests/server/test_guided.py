"""Structured output: masks of small grammars worked out by hand, and guided requests through the orchestrator.

The rule of most tests, ``NEXT``: after each byte comes the next one, with probability 0.9; the others are equally
improbable. What a grammar leaves of that can be told by hand.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from orchestrator_harness import Recorder, serving

from engine.api import SamplingParams
from engine.mock import Table, mock_config
from server.errors import InvalidRequest
from server.orchestrator.scheduler import Scheduler
from server.orchestrator.sequence import Rank, Sequence
from server.text.guided import CACHED, Guides, fit
from server.text.tokenizers import ByteTokenizer

BOS, EOS, EOT = 256, 257, 258
VOCAB = 320
GUIDES = Guides(ByteTokenizer(), (EOS, EOT), VOCAB)
OTHERS = 0.1 / 255
NEXT = Table({token: {**dict.fromkeys(range(256), OTHERS), (token + 1) % 256: 0.9} for token in range(256)})


def allowed(mask):
    assert mask.dtype == np.uint32 and mask.shape == (VOCAB // 32,)
    return {token for token in range(VOCAB) if mask[token // 32] >> (token % 32) & 1}


def after(guide, text, **options):
    matcher = guide.matcher(**options)
    for token in text.encode():
        matcher.accept(token)
    return matcher


@pytest.mark.parametrize(
    ("text", "want"),
    [("", {"a"}), ("a", {"b"}), ("ab", {"b", "c", EOS, EOT}), ("abb", {"b", "c", EOS, EOT})],
)
def test_masks_of_a_regular_expression(text, want):
    mask = after(GUIDES.compile("guided_regex", "ab+c?"), text).mask()
    assert allowed(mask) == {token if isinstance(token, int) else ord(token) for token in want}


def test_nothing_can_follow():
    matcher = after(GUIDES.compile("guided_regex", "ab+c?"), "ab")
    assert not matcher.finished  # b may follow
    matcher.accept(ord("c"))
    assert matcher.finished


def test_eos_is_not_allowed_before_the_end_nor_are_ids_without_text():
    first = allowed(GUIDES.compile("guided_regex", "[^a]+").matcher().mask())
    assert first.isdisjoint({BOS, EOS, EOT, ord("a"), *range(259, VOCAB)})
    assert {ord("b"), 0xC3} <= first and 0xFF not in first  # UTF-8 never has the byte FF
    assert allowed(GUIDES.compile("guided_grammar", 'start: <[256]> "x"').matcher().mask()) == {BOS}  # named by its id


def test_ignoring_eos_allows_it_where_nothing_else_is():
    guide = GUIDES.compile("guided_regex", "a?")
    assert allowed(guide.matcher().mask()) == {ord("a"), EOS, EOT}
    assert allowed(guide.matcher(ignore_eos=True).mask()) == {ord("a")}
    empty = GUIDES.compile("guided_regex", "")
    assert allowed(empty.matcher(ignore_eos=True).mask()) == {EOS, EOT}


@pytest.mark.parametrize(
    ("param", "text", "good", "bad"),
    [
        ("guided_grammar", 'start: greeting " " /[a-z]+/ "!"\ngreeting: "hi" | "hello"', "hello bob!", "hullo"),
        ("guided_grammar", 'root ::= greeting " " [a-z]+ "!"\ngreeting ::= "hi" | "hello"', "hi bob!", "hi  "),
        ("guided_json", '{"required": ["a"], "properties": {"a": {"type": "integer"}}}', '{"a": 1}', '{"a": x}'),
        ("guided_json", '{"enum": ["x", 5]}', "5", "4"),
        ("guided_json", "{}", "[1, null]", "nil"),
    ],
)  # fmt: skip
def test_kinds_of_grammars(param, text, good, bad):
    guide = GUIDES.compile(param, text)
    assert EOS in allowed(after(guide, good).mask())
    with pytest.raises(InvalidRequest, match=f"{param} cannot be followed"):
        after(guide, bad)


def test_choices():
    texts = ("yes", "yes!", "(a|b)", "日本 🎉", 'a"b\\', "\x00\n")
    guide = GUIDES.compile("guided_choice", texts)
    for text in texts:
        matcher = after(guide, text)
        assert matcher.finished or EOS in allowed(matcher.mask())
    assert allowed(after(guide, "yes").mask()) == {ord("!"), EOS, EOT}
    with pytest.raises(InvalidRequest, match="guided_choice cannot be followed"):
        after(guide, "a|")
    many = GUIDES.compile("guided_choice", tuple(f"choice {number}" for number in range(1000)))
    assert allowed(after(many, "choice 77").mask()) == {*map(ord, "0123456789"), EOS, EOT}


DIGITS = set(b"0123456789")


@pytest.mark.parametrize(
    ("param", "text", "before", "want"),
    [
        ("guided_json", '{"type": "integer"}', "1" * 19, DIGITS | {EOS, EOT}),
        ("guided_json", '{"type": "integer"}', "1" * 20, {EOS, EOT}),  # it may not go on for ever
        ("guided_json", '{"type": "number"}', "1" * 20, {*b".eE", EOS, EOT}),
        ("guided_json", '{"type": "number"}', "1" * 20 + ".", DIGITS),
        ("guided_json", '{"type": "number"}', "0." + "3" * 20, {*b"eE", EOS, EOT}),
        ("guided_json", '{"type": "number"}', "1e-" + "3" * 20, {EOS, EOT}),
        ("guided_json", '{"type": "array", "items": {"type": "integer"}}', "[1, " + "7" * 20, {*b" \n,]"}),
        # unless it must, and nowhere but in numbers
        ("guided_json", json.dumps({"const": 10**21}), "1" + "0" * 19, {ord("0")}),
        ("guided_json", '{"type": "string", "pattern": "^[0-9]+$"}', '"' + "5" * 20, DIGITS | {ord('"')}),
        ("guided_json", '{"type": "string", "pattern": "^[0-9]{30}$"}', '"' + "5" * 20, DIGITS),
        ("guided_regex", "[0-9]+", "5" * 20, DIGITS | {EOS, EOT}),
        ("guided_grammar", "root ::= [0-9]+", "5" * 20, DIGITS | {EOS, EOT}),
        ("guided_grammar", 'start: tool_calls\ntool_calls: %json {"type": "integer"}', "5" * 20, {EOS, EOT}),
    ],
)  # fmt: skip
def test_numbers_in_json_end(param, text, before, want):
    assert allowed(after(GUIDES.compile(param, text), before).mask()) == want


@pytest.mark.parametrize(
    ("param", "text", "message"),
    [
        ("guided_json", "{", "Expecting"),
        ("guided_json", "5", "an object"),
        ("guided_json", "true", "an object"),
        ("guided_json", "[" * 5000, "cannot be compiled"),  # the parser of Python 3.11 runs out of stack
        ("guided_json", '{"type": "strin"}', "strin"),
        ("guided_json", '{"not": {}}', "not"),
        ("guided_json", '{"$ref": "http://example.com/schema"}', "example.com"),
        ("guided_json", '{"$ref": "#/$defs/nowhere"}', "nowhere"),
        ("guided_regex", "(a", "unclosed group"),
        ("guided_regex", "(?=a)b", "look-around"),
        ("guided_regex", r"(a)\1", "backreferences"),
        ("guided_grammar", "start: x", "unknown name"),
        ("guided_grammar", "start: start", "matches no text"),
        ("guided_grammar", 'start: "a', "lexer error"),
        ("guided_regex", "a" * 65_537, "65536"),
    ],
)
def test_what_cannot_be_compiled_is_refused(param, text, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        GUIDES.compile(param, text)
    assert caught.value.param == param and caught.value.message.startswith(param)
    assert len(caught.value.message) < 400 and caught.value.message.isprintable()


def test_compiled_grammars_are_kept():
    guides = Guides(ByteTokenizer(), (EOS,), VOCAB)
    first = guides.compile("guided_regex", "a")
    assert guides.compile("guided_regex", "a") is first
    for count in range(CACHED):
        guides.compile("guided_regex", f"x{{{count}}}")
    assert guides.compile("guided_regex", "a") is not first


def test_a_model_with_a_smaller_vocabulary_than_its_tokenizer():
    assert fit(b"\xff" * 9, 35, 40).tolist() == [2**32 - 1, 7]
    assert fit(b"\xff", 8, 40).tolist() == [255, 0]
    guide = Guides(ByteTokenizer(), (EOS,), 258).compile("guided_regex", "a?")
    mask = guide.matcher().mask()
    assert [token for token in range(288) if mask[token // 32] >> (token % 32) & 1] == [ord("a"), EOS]


def test_a_model_without_an_eos_token_ends_where_nothing_can_follow():
    guide = Guides(ByteTokenizer(), (), VOCAB).compile("guided_regex", "ab?")
    assert allowed(after(guide, "a").mask()) == {ord("b")}
    assert after(guide, "ab").finished


# Through the orchestrator.


def ask(server, prompt, param, text, max_tokens=20, **options):
    return server.submit(prompt, max_tokens, guide=GUIDES.compile(param, text), **options)[1]


def test_every_token_keeps_to_the_grammar_the_first_one_included():
    with serving(NEXT) as server:
        recorder = ask(server, b"a", "guided_regex", "x[yz]+!").ok()
    # After a the model wants b: only x is allowed; y and z follow; then y, z and ! are all equally improbable.
    assert recorder.text().startswith("xyz") and re.fullmatch("x[yz]+!?", recorder.text())


def test_it_ends_with_stop_where_nothing_can_follow_without_an_eos():
    with serving(NEXT) as server:
        recorder = ask(server, b"a", "guided_regex", "bcd").ok()
    assert (recorder.text(), recorder.last().finish_reason, recorder.usage.completion_tokens) == ("bcd", "stop", 3)


def test_eos_ends_where_the_grammar_allows_it():
    rule = Table({ord("a"): {ord("b"): 0.9, EOS: 0.1}, ord("b"): {EOS: 0.9, ord("b"): 0.1}})
    with serving(rule) as server:
        recorder = ask(server, b"a", "guided_regex", "b+").ok()
        assert (recorder.text(), recorder.last().finish_reason, recorder.usage.completion_tokens) == ("b", "stop", 2)
        # The grammar wants three: EOS is not allowed although the model would choose it.
        recorder = ask(server, b"a", "guided_regex", "b{3,}").ok()
        assert (recorder.text(), recorder.usage.completion_tokens) == ("bbb", 4)


def test_length_stop_strings_stop_tokens_and_min_tokens():
    with serving(NEXT) as server:
        cut = ask(server, b"a", "guided_regex", "[b-z]+", max_tokens=4).ok()
        assert (cut.text(), cut.last().finish_reason) == ("bcde", "length")
        last = ask(server, b"a", "guided_regex", "bcde", max_tokens=4).ok()
        assert (last.text(), last.last().finish_reason) == ("bcde", "stop")
        stopped = ask(server, b"a", "guided_regex", "[b-z]+", stop=("ef",)).ok()
        assert (stopped.text(), stopped.last().finish_reason) == ("bcd", "stop")
        token = ask(server, b"a", "guided_regex", "[b-z]+", stop_token_ids=frozenset({ord("e")})).ok()
        assert (token.text(), token.last().stop_reason) == ("bcd", ord("e"))
        longer = ask(server, b"a", "guided_regex", "b{1,5}", sampling=SamplingParams(min_tokens=5)).ok()
        assert longer.text() == "bbbbb"
        ignoring = ask(server, b"a", "guided_regex", "b{1,5}", ignore_eos=True).ok()
        assert (ignoring.text(), ignoring.last().finish_reason) == ("bbbbb", "stop")


def test_samples_have_matchers_of_their_own():
    with serving(NEXT) as server:
        recorder = ask(
            server, b"a", "guided_regex", "[0-9]{4}", n=4, sampling=SamplingParams(temperature=1.0, seed=5)
        ).ok()
    texts = [recorder.text(sample) for sample in range(4)]
    assert all(re.fullmatch("[0-9]{4}", text) for text in texts) and len(set(texts)) > 1


def test_log_probs_are_the_models_own():
    with serving(NEXT) as server:
        recorder = ask(server, b"a", "guided_regex", "xy", sampling=SamplingParams(logprobs=True)).ok()
    first, second = [logprob for delta in recorder.deltas for logprob in delta.logprobs]
    assert (first.token, second.token) == (ord("x"), ord("y"))
    assert first.logprob == pytest.approx(np.log(OTHERS), abs=1e-3)
    assert second.logprob == pytest.approx(np.log(0.9), abs=1e-3)
    assert first.top[0][0] == ord("b")  # what it would have said


def test_a_guided_row_steps_once_its_last_token_was_read_and_the_others_lose_no_step():
    with serving(NEXT, slots=2) as server:
        free = server.submit(b"\x01", 40)[1]
        guided = ask(server, b"a", "guided_regex", "[b-z]{10}")
        assert free.ok().tokens() == list(range(2, 42)) and guided.ok().text() == "bcdefghijk"
        calls = list(server.engine.calls)
    masks = [place for place, call in enumerate(calls) if call.verb == "set_mask"]
    steps = [next(place for place in range(mask, len(calls)) if calls[place].verb == "generate") for mask in masks]
    reads = {call.step: place for place, call in enumerate(calls) if call.verb == "read"}
    assert len(set(steps)) == 9
    for earlier, mask in zip(steps, masks[1:], strict=False):
        assert reads[calls[earlier].step] < mask
    assert sum(len(call.slots) for call in calls if call.verb == "generate") == 9 + 39


def test_guided_rows_step_together():
    """They wait for each other, so that they share steps; a row without a grammar is in every step."""
    scheduler = Scheduler(mock_config(slots=3, prefixes=3, max_len=64))
    matcher = GUIDES.compile("guided_regex", "[a-z]+").matcher()
    first, second, free = (
        Sequence(Rank(0, arrival, 0), [97 + arrival], SamplingParams(), 20, matcher=matcher if arrival < 2 else None)
        for arrival in range(3)
    )

    def begin(sequence):
        scheduler.add(sequence)
        assert scheduler.admit() is sequence
        assert scheduler.next_chunk(sequence).last and scheduler.commit(sequence, sequence.epoch, 98)
        scheduler.inserted(sequence)
        scheduler.prefix_returned()

    def step():
        return [row.sequence for row in scheduler.plan()]

    def read(*sequences):
        for sequence in sequences:
            assert scheduler.commit(sequence, sequence.epoch, 98)

    begin(first)
    begin(free)
    assert step() == [first, free]
    begin(second)
    assert step() == [free]  # the second waits for the first's token
    read(first, free)
    assert step() == [first, second, free]
    read(free)
    assert step() == [free]
    read(first, free)
    assert step() == [free]  # the first waits for the second's
    scheduler.end(second)  # cancelled: nobody waits for it
    assert step() == [first, free]
    scheduler.put_back(first)
    begin_again = scheduler.admit()
    assert begin_again is first and not first.awaits_token


def test_a_slot_is_free_of_the_mask_of_who_had_it_before():
    with serving(NEXT, slots=1) as server:
        ask(server, b"a", "guided_regex", "x+", max_tokens=3).ok()
        assert server.run(b"a", 3).text() == "bcd"


def test_put_back_keeps_to_the_grammar():
    """Too few pages for all: the youngest are put back and prefilled again with what they had."""
    pattern = "[0-9]{30}"
    options = {"max_tokens": 30, "sampling": SamplingParams(temperature=1.0, seed=11)}
    prompts = [b"%d prompt" % number for number in range(4)]
    with serving(NEXT) as server:
        alone = [ask(server, prompt, "guided_regex", pattern, **options).ok().text() for prompt in prompts]
    with serving(NEXT, slots=4, kv_pages=22) as server:
        recorders = [Recorder() for _ in prompts]
        server.in_company(recorders[1:3])
        for prompt, recorder in zip(prompts, recorders, strict=True):
            ask(server, prompt, "guided_regex", pattern, sink=recorder, **options)
        texts = [recorder.ok().text() for recorder in recorders]
        assert sum(sequence.put_back for sequence in server.sequences) > 0
    assert texts == alone and all(re.fullmatch(pattern, text) for text in texts)


def test_a_json_object_parses_whatever_is_sampled():
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 4},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    flat = Table({}, otherwise=dict.fromkeys(range(32, 127), 1 / 95))
    with serving(flat, max_len=256) as server:
        for seed in range(5):
            sampling = SamplingParams(temperature=1.0, seed=seed)
            recorder = ask(server, b"a", "guided_json", json.dumps(schema), 240, sampling=sampling).ok()
            if recorder.last().finish_reason == "stop":
                value = json.loads(recorder.text())
                assert list(value) == ["name", "age"] and len(value["name"]) <= 4 and 0 <= value["age"] <= 99


def test_a_grammar_that_min_tokens_leaves_nothing_of_ends_the_request_only():
    """Until min_tokens the stop token cannot be chosen, and nothing else is allowed."""
    with serving(NEXT) as server:
        sampling = SamplingParams(min_tokens=3)
        recorder = ask(server, b"a", "guided_regex", "bbb", 8, sampling=sampling, stop_token_ids=frozenset({ord("b")}))
        assert isinstance(recorder.wait().error, InvalidRequest) and recorder.error.param == "guided_regex"
        assert server.run(b"a", 3).text() == "bcd"
        assert server.gauges()[:3] == (0, 0, 0)
