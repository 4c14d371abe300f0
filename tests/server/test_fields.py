"""Validation: every field typed and bounded, errors that name it, nothing clamped."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from pathlib import Path

import pytest

from engine import api
from protos.orchestrator_pb2 import DecodeRequest
from server.api import decode_fields, field_types, fields, parsing
from server.api.fields import CHAT, COMPLETIONS, GENERATE, GRPC, RequestFields
from server.errors import InvalidRequest, ModelNotFound, StartError
from server.orchestrator.validation import ModelLimits, build_request, sampling_defaults
from server.text import guided

LIMITS = ModelLimits("tiny", max_len=32, vocab_size=300, eos_token_ids=(257,))
USER = [{"role": "user", "content": "hi"}]
ASSISTANT = {"role": "assistant", "content": "well"}
CALL = {"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def completion(**body):
    return parsing.parse({"prompt": "x", **body}, COMPLETIONS)


def test_limits_are_those_of_the_engine():
    assert field_types.MAX_GRAMMAR == guided.MAX_LENGTH
    assert field_types.MAX_LOGIT_BIAS == api.MAX_LOGIT_BIAS
    assert field_types.MAX_TOP_LOGPROBS == api.TOP_LOGPROBS
    assert field_types.MAX_STOP_TOKEN_IDS == api.MAX_SUPPRESSED


GOOD = [
    ("temperature", 0, 0.0),
    ("temperature", 2.5, 2.5),
    ("top_p", 1, 1.0),
    ("top_p", 1e-300, 1e-300),
    ("top_k", -1, -1),
    ("top_k", 0, 0),
    ("top_k", 2**31 - 1, 2**31 - 1),
    ("min_p", 0, 0.0),
    ("top_n_sigma", 1.5, 1.5),
    ("top_n_sigma", -1, -1.0),  # llama-server's default, which is off
    ("min_p", 1, 1.0),
    ("seed", 0, 0),
    ("seed", 2**63 - 1, 2**63 - 1),
    ("seed", -1, -1),
    ("seed", -(2**63), -(2**63)),
    ("stop", "a", ("a",)),
    ("stop", ["a"] * 16, ("a",) * 16),
    ("stop", [], ()),
    ("stop_token_ids", [1, 2], (1, 2)),
    ("min_tokens", 0, 0),
    ("ignore_eos", True, True),
    ("presence_penalty", -2, -2.0),
    ("frequency_penalty", 2, 2.0),
    ("repetition_penalty", 1.3, 1.3),
    ("logit_bias", {"5": 1, "0": -100}, ((5, 1.0), (0, -100.0))),
    ("logprobs", 0, 0),
    ("logprobs", 5, 5),
    ("n", 1, 1),
    ("n", 128, 128),
    ("echo", False, False),
    ("max_tokens", 0, 0),
]


@pytest.mark.parametrize(("name", "value", "parsed"), GOOD)
def test_allowed_values(name, value, parsed):
    assert getattr(completion(**{name: value}), name) == parsed


BAD = [
    ("temperature", -0.1),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 10**400),
    ("temperature", []),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", -1),
    ("top_k", -2),
    ("top_k", 2**31),
    ("top_k", 1.5),
    ("top_k", 5.0),
    ("top_k", "5"),
    ("top_k", False),
    ("min_p", 1.1),
    ("top_n_sigma", -1.1),
    ("top_n_sigma", "1"),
    ("min_p", -0.1),
    ("seed", -(2**63) - 1),
    ("seed", 2**63),
    ("seed", 1.0),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a"] * 17),
    ("stop", 5),
    ("stop", [5]),
    ("stop", "\ud800"),
    ("stop", {"a": 1}),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [2**31]),
    ("stop_token_ids", [1.0]),
    ("stop_token_ids", 5),
    ("stop_token_ids", [True]),
    ("stop_token_ids", list(range(33))),
    ("min_tokens", -1),
    ("min_tokens", 1.5),
    ("ignore_eos", 1),
    ("ignore_eos", "true"),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("logit_bias", []),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"05": 1}),
    ("logit_bias", {"\u0665": 1}),
    ("logit_bias", {"99999999999": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": None}),
    ("logit_bias", {"5": math.nan}),
    ("logit_bias", {str(i): 0 for i in range(301)}),
    ("logprobs", 6),
    ("logprobs", -1),
    ("logprobs", True),
    ("n", 0),
    ("n", 129),
    ("n", 10**6),
    ("echo", "yes"),
    ("max_tokens", -1),
    ("max_tokens", "5"),
    ("max_tokens", 2**31),
    ("stream", 1),
    ("model", 5),
    ("user", 5),
    ("suffix", "x"),
    ("best_of", 2),
    ("guided_json", ""),
    ("guided_json", 5),
    ("guided_json", {"enum": ["x" * 70_000]}),
    ("guided_regex", {}),
    ("guided_regex", "x" * 65_537),
    ("guided_grammar", ["start: x"]),
    ("guided_choice", []),
    ("guided_choice", "yes"),
    ("guided_choice", ["yes", ""]),
    ("guided_choice", ["yes", 5]),
    ("guided_choice", ["\ud800"]),
    ("guided_choice", ["x"] * 1025),
    ("guided_choice", ["x" * 40_000, "y" * 40_000]),
    ("structured_outputs", "json"),
    ("structured_outputs", {}),
    ("structured_outputs", {"json": None, "json_object": False}),
    ("structured_outputs", {"json": {}, "regex": "x"}),
    ("structured_outputs", {"json_object": 1}),
    ("structured_outputs", {"json_object": True, "regex": "x"}),
    ("structured_outputs", {"choice": []}),
    ("structured_outputs", {"regex": ""}),
    ("structured_outputs", {"structural_tag": "{}"}),
    ("prompt", 5),
    ("prompt", []),
    ("prompt", ["a", 5]),
    ("prompt", [1, "a"]),
    ("prompt", [[1], "a"]),
    ("prompt", [-1]),
    ("prompt", [1.0]),
    ("prompt", [True]),
    ("prompt", "\udfff"),
    ("prompt", {"a": 1}),
    ("prompt", ["x"] * 1025),
    ("prompt", None),
    ("stream_options", {"include_usage": True}),
    ("stream_options", 5),
    ("priority", 10**6),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: ascii(value)[:40])
def test_refused_values_are_named(name, value):
    with pytest.raises(InvalidRequest) as caught:
        completion(**{name: value})
    assert caught.value.param == name
    assert caught.value.message.startswith(name)
    assert len(caught.value.message) < 400 and caught.value.message.isprintable()


def test_null_is_absent():
    assert completion(**{name: None for name in COMPLETIONS if name != "prompt"}) == completion()


def test_prompts_of_completions():
    assert completion(prompt=["a", ""]).prompt == ("a", "")
    assert completion(prompt=[1, 2]).prompt == ((1, 2),)
    assert completion(prompt=[[1], [2, 3]]).prompt == ((1,), (2, 3))
    assert completion(prompt=[[]]).prompt == ((),)  # refused once its length is known
    with pytest.raises(InvalidRequest, match="prompt is required"):
        parsing.parse({}, COMPLETIONS)


def test_echo_asks_for_the_log_probs_of_the_prompt():
    assert completion(echo=True, logprobs=2).prompt_logprobs == 2
    assert completion(logprobs=2).prompt_logprobs is None
    assert completion(echo=True).prompt_logprobs is None


def test_best_of_may_equal_n():
    assert completion(n=3, best_of=3).n == 3


def test_chat_fields():
    parsed = parsing.parse(
        {
            "messages": USER,
            "logprobs": True,
            "top_logprobs": 20,
            "max_completion_tokens": 7,
            "response_format": {"type": "text"},
            "tools": [],
            "tool_choice": "none",
        },
        CHAT,
    )
    assert (parsed.logprobs, parsed.max_tokens) == (20, 7)
    assert parsing.parse({"messages": USER, "logprobs": True}, CHAT).logprobs == 0
    assert parsing.parse({"messages": USER, "logprobs": False, "top_logprobs": 0}, CHAT).logprobs is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [5]}, "messages"),
        ({"messages": [{}]}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "x"}, "response_format"),
        ({"guided_json": {}, "guided_regex": "x"}, "guided_regex"),
        ({"guided_json": {}, "guided_choice": ["x"]}, "guided_choice"),
        ({"guided_json": {}, "structured_outputs": {"regex": "x"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "x"}}, "response_format"),
        ({"tools": [TOOL], "structured_outputs": {"regex": "x"}}, "structured_outputs"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": {}}}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
        ({"tools": [TOOL], "guided_regex": "x"}, "guided_regex"),
        ({"tools": [TOOL], "response_format": {"type": "regex", "pattern": "x"}}, "response_format"),
        ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "\ud800"}}}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"continue_final_message": True}, "messages"),
        (
            {"continue_final_message": True, "add_generation_prompt": True, "messages": [ASSISTANT]},
            "add_generation_prompt",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": 5}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "messages"),
        ({"messages": [{"role": "tool", "tool_call_id": "1", "content": {"x": 1}}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL | {"function": ["f"]}]}]}, "messages"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_refused_chat_fields(body, param):
    with pytest.raises(InvalidRequest) as caught:
        parsing.parse({"messages": USER, **body}, CHAT)
    assert caught.value.param == param


def test_messages_are_made_plain():
    parsed = parsing.parse(
        {
            "messages": [
                {"role": "developer", "content": "be brief"},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    "name": None,
                },
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "1", "content": "4"},
            ]
        },
        CHAT,
    )
    assert parsed.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    )


def sent_back(**turn):
    """What becomes of a turn of the assistant."""
    messages = [*USER, {"role": "assistant", **turn}, *USER]
    return parsing.parse({"messages": messages}, CHAT).messages[1]


@pytest.mark.parametrize(
    ("turn", "content"),
    [
        ({}, ""),
        ({"content": None}, ""),
        ({"content": ""}, ""),
        ({"content": []}, ""),
        ({"content": "x", "tool_calls": []}, "x"),
        ({"content": "x", "tool_calls": None, "function_call": None, "audio": None, "refusal": None}, "x"),
        ({"content": [{"type": "text", "text": "x", "annotations": [], "cache_control": {"type": "ephemeral"}}]}, "x"),
        ({"content": [{"type": "output_text", "text": "x", "annotations": []}]}, "x"),
        ({"content": None, "refusal": "I will not."}, "I will not."),
        ({"content": [{"type": "refusal", "refusal": "I will not."}]}, "I will not."),
        ({"content": None, "audio": {"id": "audio_1", "data": "UklGRg", "expires_at": 1, "transcript": "x"}}, "x"),
        ({"content": None, "audio": {"id": "audio_1"}}, ""),
        ({"content": ["x"]}, "x"),
    ],
)
def test_empty_and_other_answers_may_be_sent_back(turn, content):
    made = sent_back(**turn)
    assert made["content"] == content
    assert "tool_calls" not in made and "function_call" not in made


@pytest.mark.parametrize("calls", [[CALL], [CALL | {"index": 0, "type": "function"}]])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_beside_calls_no_content_is_none(calls, content):
    made = sent_back(tool_calls=calls, **content)
    assert made["content"] is None and made["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert sent_back(tool_calls=calls, content="x")["content"] == "x"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"arguments": '{"x": 1}'}, {"x": 1}),
        ({"arguments": {"x": 1}}, {"x": 1}),
        ({"arguments": ""}, {}),
        ({"arguments": None}, {}),
        ({"arguments": "null"}, {}),
        ({}, {}),
        # What a model wrote that is no object, or that max_tokens cut.
        ({"arguments": '{"city": "Par'}, {"INVALID_JSON": '{"city": "Par'}),
        ({"arguments": "[1]"}, {"INVALID_JSON": "[1]"}),
        ({"arguments": '{"x": "\\ud800"}'}, {"INVALID_JSON": '{"x": "\\ud800"}'}),
        ({"arguments": '{"x":' * 500 + "1" + "}" * 500}, {"INVALID_JSON": '{"x":' * 500 + "1" + "}" * 500}),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_arguments_of_calls_that_are_sent_back(arguments, shown):
    call = {"id": "1", "type": "function", "function": {"name": "f", **arguments}}
    assert sent_back(tool_calls=[call])["tool_calls"][0]["function"] == {"name": "f", "arguments": shown}


def test_calls_of_other_kinds_may_be_sent_back():
    old = sent_back(content=None, function_call={"name": "f", "arguments": "{}"})
    assert old["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    custom = {"id": "1", "type": "custom", "custom": {"name": "sh", "input": "ls"}}
    assert sent_back(tool_calls=[custom])["tool_calls"] == [
        {"id": "1", "type": "function", "function": {"name": "sh", "arguments": {"input": "ls"}}}
    ]


@pytest.mark.parametrize(
    "turn",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"reasoning": "hm", "reasoning_details": [{"type": "reasoning.text", "text": "hm"}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "x"}]},
        {"content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "x"}]},
        {"content": [{"type": "reasoning", "text": "hm"}, {"type": "text", "text": "x"}]},
    ],
)
def test_thoughts_are_no_content_and_have_one_name(turn):
    made = sent_back(**({"content": "x"} | turn))
    assert (made["content"], made["reasoning_content"]) == ("x", "hm")


def test_results_of_functions():
    def result(message):
        return parsing.parse({"messages": [*USER, message]}, CHAT).messages[1]

    assert result({"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "4"}]})["content"] == "4"
    for nothing in ({}, {"content": None}, {"content": ""}, {"content": []}):
        assert result({"role": "tool", "tool_call_id": "1", **nothing})["content"] == ""
    assert result({"role": "function", "name": "f", "content": "4"}) == {"role": "tool", "name": "f", "content": "4"}


def test_fields_of_a_vendor_reach_the_template():
    assert sent_back(content="x", prefix=True, name="bot", audio=None)["prefix"] is True


def test_a_message_at_fault_is_named_by_its_place():
    for messages, said in [
        ([*USER, 5], "messages[1] must be an object"),
        ([*USER, {"role": "king"}], "messages[1].role must be one of"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}], "messages[0].content[1] "),
        ([*USER, {"role": "assistant", "tool_calls": [CALL, {"id": "1"}]}], "messages[1].tool_calls[1] must be"),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            parsing.parse({"messages": messages}, CHAT)
        assert caught.value.message.startswith(said)


SCHEMA = {"b": 1, "a": {"é": []}}
SCHEMA_TEXT = '{"b": 1, "a": {"é": []}}'  # in the order that was given


@pytest.mark.parametrize(
    ("format", "name", "value"),
    [
        ({"type": "json_object"}, "guided_json", '{"type": "object"}'),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}, "guided_json", SCHEMA_TEXT),
        ({"type": "json_object", "schema": SCHEMA}, "guided_json", SCHEMA_TEXT),  # llama.cpp, Fireworks, Together
        ({"type": "json_schema", "schema": SCHEMA}, "guided_json", SCHEMA_TEXT),  # llama.cpp, Together
        ({"type": "json", "value": SCHEMA}, "guided_json", SCHEMA_TEXT),  # TGI
        ({"type": "json_object", "value": SCHEMA, "schema": None}, "guided_json", SCHEMA_TEXT),  # TGI
        ({"type": "regex", "pattern": "a+"}, "guided_regex", "a+"),  # Together
        ({"type": "regex", "regex": "a+"}, "guided_regex", "a+"),
        ({"type": "regex", "value": "a+"}, "guided_regex", "a+"),  # TGI
        ({"type": "grammar", "grammar": 'root ::= "a"'}, "guided_grammar", 'root ::= "a"'),  # Fireworks
        ({"type": "grammar", "value": 'root ::= "a"'}, "guided_grammar", 'root ::= "a"'),
    ],
)
def test_response_formats_are_guides(format, name, value):
    for body, table in (({"messages": USER}, CHAT), ({"prompt": "x"}, COMPLETIONS), ({"prompt": "x"}, fields.GENERATE)):
        parsed = parsing.parse(body | {"response_format": format}, table)
        assert {guide: getattr(parsed, guide) for guide in fields.GUIDED} == dict.fromkeys(fields.GUIDED) | {name: value}
        assert parsed.guide_field == "response_format"


def test_the_response_format_of_free_text_is_none():
    parsed = parsing.parse({"messages": USER, "response_format": {"type": "text"}, "guided_regex": "x"}, CHAT)
    assert (parsed.guided_regex, parsed.guide_field) == ("x", None)


@pytest.mark.parametrize(
    ("format", "message"),
    [
        ({"type": "structural_tag", "structures": []}, "structural_tag is not supported"),
        ({"type": "ebnf"}, "one of text, json_object, json_schema, json, regex, grammar"),
        ({"type": []}, "one of text"),
        ({"type": "json"}, "of type json must have"),
        ({"type": "json_object", "schema": "x"}, "of type json_object must have"),
        ({"type": "json_schema", "json_schema": []}, "must have an object as json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "of type json_schema must have"),
        ({"type": "json", "schema": {}, "value": {}}, "both schema and value"),
        ({"type": "regex"}, 'must have {"pattern": string}'),
        ({"type": "regex", "pattern": 5}, "string"),
        ({"type": "regex", "pattern": ""}, "1 to 65536 characters"),
        ({"type": "regex", "pattern": "a", "value": "a"}, "both pattern and value"),
        ({"type": "grammar", "grammar": ["x"]}, "string"),
    ],
)
def test_response_formats_that_say_nothing_are_refused(format, message):
    with pytest.raises(InvalidRequest, match="^response_format .*" + re.escape(message)) as caught:
        parsing.parse({"messages": USER, "response_format": format}, CHAT)
    assert caught.value.param == "response_format"


def test_guides_are_text():
    assert completion(guided_json={"type": "object"}).guided_json == '{"type": "object"}'
    assert completion(guided_json='{"type":"object"}').guided_json == '{"type":"object"}'
    assert completion(guided_regex="a+").guided_regex == "a+"
    assert completion(guided_grammar="start: /a/").guided_grammar == "start: /a/"
    assert completion(guided_choice=["a", "b"]).guided_choice == ("a", "b")
    for outputs, name, value in [
        ({"json": {"type": "object"}}, "guided_json", '{"type": "object"}'),
        ({"json_object": True, "regex": None}, "guided_json", '{"type": "object"}'),
        ({"regex": "a+", "disable_any_whitespace": True}, "guided_regex", "a+"),
        ({"choice": ["a"]}, "guided_choice", ("a",)),
        ({"grammar": "start: /a/"}, "guided_grammar", "start: /a/"),
    ]:
        parsed = completion(structured_outputs=outputs)
        assert (getattr(parsed, name), parsed.guide_field) == (value, "structured_outputs")


def test_tools_and_choices():
    parsed = parsing.parse({"messages": USER, "tools": [TOOL]}, CHAT)
    assert (parsed.tools, parsed.tool_choice, parsed.parallel_tool_calls) == ((TOOL,), "auto", True)
    named = {"type": "function", "function": {"name": "f"}}
    assert parsing.parse({"messages": USER, "tools": [TOOL], "tool_choice": named}, CHAT).tool_choice.name == "f"


def test_generate_takes_no_logprobs_and_one_sample():
    assert parsing.parse({"prompt": "x", "n": 1}, GENERATE).prompt == ("x",)
    for body, param in [
        ({"logprobs": 1}, "logprobs"),
        ({"n": 2}, "n"),
        ({"prompt": ["x"]}, "prompt"),
        ({"prompt": None}, "prompt"),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            parsing.parse({"prompt": "x", **body}, GENERATE)
        assert caught.value.param == param


def test_unknown_fields_are_logged_once(caplog):
    for _ in range(2):
        completion(frobnicate=1)
    assert [record.getMessage() for record in caplog.records].count(
        "ignoring unknown request field 'frobnicate' (said once per name)"
    ) == 1


# The wire.


def test_fields_survive_the_wire():
    parsed = RequestFields(
        max_tokens=5,
        n=3,
        temperature=0.0,
        top_k=-1,
        top_p=0.9,
        min_p=0.1,
        presence_penalty=-1.0,
        frequency_penalty=0.5,
        repetition_penalty=1.25,
        seed=2**63 - 1,
        stop=("a", "\n"),
        stop_token_ids=(3, 4),
        min_tokens=2,
        ignore_eos=True,
        logit_bias=((7, -100.0),),
        logprobs=0,
        prompt_logprobs=20,
        echo=True,
        want_text=True,
        model_defaults=True,
        priority=-3,
        model="tiny",
        request_id="id",
        guided_regex="a+",
        show_tool_markers=True,
    )
    request = DecodeRequest.FromString(decode_fields.fields_to_proto(parsed).SerializeToString())
    assert decode_fields.fields_from_proto(request) == parsed
    for other in (RequestFields(guided_choice=("a", "ü")), RequestFields(seed=-1)):
        assert decode_fields.fields_from_proto(decode_fields.fields_to_proto(other)) == other


def test_jetstreams_zeros_are_absent():
    assert decode_fields.fields_from_proto(DecodeRequest()) == RequestFields()
    assert decode_fields.fields_from_proto(DecodeRequest(max_tokens=0, num_samples=0)).max_tokens is None
    assert decode_fields.fields_from_proto(decode_fields.fields_to_proto(RequestFields(max_tokens=0))) == RequestFields(
        max_tokens=0, prompt_only=True
    )


@pytest.mark.parametrize(
    "request_fields",
    [
        {"max_tokens": -1},
        {"num_samples": -1},
        {"num_samples": 129},
        {"temperature": math.nan},
        {"temperature": -1},
        {"top_p": 0},
        {"top_k": -2},
        {"stop": [""]},
        {"stop": ["x"] * 17},
        {"stop_token_ids": [-1]},
        {"logit_bias": {-1: 1}},
        {"logit_bias": {1: math.inf}},
        {"logprobs": 21},
        {"prompt_logprobs": -1},
        {"guided_json": ""},
        {"guided_choice": ["a", ""]},
        {"request_id": ""},
        {"request_id": "a\nb"},
        {"prompt_only": True, "max_tokens": 3},
    ],
)
def test_refused_over_grpc(request_fields):
    with pytest.raises(InvalidRequest) as caught:
        decode_fields.fields_from_proto(DecodeRequest(**request_fields))
    assert caught.value.param in GRPC and caught.value.param in request_fields


TABLES = {
    "generate": GENERATE,
    "completions": COMPLETIONS,
    "chat": CHAT,
    "gRPC": GRPC,
    "tokenize": fields.TOKENIZE,
    "detokenize": fields.DETOKENIZE,
}
OF_ANY_KIND = [5, -1, 2**70, 1.5, math.nan, "x", "", "\ud800", True, [], [None], {}, {"a": []}, [[[]]]]


@pytest.mark.parametrize("kind", TABLES)
def test_whatever_is_refused_is_named(kind):
    """Every field of every table, with values of all kinds."""
    for name, field in TABLES[kind].items():
        refused = 0
        for value in OF_ANY_KIND:
            try:
                field.check(value)
            except ValueError:
                refused += 1
                with pytest.raises(InvalidRequest) as caught:
                    parsing.checked({name: value}, TABLES[kind])
                assert caught.value.param == name
                assert re.match(rf"{re.escape(name)}[ .\[]", caught.value.message)
        assert refused, name


def test_an_error_may_quote_what_no_answer_can_hold():
    assert InvalidRequest("not 'a\ud800'").message == r"not 'a\ud800'"


def test_every_refusal_names_a_field():
    """By the sources: only what is wrong with a body as a whole names none."""
    root = Path(fields.__file__).parents[1]
    unnamed = []
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            refusal = isinstance(called, ast.Name) and called.id in ("InvalidRequest", "ModelNotFound")
            if refusal and not any(keyword.arg == "param" for keyword in node.keywords):
                unnamed.append(path.relative_to(root).as_posix())
    assert set(unnamed) == {"proxy/transport.py"}


# Against the model.


def built(prompt=(1, 2), limits=LIMITS, **parsed):
    return build_request(RequestFields(**parsed), prompt, limits, request_id="r")


@pytest.mark.parametrize(
    ("parsed", "prompt", "param"),
    [
        ({}, (300,), "prompt"),
        ({}, (-1,), "prompt"),
        ({}, (), "prompt"),
        ({}, (1,) * 33, "prompt"),
        ({}, (1,) * 32, "prompt"),
        ({"max_tokens": 31}, (1, 2), "max_tokens"),
        ({"max_tokens": 1}, (1,) * 32, "max_tokens"),
        ({"stop_token_ids": (300,)}, (1,), "stop_token_ids"),
        ({"logit_bias": ((300, 1.0),)}, (1,), "logit_bias"),
        ({"min_tokens": 6, "max_tokens": 5}, (1,), "min_tokens"),
        ({"min_tokens": 32}, (1,), "min_tokens"),
        ({"min_tokens": 1, "stop_token_ids": tuple(range(32))}, (1,), "stop_token_ids"),
    ],
)
def test_what_the_model_does_not_allow(parsed, prompt, param):
    with pytest.raises(InvalidRequest) as caught:
        built(prompt, **parsed)
    assert caught.value.param == param


def test_too_long_says_both_numbers():
    with pytest.raises(InvalidRequest) as caught:
        built((1,) * 10, max_tokens=23)
    assert (
        "33" in caught.value.message and "32" in caught.value.message and caught.value.code == "context_length_exceeded"
    )


def test_lengths_at_the_limit():
    assert built((1,) * 10, max_tokens=22).max_tokens == 22
    assert built((1,) * 10).max_tokens == 22
    assert built((1,) * 32, max_tokens=0).max_tokens == 0


def test_samples_differ_in_their_index_only():
    request = built(n=3, temperature=1.0)
    assert [sampling.sample for sampling in request.sampling] == [0, 1, 2]
    assert len({sampling.seed for sampling in request.sampling}) == 1
    assert 0 <= request.sampling[0].seed < 2**63


def test_only_the_seed_of_minus_1_is_random():
    """As vLLM's and llama.cpp's clients send it; other negative seeds are seeds, each its own: 64 bits, two's complement."""
    assert len({built(seed=-1).sampling[0].seed for _ in range(5)} - {2**64 - 1}) == 5
    assert len({sampling.seed for sampling in built(seed=-1, n=4).sampling}) == 1  # samples differ by their index
    assert [built(seed=seed).sampling[0].seed for seed in (-2, -(2**63), 5)] == [2**64 - 2, 2**63, 5]


