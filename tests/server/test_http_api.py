"""The HTTP routes, over real sockets: the ``openai`` package, and plain requests where that is too polite.

The model: after each byte comes the next; after "q" comes "r" with probability 0.5, "s" with 0.3, "t" with 0.2; after
"." EOS.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import tracemalloc
import zlib

import httpx
import openai
import pytest
from front_doors import MAX_LEN, NAME, open_doors
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.mock import Script, Table
from server.errors import InvalidRequest, TooLarge
from server.proxy.routes import make_app
from server.proxy.transport import BODY_LIMIT, decompress, parse_json
from server.text.tokenizers import ByteTokenizer

EOS = 257
PAGE = "http://page.test:3000"  # an origin whose pages may call
NEXT = {token: {(token + 1) % 256: 1.0} for token in range(256)}
MODEL = Table(NEXT | {ord("q"): {ord("r"): 0.5, ord("s"): 0.3, ord("t"): 0.2}, ord("."): {EOS: 1.0}})


@pytest.fixture(scope="module")
def doors():
    with open_doors(MODEL, slots=4, max_queue=64, config={"cors_origin": (PAGE, "null")}) as opened:
        yield opened


@pytest.fixture(scope="module")
def http(doors):
    with httpx.Client(base_url=doors.http, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def api(doors):
    with openai.OpenAI(base_url=f"{doors.http}/v1", api_key="unused", max_retries=0, timeout=30) as client:
        yield client


def events(response):
    """The data of server-sent events, parsed; checks the framing and the end."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-1] == "" and blocks[-2] == "data: [DONE]"
    assert all(block.startswith("data: ") for block in blocks[:-1])
    return [json.loads(block[6:]) for block in blocks[:-2]]


# /generate


def test_generate(http):
    answer = http.post("/generate", json={"prompt": "abc", "max_tokens": 3})
    assert (answer.status_code, answer.json()) == (200, {"response": "def"})


def test_generate_stops_at_eos(http):
    assert http.post("/generate", json={"prompt": "+"}).json() == {"response": ",-."}


def test_generate_streams(http):
    pieces = events(http.post("/generate", json={"prompt": "abc", "max_tokens": 9, "stream": True}))
    assert all(set(piece) == {"response"} for piece in pieces)
    assert "".join(piece["response"] for piece in pieces) == "defghijkl"


# /v1/completions


def test_completion(api):
    answer = api.completions.create(model=NAME, prompt="abc", max_tokens=3)
    choice = answer.choices[0]
    assert (answer.object, answer.model, answer.id[:5]) == ("text_completion", NAME, "cmpl-")
    assert (choice.text, choice.index, choice.finish_reason, choice.logprobs) == ("def", 0, "length", None)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 3, 7)


def test_completion_without_a_length_is_16_tokens(api):
    assert api.completions.create(model=NAME, prompt="0").usage.completion_tokens == 16


def test_completion_of_many_prompts_and_samples(api):
    answer = api.completions.create(model=NAME, prompt=["abc", "xy", "0"], max_tokens=2, n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == ["de", "de", "z{", "z{", "12", "12"]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, 12)


def test_completion_of_token_ids(api):
    assert api.completions.create(model=NAME, prompt=[97, 98], max_tokens=2).choices[0].text == "cd"
    assert api.completions.create(model=NAME, prompt=[97, 98], max_tokens=2).usage.prompt_tokens == 2
    answer = api.completions.create(model=NAME, prompt=[[97], [48, 49]], max_tokens=2, echo=True)
    assert [choice.text for choice in answer.choices] == ["abc", "0123"]


def test_completion_log_probs(api):
    answer = api.completions.create(model=NAME, prompt="pq", max_tokens=1, logprobs=3, temperature=0)
    logprobs = answer.choices[0].logprobs
    assert (logprobs.tokens, logprobs.text_offset) == (["r"], [0])
    assert logprobs.token_logprobs == pytest.approx([math.log(0.5)], abs=1e-4)
    assert logprobs.top_logprobs[0] == pytest.approx(
        {"r": math.log(0.5), "s": math.log(0.3), "t": math.log(0.2)}, abs=1e-4
    )


