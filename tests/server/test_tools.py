"""Tool calls: their parsing in every format, whatever the cuts; their grammars; and the whole way through HTTP.

The mock engine says what a test has it say, whatever the prompt, so the answers are those of the formats' own
descriptions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json

import httpx
import openai
import pytest
from front_doors import NAME, open_doors
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.mock import Table
from protos import preheat_pb2
from server.client import Client
from server.errors import InvalidRequest
from server.grpc.chat_rendering import render_chat
from server.text.guided import Guides
from server.text.tokenizers import ByteTokenizer, ChatTemplate
from server.text.tokenizers.special import SpecialToken, SpecialTokens
from server.text.tool_forms import FORMS
from server.text.tool_use import ToolUse

EOS = 257
GENERIC, HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS = "generic", "hermes", "llama3", "mistral", "mistral-args"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "maxProperties": 0}}}
NAMES = ("get_weather", "time", "get")


def joined(pieces):
    """Content and calls of the outcomes of several pushes."""
    content, calls = "", []
    for parsed in pieces:
        content += parsed.content
        for piece in parsed.pieces:
            if piece.id is not None:
                assert piece.index == len(calls)
                calls.append([piece.name, ""])
            calls[piece.index][1] += piece.arguments
    return content, [tuple(call) for call in calls]


def parse(format, parts, **options):
    parser = FORMS[format].parser(NAMES, **options)
    return joined([*(parser.push(part) for part in parts), parser.finish()])


ARGUMENTS = '{"city": "Pa}ris \\"{"}'
CALL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
LLAMA = f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}'
WANT = ("get_weather", ARGUMENTS)
UNKNOWN = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
CASES = [
    (HERMES, "plain", "plain", []),
    (HERMES, " < tool_call> \n", " < tool_call> \n", []),
    (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", [WANT]),
    (HERMES, f"Let me see.\n<tool_call>{CALL}</tool_call>\n", "Let me see.", [WANT]),
    (
        HERMES,
        f'<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{{"name": "time", "arguments": {{}}}}\n</tool_call>',
        "",
        [WANT, ("time", "{}")],
    ),
    (HERMES, f"<tool_call>{CALL}</tool_call> done", " done", [WANT]),
    (HERMES, '<tool_call>{"arguments": {"x": [1]}, "name": "get"}</tool_call>', "", [("get", '{"x": [1]}')]),
    (HERMES, '<tool_call>{"name": "get"}</tool_call>', "", [("get", "{}")]),
    (HERMES, '<tool_call>{"name": "get", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("get", '{"x": 1}')]),
    (HERMES, '<tool_call>{"name": "get", "id": 5, "arguments": {}}</tool_call>', "", [("get", "{}")]),
    (HERMES, '<tool_call>{"name": "get", "arguments": {}, "id": 5}</tool_call>', "", [("get", "{}")]),
    (HERMES, UNKNOWN, UNKNOWN, []),
    (HERMES, "a <tool_call>{nonsense}</tool_call>", "a <tool_call>{nonsense}</tool_call>", []),
    (HERMES, '<tool_call>{"name": "ge', '<tool_call>{"name": "ge', []),
    (HERMES, '<tool_call>{"name": "get", "arguments": {"x": ', "", [("get", '{"x": ')]),
    (HERMES, "<tool_call>", "<tool_call>", []),
    (MISTRAL, f"[TOOL_CALLS][{CALL}]", "", [WANT]),
    (MISTRAL, f'[TOOL_CALLS] [{CALL}, {{"name":"time","arguments":{{}}}}]', "", [WANT, ("time", "{}")]),
    (MISTRAL, f"Well: [TOOL_CALLS]{CALL}", "Well:", [WANT]),
    (MISTRAL, "[TOOL_CALLS][5]", "[TOOL_CALLS][5]", []),
    (MISTRAL, "[TOOL", "[TOOL", []),
    (MISTRAL, f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}", "", [WANT]),
    (MISTRAL_ARGS, f"Well: [TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}", "Well:", [WANT]),
    (MISTRAL_ARGS, f"[TOOL_CALLS] get_weather[CALL_ID]a1B2c3D4e[ARGS] {ARGUMENTS}", "", [WANT]),
    (MISTRAL_ARGS, "[TOOL_CALLS]get[ARGS]{}[TOOL_CALLS]time[ARGS]{}", "", [("get", "{}"), ("time", "{}")]),
    (MISTRAL_ARGS, f"[TOOL_CALLS][{CALL}]", "", [WANT]),
    (MISTRAL_ARGS, '[TOOL_CALLS]get[ARGS]{"x": ', "", [("get", '{"x": ')]),
    (MISTRAL_ARGS, "[TOOL_CALLS]get[ARGS]{} done", " done", [("get", "{}")]),
    (MISTRAL_ARGS, "[TOOL_CALLS]get[ARGS]5", "[TOOL_CALLS]get[ARGS]5", []),
    (MISTRAL_ARGS, "[TOOL_CALLS]rm[ARGS]{}", "[TOOL_CALLS]rm[ARGS]{}", []),
    (MISTRAL_ARGS, "[TOOL_CALLS]get[CALL_ID]?[ARGS]{}", "[TOOL_CALLS]get[CALL_ID]?[ARGS]{}", []),
    (MISTRAL_ARGS, "[TOOL_CALLS]get[CALL_ID]x", "[TOOL_CALLS]get[CALL_ID]x", []),
    (MISTRAL_ARGS, "[TOOL_CALLS]get_wea", "[TOOL_CALLS]get_wea", []),
    (LLAMA3, LLAMA, "", [WANT]),
    (LLAMA3, CALL, "", [WANT]),
    (LLAMA3, f" <|python_tag|>{LLAMA}", "", [WANT]),
    (LLAMA3, f"{LLAMA}; {LLAMA}", "", [WANT, WANT]),
    (LLAMA3, f"<|python_tag|>{LLAMA}<|python_tag|>{LLAMA}", "", [WANT, WANT]),
    (LLAMA3, '{"type": "function", "name": "get", "parameters": {}}', "", [("get", "{}")]),
    (LLAMA3, '<|python_tag|>{"parameters": {}, "name": "get"}', "", [("get", "{}")]),
    (LLAMA3, '{"name": "Bob", "age": 5}', '{"name": "Bob", "age": 5}', []),
    (LLAMA3, '{"name": "get", "age": 5}', '{"name": "get", "age": 5}', []),
    (LLAMA3, f"The call is {LLAMA}", f"The call is {LLAMA}", []),
    (LLAMA3, "<|python_tag|>print(5)", "<|python_tag|>print(5)", []),
    (LLAMA3, f"{LLAMA} and so on", " and so on", [WANT]),
    (LLAMA3, " \n ", " \n ", []),
    (LLAMA3, "", "", []),
]  # fmt: skip


@pytest.mark.parametrize(("format", "text", "content", "calls"), CASES, ids=lambda value: ascii(value)[:30])
def test_calls_in_a_text(format, text, content, calls):
    assert parse(format, [text]) == (content, calls)
    assert parse(format, list(text)) == (content, calls)  # character by character


@settings(deadline=None, derandomize=True, max_examples=300)
@given(
    format=st.sampled_from([HERMES, MISTRAL, MISTRAL_ARGS, LLAMA3]),
    parts=st.lists(
        st.sampled_from([
            "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[", "]", ",", ";", " ", "\n", "x", "{",
            "}", '"', "get", "get_weather", "[ARGS]", "[CALL_ID]", CALL, LLAMA, '{"name": "get", ', '"arguments": {',
            '"name": "rm"', "<tool", "[TOOL",
        ]),
        max_size=8,
    ),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)  # fmt: skip
def test_the_outcome_does_not_depend_on_the_cuts(format, parts, cuts):
    text = "".join(parts)
    places = sorted({0, *(cut % (len(text) + 1) for cut in cuts), len(text)})
    pieces = [text[begin:end] for begin, end in itertools.pairwise(places)]
    content, calls = parse(format, [text])
    assert parse(format, pieces) == parse(format, list(text)) == (content, calls)
    if not calls:
        assert content == text  # nothing is lost


def test_without_parallel_calls_only_the_first_counts():
    text = f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call> done"
    assert parse(HERMES, [text], parallel=False) == parse(HERMES, list(text), parallel=False) == ("", [WANT])


def test_mistrals_ids_have_nine_letters_and_digits():
    first, second = (FORMS[MISTRAL].parser(NAMES).push(f"[TOOL_CALLS][{CALL}]").pieces[0].id for _ in range(2))
    assert len(first) == 9 and first.isalnum() and first != second
    named = FORMS[MISTRAL_ARGS].parser(NAMES).push("[TOOL_CALLS]get[CALL_ID]a1B2c3D4e[ARGS]{}").pieces[0]
    assert (named.id, named.name) == ("a1B2c3D4e", "get")  # the model's own


# The grammar of calls.

HERMES_TEMPLATE = (
    "{% if tools %}{{ '# Tools <tool_call>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role + ': ' + (m.content or '') }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments.city + '!' }}{% endfor %}"
    "{{ '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
MISTRAL_TEMPLATE = HERMES_TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]")
ARGS_TEMPLATE = HERMES_TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]f[ARGS]")
LLAMA_TEMPLATE = HERMES_TEMPLATE.replace("<tool_call>", '"parameters"')


class Tokenizer(ByteTokenizer):
    """The byte tokenizer with a chat template, and control tokens from id 259 on."""

    def __init__(self, template: str, *controls: str):
        super().__init__()
        self._controls = {259 + place: spelling for place, spelling in enumerate(controls)}
        spellings = {256: "<|bos|>", 257: "<|eos|>", 258: "<|eot|>"} | self._controls
        self.special = SpecialTokens(SpecialToken(id, spelling) for id, spelling in spellings.items())
        self.vocab_size = 259 + len(controls)
        self.chat_template = ChatTemplate(template, control_spellings=self.special.unspoken)

    def find_bytes(self, id: int) -> bytes:
        return self._controls[id].encode() if id in self._controls else super().find_bytes(id)


@pytest.mark.parametrize(
    ("template", "format"),
    [
        (HERMES_TEMPLATE, HERMES),
        (MISTRAL_TEMPLATE, MISTRAL),
        (ARGS_TEMPLATE, MISTRAL_ARGS),
        (LLAMA_TEMPLATE, LLAMA3),
        ("{{ messages }}", GENERIC),
    ],
)
def test_the_template_tells_the_format(template, format):
    assert ToolUse.of(Tokenizer(template)).form.name == format
    assert ToolUse.of(Tokenizer({"default": "x", "tool_use": HERMES_TEMPLATE})).form.name == HERMES


def accepts(form, tools, text, *, tokenizer=None, **options):
    """Whether a whole text is allowed by the grammar of calls."""
    guides = Guides(tokenizer or ByteTokenizer(), (EOS,), 320)
    grammar = f"start: tool_calls\n{form.grammar(tools, **({'parallel': True} | options))}"
    matcher = guides.compile("guided_grammar", grammar).matcher()
    try:
        for token in text if isinstance(text, list) else text.encode():
            matcher.accept(token)
        if not matcher.finished:
            matcher.accept(EOS)
    except InvalidRequest:
        return False
    return True


@pytest.mark.parametrize(
    ("format", "one", "two"),
    [
        (HERMES, "<tool_call>\n%s\n</tool_call>", "<tool_call>\n%s\n</tool_call>\n<tool_call>\n%s\n</tool_call>"),
        (MISTRAL, "[TOOL_CALLS][%s]", "[TOOL_CALLS][%s, %s]"),
        (LLAMA3, "%s", None),
    ],
)
def test_grammars_allow_calls_of_the_tools_only(format, one, two):
    form = FORMS[format]({})
    key = "parameters" if format == LLAMA3 else "arguments"
    good = f'{{"name": "get_weather", "{key}": {{"city": "Oslo"}}}}'
    assert accepts(form, [WEATHER, TIME], one % good)
    assert accepts(form, [WEATHER, TIME], one % f'{{"name": "time", "{key}": {{}}}}')
    assert not accepts(form, [TIME], one % good)
    assert not accepts(form, [WEATHER], one % f'{{"name": "get_weather", "{key}": {{"town": "Oslo"}}}}')
    assert not accepts(form, [WEATHER], "Sorry")
    if two:
        assert accepts(form, [WEATHER], two % (good, good))
        assert not accepts(form, [WEATHER], two % (good, good), parallel=False)


ARGS_OF = "[TOOL_CALLS]%s[ARGS]%s"


def test_the_grammar_of_calls_that_begin_with_their_name():
    form = FORMS[MISTRAL_ARGS]({})
    good = ARGS_OF % ("get_weather", '{"city": "Oslo"}')
    assert accepts(form, [WEATHER, TIME], good) and accepts(form, [TIME], ARGS_OF % ("time", "{}"))
    assert not accepts(form, [TIME], good) and not accepts(form, [WEATHER], ARGS_OF % ("get_weather", "{}"))
    assert accepts(form, [WEATHER], good + good) and not accepts(form, [WEATHER], good + good, parallel=False)
    tokenizer = Tokenizer(ARGS_TEMPLATE + "[CALL_ID]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    form = ToolUse.of(tokenizer).form
    text = [259, *b"time", 261, *b"a1B2c3D4e", 260, *b"{}"]
    assert accepts(form, [TIME], text, tokenizer=tokenizer)
    assert not accepts(form, [TIME], [259, *b"time", 260, *b"{}"], tokenizer=tokenizer)  # its calls have ids


STRICT = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
LOOSE = {"type": "function", "function": {"name": "loose", "parameters": WEATHER["function"]["parameters"]}}
OPTIONAL = [
    (HERMES, "<tool_call>\n%s\n</tool_call>", "arguments"),
    (HERMES, "<tool_call>%s</tool_call>", "arguments"),
    (MISTRAL, "[TOOL_CALLS][%s]", "arguments"),
    (MISTRAL_ARGS, "", ""),
    (LLAMA3, "%s", "parameters"),
    (LLAMA3, "%s", "arguments"),
    (LLAMA3, " <|python_tag|>%s", "parameters"),
]


@pytest.mark.parametrize(("format", "around", "key"), OPTIONAL)
def test_where_calls_are_optional_text_is_free_and_a_strict_tool_is_called_right(format, around, key):
    def call(name, arguments):
        if format == MISTRAL_ARGS:
            return ARGS_OF % (name, arguments)
        return around % f'{{"name": "{name}", "{key}": {arguments}}}'

    def allows(text, **options):
        return accepts(FORMS[format]({}), [STRICT, LOOSE], text, optional=True, **options)

    good, bad = call("get_weather", '{"city": "Oslo"}'), call("get_weather", '{"town": "Oslo"}')
    assert all(allows(text) for text in ("", "It rains.", '{"name": "Bob", "age": 5}', "[5]", "< tool_call>", "[ARGS]"))
    assert allows(good) and not allows(bad) and not allows(call("get_weather", "5"))
    assert allows(call("loose", '{"town": "Oslo"}')) and not allows(call("loose", "5"))
    assert not allows(good + " and so on")
    if format != LLAMA3:  # there a call is all there is
        assert allows("Let me see.\n" + good) and not allows("Let me see.\n" + bad)
        assert not allows(call("rm", "{}"))
        several = good[:-1] + ", " + good[len("[TOOL_CALLS][") :] if format == MISTRAL else None
        several = several or (good + good if format == MISTRAL_ARGS else good + "\n" + good)
        assert allows(several) and not allows(several, parallel=False)


@pytest.mark.parametrize("format", [HERMES, MISTRAL, MISTRAL_ARGS, LLAMA3])
def test_optional_calls_keep_to_nothing_unless_a_tool_is_strict_or_one_call_is_the_most(format):
    form = FORMS[format]({})
    assert form.grammar([WEATHER, TIME], parallel=True, optional=True) is None
    assert form.grammar([WEATHER, TIME], parallel=False, optional=True) is not None
    assert form.grammar([STRICT, TIME], parallel=True, optional=True) is not None


def test_control_tokens_that_mark_optional_calls():
    tokenizer = Tokenizer(MISTRAL_TEMPLATE, "[TOOL_CALLS]")
    form = ToolUse.of(tokenizer).form
    calls = [259, *b'[{"name": "get_weather", "arguments": {"city": "a"}}]']
    options = {"tokenizer": tokenizer, "optional": True}
    assert accepts(form, [STRICT], [*b"Well: ", *calls], **options) and accepts(form, [STRICT], "No", **options)
    assert not accepts(form, [STRICT], [*calls[:-3], *b"5}]"], **options)
    llama = Tokenizer(LLAMA_TEMPLATE, "<|python_tag|>")
    form = ToolUse.of(llama).form
    call = list(b'{"name": "get_weather", "parameters": {"city": "a"}}')
    options["tokenizer"] = llama
    assert accepts(form, [STRICT], call, **options) and accepts(form, [STRICT], [259, *call], **options)
    assert not accepts(form, [STRICT], [259, *b"print()"], **options)


@pytest.mark.parametrize("format", [HERMES, MISTRAL, MISTRAL_ARGS, LLAMA3])
@pytest.mark.parametrize("optional", [False, True])
def test_arguments_are_those_that_are_listed(format, optional):
    parameters = {"type": "object", "properties": {"x": {"type": "object", "properties": {"y": {"type": "integer"}}}}}
    form = {
        HERMES: '<tool_call>{"name": "f", "arguments": %s}</tool_call>',
        MISTRAL: '[TOOL_CALLS][{"name": "f", "arguments": %s}]',
        MISTRAL_ARGS: "[TOOL_CALLS]f[ARGS]%s",
        LLAMA3: '{"name": "f", "parameters": %s}',
    }[format]

    def allows(arguments, parameters=parameters):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": optional}}
        return accepts(FORMS[format]({}), [tool], form % arguments, optional=optional)

    assert allows('{"x": {"y": 1}}') and allows('{\n  "x": {}\n}')
    assert not any(map(allows, ('{"z": 1}', '{"x": {"y": 1, "z": 1}}', '{"x":  {}}')))
    assert allows('{"z": 1}', parameters | {"additionalProperties": True}) and allows('{"z": 1}', {"type": "object"})


def test_references_inside_a_tools_schema_still_hold():
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
    parameters = {"$ref": "#/$defs/node", "$defs": {"node": node}}
    tool = {"type": "function", "function": {"name": "walk", "parameters": parameters}}
    form = FORMS[LLAMA3]({})
    assert accepts(form, [WEATHER, tool], '{"name": "walk", "parameters": {"next": {"next": {}}}}')
    assert not accepts(form, [WEATHER, tool], '{"name": "walk", "parameters": {"next": 5}}')


def test_markers_that_are_control_tokens_are_written_as_such():
    tokenizer = Tokenizer(MISTRAL_TEMPLATE, "[TOOL_CALLS]")
    form = ToolUse.of(tokenizer).form
    rest = list(b'[{"name": "time", "arguments": {}}]')
    assert accepts(form, [TIME], [259, *rest], tokenizer=tokenizer)
    assert not accepts(form, [TIME], "[TOOL_CALLS]" + bytes(rest).decode(), tokenizer=tokenizer)


# Over HTTP.


@dataclasses.dataclass
class Server:
    http: httpx.Client
    api: openai.OpenAI
    doors: object

    def says(self, answer):
        """What the model answers to anything, as bytes or ids; after that EOS."""
        ids = list(answer.encode() if isinstance(answer, str) else answer)

        def rule(tokens):
            ends = [end for end in range(11, len(tokens) + 1) if tuple(tokens[end - 11 : end]) == PROMPT_END]
            place = len(tokens) - ends[-1] if ends else len(ids)
            if self.flat or place >= len(ids):
                return {EOS: 0.5} | dict.fromkeys(range(33, 127), 0.5 / 94)
            return {ids[place]: 1.0}

        self.doors.engine.rule = rule

    flat = False


PROMPT_END = tuple(b"assistant: ")


@contextlib.contextmanager
def serving(tokenizer):
    with (
        open_doors(Table({}), max_len=1024, tokenizer=tokenizer) as doors,
        httpx.Client(base_url=doors.http, timeout=30) as http,
        openai.OpenAI(base_url=f"{doors.http}/v1", api_key="unused", max_retries=0, timeout=30) as api,
    ):
        yield Server(http, api, doors)


@pytest.fixture(scope="module")
def hermes():
    with serving(Tokenizer(HERMES_TEMPLATE)) as server:
        yield server


@pytest.fixture(scope="module")
def mistral():
    with serving(Tokenizer(MISTRAL_TEMPLATE, "[TOOL_CALLS]")) as server:
        yield server


USER = [{"role": "user", "content": "Weather?"}]


def test_tokenize_shows_the_tools_as_a_chat_does(mistral):
    body = {"messages": USER, "tools": [WEATHER, TIME]}
    tokens = mistral.http.post("/tokenize", json=body).json()
    used = mistral.api.chat.completions.create(model=NAME, max_tokens=1, **body).usage.prompt_tokens
    bare = mistral.http.post("/tokenize", json={"messages": USER}).json()
    assert bare["count"] < tokens["count"] == len(tokens["tokens"]) == used


def both_ways(server, **options):
    """The whole answer's choice, after it was compared with the stream's."""
    options = {"model": NAME, "messages": USER, "temperature": 0, "tools": [WEATHER, TIME]} | options
    choice = server.api.chat.completions.create(**options).choices[0]
    chunks = [chunk.choices[0] for chunk in server.api.chat.completions.create(**options, stream=True)]
    calls = []
    for chunk in chunks:
        for piece in chunk.delta.tool_calls or []:
            if piece.id:
                assert piece.index == len(calls) and piece.type == "function"
                calls.append([piece.function.name, ""])
            calls[piece.index][1] += piece.function.arguments
    assert calls == [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or []]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == (choice.message.content or "")
    assert chunks[-1].finish_reason == choice.finish_reason
    return choice


def test_a_call_comes_back_as_a_call(hermes):
    hermes.says(f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>")
    choice = both_ways(hermes)
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "get_weather", ARGUMENTS)
    assert call.id.startswith("call_")


def test_an_answer_stays_an_answer(hermes):
    hermes.says("It rains. <tool_call>{}")
    choice = both_ways(hermes)
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (
        "It rains. <tool_call>{}", None, "stop",
    )  # fmt: skip


def test_without_choice_nothing_is_parsed_and_the_template_sees_no_tools(hermes):
    hermes.says(f"<tool_call>{CALL}</tool_call>")
    options = {"model": NAME, "messages": USER, "temperature": 0}
    none = hermes.api.chat.completions.create(**options, tools=[WEATHER], tool_choice="none")
    bare = hermes.api.chat.completions.create(**options)
    assert none.choices[0].message.content == f"<tool_call>{CALL}</tool_call>"
    assert none.usage.prompt_tokens == bare.usage.prompt_tokens
    assert hermes.api.chat.completions.create(**options, tools=[WEATHER]).usage.prompt_tokens > bare.usage.prompt_tokens


def test_a_call_cut_short_is_length(hermes):
    before = '<tool_call>{"name": "get_weather", "arguments": '
    hermes.says(f"<tool_call>{CALL}</tool_call>")
    choice = both_ways(hermes, max_tokens=len(before) + 12)
    assert (choice.finish_reason, choice.message.tool_calls[0].function.arguments) == ("length", ARGUMENTS[:12])


def test_a_call_within_which_a_stop_string_appears_is_no_call_to_be_made(hermes):
    """Its arguments do not parse. Behind them the call is whole, though its object is not."""
    hermes.says(f"<tool_call>{CALL}</tool_call>")
    end = len(ARGUMENTS) // 2
    choice = both_ways(hermes, stop=[ARGUMENTS[end : end + 4]])
    assert (choice.finish_reason, choice.message.tool_calls[0].function.arguments) == ("stop", ARGUMENTS[:end])
    choice = both_ways(hermes, stop=["}</tool_call>"])
    assert (choice.finish_reason, choice.message.tool_calls[0].function.arguments) == ("tool_calls", ARGUMENTS)


def test_what_was_answered_may_be_sent_back(hermes):
    """As clients do it: the message object, whole and with every field."""
    hermes.says(f"<tool_call>{CALL}</tool_call>")
    options = {"model": NAME, "temperature": 0, "tools": [WEATHER]}
    message = hermes.api.chat.completions.create(**options, messages=USER).choices[0].message
    assert message.content is None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "4"}
    lengths = set()
    for turn in (message, message.model_dump(), message.model_dump(exclude_unset=True)):
        answer = hermes.api.chat.completions.create(**options, messages=[*USER, turn, result], max_tokens=1)
        lengths.add(answer.usage.prompt_tokens)
    assert len(lengths) == 1


def test_ids_of_other_servers_fit_templates_that_want_nine_characters():
    """Mistral's templates refuse others, OpenAI's ids among them."""
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{{ c.id }}{% endfor %}"
        "{% if m.role == 'tool' %}={{ m.tool_call_id }}{% endif %}{% endfor %}"
    )
    call = {"id": "call_7xYz0123456", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "assistant", "tool_calls": [call, call | {"id": "call_1"}, call | {"id": "AbCdEfGh9"}]},
        {"role": "tool", "tool_call_id": "call_7xYz0123456", "content": "4"},
    ]
    request = preheat_pb2.RenderChatRequest(messages=json.dumps(messages))
    tokenizer = Tokenizer(template)
    text = render_chat(tokenizer, ToolUse.of(tokenizer), request).text
    assert text == "Yz0123456" + "0000call1" + "AbCdEfGh9" + "=" + "Yz0123456"


def test_a_required_call_is_made_whatever_the_model_wants(hermes):
    hermes.says("No!")
    hermes.flat = True
    try:
        for choice in (
            both_ways(hermes, tool_choice="required", tools=[TIME], parallel_tool_calls=False, max_tokens=200),
            both_ways(hermes, tool_choice={"type": "function", "function": {"name": "time"}}, max_tokens=200),
        ):
            assert choice.message.tool_calls[0].function.name == "time"
    finally:
        hermes.flat = False


def test_an_optional_call_of_a_strict_tool_keeps_to_its_schema(hermes):
    """Of city and town, which the model wants to say, the schema knows city."""
    wrong = '<tool_call>\n{"name": "get_weather", "arguments": {"town": "Oslo"}}\n</tool_call>'
    hermes.says("Let me see. " + wrong)
    loose = both_ways(hermes)
    assert json.loads(loose.message.tool_calls[0].function.arguments) == {"town": "Oslo"}
    strict = both_ways(hermes, tools=[STRICT, TIME], max_tokens=200)
    assert strict.message.content == "Let me see."
    assert strict.message.tool_calls[0].function.arguments.startswith('{"city": "')
    hermes.says("No: <tool_call")
    assert both_ways(hermes, tools=[STRICT]).message.content == "No: <tool_call"


def test_at_most_one_call_without_parallel_ones(hermes):
    """The model is not let go on; a schema that cannot be compiled does not matter, for the tool is not strict."""
    one = '<tool_call>\n{"name": "f", "arguments": {"x": 5}}\n</tool_call>'
    hermes.says(f"{one}\n{one}")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "strin"}}}]
    assert len(both_ways(hermes, tools=tools).message.tool_calls) == 2
    options = {"model": NAME, "messages": USER, "temperature": 0, "tools": tools, "parallel_tool_calls": False}
    answer = hermes.api.chat.completions.create(**options)
    assert both_ways(hermes, tools=tools, parallel_tool_calls=False).finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.arguments, answer.usage.completion_tokens) == ('{"x": 5}', len(one))
    hermes.says("No calls today")
    assert both_ways(hermes, tools=tools, parallel_tool_calls=False).message.content == "No calls today"


def test_a_strict_tool_that_cannot_be_compiled_is_refused(hermes):
    for parameters in ({"type": "strin"}, {"$ref": "#/nowhere"}):
        bad = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
        answer = hermes.http.post("/v1/chat/completions", json={"messages": USER, "tools": [bad]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


def test_a_named_call_has_the_tools_arguments(mistral):
    # The model wants to answer; the grammar lets it say only what a call has.
    mistral.says([259, *b'[{"name": "get_weather", "arguments": {"city": "Oslo"}}]'])
    choice = both_ways(mistral, tool_choice={"type": "function", "function": {"name": "get_weather"}})
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Oslo"} and len(call.id) == 9


def test_control_tokens_that_mark_calls_are_seen(mistral):
    mistral.says([259, *b'[{"name": "time", "arguments": {}}]'])
    assert both_ways(mistral).message.tool_calls[0].function.name == "time"
    # And are no text where nobody looks for calls.
    answer = mistral.api.chat.completions.create(model=NAME, messages=USER, temperature=0)
    assert answer.choices[0].message.content == '[{"name": "time", "arguments": {}}]'


def test_an_answer_format_beside_tools_allows_either(hermes):
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["rain", "sun"]}, "strict": True}}
    hermes.says('"sun" and more')
    choice = both_ways(hermes, response_format=format)
    assert (choice.message.content, choice.finish_reason) == ('"sun"', "stop")
    hermes.says(f"<tool_call>\n{CALL}\n</tool_call>")
    assert both_ways(hermes, response_format=format).finish_reason == "tool_calls"
    format["json_schema"]["schema"] = {"type": "object", "properties": {"a": {"type": "integer"}}}  # and nothing else
    hermes.says('{"a": 1, "b": 2}')
    content = both_ways(hermes, response_format=format, max_tokens=30).message.content
    assert content.startswith('{"a": 1') and "b" not in content
    format["json_schema"]["schema"] = {"$ref": "#/nowhere"}
    answer = hermes.http.post("/v1/chat/completions", json={"messages": USER, "tools": [TIME], "response_format": format})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")


def test_a_conversation_with_calls_goes_back_in(hermes):
    hermes.says("Cold.")
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "-3"},
    ]
    answer = hermes.api.chat.completions.create(model=NAME, messages=messages, temperature=0)
    text = "user: Weather?#assistant: Oslo!#tool: -3#assistant: "  # one token for each end of turn
    assert (answer.usage.prompt_tokens, answer.choices[0].message.content) == (len(text), "Cold.")


def test_log_probs_of_all_tokens_are_told_beside_calls(hermes):
    text = f"<tool_call>{CALL}</tool_call>"
    hermes.says(text)
    options = {"model": NAME, "messages": USER, "temperature": 0, "tools": [WEATHER], "logprobs": True}
    whole = hermes.api.chat.completions.create(**options).choices[0]
    assert bytes(sum((token.bytes for token in whole.logprobs.content), [])).decode() == text
    chunks = [chunk.choices[0] for chunk in hermes.api.chat.completions.create(**options, stream=True)]
    told = [token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.content]
    assert told == whole.logprobs.content


def test_several_choices_have_calls_of_their_own(hermes):
    hermes.says(f"<tool_call>{CALL}</tool_call>")
    answer = hermes.api.chat.completions.create(model=NAME, messages=USER, temperature=0, tools=[WEATHER], n=2)
    first, second = (choice.message.tool_calls[0] for choice in answer.choices)
    assert first.function == second.function and first.id != second.id


def test_tools_that_cannot_be_used_are_refused(hermes):
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "strin"}}}
    body = {"messages": USER, "tools": [bad], "tool_choice": "required"}
    answer = hermes.http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert answer.json()["error"]["message"].startswith("tools cannot be compiled")



# Structured output and continued messages, over HTTP and gRPC.


def test_response_format(hermes):
    hermes.says('{"a": 1} and more')
    options = {"model": NAME, "messages": USER, "temperature": 0}
    schema = {"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    for format in (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
    ):
        choice = hermes.api.chat.completions.create(**options, response_format=format).choices[0]
        assert (choice.message.content, choice.finish_reason) == ('{"a": 1}', "stop")
        chunks = hermes.api.chat.completions.create(**options, response_format=format, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == '{"a": 1}'
    for format, text in (
        ({"type": "regex", "pattern": r"\{.*\}"}, '{"a": 1}'),
        ({"type": "grammar", "grammar": 'root ::= "{" [^}]* "}"'}, '{"a": 1}'),
        ({"type": "grammar", "grammar": 'start: "{" /[^}]*/'}, '{"a": 1'),
    ):
        answer = hermes.http.post("/v1/chat/completions", json={"messages": USER, "response_format": format, "max_tokens": len(text)})
        assert answer.json()["choices"][0]["message"]["content"] == text
    bad = {"type": "grammar", "grammar": "root ::= x"}
    answer = hermes.http.post("/v1/chat/completions", json={"messages": USER, "response_format": bad})
    assert answer.json()["error"]["message"] == "response_format cannot be compiled: line 1: there is no rule x"
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        hermes.api.chat.completions.create(**options, response_format=bad)
    assert caught.value.param == "response_format" and "response_format cannot be compiled" in str(caught.value)


def test_the_openai_package_parses_structured_output(hermes):
    import pydantic

    class Step(pydantic.BaseModel):
        explanation: str
        output: int

    class Answer(pydantic.BaseModel):
        steps: list[Step]
        final: str

    hermes.says('{"steps": [{"explanation": "so", "output": 4}], "final": "four"}')
    parsed = hermes.api.chat.completions.parse(model=NAME, messages=USER, temperature=0, response_format=Answer)
    assert parsed.choices[0].message.parsed == Answer(steps=[Step(explanation="so", output=4)], final="four")
    hermes.says('<tool_call>{"name": "Step", "arguments": {"explanation": "x", "output": 1}}</tool_call>')
    with hermes.api.chat.completions.stream(
        model=NAME, messages=USER, temperature=0, tools=[openai.pydantic_function_tool(Step)]
    ) as stream:
        (choice,) = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.parsed_arguments == Step(explanation="x", output=1)


def test_guided_fields_on_every_route(hermes):
    hermes.says("y")
    bodies = [
        ({"guided_regex": "[0-9]{3}"}, lambda text: len(text) == 3 and text.isdigit()),
        ({"guided_json": {"enum": [5]}}, lambda text: text == "5"),
        ({"guided_json": '{"enum": ["q"]}'}, lambda text: text == '"q"'),
        ({"guided_grammar": 'start: "yes" | "no"'}, lambda text: text in ("yes", "no")),
        ({"guided_choice": ["y/n", "n"]}, lambda text: text in ("y/n", "n")),
        ({"structured_outputs": {"json": {"enum": [5]}}}, lambda text: text == "5"),
        ({"structured_outputs": {"regex": "[0-9]{3}", "json_object": False}}, lambda text: len(text) == 3),
        ({"structured_outputs": {"choice": ["(a|b)", "\n"]}}, lambda text: text in ("(a|b)", "\n")),
        ({"structured_outputs": {"grammar": 'start: "yes"'}}, lambda text: text == "yes"),
        ({"grammar": 'root ::= "yes" | "no"'}, lambda text: text in ("yes", "no")),  # llama-server's
        ({"grammar": {"type": "regex", "value": "[0-9]{3}"}}, lambda text: len(text) == 3 and text.isdigit()),  # TGI's
        ({"json_schema": {"enum": [5]}}, lambda text: text == "5"),
        ({"regex": "[0-9]{3}"}, lambda text: len(text) == 3 and text.isdigit()),  # SGLang's
        ({"ebnf": 'root ::= "yes" | "no"'}, lambda text: text in ("yes", "no")),
    ]
    for options, holds in bodies:
        generated = hermes.http.post("/generate", json={"prompt": "assistant: ", **options}).json()["response"]
        completion = hermes.http.post("/v1/completions", json={"prompt": "x", **options}).json()["choices"][0]
        chat = hermes.http.post("/v1/chat/completions", json={"messages": USER, **options}).json()["choices"][0]
        assert holds(generated) and holds(completion["text"]) and holds(chat["message"]["content"])
        assert completion["finish_reason"] == chat["finish_reason"] == "stop"
        with hermes.api.completions.create(
            model=NAME, prompt="x", max_tokens=16, stream=True, extra_body=options
        ) as stream:
            assert holds("".join(chunk.choices[0].text for chunk in stream))
    for options, message in [
        ({"guided_regex": "("}, "guided_regex cannot be compiled"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs cannot be compiled"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag is not supported"),
    ]:
        refused = hermes.http.post("/generate", json={"prompt": "x", **options})
        (field,) = options
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        assert refused.json()["error"]["message"].startswith(message)
    nowhere = {"prompt": "x", "regex": "bbb", "stop_token_ids": [ord("b")], "min_tokens": 3, "max_tokens": 8}
    refused = hermes.http.post("/generate", json=nowhere)  # found out in the middle of it
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "regex")
    events = hermes.http.post("/generate", json=nowhere | {"stream": True}).text.split("\n\n")
    assert json.loads(events[0].removeprefix("data: "))["error"]["param"] == "regex"


def test_a_choice_over_grpc(hermes):
    with Client(hermes.doors.grpc.local_address) as client:
        options = {"guided_choice": ["rain", "rainbow", "sun"], "max_tokens": 20}
        texts = {client.generate("x", **options, temperature=1, seed=seed).text for seed in range(20)}
        assert texts <= {"rain", "rainbow", "sun"} and len(texts) > 1
        pieces = list(client.stream("x", **options, temperature=1, seed=0))
        assert "".join(piece.text for piece in pieces) == client.generate("x", **options, temperature=1, seed=0).text
        with pytest.raises(InvalidRequest, match="guided_choice"):
            client.generate("x", guided_choice=[""])


def test_the_last_message_is_gone_on_with(hermes):
    messages = [*USER, {"role": "assistant", "content": "It is "}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 3, "temperature": 0}
    hermes.says("It is raining")  # its beginning is in the prompt already
    answer = hermes.http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "rai"
    assert answer["usage"]["prompt_tokens"] == len("user: Weather?#assistant: It is ")
