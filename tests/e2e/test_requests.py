"""Requests whose answers are known, to a served checkpoint: over HTTP whole and streamed, and over gRPC.

The model's next token depends on the last one only. After most bytes comes the next byte, for certain; `ODDS` lists
the others, so every expectation below can be worked out by hand from it.
"""

import json
import math

import httpx
import numpy as np
import pytest
from server_process import serving

from server.client import Client
from server.errors import InvalidRequest
from tests.golden import known

BOS, EOS, EOT, UNKNOWN = known.BOS, known.EOS, known.EOT, 260  # the tokenizer knows no 260
MAX_LEN = 64
ODDS = {
    "q": {"r": 0.5, "s": 0.3, "t": 0.2},
    "m": {"m": 0.6, "n": 0.4},
    ".": {EOS: 1.0},
    "#": {EOT: 1.0},
    "?": {EOS: 0.6, "!": 0.4},
    "(": {0xC3: 1.0}, 0xC3: {0xA9: 1.0}, 0xA9: {")": 1.0}, ")": {EOS: 1.0},  # é
    "{": {0xE2: 1.0}, 0xE2: {0x82: 1.0}, 0x82: {EOS: 1.0},  # the beginning of €
    "[": {0xFF: 1.0}, 0xFF: {"]": 1.0}, "]": {EOS: 1.0},  # no UTF-8
    "<": {UNKNOWN: 1.0}, UNKNOWN: {">": 1.0}, ">": {EOS: 1.0},
    "~": {BOS: 1.0}, BOS: {"A": 1.0},
    "z": {"z": 1.0},
}  # fmt: skip


def token(name):
    return name if isinstance(name, int) else ord(name)


def matrix():
    table = np.zeros((known.VOCAB, known.VOCAB))
    for row in range(known.VOCAB):
        table[row, (row + 1) % 256] = 1.0
    for name, odds in ODDS.items():
        table[token(name)] = 0
        for follower, probability in odds.items():
            table[token(name), token(follower)] = probability
    return table


@pytest.fixture(scope="module")
def server(tmp_path_factory, cache):
    model = known.make(tmp_path_factory.mktemp("known"), matrix(), layers=1)
    options = ("--slots", "2", "--max-len", str(MAX_LEN), "--prefill-buckets", "16", "--served-model-name", "known")
    with serving(model, cache, *options, "--max-queue", "256") as running:
        yield running
        running.assert_nothing_compiled()


@pytest.fixture(scope="module")
def client(server):
    with Client(server.grpc, timeout=60) as opened:
        yield opened


def post(server, body, path="/v1/completions"):
    return httpx.post(server.http + path, json=body, timeout=60)


def whole(server, client, prompt, options):
    choice = post(server, {"prompt": prompt, **options}).json()
    usage = choice["usage"]["completion_tokens"]
    return choice["choices"][0]["text"], choice["choices"][0]["finish_reason"], usage


