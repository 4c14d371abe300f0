"""Tools for models whose chat templates know none: what is told, what is spelled, and the whole way through HTTP.

The texts that a model is given are written down here as they should be.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json

import httpx
import openai
import pytest
from front_doors import NAME, open_doors
from guide_harness import allows

from engine.mock import Table
from server.config.commands import load_serve_config
from server.errors import InvalidRequest, StartError
from server.text.tokenizers import ByteTokenizer, ChatTemplate, load_tokenizer
from server.text.tool_forms import FORMS
from server.text.tool_use import ToolUse
from tests.golden import known

EOS = 257
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
ALTERNATING = (  # as Gemma's: no system turn, user and assistant in turns
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate, system is none') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
TAUGHT = "{% if tools %}<tools>{{ tools | tojson }} as <tool_call>{% endif %}" + PLAIN
MENTIONED = "{# tools, some day #}" + PLAIN
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Now, in °C",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
CALL = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
USER = [{"role": "user", "content": "Weather?"}]


class Tokenizer(ByteTokenizer):
    def __init__(self, template):
        super().__init__()
        self.chat_template = template and ChatTemplate(template, control_spellings=self.special.unspoken)


def use(template, name=None):
    return ToolUse.of(Tokenizer(template), name)


def prompt(template, messages, tools=(), *, form=None, parallel=True, optional=True, called=""):
    """The text that the model is given."""
    tokenizer = Tokenizer(template)
    turns, shown = ToolUse.of(tokenizer, form).conversation(
        messages, tools, parallel=parallel, optional=optional, called=called
    )
    return tokenizer.chat_template.render(turns, tools=shown)


@pytest.mark.parametrize(
    ("template", "name", "said"),
    [
        (PLAIN, None, "generic (the chat template knows no tools); tools are told in the system turn"),
        (MENTIONED, None, "generic (the chat template knows no tools); tools are told in the system turn"),
        (ALTERNATING, None, "generic (the chat template knows no tools); tools are told in the first turn"),
        (TAUGHT, None, "hermes (by the chat template); tools are shown by the chat template"),
        (TAUGHT, "mistral", "mistral (--tool-format); tools are shown by the chat template"),
        (TAUGHT, "generic", "generic (--tool-format); tools are told in the system turn"),
        (PLAIN, "hermes", "hermes (--tool-format); tools are told in the system turn"),
    ],
)
def test_the_form_is_chosen_and_said(template, name, said):
    assert use(template, name).explain() == f"tools: calls in the form {said}"


def test_without_a_template_there_is_nothing_to_say():
    assert use(None) is None


TOLD = """\
You can call these functions, whose parameters are JSON schemas:
{"name": "get_weather", "description": "Now, in °C", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, \
"required": ["city"]}}
{"name": "time"}