def test_the_chosen_token_is_among_the_alternatives(api):
    answer = api.completions.create(model=NAME, prompt="q", max_tokens=1, logprobs=1, logit_bias={str(ord("t")): 100})
    assert set(answer.choices[0].logprobs.top_logprobs[0]) == {"r", "t"}
    assert answer.choices[0].logprobs.token_logprobs == pytest.approx([math.log(0.2)], abs=1e-4)


def test_scoring_a_prompt(api):
    answer = api.completions.create(model=NAME, prompt="pqs", max_tokens=0, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("pqs", "length")
    assert choice.logprobs.tokens == ["<|bos|>", "p", "q", "s"]
    assert choice.logprobs.text_offset == [0, 0, 1, 2]
    assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.token_logprobs[2:] == pytest.approx([0, math.log(0.3)], abs=1e-4)
    assert answer.usage.completion_tokens == 0


def test_log_probs_of_the_prompt_as_vllm_has_them(http):
    body = {"prompt": "pqs", "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    first, _, q, s = choice["prompt_logprobs"]
    assert (choice["text"], choice["logprobs"], first) == ("t", None, None)
    ids = {character: str(ord(character)) for character in "pqrs"}
    assert q == {ids["q"]: {"logprob": pytest.approx(0, abs=1e-4), "rank": 1, "decoded_token": "q"}}
    assert s == {
        ids["s"]: {"logprob": pytest.approx(math.log(0.3), abs=1e-4), "rank": None, "decoded_token": "s"},
        ids["r"]: {"logprob": pytest.approx(math.log(0.5), abs=1e-4), "rank": 1, "decoded_token": "r"},
    }
    more = http.post("/v1/completions", json=body | {"prompt_logprobs": 3, "echo": True, "logprobs": 1}).json()["choices"][0]
    assert [entry["rank"] for entry in more["prompt_logprobs"][3].values()] == [2, 1, 3]  # s, r, t
    assert more["text"] == "pqst" and set(more["logprobs"]["top_logprobs"][3]) == {"r", "s"}  # of logprobs, and the token itself
    chat = http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 1, "n": 2, "prompt_logprobs": 0}).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in chat["prompt_logprobs"][1:])
    refused = http.post("/v1/completions", json=body | {"stream": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_offsets_within_a_character(api):
    answer = api.completions.create(model=NAME, prompt=[0xC3, 0xA9, 0x61], max_tokens=1, echo=True, logprobs=0)
    assert answer.choices[0].text == "éab"
    assert answer.choices[0].logprobs.tokens == ["bytes:\\xc3", "bytes:\\xa9", "a", "b"]
    assert answer.choices[0].logprobs.text_offset == [0, 0, 1, 2]


class SpaceTokenizer(ByteTokenizer):
    """Puts a space before every text, and takes it off again, as SentencePiece does."""

    strip_leading_space = True

    def encode_text(self, text, *, parse_special):
        return super().encode_text(" " + text, parse_special=parse_special)


@pytest.mark.parametrize(
    ("prompt", "answer", "text", "tokens", "offsets"),
    [
        ("ab", b" c", "ab c", ["<|bos|>", " ", "a", "b", " ", "c"], [0, 0, 0, 1, 2, 3]),
        (" a", b"b", " ab", ["<|bos|>", " ", " ", "a", "b"], [0, 0, 0, 1, 2]),
        ([256], b" c", "c", ["<|bos|>", " ", "c"], [0, 0, 0]),  # a text of its own begins here
        ("", b" c", " c", ["<|bos|>", " ", " ", "c"], [0, 0, 0, 1]),
    ],
)
def test_spaces_that_a_tokenizer_puts_before_a_text(prompt, answer, text, tokens, offsets):
    ids = prompt if isinstance(prompt, list) else [256, *f" {prompt}".encode()]
    with open_doors(Script({tuple(ids): answer}), tokenizer=SpaceTokenizer()) as doors:
        body = {"prompt": prompt, "echo": True, "logprobs": 0, "temperature": 0}
        choice = httpx.post(f"{doors.http}/v1/completions", json=body).json()["choices"][0]
        chunks = events(httpx.post(f"{doors.http}/v1/completions", json=body | {"stream": True}))
    assert (choice["text"], choice["logprobs"]["tokens"]) == (text, tokens)
    assert choice["logprobs"]["text_offset"] == offsets
    assert sum((chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks), []) == offsets
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


def test_streamed_completion_equals_the_whole(http):
    body = {"prompt": ["abc", "q"], "max_tokens": 12, "n": 2, "seed": 3, "logprobs": 2, "echo": True, "temperature": 1}
    whole = http.post("/v1/completions", json=body).json()
    chunks = events(
        http.post("/v1/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}})
    )
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"] | {
        "prompt_tokens_details": chunks[-1]["usage"]["prompt_tokens_details"]
    }
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1
    for choice in whole["choices"]:
        mine = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        assert [piece["finish_reason"] for piece in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert sum((piece["logprobs"][key] for piece in mine), []) == choice["logprobs"][key]


def test_stop_strings(api):
    answer = api.completions.create(model=NAME, prompt="a", max_tokens=20, stop=["fg", "zz"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("bcde", "stop")


@pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
def test_a_stop_string_may_be_shown(http, name):
    body = {"prompt": "a", "max_tokens": 20, "stop": ["fg", "zz"], name: True}
    whole = http.post("/v1/completions", json=body).json()["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == ("bcdefg", "stop")
    chunks = events(http.post("/v1/completions", json=body | {"stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "bcdefg"
    assert http.post("/generate", json=body).json() == {"response": "bcdefg"}
    assert http.post("/generate", json=body | {"stop": ["?"], "max_tokens": 2}).json() == {"response": "bc"}
    chat = {"messages": CHAT, "max_tokens": 9, "stop": "$", name: True}
    assert http.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"] == '!"#$'


def test_as_many_as_fit(http):
    body = {"prompt": "0", "n_predict": -1, "ignore_eos": True}
    assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == MAX_LEN - len("0") - 1
    assert http.post("/v1/completions", json=body | {"n_predict": 3}).json()["usage"]["completion_tokens"] == 3


def test_stop_tokens_and_min_tokens(api):
    answer = api.completions.create(model=NAME, prompt="a", max_tokens=20, extra_body={"stop_token_ids": [ord("d")]})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("bc", "stop")
    answer = api.completions.create(
        model=NAME, prompt=",", max_tokens=4, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 4


def test_a_seed_decides(http):
    def sampled(**options):
        body = {"prompt": "q", "max_tokens": 1, "n": 8, "temperature": 1, **options}
        return [choice["text"] for choice in http.post("/v1/completions", json=body).json()["choices"]]

    assert sampled(seed=7) == sampled(seed=7)
    assert set(sampled(seed=7)) <= {"r", "s", "t"} and len(set(sampled(seed=7))) > 1
    assert sampled(seed=-7) == sampled(seed=-7)
    assert len({tuple(sampled(seed=-1)) for _ in range(6)}) > 1  # 6 x 8 draws of three letters


# /v1/chat/completions


CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
# The template ends with "assistant: ", so the answer begins after a space: !"#$%...


def test_chat(api):
    answer = api.chat.completions.create(model=NAME, messages=CHAT, max_completion_tokens=3)
    choice = answer.choices[0]
    assert (answer.object, answer.model, answer.id[:9]) == ("chat.completion", NAME, "chatcmpl-")
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", '!"#', "length")
    assert answer.usage.prompt_tokens == len("system: s") + 1 + len("user: hi") + 1 + len("assistant: ")


def test_answers_may_be_sent_back(api):
    """Whole messages as OpenAI's client has them, and answers of nothing; lengths by the byte tokenizer's template."""
    message = api.chat.completions.create(model=NAME, messages=CHAT, max_tokens=3).choices[0].message
    rest = len("system: s") + 1 + len("user: hi") + 1 + len("assistant: ") + 1 + len("user: hi") + 1 + len("assistant: ")
    for turn, length in [
        (message, 3),
        (message.model_dump(), 3),
        ({"role": "assistant", "content": None}, 0),
        ({"role": "assistant", "tool_calls": []}, 0),
    ]:
        answer = api.chat.completions.create(model=NAME, messages=[*CHAT, turn, CHAT[-1]], max_tokens=1)
        assert answer.usage.prompt_tokens == rest + length


def test_chat_goes_on_until_eos(api):
    answer = api.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "x"}])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (
        "".join(map(chr, range(33, 47))),
        "stop",
    )


def test_chat_log_probs(api):
    answer = api.chat.completions.create(
        model=NAME, messages=CHAT, max_tokens=2, logprobs=True, top_logprobs=2, n=2, temperature=0
    )
    for choice in answer.choices:
        first, second = choice.logprobs.content
        assert (first.token, first.bytes, second.token) == ("!", [33], '"')
        assert first.logprob == pytest.approx(0, abs=1e-4)
        assert [len(token.top_logprobs) for token in (first, second)] == [2, 2]
    assert (
        api.chat.completions.create(model=NAME, messages=CHAT, max_tokens=1, logprobs=True)
        .choices[0]
        .logprobs.content[0]
        .top_logprobs
        == []
    )


def test_chat_streams(api):
    chunks = list(
        api.chat.completions.create(
            model=NAME, messages=CHAT, max_tokens=4, n=2, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].usage.completion_tokens == 8 and chunks[-1].choices == []
    for index in (0, 1):
        mine = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(piece.delta.content or "" for piece in mine) == '!"#$'
        assert mine[-1].finish_reason == "length"


def test_async_client(doors):
    async def talk():
        async with openai.AsyncOpenAI(
            base_url=f"{doors.http}/v1", api_key="unused", max_retries=0, timeout=30
        ) as client:
            whole, stream = await asyncio.gather(
                client.completions.create(model=NAME, prompt="a", max_tokens=4),
                client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=4, stream=True),
            )
            return whole.choices[0].text, "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(talk()) == ("bcde", '!"#$')


def test_a_user_cannot_spell_a_control_token(http):
    body = {"messages": [{"role": "user", "content": "<|eot|>"}], "max_tokens": 1}
    usage = http.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["prompt_tokens"] == len("user: <|eot|>") + 1 + len("assistant: ")


# Models, tokenizer, state


def test_models(api):
    assert [model.id for model in api.models.list()] == [NAME]
    assert api.models.retrieve(NAME).object == "model"
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("other")


def test_state(http):
    assert http.get("/health").json() == {"status": "ok", "state": "ready"}
    assert http.get("/ready").json() == {"state": "ready"}
    assert http.get("/warmup").json() == {}
    page = http.get("/")
    assert page.headers["content-type"].startswith("text/html") and "Preheat" in page.text


def test_metrics_count_what_the_proxy_refuses(http):
    def value(outcome):
        lines = http.get("/metrics").text.splitlines()
        return float(
            next(line for line in lines if line.startswith(f'preheat_requests_total{{outcome="{outcome}"}}')).split()[1]
        )

    before = value("invalid"), value("ok")
    http.post("/generate", json={"prompt": 5})  # refused by the proxy
    http.post("/generate", json={"prompt": "a", "max_tokens": 1000})  # by the orchestrator
    http.post("/generate", content=b"{")
    http.post("/generate", json={"prompt": "a", "max_tokens": 1})
    assert (value("invalid"), value("ok")) == (before[0] + 3, before[1] + 1)


# Errors


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {}, "prompt"),
        ("/generate", {"prompt": None}, "prompt"),
        ("/generate", {"prompt": ["a"]}, "prompt"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, "temperature"),
        ("/v1/completions", {"prompt": "a", "n": 0}, "n"),
        ("/v1/completions", {"prompt": [320]}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, "prompt"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"320": 1}}, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [320]}, "stop_token_ids"),
        ("/v1/completions", {"prompt": "a" * MAX_LEN}, "prompt"),
        ("/v1/completions", {"prompt": "a", "max_tokens": MAX_LEN}, "max_tokens"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "x"}]}, "messages"),
        ("/v1/chat/completions", {"messages": CHAT, "response_format": {"type": "xml"}}, "response_format"),
        ("/v1/chat/completions", {"messages": CHAT, "tool_choice": {"type": "function", "function": {"name": "\ud800"}}}, "tool_choice"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * MAX_LEN}]}, "messages"),
        ("/v1/chat/completions", {"messages": CHAT, "max_completion_tokens": MAX_LEN}, "max_completion_tokens"),
        ("/v1/completions", {"prompt": "a", "n_predict": MAX_LEN}, "n_predict"),
        ("/v1/completions", {"prompt": "a", "n": 128}, "n"),
        ("/v1/completions", {"prompt": "a", "min_tokens": 17}, "min_tokens"),
        ("/v1/completions", {"prompt": "a", "regex": "("}, "regex"),
        ("/v1/completions", {"prompt": "a", "mirostat": 2}, "mirostat"),
        ("/tokenize", {}, "text"),
        ("/tokenize", {"text": "\ud800"}, "text"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [320]}, "tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_name_the_field(http, path, body, param, stream):
    body = body | ({"stream": True} if stream else {})
    answer = http.post(path, content=json.dumps(body))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert param in error["message"] or param == "messages"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"5", b"null", b'"x"', b"\xff", b'{"prompt": NaN}', b'{"a":' * 100_000, b"[" * 70 + b"]" * 70],
    ids=lambda body: ascii(body[:24]),
)
def test_what_is_no_request_has_no_field_to_name(body):
    with pytest.raises(InvalidRequest, match="^the body ") as caught:
        parse_json(body)
    assert caught.value.param is None