def streamed(server, client, prompt, options):
    body = {"prompt": prompt, **options, "stream": True, "stream_options": {"include_usage": True}}
    lines = [line[6:] for line in post(server, body).text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    *chunks, last = map(json.loads, lines[:-1])
    choices = [chunk["choices"][0] for chunk in chunks]
    text = "".join(choice["text"] for choice in choices)
    return text, choices[-1]["finish_reason"], last["usage"]["completion_tokens"]


def over_grpc(server, client, prompt, options):
    options = dict(options)
    if "logit_bias" in options:
        options["logit_bias"] = {int(key): value for key, value in options["logit_bias"].items()}
    answer = client.generate(prompt, **options)
    return answer.text, answer.finish_reason, answer.completion_tokens


DOORS = [whole, streamed, over_grpc]
CASES = [
    # Ends: EOS and end of turn, also as the first token; counted, not shown.
    ("+", {}, ",-.", "stop", 4),
    (".", {}, "", "stop", 1),
    ('"', {}, "#", "stop", 2),
    ("a", {"max_tokens": 3}, "bcd", "length", 3),
    ("a", {"max_tokens": 1}, "b", "length", 1),
    (".", {"max_tokens": 1}, "", "stop", 1),
    (".", {"max_tokens": 2, "ignore_eos": True}, "\x02", "length", 2),  # 257 is no text; 257 + 1 = 2 modulo 256
    ("?", {"min_tokens": 1, "max_tokens": 1}, "!", "length", 1),
    ("?", {}, "", "stop", 1),
    # Text: a character in two tokens, the beginning of one, no UTF-8, ids of no token, control tokens.
    ("'", {"max_tokens": 3}, "(é", "length", 3),
    ("(", {}, "é)", "stop", 4),
    ("(", {"max_tokens": 1}, "\ufffd", "length", 1),
    ("{", {}, "\ufffd", "stop", 3),
    ("[", {}, "\ufffd]", "stop", 3),
    ("<", {}, ">", "stop", 3),
    ("~", {"max_tokens": 2}, "A", "length", 2),
    # Stop strings: within the text, false start, across a character, first token, at the end, in the prompt, several.
    ("a", {"max_tokens": 20, "stop": "fg"}, "bcde", "stop", 6),
    ("a", {"max_tokens": 20, "stop": ["fgx", "j"]}, "bcdefghi", "stop", 9),
    ("(", {"stop": "é"}, "", "stop", 2),
    ("a", {"max_tokens": 5, "stop": "b"}, "", "stop", 1),
    ("a", {"max_tokens": 3, "stop": "d"}, "bc", "stop", 3),
    ("a", {"max_tokens": 3, "stop": "de"}, "bcd", "length", 3),
    ("abc", {"max_tokens": 3, "stop": ["abc", "c"]}, "def", "length", 3),
    ("a", {"max_tokens": 9, "stop": ["gh", "fg"]}, "bcde", "stop", 6),
    ("a", {"max_tokens": 9, "stop_token_ids": [ord("d")]}, "bc", "stop", 3),
    # Choices: greedy, bias, penalties, filters.
    ("q", {"max_tokens": 1}, "r", "length", 1),
    ("q", {"max_tokens": 1, "temperature": 1e-7, "seed": 1}, "r", "length", 1),
    ("q", {"max_tokens": 1, "temperature": 5, "top_k": 1, "seed": 1}, "r", "length", 1),
    ("q", {"max_tokens": 1, "temperature": 5, "top_p": 1e-9, "seed": 1}, "r", "length", 1),
    ("q", {"max_tokens": 1, "temperature": 1, "min_p": 1, "seed": 1}, "r", "length", 1),
    ("q", {"max_tokens": 1, "logit_bias": {str(ord("t")): 1}}, "t", "length", 1),  # 0.2 e > 0.5
    ("q", {"max_tokens": 1, "logit_bias": {str(ord("r")): -100}}, "s", "length", 1),
    ("m", {"max_tokens": 2, "presence_penalty": 2}, "mn", "length", 2),  # of generated tokens only
    ("m", {"max_tokens": 3, "frequency_penalty": 0.3}, "mmn", "length", 3),  # 0.3 < log(0.6 / 0.4) = 0.41 < 0.6
    ("m", {"max_tokens": 1, "repetition_penalty": 2}, "n", "length", 1),  # of the prompt too: 2 log 0.6 < log 0.4
    # Grammars.
    ("q", {"max_tokens": 9, "guided_regex": "[st]u"}, "su", "stop", 2),
    ("a", {"max_tokens": 9, "guided_grammar": 'start: "bc" "X" /[y-z]/'}, "bcXy", "stop", 4),
    ("?", {"max_tokens": 9, "guided_regex": "!?"}, "", "stop", 1),
    ("?", {"max_tokens": 9, "guided_regex": "!"}, "!", "stop", 1),
    ("q", {"max_tokens": 9, "guided_json": '{"const": 5}'}, "5", "stop", 1),
]  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("prompt", "options", "text", "reason", "count"), CASES, ids=lambda value: ascii(value)[:40])
def test_known_answers(server, client, door, prompt, options, text, reason, count):
    options = {"temperature": 0, "max_tokens": 30} | options
    assert door(server, client, prompt, options) == (text, reason, count)


@pytest.mark.parametrize("door", DOORS)
def test_lengths_up_to_the_limit(server, client, door):
    for length in (1, 15, 16, 17, 40, MAX_LEN - 1):  # one bucket is 16
        room = MAX_LEN - length
        assert door(server, client, [ord("z")] * length, {"temperature": 0, "max_tokens": room}) == (
            "z" * room, "length", room,
        )  # fmt: skip


def test_no_length_is_what_fits(server, client):
    assert post(server, {"prompt": "zz"}, "/generate").json() == {"response": "z" * (MAX_LEN - 3)}  # BOS, z, z
    assert client.generate("zz").text == "z" * (MAX_LEN - 3)
    assert whole(server, client, "zz", {})[2] == 16