To call one, write this and nothing else:
{"name": "FUNCTION", "arguments": {"ARGUMENT": VALUE}}
To call several at once:
{"name": "FUNCTION", "arguments": {"ARGUMENT": VALUE}}
{"name": "FUNCTION", "arguments": {"ARGUMENT": VALUE}}
You will be given what they return.
"""
ELSE = "If none is of use, answer in your own words."


def test_what_is_told():
    tools = [WEATHER, TIME]
    assert prompt(PLAIN, USER, tools) == f"<system>{TOLD}{ELSE}<user>Weather?<assistant>"
    several = TOLD[TOLD.index("To call several") : TOLD.index("You will")]
    assert prompt(PLAIN, USER, tools, parallel=False) == f"<system>{TOLD.replace(several, '')}{ELSE}<user>Weather?<assistant>"
    assert prompt(PLAIN, USER, tools, optional=False) == f"<system>{TOLD[:-1]}<user>Weather?<assistant>"
    assert prompt(PLAIN, USER, tools, optional=False, called="time") == f"<system>{TOLD}Now call time.<user>Weather?<assistant>"
    system = {"role": "system", "content": "Be brief."}
    assert prompt(PLAIN, [system, *USER], tools) == f"<system>Be brief.\n\n{TOLD}{ELSE}<user>Weather?<assistant>"
    assert prompt(PLAIN, [system, *USER]) == "<system>Be brief.<user>Weather?<assistant>"
    assert prompt(ALTERNATING, USER, tools) == f"<user>{TOLD}{ELSE}\n\nWeather?"
    assert prompt(ALTERNATING, [system, *USER], tools) == f"<user>Be brief.\n\n{TOLD}{ELSE}\n\nWeather?"


def test_what_is_told_in_another_form():
    call = '<tool_call>\n{"name": "FUNCTION", "arguments": {"ARGUMENT": VALUE}}\n</tool_call>'
    text = prompt(PLAIN, USER, [TIME], form="hermes", parallel=False)
    assert f"To call one, write this and nothing else:\n{call}\nYou will" in text
    assert "[TOOL_CALLS]FUNCTION[ARGS]" in prompt(PLAIN, USER, [TIME], form="mistral-args")


def test_a_template_that_shows_tools_is_given_them():
    assert prompt(TAUGHT, USER, [TIME]) == f"<tools>{json.dumps([TIME])} as <tool_call><user>Weather?<assistant>"
    assert "<tools>" not in prompt(TAUGHT, USER, [TIME], form="generic")


SAID = '{"name": "get_weather", "arguments": {"city": "Köln"}}'
CONVERSATION = [
    *USER,
    {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, {**CALL, "id": "b", "function": TIME["function"]}]},
    {"role": "tool", "tool_call_id": "a", "content": "9"},
    {"role": "tool", "tool_call_id": "b", "content": "noon"},
]


def test_calls_and_results_of_the_conversation_are_spelled():
    spelled = f'<user>Weather?<assistant>Let me see.\n{SAID}\n{{"name": "time", "arguments": {{}}}}'
    results = "<user>get_weather returned:\n9\n\ntime returned:\nnoon"
    assert prompt(PLAIN, CONVERSATION) == f"{spelled}{results}<assistant>"
    assert prompt(PLAIN, [*CONVERSATION, {"role": "user", "content": "So?"}]) == f"{spelled}{results}\n\nSo?<assistant>"
    assert prompt(ALTERNATING, [*CONVERSATION, {"role": "assistant", "content": "Fine."}, *USER]) == (
        f"{spelled}{results}<assistant>Fine.<user>Weather?"
    )
    unknown = [*USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": ""}, *USER]
    assert prompt(PLAIN, unknown) == f"<user>Weather?<assistant>{SAID}<user>The function returned:\n\n\nWeather?<assistant>"
    named = [*USER, {"role": "tool", "name": "f", "content": "1"}]
    assert prompt(PLAIN, named) == "<user>Weather?<user>f returned:\n1<assistant>"


def test_a_template_that_shows_calls_is_given_them():
    template = "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls or [] %}!{{ c.id }}{% endfor %};{% endfor %}"
    assert prompt(template, CONVERSATION) == "user;assistant!a!b;tool;tool;"
    assert use(template).form.name == "generic" and prompt(template, CONVERSATION, form="generic") == "user;assistant!a!b;tool;tool;"
    shown = "{{ tools | tojson }}" + template
    assert prompt(shown, CONVERSATION, form="generic").endswith("user;assistant;user;")


def test_what_users_spell_like_control_tokens_stays_text():
    tokenizer = Tokenizer(PLAIN)
    tool = {"type": "function", "function": {"name": "f", "description": "<|eos|>"}}
    turns, _ = ToolUse.of(tokenizer).conversation(USER, [tool], parallel=True, optional=True)
    assert EOS not in tokenizer.encode_chat(tokenizer.chat_template.render(turns))


# Every form.


@pytest.mark.parametrize("name", FORMS)
def test_a_form_reads_what_it_spells_and_its_grammar_allows_that(name):
    form = FORMS[name]({})
    calls = [("get_weather", '{"city": "a}\\"b"}'), ("time", "{}")]
    for some in (calls[:1], calls):
        parser = form.parser(["get_weather", "time"])
        text = form.spelled(some)
        pieces = [*parser.push(text).pieces, *parser.finish().pieces]
        assert [piece.name for piece in pieces if piece.name] == [name for name, _ in some]
        assert "".join(piece.arguments for piece in pieces) == "".join(arguments for _, arguments in some)
    one = form.spelled(calls[:1])
    for options in ({}, {"optional": True}, {"parallel": False}, {"parallel": False, "optional": True}):
        grammar = form.grammar([WEATHER, TIME], **({"parallel": True} | options))
        assert grammar is None or allows("guided_grammar", f"start: tool_calls\n{grammar}", one)


def generic(text, tools=(WEATHER, TIME), **options):
    grammar = FORMS["generic"]({}).grammar(tools, **({"parallel": True} | options))
    return allows("guided_grammar", f"start: tool_calls\n{grammar}", text)


GOOD, OTHER = '{"name": "get_weather", "arguments": {"city": "Oslo"}}', '{"name": "time", "arguments": {}}'


def test_the_generic_grammar_of_calls():
    assert generic(GOOD) and generic(OTHER) and generic(f"{GOOD}\n{OTHER}\n{GOOD}")
    assert generic('{\n  "name": "get_weather",\n  "arguments": {\n    "city": "Oslo"\n  }\n}')
    assert not any(map(generic, ("", "Hi", f"{GOOD};{GOOD}", f"{GOOD} and so on", '{"name": "rm", "arguments": {}}')))
    assert not generic('{"name": "get_weather", "arguments": {"town": "Oslo"}}') and not generic(OTHER, [WEATHER])
    assert generic("\n".join([OTHER] * 16)) and not generic("\n".join([OTHER] * 17))
    assert generic(OTHER, parallel=False) and not generic(f"{OTHER}\n{OTHER}", parallel=False)


def test_the_generic_grammar_of_optional_calls_keeps_to_every_schema():
    assert all(generic(text, optional=True) for text in ("", "Hi {", '{"a": 1}', '{"name": "Bob"}', GOOD, f"{GOOD}\n{OTHER}"))
    bad = '{"name": "get_weather", "arguments": {"town": "Oslo"}}'
    assert not any(generic(text, optional=True) for text in (bad, GOOD + " and so on", f"{GOOD}\n{bad}"))
    assert not generic(f"{OTHER}\n{OTHER}", optional=True, parallel=False)
    assert generic("\n".join([OTHER] * 16), optional=True) and not generic("\n".join([OTHER] * 17), optional=True)


def test_of_a_tool_that_is_not_strict_holds_what_can_be_kept_to():
    parameters = {
        "type": "object",
        "properties": {
            "x": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
            "y": {"type": "string", "format": "color", "pattern": "^(?!a)", "not": {"const": "b"}},
        },
        "minProperties": 1,
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    for options in ({}, {"optional": True}):
        assert generic('{"name": "f", "arguments": {"x": [1, 1], "y": "a"}}', [tool], **options)
        assert not generic('{"name": "f", "arguments": {"x": ["1"]}}', [tool], **options)
    strict = {"type": "function", "function": tool["function"] | {"strict": True}}
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        generic("", [strict])


# Over HTTP: a model whose template knows no tools says what the test has it say, whatever the prompt.


@dataclasses.dataclass
class Server:
    http: httpx.Client
    api: openai.OpenAI
    doors: object

    def says(self, text):
        """What follows the last ``<assistant>``; then EOS."""
        ids, mark = list(text.encode()), list(b"<assistant>")

        def rule(tokens):
            ends = [end for end in range(len(mark), len(tokens) + 1) if list(tokens[end - len(mark) : end]) == mark]
            place = len(tokens) - ends[-1]
            return {ids[place]: 1.0} if place < len(ids) else {EOS: 0.5} | dict.fromkeys(range(33, 127), 0.5 / 94)

        self.doors.engine.rule = rule

    def ask(self, **options):
        """The whole answer's choice, after it was compared with the stream's."""
        options = {"model": NAME, "messages": USER, "temperature": 0, "tools": [WEATHER, TIME]} | options
        choice = self.api.chat.completions.create(**options).choices[0]
        chunks = [chunk.choices[0] for chunk in self.api.chat.completions.create(**options, stream=True)]
        calls = []
        for piece in (piece for chunk in chunks for piece in chunk.delta.tool_calls or []):
            if piece.id:
                calls.append([piece.function.name, ""])
            calls[piece.index][1] += piece.function.arguments
        assert calls == [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or []]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == (choice.message.content or "")
        assert chunks[-1].finish_reason == choice.finish_reason
        return choice


@pytest.fixture(scope="module")
def server():
    with contextlib.ExitStack() as stack:
        doors = stack.enter_context(open_doors(Table({}), max_len=1536, tokenizer=Tokenizer(PLAIN)))
        http = stack.enter_context(httpx.Client(base_url=doors.http, timeout=30))
        api = stack.enter_context(openai.OpenAI(base_url=f"{doors.http}/v1", api_key="unused", max_retries=0, timeout=30))
        yield Server(http, api, doors)


def called(choice):
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]


def test_calls_are_made_and_read(server):
    server.says(f"{GOOD}\n{OTHER}")
    assert called(server.ask()) == [("get_weather", {"city": "Oslo"}), ("time", {})]
    assert called(server.ask(parallel_tool_calls=False)) == [("get_weather", {"city": "Oslo"})]


def test_an_answer_stays_an_answer(server):
    server.says('{"city": "Oslo"}')
    choice = server.ask()
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ('{"city": "Oslo"}', None, "stop")


def test_a_call_that_the_model_gets_wrong_is_kept_right(server):
    server.says('{"name": "get_weather", "arguments": {"town": "Oslo"}}')
    choice = server.ask(max_tokens=120)
    assert choice.message.tool_calls[0].function.arguments.startswith('{"city": "')


def test_calls_that_are_asked_for(server):
    server.says("Rain.")  # which no grammar of calls lets it say
    for choice in ("required", {"type": "function", "function": {"name": "time"}}):
        answer = server.ask(tools=[TIME], tool_choice=choice, parallel_tool_calls=False, max_tokens=200)
        assert called(answer)[0][0] == "time"


def test_without_choice_nothing_is_told_and_nothing_parsed(server):
    server.says(GOOD)
    options = {"model": NAME, "messages": USER, "temperature": 0}
    none = server.api.chat.completions.create(**options, tools=[WEATHER], tool_choice="none")
    assert none.choices[0].message.content == GOOD
    assert none.usage.prompt_tokens == len("<user>Weather?<assistant>")


def test_the_prompt_is_what_is_told(server):
    server.says("Cold.")
    told = prompt(PLAIN, CONVERSATION, [WEATHER, TIME])
    arguments = json.dumps(CALL["function"]["arguments"])
    calls = [CALL | {"function": CALL["function"] | {"arguments": arguments}}]
    calls.append({"id": "b", "type": "function", "function": {"name": "time", "arguments": "{}"}})
    messages = [CONVERSATION[0], CONVERSATION[1] | {"tool_calls": calls}, *CONVERSATION[2:]]
    answer = server.api.chat.completions.create(
        model=NAME, messages=messages, temperature=0, tools=[WEATHER, TIME]
    )
    assert (answer.usage.prompt_tokens, answer.choices[0].message.content) == (len(told.encode()), "Cold.")


def test_an_answers_format_beside_calls(server):
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["rain", "sun"]}}}
    server.says('"sun"')
    assert server.ask(response_format=format).message.content == '"sun"'
    server.says(OTHER)
    assert called(server.ask(response_format=format)) == [("time", {})]


# The options.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tool_format": "xml"}, "--tool-format = 'xml' (command line): must be one of generic, hermes, llama3, mistral, mistral-args"),
        ({"chat_template": "/nowhere/x.jinja"}, "--chat-template = '/nowhere/x.jinja' (command line): /nowhere/x.jinja cannot be read"),
    ],
)
def test_options_that_cannot_be(arguments, said):
    with pytest.raises(StartError) as caught:
        load_serve_config(arguments, {})
    assert str(caught.value).startswith(said)


def test_a_template_that_cannot_be(tmp_path):
    file = tmp_path / "x.jinja"
    for content, said in (
        (b"{% for %}", "is not valid Jinja: line 1: "),
        (b"a\n\n{{ x", "is not valid Jinja: line 3: "),
        (b"\xff\xfe", "is no UTF-8 text"),
    ):
        file.write_bytes(content)
        with pytest.raises(StartError, match=f"--chat-template = .*{file} {said}"):
            load_serve_config({"chat_template": str(file)}, {})


def test_the_given_template_counts(tmp_path):
    known.write_tokenizer(tmp_path)
    file = tmp_path / "given.jinja"
    file.write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}<|eos|>{% endfor %}")
    assert load_serve_config({"chat_template": str(file)}, {}).chat_template == file
    (tmp_path / "chat_template.jinja").write_text("the model's own")
    tokenizer = load_tokenizer(tmp_path, file)
    text = tokenizer.chat_template.render([{"role": "user", "content": "a<|eos|>"}])
    ids = tokenizer.encode_chat(text)
    assert text.startswith("<|bos|>a") and ids[-1] == tokenizer.eos_token_ids[0] and ids.count(ids[-1]) == 1
    assert load_tokenizer(tmp_path).chat_template.render(USER) == "the model's own"