def test_silence_is_greedy_but_on_v1():
    limits = ModelLimits("tiny", 32, 300, defaults=RequestFields(temperature=0.6, top_k=20, repetition_penalty=1.1))
    assert built(limits=limits).sampling[0].temperature == 0.0
    assert built(limits=limits).sampling[0].top_k == 0
    of_model = built(limits=limits, model_defaults=True, top_k=5).sampling[0]
    assert (of_model.temperature, of_model.top_k, of_model.repetition_penalty, of_model.top_p) == (0.6, 5, 1.1, 1.0)
    assert built(model_defaults=True).sampling[0].temperature == 1.0
    assert built(model_defaults=True, temperature=0.0).sampling[0].temperature == 0.0


def test_values_with_another_meaning_on_the_device():
    sampling = built(temperature=1e-9, top_k=300, top_p=1e-300).sampling[0]
    assert (sampling.temperature, sampling.top_k) == (0.0, 0)  # the limit of a low temperature; as many as there are
    assert sampling.top_p > 0
    tiny = 2.0**-126  # the least normal float32: what is less may be 0 there, which is off and not nearly greedy
    assert [built(top_n_sigma=n).sampling[0].top_n_sigma for n in (1e-300, 0.5, 0.0, -1.0)] == [tiny, 0.5, 0.0, 0.0]
    assert built(top_k=299).sampling[0].top_k == 299


