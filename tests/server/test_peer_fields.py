"""Fields of other servers: known here, all of them, and refused by name wherever ignoring one would change the answer.

Which fields there are is from those servers' own sources (``tests/golden/peer_fields.json``) and from the installed ``openai``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_type_hints

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat

from server.api import field_types, fields, parsing, peer_fields
from server.api.fields import CHAT, COMPLETIONS, GENERATE
from server.errors import InvalidRequest

ROOT = Path(__file__).parents[2]
PEERS = json.loads((ROOT / "tests" / "golden" / "peer_fields.json").read_text())
BASE = {
    "generate": (GENERATE, {"prompt": "x"}),
    "completions": (COMPLETIONS, {"prompt": "x"}),
    "chat": (CHAT, {"messages": [{"role": "user", "content": "x"}]}),
}
ROUTES = pytest.mark.parametrize("route", BASE)
REFUSED = [(name, allowed) for row in peer_fields.REFUSED for name, allowed in row.names.items()]
IGNORED = [name for row in peer_fields.IGNORED for name in row.names]
VALUES = [0, 1, -1, 0.5, 7, True, False, "x", "", [], [1], {}, {"a": 1}]


def parse(route, **body):
    table, base = BASE[route]
    return parsing.parse(base | body, table)


@ROUTES
@pytest.mark.parametrize("peer", PEERS)
def test_every_field_of_a_peer_is_known(peer, route):
    known = BASE[route][0].keys() | peer_fields.FIELDS.keys()
    assert not set(PEERS[peer]["fields"]) - known


def test_every_field_of_openais_client_is_known():
    assert not get_type_hints(chat.CompletionCreateParamsBase).keys() - CHAT.keys() - peer_fields.FIELDS.keys()
    assert not get_type_hints(completions.CompletionCreateParamsBase).keys() - COMPLETIONS.keys() - peer_fields.FIELDS.keys()


@ROUTES
def test_what_would_change_the_answer_is_refused_by_name(route):
    table, _ = BASE[route]
    silent = parse(route)
    for name, allowed in REFUSED:
        if name in table:  # of this route
            continue
        for value in (*allowed, None):
            assert parse(route, **{name: value}) == silent
        others = [value for value in VALUES if json.dumps(value) not in [json.dumps(item) for item in allowed]]
        for value in others:
            with pytest.raises(InvalidRequest) as caught:
                parse(route, **{name: value})
            assert caught.value.param == name
            assert caught.value.message.startswith(f"{name} is not supported: ")


@ROUTES
def test_what_does_not_change_the_answer_is_taken(route):
    silent = parse(route)
    for name in IGNORED:
        assert name not in BASE[route][0]
        assert all(parse(route, **{name: value}) == silent for value in VALUES)


def test_each_field_has_one_fate():
    names = [name for name, _ in REFUSED] + IGNORED
    assert len(names) == len(set(names))


def test_numbers_may_be_spelled_either_way():
    assert parse("completions", typical_p=1.0, mirostat=0.0) == parse("completions", typical_p=1, mirostat=0)
    with pytest.raises(InvalidRequest, match="^mirostat is not supported: .*; only 0 or null is accepted, not False$"):
        parse("completions", mirostat=False)


def test_fields_that_nobody_knows_are_ignored():
    assert parse("completions", frabjous=5) == parse("completions")


def test_the_document_has_the_same_rows():
    text = (ROOT / "docs" / "api.md").read_text()
    for row in peer_fields.REFUSED:
        shown = ", ".join(f"`{name}`" + (f" ({', '.join(json.dumps(one) for one in allowed)})" if allowed else "")
                          for name, allowed in row.names.items())  # fmt: skip
        assert f"| {shown} | {', '.join(row.of)} | {row.why} |\n" in text
    for row in peer_fields.IGNORED:
        assert f"| {', '.join(f'`{name}`' for name in row.names)} | {', '.join(row.of)} | {row.why} |\n" in text


# What is honoured.


@ROUTES
@pytest.mark.parametrize(
    ("body", "guide"),
    [
        ({"grammar": 'root ::= "a"'}, {"guided_grammar": 'root ::= "a"'}),  # llama-server's
        ({"grammar": {"type": "regex", "value": "a+"}}, {"guided_regex": "a+"}),  # TGI's
        ({"grammar": {"type": "json", "value": {"type": "object"}}}, {"guided_json": '{"type": "object"}'}),
        ({"json_schema": {"type": "object"}}, {"guided_json": '{"type": "object"}'}),  # llama-server's
        ({"json_schema": '{"type": "object"}'}, {"guided_json": '{"type": "object"}'}),  # SGLang's
        ({"regex": "a+"}, {"guided_regex": "a+"}),
        ({"ebnf": 'root ::= "a"'}, {"guided_grammar": 'root ::= "a"'}),
        ({"response_format": {"type": "regex", "value": "a+"}}, {"guided_regex": "a+"}),  # TGI's
        ({"response_format": {"type": "regex", "regex": "a+"}}, {"guided_regex": "a+"}),
        ({"response_format": {"type": "regex", "pattern": "a+"}}, {"guided_regex": "a+"}),
        ({"response_format": {"type": "grammar", "grammar": 'root ::= "a"'}}, {"guided_grammar": 'root ::= "a"'}),
    ],
)
def test_guides_of_other_servers(route, body, guide):
    (name,) = body
    parsed = parse(route, **body)
    assert {key: getattr(parsed, key) for key in fields.GUIDED if getattr(parsed, key) is not None} == guide
    assert parsed.guide_field == name
    with pytest.raises(InvalidRequest) as caught:
        parse(route, **body, structured_outputs={"regex": "b"})
    assert caught.value.param in (name, "structured_outputs") and "exclude each other" in caught.value.message


@ROUTES
@pytest.mark.parametrize(
    ("format", "schema"),
    [
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_object", "schema": {"type": "array"}}, {"type": "array"}),  # llama-server's
        ({"type": "json_object", "value": {"type": "array"}}, {"type": "array"}),  # TGI's
        ({"type": "json", "value": {"type": "array"}}, {"type": "array"}),
        ({"type": "json_schema", "schema": {"type": "array"}}, {"type": "array"}),  # llama-server's
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}, {"type": "array"}),  # OpenAI's
    ],
)
def test_formats_of_json(route, format, schema):
    parsed = parse(route, response_format=format)
    assert (json.loads(parsed.guided_json), parsed.guide_field) == (schema, "response_format")


@ROUTES
def test_formats_that_say_nothing(route):
    for body in ({"response_format": {"type": "text"}}, {"grammar": ""}, {"grammar": {"type": "text"}}):
        assert parse(route, **body) == parse(route)


@ROUTES
@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
        {"response_format": {"type": "regex"}},
        {"response_format": {"type": "regex", "value": ""}},
        {"response_format": {"type": "regex", "value": 5}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_object", "schema": 5}},
        {"response_format": {"type": ["regex"]}},
        {"grammar": 5},
        {"grammar": {"type": "xml"}},
        {"json_schema": 5},
        {"regex": ""},
        {"ebnf": []},
        {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
        {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
        {"structured_outputs": {"json_object": True, "disable_additional_properties": True}},
        {"n_predict": -2},
        {"n_predict": True},
        {"max_completion_tokens": -1},
        {"best_of": 3},
        {"no_stop_trim": 1},
        {"include_stop_str_in_output": True, "stop_token_ids": [1]},
        {"prompt_logprobs": -1},
        {"prompt_logprobs": 21},
        {"prompt_logprobs": 1, "stream": True},
        {"stream_options": {"include_usage": False, "continuous_usage_stats": True}, "stream": True},
    ],
    ids=lambda body: ascii(body)[:60],
)
def test_bad_values_are_named(route, body):
    with pytest.raises(InvalidRequest) as caught:
        parse(route, **body)
    assert caught.value.param == next(iter(body))


@ROUTES
def test_lengths_by_other_names(route):
    for name in ("n_predict", "max_completion_tokens", "max_tokens"):
        assert parse(route, **{name: 5}).max_tokens == 5
    assert parse(route, n_predict=5, max_tokens=5).max_tokens == 5
    with pytest.raises(InvalidRequest, match="^max_tokens and n_predict differ") as caught:
        parse(route, max_tokens=5, n_predict=6)
    assert caught.value.param == "n_predict"
    fills = parse(route, n_predict=-1)
    assert (fills.max_tokens, fills.as_many_as_fit) == (None, True)


def test_log_probs_of_prompts_are_asked_for_once():
    def asked(**body):
        parsed = parse("completions", **body)
        return parsed.prompt_logprobs, parsed.shown_prompt_logprobs

    assert asked(prompt_logprobs=3) == (3, 3)
    assert asked(prompt_logprobs=0, echo=True, logprobs=2) == (2, 0)
    assert asked(prompt_logprobs=3, echo=True, logprobs=2) == (3, 3)
    assert asked(logprobs=2) == (None, None)
    assert parse("chat", prompt_logprobs=3).prompt_logprobs == 3


def test_variables_of_the_template():
    """As vLLM hands them over: what the client says of the template itself wins."""
    assert parse("chat", reasoning_effort="low").chat_template_kwargs == {"reasoning_effort": "low", "enable_thinking": True}
    assert parse("chat", reasoning_effort="none").chat_template_kwargs["enable_thinking"] is False
    both = parse("chat", reasoning_effort="none", chat_template_kwargs={"enable_thinking": True, "x": 1})
    assert both.chat_template_kwargs == {"reasoning_effort": "none", "enable_thinking": True, "x": 1}
    assert parse("chat", documents=[{"title": "t"}]).chat_template_kwargs == {"documents": ({"title": "t"},)}
    for body in ({"reasoning_effort": "some"}, {"reasoning_effort": 0.5}, {"documents": ["x"]}, {"documents": {}}):
        with pytest.raises(InvalidRequest) as caught:
            parse("chat", **body)
        assert caught.value.param == next(iter(body))


def test_neutral_values_do_not_mix_kinds():
    check = field_types.neutral(0, False, because="x")
    check(0), check(0.0), check(False)
    for value in (1, True, "0", None, []):
        with pytest.raises(ValueError, match="x; only 0 or false or null"):
            check(value)