def test_a_number_too_long_for_anything_is_named(http):
    answer = http.post("/v1/completions", content=b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}")
    assert answer.json()["error"]["message"] == "the body has an integer of more than 4300 digits"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": NaN}',
        b'{"prompt": Infinity}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        '{"prompt": "a"}'.encode("utf-16"),
        b'{"prompt": "a", "x": ' + b"[" * 70 + b"]" * 70 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": {"\\ud800": 1}}',
        b'{"\\udfff": 1}',
    ],
    ids=lambda body: ascii(body[:24]),
)
def test_bodies_that_are_no_requests(http, body):
    for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        if path == "/tokenize" and b"temperature" in body:
            continue  # unknown there
        answer = http.post(path, content=body)
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    assert http.post("/generate", json={"prompt": "a", "max_tokens": 1}).json() == {
        "response": "b"
    }  # the connection goes on


def test_nul_is_a_character(http):
    assert http.post("/generate", json={"prompt": "\0", "max_tokens": 1}).json() == {"response": "\1"}


def test_other_errors_have_the_envelope(http):
    missing = http.get("/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = http.get("/generate")
    assert (wrong.status_code, wrong.json()["error"]["code"], wrong.headers["allow"]) == (
        405,
        "method_not_allowed",
        "POST",
    )
    unknown = http.post("/v1/completions", json={"model": "other", "prompt": "a"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    large = http.post("/generate", content=b" " * (BODY_LIMIT + 1))
    assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")


def test_a_large_body_without_a_length(http):
    def parts():
        for _ in range(BODY_LIMIT // 2**20 + 1):
            yield b" " * 2**20

    assert http.post("/generate", content=parts()).status_code == 413


# Compressed bodies


def raw_deflate(data):
    """Without the header of RFC 1950, as some clients send it."""
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


BODY = json.dumps({"prompt": "abc", "max_tokens": 3}).encode()


@pytest.mark.parametrize(
    ("encoding", "content"),
    [
        ("gzip", gzip.compress(BODY, mtime=0)),
        ("x-gzip", gzip.compress(BODY, mtime=0)),
        ("GZip", gzip.compress(BODY, mtime=0)),
        ("identity, gzip", gzip.compress(BODY, mtime=0)),
        ("deflate", zlib.compress(BODY)),
        ("deflate", raw_deflate(BODY)),
        ("identity", BODY),
        ("", BODY),
    ],
)
def test_compressed_bodies(http, encoding, content):
    answer = http.post("/generate", content=content, headers={"content-encoding": encoding})
    assert answer.json() == {"response": "def"}


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "aws-chunked", "gzip, br", "gzip, gzip"])
def test_other_encodings_are_named(http, encoding):
    answer = http.post("/v1/completions", content=b"\x1b\x00", headers={"content-encoding": encoding})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (415, "unsupported_encoding", None)
    assert f"Content-Encoding '{encoding}'" in error["message"]
    assert answer.headers["accept-encoding"] == "gzip, deflate"  # RFC 9110 15.5.16


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("harm", ["none of it", "nothing", "cut", "changed", "followed"])
def test_bodies_that_are_not_what_their_encoding_says(http, encoding, harm):
    content = {"gzip": gzip.compress, "deflate": zlib.compress}[encoding](BODY)
    content = {
        "none of it": BODY,
        "nothing": b"",
        "cut": content[:-1],
        "changed": content[:-6] + bytes([content[-6] ^ 1]) + content[-5:],  # of the checksum, or the last block
        "followed": content + b"x",
    }[harm]
    answer = http.post("/generate", content=content, headers={"content-encoding": encoding})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith(f"the body is not valid {encoding}, as Content-Encoding says")


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_compressed_body_that_would_be_huge_takes_no_memory(encoding):
    packer = zlib.compressobj(1, wbits=31 if encoding == "gzip" else 15)
    bomb = b"".join(packer.compress(bytes(2**20)) for _ in range(128)) + packer.flush()
    assert len(bomb) < 2**20
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge, match=f"decompressed \\({encoding}\\), is over the limit of {BODY_LIMIT} bytes"):
            decompress(bomb, encoding)
        assert tracemalloc.get_traced_memory()[1] < 3 * BODY_LIMIT  # of 128 MiB; a buffer is doubled as it grows
    finally:
        tracemalloc.stop()
    fits = zlib.compress(b" " * BODY_LIMIT)
    assert len(decompress(fits, "deflate")) == BODY_LIMIT


# Pages of other origins (https://fetch.spec.whatwg.org/#http-cors-protocol)


HEADERS = "authorization, content-type, x-stainless-lang, x-stainless-retry-count"  # of OpenAI's client in a browser


def preflight(origin, **more):
    asked = {"access-control-request-method": "POST", "access-control-request-headers": HEADERS}
    return {"origin": origin, **asked, **more}


def test_a_page_may_call(http):
    answer = http.options("/v1/chat/completions", headers=preflight(PAGE))
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == HEADERS
    assert "access-control-allow-credentials" not in answer.headers
    assert "Origin" in answer.headers["vary"]
    home = http.options("/v1/models", headers=preflight(PAGE, **{"access-control-request-private-network": "true"}))
    assert (home.status_code, home.headers["access-control-allow-private-network"]) == (200, "true")


def test_a_page_reads_answers_errors_and_streams(http):
    body = {"prompt": "a", "max_tokens": 2}
    for origin in (PAGE, "null"):
        for answer, status in [
            (http.post("/generate", json=body, headers={"origin": origin}), 200),
            (http.post("/v1/completions", json=body | {"stream": True}, headers={"origin": origin}), 200),
            (http.post("/generate", json={"prompt": 5}, headers={"origin": origin}), 400),
            (http.get("/nothing", headers={"origin": origin}), 404),
            (http.get("/generate", headers={"origin": origin}), 405),
            (http.get("/v1/models", headers={"origin": origin}), 200),
        ]:
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == origin
            exposed = answer.headers["access-control-expose-headers"].lower().split(", ")
            assert {"x-request-id", "retry-after"} <= set(exposed)


def test_other_pages_read_nothing(http):
    for origin in ("http://page.test", "https://page.test:3000", "http://evil.test", "http://page.test:3000.evil.test"):
        refused = http.options("/generate", headers=preflight(origin))
        assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
        answer = http.post("/generate", json={"prompt": "a", "max_tokens": 1}, headers={"origin": origin})
        assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers
    assert http.options("/generate").status_code == 405  # no preflight


def ask(app, method, path, headers):
    """A request that needs no orchestrator, to an application in this process."""

    async def send():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(send())


def test_preflights_need_no_key_and_a_page_reads_that_it_needs_one():
    app = make_app(["x:1"], api_keys=["k"], cors_origins=["*"])
    answer = ask(app, "OPTIONS", "/v1/chat/completions", preflight(PAGE))
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
    assert answer.headers["access-control-allow-headers"] == HEADERS  # "*" would not stand for authorization
    refused = ask(app, "GET", "/v1/models", {"origin": PAGE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "*")


def test_pages_are_let_in_only_where_asked_for():
    answer = ask(make_app(["x:1"]), "OPTIONS", "/generate", preflight(PAGE))
    assert answer.status_code == 405
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_openai_raises_its_own_types(api):
    with pytest.raises(openai.BadRequestError) as caught:
        api.completions.create(model=NAME, prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        api.chat.completions.create(model="other", messages=CHAT)


def test_request_ids_are_echoed(http):
    for path in ("/generate", "/nothing"):
        assert (
            http.post(path, json={"prompt": "a", "max_tokens": 1}, headers={"x-request-id": "mine"}).headers[
                "x-request-id"
            ]
            == "mine"
        )
    made = {http.post("/generate", json={"prompt": "a", "max_tokens": 1}).headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    assert http.get("/health", headers={"x-request-id": "x" * 1000}).headers["x-request-id"] != "x" * 1000


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = [
    "prompt",
    "messages",
    "max_tokens",
    "n",
    "temperature",
    "top_p",
    "top_k",
    "stop",
    "seed",
    "logprobs",
    "logit_bias",
    "stream",
    "stop_token_ids",
    "echo",
    "top_logprobs",
    "min_tokens",
    "stream_options",
    "response_format",
    "model",
    "tools",
]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    path=st.sampled_from(["/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]),
    body=JSON_VALUES | st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=5),
)
def test_no_body_is_a_fault_of_ours(http, path, body):
    base = {"prompt": "a", "messages": CHAT, "text": "a", "tokens": [97], "max_tokens": 2}
    for sent in (body, base | body if isinstance(body, dict) else body):
        answer = http.post(path, content=json.dumps(sent).encode())
        assert answer.status_code in (200, 400, 404, 429), (sent, answer.text)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    tokens=st.lists(st.sampled_from([0x61, 0x62, 0x20, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xFF, 256, 300]), max_size=24),
    stops=st.lists(st.text(alphabet="ab é€", min_size=1, max_size=3), max_size=3),
)
def test_the_joined_stream_is_the_text(doors, http, tokens, stops):
    """Of any tokens, whole characters or not, control tokens and ids that no tokenizer knows, with any stop strings."""
    prompt = [1]
    text = bytes(token for token in tokens if token < 256).decode("utf-8", "replace")
    found = [text.index(stop) for stop in stops if stop in text]
    rule, doors.engine.rule = doors.engine.rule, Script({tuple(prompt): tokens})
    try:
        body = {"prompt": prompt, "max_tokens": 40, "stop": stops, "temperature": 0}
        whole = http.post("/v1/completions", json=body).json()["choices"][0]
        chunks = events(http.post("/v1/completions", json=body | {"stream": True}))
    finally:
        doors.engine.rule = rule
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    assert whole["finish_reason"] == "stop"
    if not found:
        assert whole["text"] == text
    else:
        # Cut where a stop string begins; of several, the one that was complete first wins.
        assert len(whole["text"]) in found and text.startswith(whole["text"])
        assert not any(stop in whole["text"] for stop in stops)