def test_another_model_is_not_found():
    with pytest.raises(ModelNotFound):
        built(model="other")
    assert built(model="tiny").prompt == (1, 2)


def test_generation_config():
    read = sampling_defaults({"temperature": 0.7, "top_p": 0.8, "do_sample": True, "top_k": None, "eos_token_id": [1]})
    assert read == RequestFields(temperature=0.7, top_p=0.8)
    with pytest.raises(StartError, match="generation_config.json: top_p must be"):
        sampling_defaults({"top_p": 7})


# Adapters.

WITH_ADAPTERS = dataclasses.replace(LIMITS, adapters=("pirate", "poet"))


@pytest.mark.parametrize(
    ("asked", "adapter", "name"),
    [
        ({}, 0, None),
        ({"model": "tiny"}, 0, None),
        ({"model": "poet"}, 2, "poet"),
        ({"lora_adapter_id": "pirate"}, 1, "pirate"),
        ({"lora_adapter_id": "pirate", "model": "tiny"}, 1, "pirate"),
        ({"lora_adapter_id": "poet", "model": "poet"}, 2, "poet"),
    ],
)
def test_an_adapter_is_chosen_by_model_or_by_id(asked, adapter, name):
    request = built(limits=WITH_ADAPTERS, n=2, **asked)
    assert [sampling.adapter for sampling in request.sampling] == [adapter, adapter]
    assert request.adapter == name


