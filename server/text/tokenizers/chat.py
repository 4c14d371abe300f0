"""Chat templates: Jinja programs of the model, rendered in a sandbox, as Hugging Face's libraries render them.

A template's output is text in which its control tokens are spelled out, to be encoded with ``parse_special``. So that a
user cannot forge turns, control tokens spelled in *messages* are marked while rendering: a noncharacter, U+FDD0, goes
after their first character, which `server.text.tokenizers.base` takes out again once the real ones have been found. A U+FDD0
of the user's own is doubled for the journey.
"""

from __future__ import annotations

import datetime
import json
import pathlib
import re
from collections.abc import Mapping, Sequence

import jinja2
import jinja2.ext
import jinja2.sandbox

from server.errors import InvalidRequest, StartError

MARK = "\ufdd0"


def unmark(text: str) -> str:
    """Takes marks out of rendered text."""
    return re.sub(f"{MARK}({MARK}?)", r"\1", text) if MARK in text else text


class GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` blocks, by which templates tell trainers what the assistant wrote; here they are just their
    body.
    """

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; templates expect JSON as it is."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


class NoContent(str):
    """The content of an assistant's turn that has only calls. Transformers hands `None` to templates there, and some ask
    for it (``content is none``); others print it or add to it, which must not spell "None" or fail. So it is both."""

    def __new__(cls) -> NoContent:
        return super().__new__(cls, "")

    def __eq__(self, other: object) -> bool:
        return other is None or super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _is_none(value: object) -> bool:
    return value is None or isinstance(value, NoContent)


def _told(error: jinja2.TemplateError) -> str:
    line = getattr(error, "lineno", None)
    return f"line {line}: {error}" if line else str(error)


def read_template(file: pathlib.Path) -> str:
    """The text of a template that the operator gives instead of the model's own, which is valid Jinja.

    Raises:
        StartError: it is not, or it cannot be read.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise StartError(f"{file} cannot be read: {error.strerror}; give a file with a Jinja template") from None
    except UnicodeDecodeError as error:
        raise StartError(f"{file} is no UTF-8 text ({error.reason}, byte {error.start}); give a file with a Jinja template") from None
    ChatTemplate(text, source=str(file), remedy="correct it")
    return text


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.tests["none"] = _is_none
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _clean(message: Mapping[str, object]) -> dict[str, object]:
    clean = {key: value for key, value in message.items() if value is not None}
    return clean if message.get("role") != "assistant" else {"content": NoContent()} | clean


class ChatTemplate:
    """One chat template, or several named ones of which ``tool_use`` is taken when tools are given, else ``default``.

    ``special_tokens`` are the names a template may use, such as ``bos_token``, with their spellings;
    ``control_spellings`` are what is marked in messages. Raises `StartError` for a template that is not valid Jinja.
    """

    def __init__(
        self,
        template: str | Mapping[str, str],
        *,
        special_tokens: Mapping[str, str] | None = None,
        control_spellings: Sequence[str] = (),
        source: str = "the chat template",
        remedy: str = "download the model's tokenizer files again",
    ):
        self.sources = {"default": template} if isinstance(template, str) else dict(template)
        self.special_tokens = dict(special_tokens or {})
        ordered = sorted(filter(None, control_spellings), key=len, reverse=True)
        self._forged = re.compile("|".join([re.escape(MARK), *map(re.escape, ordered)]))
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(text) for name, text in self.sources.items()}
        except jinja2.TemplateError as error:
            raise StartError(f"{source} is not valid Jinja: {_told(error)}; {remedy}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> str:
        """The prompt of a conversation, to be encoded with ``parse_special``.

        ``kwargs`` are further variables of the template. Fields of a message that are `None` are left out, but for the
        content of an assistant, see `NoContent`. Raises `InvalidRequest` with param ``messages`` when the template does.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise InvalidRequest(
                f"the model's chat templates are {', '.join(self._templates)}; none of them is for this request",
                param="messages",
            )
        clean = [_clean(message) for message in messages]
        variables = {
            **self.special_tokens,
            **{self._marked_text(name): self._marked(value) for name, value in kwargs.items()},
            "messages": self._marked(clean),
            "tools": self._marked(list(tools)) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(variables)
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from None
        except Exception as error:  # a template is a program: it fails as any on input that it was not made for
            raise InvalidRequest(
                f"the model's chat template fails on these messages ({type(error).__name__}: {error}); "
                "check roles and contents",
                param="messages",
            ) from error

    def _marked_text(self, text: str) -> str:
        return self._forged.sub(lambda match: match[0][0] + MARK + match[0][1:], text)

    def _marked(self, value: object) -> object:
        """The value with every control token that it spells marked."""
        if isinstance(value, NoContent):
            return value
        if isinstance(value, str):
            return self._marked_text(value)
        if isinstance(value, Mapping):
            return {self._marked(key): self._marked(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._marked(item) for item in value]
        return value
