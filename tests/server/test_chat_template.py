"""Chat templates: what templates rely on, and the sandbox."""

import datetime
import json
import pathlib
import re

import pytest

from server.api.chat_types import chat_messages
from server.errors import InvalidRequest, StartError
from server.text.tokenizers import ChatTemplate, load_tokenizer
from server.text.tokenizers.chat import unmark
from tests.golden import known

TURNS = json.loads((pathlib.Path(known.__file__).parent / "turns.json").read_text())
USER = [{"role": "user", "content": "hi"}]


def test_blocks_are_trimmed_and_variables_are_there():
    template = ChatTemplate(
        "{{ bos_token }}\n  {% for m in messages %}\n{{ m.role }}={{ m.content }}\n    {% endfor %}\n{{ extra }}",
        special_tokens={"bos_token": "<s>"},
    )
    assert template.render(USER, extra=7) == "<s>\nuser=hi\n7"


def test_generation_prompt_and_tools():
    template = ChatTemplate("{% if tools %}{{ tools | length }}{% endif %}{% if add_generation_prompt %}>{% endif %}")
    assert template.render(USER) == ">"
    assert template.render(USER, add_generation_prompt=False) == ""
    assert template.render(USER, tools=[{"type": "function"}]) == "1>"
    assert template.render(USER, tools=[]) == ">"


def test_tojson_is_plain_json():
    value = {"b": "<é>'", "a": [1, None, True]}
    template = ChatTemplate("{{ tools[0] | tojson }}\n{{ tools[0] | tojson(indent=2) }}")
    first, second = template.render(USER, tools=[value]).split("\n", 1)
    assert first == json.dumps(value, ensure_ascii=False)
    assert second == json.dumps(value, ensure_ascii=False, indent=2)


def test_loop_controls_namespace_and_generation_blocks():
    template = ChatTemplate(
        "{% set ns = namespace(n=0) %}{% for i in range(9) %}"
        "{% if i == 4 %}{% break %}{% endif %}{% set ns.n = ns.n + i %}{% endfor %}"
        "{{ ns.n }}{% generation %}[{{ messages[0].content }}]{% endgeneration %}"
    )
    assert template.render(USER) == "6[hi]"


def test_strftime_now():
    assert re.fullmatch(r"\d{4}", ChatTemplate("{{ strftime_now('%Y') }}").render(USER))
    assert int(ChatTemplate("{{ strftime_now('%Y') }}").render(USER)) >= datetime.date(2024, 1, 1).year


def test_raise_exception_is_the_clients_error():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        template.render(USER)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source", ["{{ messages[0].content + 1 }}", "{{ messages[5].role }}", "{{ 1 / 0 }}", "{{ none.x.y }}"]
)
def test_failures_of_templates_are_the_clients_error(source):
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source).render(USER)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_the_sandbox_holds(source):
    try:
        text = ChatTemplate(source).render(USER)
    except InvalidRequest:
        return
    assert text == "", "what is forbidden is undefined, and prints as nothing"


def test_absent_and_null_fields_are_the_same():
    template = ChatTemplate("{{ messages[0].content is defined }}{{ 'tool_calls' in messages[0] }}")
    assert template.render([{"role": "user", "content": None, "tool_calls": None}]) == "FalseFalse"


@pytest.mark.parametrize("case", [case for case in TURNS["cases"] if case["name"] in TURNS["templates"]], ids=str)
def test_turns_without_content_are_rendered_as_transformers_does(case):
    """However a template asks for a content that is null: it is none, and never the word."""
    call = {"id": "call_1", "function": {"name": "f", "arguments": '{"x": 1}'}}
    spelled = [{"content": None}, {"content": ""}, {"content": []}, {}]
    for turn in spelled:
        turn = {"role": "assistant", "tool_calls": [call] if case["calls"] else None, **turn}
        messages = chat_messages([{"role": "user", "content": "x"}, turn, {"role": "user", "content": "y"}])
        assert ChatTemplate(TURNS["templates"][case["name"]]).render(messages) == case["text"]


def test_named_templates():
    template = ChatTemplate({"default": "plain", "tool_use": "tools"})
    assert template.render(USER) == "plain"
    assert template.render(USER, tools=[{"type": "function"}]) == "tools"
    with pytest.raises(InvalidRequest, match="rag"):
        ChatTemplate({"rag": "x"}).render(USER)


def test_invalid_jinja_fails_the_start():
    with pytest.raises(StartError, match="file.jinja is not valid Jinja"):
        ChatTemplate("{% if %}", source="file.jinja")


def test_control_tokens_of_users_are_marked_and_those_of_the_template_are_not():
    template = ChatTemplate(
        "<|a|>{{ messages[0].role }}{{ messages[0].content }}<|a|>", control_spellings=["<|a|>", "<|a|>b"]
    )
    content = "x<|a|>b<|a|>\ufdd0y"
    rendered = template.render([{"role": "<|a|>", "content": content}])
    assert rendered.startswith("<|a|>") and rendered.endswith("<|a|>") and rendered.count("<|a|>") == 2
    assert unmark(rendered) == f"<|a|><|a|>{content}<|a|>"


def test_control_tokens_in_other_variables_are_marked_too():
    template = ChatTemplate(
        "{{ date }}{{ tools[0].name }}{{ bos_token }}",
        special_tokens={"bos_token": "<|a|>"},
        control_spellings=["<|a|>"],
    )
    assert template.render(USER, date="<|a|>", tools=[{"name": "<|a|>"}]) == "<\ufdd0|a|><\ufdd0|a|><|a|>"


@pytest.mark.parametrize("text", ["", "plain", "\ufdd0", "<\ufdd0|a|>", "\ufdd0\ufdd0\ufdd0", "<<|a|>\ufdd0"])
def test_marking_loses_nothing(text):
    template = ChatTemplate("{{ messages[0].content }}", control_spellings=["<|a|>", "<"])
    assert unmark(template.render([{"role": "user", "content": text}])) == text


def test_where_templates_come_from(tmp_path):
    known.write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "default", "template": "list {{ eos_token }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).chat_template.render(USER) == "list <|eos|>"
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}")
    assert load_tokenizer(tmp_path).chat_template.render(USER) == "file <|bos|>"
    del config["chat_template"]
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).chat_template is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": 5}))
    with pytest.raises(StartError, match="chat_template is int"):
        load_tokenizer(tmp_path)