@pytest.mark.parametrize(
    ("limits", "asked", "error", "param", "said"),
    [
        (WITH_ADAPTERS, {"model": "nobody"}, ModelNotFound, "model", "'tiny', 'pirate', 'poet' are served"),
        (LIMITS, {"model": "nobody"}, ModelNotFound, "model", "'tiny' is served"),
        (WITH_ADAPTERS, {"lora_adapter_id": "tiny"}, InvalidRequest, "lora_adapter_id", "served are pirate, poet"),
        (LIMITS, {"lora_adapter_id": "poet"}, InvalidRequest, "lora_adapter_id", "this server has none"),
        (WITH_ADAPTERS, {"lora_adapter_id": "poet", "model": "pirate"}, InvalidRequest, "lora_adapter_id", "'pirate'"),
    ],
)
def test_adapters_that_are_not_there(limits, asked, error, param, said):
    with pytest.raises(error) as caught:
        built(limits=limits, **asked)
    assert caught.value.param == param
    assert said in caught.value.message


def test_the_adapter_id_travels():
    request = decode_fields.fields_to_proto(parsing.parse({"prompt": "x"}, fields.COMPLETIONS))
    assert request.lora_adapter_id == ""
    parsed = decode_fields.fields_from_proto(DecodeRequest(lora_adapter_id="poet"))
    assert parsed.lora_adapter_id == "poet"
    assert decode_fields.fields_to_proto(parsed).lora_adapter_id == "poet"
