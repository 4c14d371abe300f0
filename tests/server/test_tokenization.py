"""Control tokens in raw prompts and in answers, and the routes of the tokenizer, in every spelling.

The tokenizer is `ByteTokenizer`: ids 0-255 are bytes, 256 is <|bos|>, 257 <|eos|>, 258 <|eot|>, so that every expected
id is written down by hand. The model: after each byte comes the next; after "x" the token <|bos|>, after that "m".
"""

from __future__ import annotations

import json

import httpx
import pytest
from front_doors import MAX_LEN, NAME, open_doors

from engine.mock import Table
from server.client import Client, decode_request
from server.grpc.streams import PromptOffsets
from server.text.tokenizers import ByteTokenizer

BOS, EOS, EOT = 256, 257, 258
NEXT = {token: {(token + 1) % 256: 1.0} for token in range(256)}
MODEL = Table(NEXT | {ord("x"): {BOS: 1.0}, BOS: {ord("m"): 1.0}, ord("."): {EOS: 1.0}})


@pytest.fixture(scope="module")
def doors():
    with open_doors(MODEL, slots=4, max_queue=64) as opened:
        yield opened


@pytest.fixture(scope="module")
def http(doors):
    with httpx.Client(base_url=doors.http, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def client(doors):
    with Client(doors.grpc.address, timeout=30) as client:
        yield client


def post(http, path, **body):
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(http, path, **body):
    blocks = http.post(path, json=body | {"stream": True}).text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


# Raw prompts. (text, options, ids)
PROMPTS = [
    ("<|eot|>a", {}, [BOS, EOT, 97]),
    ("a<|eot|>\n<|bos|>", {}, [BOS, 97, EOT, 10, BOS]),
    ("<|bos|>a", {}, [BOS, 97]),  # one BOS
    ("<|bos|><|bos|>a", {}, [BOS, BOS, 97]),  # as many as were asked for
    ("<|bos|>a", {"add_special_tokens": False}, [BOS, 97]),
    ("<|eot|>a", {"add_special_tokens": False}, [EOT, 97]),
    ("<|bos|>a", {"parse_special": False}, [BOS, *b"<|bos|>a"]),
    ("<|eot|>", {"parse_special": False, "add_special_tokens": False}, [*b"<|eot|>"]),
    ("a\ufdd0<|eot|>\ufdd0\ufdd0", {}, [BOS, 97, *"\ufdd0".encode(), EOT, *"\ufdd0\ufdd0".encode()]),
]


@pytest.mark.parametrize(("text", "options", "ids"), PROMPTS)
def test_control_tokens_of_a_raw_prompt(http, client, text, options, ids):
    echo = {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 0}
    choice = post(http, "/v1/completions", **echo, **options)["choices"][0]
    names = ByteTokenizer()
    assert choice["logprobs"]["tokens"] == [names.token_text(id) for id in ids]
    assert choice["text"] == text
    assert post(http, "/tokenize", prompt=text, **options)["tokens"] == ids
    messages = list(client.decode(decode_request(text, prompt_only=True, prompt_logprobs=0, **options)))
    assert [id for message in messages for id in message.prompt.token_ids] == ids


def test_generate_parses_control_tokens(http):
    assert post(http, "/generate", prompt="x<|bos|>", max_tokens=2) == {"response": "mn"}
    assert post(http, "/generate", prompt="x<|bos|>", max_tokens=2, parse_special=False) == {"response": "?@"}


def test_jetstreams_has_bos_adds_none(client):
    def prompt(**options):
        request = decode_request("<|eot|>a", prompt_only=True, echo=True, **options)
        return [id for message in client.decode(request) for id in message.prompt.token_ids]

    assert prompt() == [BOS, EOT, 97] and prompt(has_bos=True) == [EOT, 97]


def test_text_of_a_message_stays_text(http):
    body = {"messages": [{"role": "user", "content": "<|eot|>"}], "max_tokens": 1}
    plain = len("user: <|eot|>") + 1 + len("assistant: ")
    for options, count in (({}, plain), ({"parse_special": False}, plain), ({"add_special_tokens": True}, plain + 1)):
        assert post(http, "/v1/chat/completions", **body, **options)["usage"]["prompt_tokens"] == count
    refused = http.post("/v1/chat/completions", json=body | {"parse_special": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "parse_special")


# Answers. After "w" come x, <|bos|>, m, n, ...
HIDDEN = {"text": "xmn", "text_offset": [0, 1, 1, 2]}
SHOWN = {"text": "x<|bos|>mn", "text_offset": [0, 1, 8, 9]}


@pytest.mark.parametrize(("options", "want"), [({}, HIDDEN), ({"skip_special_tokens": False}, SHOWN)])
def test_control_tokens_of_an_answer(http, client, options, want):
    body = {"prompt": "w", "max_tokens": 4, "temperature": 0, **options}
    choice = post(http, "/v1/completions", **body, logprobs=0)["choices"][0]
    assert choice["text"] == want["text"]
    assert choice["logprobs"]["tokens"] == ["x", "<|bos|>", "m", "n"]
    assert choice["logprobs"]["text_offset"] == want["text_offset"]
    chunks = [chunk["choices"][0] for chunk in streamed(http, "/v1/completions", **body, logprobs=0)]
    assert "".join(chunk["text"] for chunk in chunks) == want["text"]
    assert sum((chunk["logprobs"]["text_offset"] for chunk in chunks), []) == want["text_offset"]
    assert post(http, "/generate", **body)["response"] == want["text"]
    assert client.generate("w", max_tokens=4, **options).text == want["text"]
    chat = {"messages": [{"role": "assistant", "content": "w"}], "continue_final_message": True}
    answer = post(http, "/v1/chat/completions", **(body | chat | {"prompt": None}))
    assert answer["choices"][0]["message"]["content"] == want["text"]


@pytest.mark.parametrize(
    ("options", "text", "reason"),
    [
        ({"stop": "<|bos|>"}, "xmn", "length"),  # what is not shown does not stop
        ({"stop": "<|bos|>", "skip_special_tokens": False}, "x", "stop"),
        ({"stop": ["s|>m"], "skip_special_tokens": False}, "x<|bo", "stop"),
        ({"stop": ["|>n", "zz"], "skip_special_tokens": False}, "x<|bos|>mn", "length"),
    ],
)
def test_stop_strings_see_what_is_shown(http, options, text, reason):
    body = {"prompt": "w", "max_tokens": 4, "temperature": 0, **options}
    choice = post(http, "/v1/completions", **body)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text, reason)
    chunks = [chunk["choices"][0] for chunk in streamed(http, "/v1/completions", **body)]
    assert ("".join(chunk["text"] for chunk in chunks), chunks[-1]["finish_reason"]) == (text, reason)


def test_the_token_that_ends_an_answer_is_not_shown(http):
    body = {"prompt": "+", "max_tokens": 9, "temperature": 0, "skip_special_tokens": False}
    choice = post(http, "/v1/completions", **body)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (",-.", "stop")
    choice = post(http, "/v1/completions", **body, ignore_eos=True)["choices"][0]
    assert choice["text"].startswith(",-.<|eos|>")


def test_echo_of_control_tokens(http):
    def echo(prompt, **options):
        body = {"max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 0}
        choice = post(http, "/v1/completions", prompt=prompt, **body, **options)["choices"][0]
        return choice["text"], choice["logprobs"]["text_offset"]

    assert echo("<|bos|>é<|eot|>z") == ("<|bos|>é<|eot|>z{", [0, 7, 7, 8, 15, 16])
    assert echo("é<|eot|>z") == ("é<|eot|>z{", [0, 0, 0, 1, 8, 9])  # BOS, which was added, is no part of the text
    assert echo([BOS, 97, EOT, 98]) == ("abc", [0, 0, 1, 1, 2])
    shown = ("<|bos|>a<|eot|>bc", [0, 7, 8, 15, 16])
    assert echo([BOS, 97, EOT, 98], skip_special_tokens=False) == shown


# Offsets in a text that the tokens do not spell exactly: what was added, dropped or composed. (text, ids, offsets)
@pytest.mark.parametrize(
    ("text", "ids", "offsets"),
    [
        ("a<|eot|>b", [BOS, 97, EOT, *b" b"], [0, 0, 1, 8, 8]),  # a space that a tokenizer puts behind a control token
        ("a <|eot|>  b", [BOS, 97, EOT, 98], [0, 0, 2, 11]),  # space that a control token takes
        ("e\u0301x", [*"éx".encode()], [0, 0, 2]),
        ("ab", [97, 99, 98], [0, 1, 2]),
    ],
)
def test_offsets_follow_the_text(text, ids, offsets):
    places = PromptOffsets(ByteTokenizer(), text)
    assert [places.next(id) for id in ids] == offsets


# The tokenizer's routes

CHAT = [{"role": "user", "content": "<|eot|>"}]
RENDERED = [*b"user: <|eot|>", EOT]
ASSISTANT = [*b"assistant: "]
LAST = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
@pytest.mark.parametrize(
    ("body", "ids"),
    [
        ({"text": "aé"}, [BOS, 97, 0xC3, 0xA9]),
        ({"text": ""}, [BOS]),
        ({"prompt": "a<|eot|>"}, [BOS, 97, EOT]),
        ({"prompt": "a", "add_special_tokens": False, "model": NAME}, [97]),
        ({"content": "a<|eot|>"}, [97, EOT]),  # llama.cpp's default
        ({"content": "a<|eot|>", "add_special": True, "parse_special": False}, [BOS, 97, *b"<|eot|>"]),
        ({"messages": CHAT}, [*RENDERED, *ASSISTANT]),
        ({"messages": CHAT, "add_generation_prompt": False}, RENDERED),
        ({"messages": CHAT, "add_special_tokens": True}, [BOS, *RENDERED, *ASSISTANT]),
        ({"messages": LAST, "continue_final_message": True}, [*b"user: q", EOT, *b"assistant: a"]),
        ({"messages": CHAT, "chat_template_kwargs": {"unused": 1}, "parse_special": False}, [*RENDERED, *ASSISTANT]),
    ],
)
def test_tokenize(http, path, body, ids):
    assert post(http, path, **body) == {"tokens": ids, "count": len(ids), "max_model_len": MAX_LEN}


def test_tokens_as_strings_and_pieces(http):
    answer = post(http, "/tokenize", prompt="aé<|eot|>", return_token_strs=True)
    assert answer["tokens"] == [BOS, 97, 0xC3, 0xA9, EOT]
    assert answer["token_strs"] == ["<|bos|>", "a", "bytes:\\xc3", "bytes:\\xa9", "<|eot|>"]
    pieces = post(http, "/tokenize", content="aé<|eot|>", with_pieces=True)
    assert pieces["tokens"] == [
        {"id": 97, "piece": "a"},
        {"id": 0xC3, "piece": [0xC3]},
        {"id": 0xA9, "piece": [0xA9]},
        {"id": EOT, "piece": "<|eot|>"},
    ]
    assert pieces["count"] == 4


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
def test_detokenize(http, path):
    tokens = [BOS, 97, 0xC3, 0xA9, EOT]
    shown = "<|bos|>aé<|eot|>"
    assert post(http, path, tokens=tokens) == {"text": "aé", "prompt": shown, "content": shown}
    assert set(post(http, path, tokens=tokens, skip_special_tokens=True).values()) == {"aé"}
    assert set(post(http, path, tokens=tokens, skip_special_tokens=False, model=NAME).values()) == {shown}
    assert post(http, path, tokens=[])["prompt"] == ""


def test_tokenizer_info(http):
    info = http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == ("<|bos|>", "<|eos|>")
    assert isinstance(info["tokenizer_class"], str) and "assistant: " in info["chat_template"]
    # As lm-eval finds the ids of these.
    ids = [
        post(http, "/tokenize", prompt=info[name], add_special_tokens=False)["tokens"]
        for name in ("bos_token", "eos_token")
    ]
    assert ids == [[BOS], [EOS]]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "text"),
        ("/tokenize", {"text": None}, 400, "text"),
        ("/tokenize", {"text": "a", "prompt": "a"}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"content": 5}, 400, "content"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": CHAT, "parse_special": True}, 400, "parse_special"),
        ("/tokenize", {"messages": CHAT, "continue_final_message": True}, 400, "messages"),
        ("/tokenize", {"messages": CHAT, "chat_template": "{{ 1 }}"}, 400, "chat_template"),
        ("/tokenize", {"messages": CHAT, "chat_template_kwargs": {"tools": 1}}, 400, "chat_template_kwargs"),
        ("/tokenize", {"text": "a", "add_special": True, "add_special_tokens": False}, 400, "add_special"),
        ("/tokenize", {"text": "a", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [97], "skip_special_tokens": 1}, 400, "skip_special_tokens"),
        ("/detokenize", {"tokens": [97], "model": "other"}, 404, "model"),
        ("/v1/completions", {"prompt": "a", "parse_special": "no"}, 400, "parse_special"),
        ("/generate", {"prompt": "a", "skip_special_tokens": 0}, 400, "skip_special_tokens"),
    ],
)
def test_refusals_name_the_field(http, path, body, status, param):
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