@pytest.mark.parametrize(
    ("prompt", "options", "param"),
    [
        ([], {}, "prompt"),
        ([known.VOCAB], {}, "prompt"),
        ([ord("z")] * (MAX_LEN + 1), {"max_tokens": 1}, "prompt"),
        ([ord("z")] * MAX_LEN, {"max_tokens": 1}, "max_tokens"),
        ("z", {"max_tokens": MAX_LEN}, "max_tokens"),
        ("z", {"stop_token_ids": [known.VOCAB]}, "stop_token_ids"),
        ("z", {"guided_regex": "("}, "guided_regex"),
        ("z", {"guided_json": "{"}, "guided_json"),
        ("z", {"guided_grammar": "start: x"}, "guided_grammar"),
        ("z", {"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ],
)
def test_refused_at_every_door(server, client, prompt, options, param):
    for stream in (False, True):
        answer = post(server, {"prompt": prompt, **options, "stream": stream})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    with pytest.raises(InvalidRequest) as caught:
        client.generate(prompt, **options)
    assert caught.value.param == param


def logprob(text):
    return pytest.approx(math.log(text), abs=1e-4)


def test_log_probs_of_the_first_and_all_other_tokens(server):
    body = {"prompt": "pq", "max_tokens": 2, "temperature": 0, "logprobs": 3, "echo": True}
    choice = post(server, body).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert (choice["text"], logprobs["tokens"]) == ("pqrs", ["<|bos|>", "p", "q", "r", "s"])
    assert logprobs["text_offset"] == [0, 0, 1, 2, 3]
    values = logprobs["token_logprobs"]
    assert values[0] is None and values[1] < -50 and values[2:] == pytest.approx([0, math.log(0.5), 0], abs=1e-4)
    assert logprobs["top_logprobs"][3] == {"r": logprob(0.5), "s": logprob(0.3), "t": logprob(0.2)}
    scored = post(server, {"prompt": [ord("q"), ord("t")], "max_tokens": 0, "logprobs": 0, "echo": True}).json()
    assert scored["choices"][0]["logprobs"]["token_logprobs"][1] == logprob(0.2)
    assert scored["usage"]["completion_tokens"] == 0


def test_log_probs_are_those_before_temperature_bias_and_grammar(server, client):
    bias = {"logit_bias": {str(ord("r")): 9}}
    for options in ({"temperature": 3, "seed": 4, "top_k": 1}, bias, {"guided_regex": "r"}):
        body = {"prompt": "q", "max_tokens": 1, "temperature": 0, "logprobs": 0, **options}
        assert post(server, body).json()["choices"][0]["logprobs"]["token_logprobs"] == [logprob(0.5)]


def test_a_seed_gives_the_same_alone_in_a_batch_streamed_and_over_grpc(server, client):
    options = {"temperature": 1, "seed": 2**63 - 1, "max_tokens": 8, "ignore_eos": True}
    first = whole(server, client, "m", options)
    assert streamed(server, client, "m", options) == over_grpc(server, client, "m", options) == first
    body = {"prompt": ["m", "q", "m"], **options}
    texts = [choice["text"] for choice in post(server, body).json()["choices"]]
    assert texts[0] == texts[2] == first[0]


def test_samples_follow_the_distribution(server):
    body = {"prompt": "q", "max_tokens": 1, "temperature": 1, "seed": 3, "n": 128}
    texts = [choice["text"] for choice in post(server, body).json()["choices"]]
    for text, probability in (("r", 0.5), ("s", 0.3), ("t", 0.2)):
        deviation = math.sqrt(128 * probability * (1 - probability))
        assert abs(texts.count(text) - 128 * probability) < 4 * deviation
    assert texts.count("r") + texts.count("s") + texts.count("t") == 128
    body |= {"top_p": 0.6}
    assert {choice["text"] for choice in post(server, body).json()["choices"]} == {"r", "s"}
    body |= {"top_p": 1, "min_p": 0.5}  # at least half of 0.5
    assert {choice["text"] for choice in post(server, body).json()["choices"]} == {"r", "s"}
    body |= {"min_p": 0, "guided_regex": "s|t"}
    texts = [choice["text"] for choice in post(server, body).json()["choices"]]
    assert set(texts) == {"s", "t"} and abs(texts.count("s") - 128 * 0.6) < 4 * math.sqrt(128 * 0.24)


def test_control_tokens_of_a_raw_prompt(server):
    assert post(server, {"text": "<|eos|>"}, "/tokenize").json()["tokens"] == [BOS, EOS]
    answer = post(server, {"prompt": "<|bos|>z", "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == 2
    answer = post(server, {"prompt": "<|bos|>z", "max_tokens": 1, "parse_special": False}).json()
    assert answer["usage"]["prompt_tokens"] == 1 + len("<|bos|>z")


def test_chat_is_templated_and_ends_with_its_turn(server):
    """The template ends with "assistant: ": after the space comes !, and so on to #, which ends the turn."""
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "logprobs": True, "top_logprobs": 1}
    answer = post(server, body, "/v1/chat/completions").json()
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('!"#', "stop")
    assert answer["usage"]["prompt_tokens"] == len("user: hi") + 1 + len("assistant: ")  # the end of turn is one token
    assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == [[33], [34], [35]]
    body |= {"continue_final_message": True, "messages": [*body["messages"], {"role": "assistant", "content": "0"}]}
    answer = post(server, body | {"max_tokens": 2}, "/v1/chat/completions").json()
    assert answer["choices"][0]["message"]["content"] == "12"
