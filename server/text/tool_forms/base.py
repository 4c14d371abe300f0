"""What a form of tool calls is, and what the grammars of forms have in common.

A grammar is made of the same rules in two ways. Where a call is asked for, the text is calls, and every tool's schema
holds. Where calls are optional, it is any text, perhaps followed by calls: what begins like a call goes on as one,
with arguments by the schema of a tool that is strict, and any object for another. Of the schema of a tool that is not
strict holds what can be kept to; that of a strict one is refused where anything cannot.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Mapping, Sequence
from typing import ClassVar, NotRequired, Protocol, TypedDict

from server.text import json_schemas
from server.text.json_schemas import Schema
from server.text.tool_forms.parsing import ToolParser

CALLS = "start: tool_calls"  # with which a grammar of calls begins
ANYTHING = r"/(.|\n)*/"
ANY_OBJECT: Schema = {"type": "object"}
NO_MEMBERS: Schema = {"type": "object", "properties": {}}


class Function(TypedDict):
    """What a tool is."""

    name: str
    description: NotRequired[str | None]
    parameters: NotRequired[Schema | None]
    strict: NotRequired[bool | None]


class Tool(TypedDict):
    """OpenAI's; others have been refused (`server.api.chat_types.tools`)."""

    type: str
    function: Function


class Tokenizer(Protocol):
    """What is needed of `server.text.tokenizers.Tokenizer`."""

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]: ...

    def is_special(self, id: int) -> bool: ...


class ToolForm(abc.ABC):
    """How one model writes calls.

    Args:
        controls: the markers that are control tokens of the model, with their ids.
        source: of the model's chat template, where it teaches the form.
    """

    name: ClassVar[str]
    markers: ClassVar[tuple[str, ...]]  # what shows where calls are, the one that begins them first
    parser: ClassVar[type[ToolParser]]
    always_guided: ClassVar[bool] = False  # optional calls keep to the schemas of tools that are not strict, too

    def __init__(self, controls: Mapping[str, int], source: str = ""):
        self.controls = controls
        self.source = source

    @classmethod
    @abc.abstractmethod
    def is_taught_by(cls, source: str) -> bool:
        """Whether a chat template that shows tools has calls written in this form."""

    @abc.abstractmethod
    def spelled(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls as the model writes them, of functions' names and JSON texts of arguments."""

    @abc.abstractmethod
    def rules(self, tools: Sequence[Tool], schemas: Sequence[Schema], *, parallel: bool, optional: bool) -> str:
        """`grammar`, of tools with arguments by these schemas."""

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, optional: bool = False) -> str | None:
        """The Lark rule ``tool_calls`` and all it needs: one call or, where ``parallel``, more.

        Args:
            tools: at least one.
            optional: text is allowed instead, and before the calls. `None`: there is nothing to keep to.

        Raises:
            ValueError: a schema cannot be kept to.
        """
        if optional and parallel and not self.always_guided and not any(map(is_strict, tools)):
            return None
        any_object = optional and not self.always_guided
        schemas = [ANY_OBJECT if any_object and not is_strict(tool) else _parameters(tool) for tool in tools]
        return self.rules(tools, schemas, parallel=parallel, optional=optional)

    def marked(self, calls: str, body: str, *, optional: bool) -> str:
        """The rule of ``calls`` behind the form's first marker; ``body`` are rules that it needs."""
        marker = self.literal(self.markers[0])
        if not optional:
            return f"tool_calls: {marker} {calls}\n{body}"
        # A marker that is text ends the text where it first appears; a control token is no part of a text anyway.
        lazy = "" if self.markers[0] in self.controls else "[lazy]"
        opening = f"tool_opening{lazy}: TOOL_TEXT {marker}\nTOOL_TEXT: {ANYTHING}\n"
        return f"tool_calls: TOOL_TEXT | tool_opening {calls}\n{opening}{body}"

    def literal(self, marker: str) -> str:
        """A marker in a grammar: its token, or its text."""
        return f"<[{self.controls[marker]}]>" if marker in self.controls else json.dumps(marker)


def call_schema(tools: Sequence[Tool], schemas: Sequence[Schema], arguments: str) -> Schema:
    """The JSON schema of one call, whose arguments have that name. The tools' own schemas become definitions."""
    definitions, choices = {}, []
    for index, (tool, schema) in enumerate(zip(tools, schemas, strict=True)):
        place = f"tool{index}"
        definitions[place] = json_schemas.closed(schema, f"#/$defs/{place}", lenient=not is_strict(tool))
        choices.append({
            "type": "object",
            "properties": {"name": {"const": tool["function"]["name"]}, arguments: {"$ref": f"#/$defs/{place}"}},
            "required": ["name", arguments],
            "additionalProperties": False,
        })  # fmt: skip
    return {"anyOf": choices, "$defs": definitions}


def call_text(name: str, arguments: str, key: str = "arguments") -> str:
    """A call as an object."""
    return f'{{"name": {json.dumps(name)}, "{key}": {arguments}}}'


def arguments_in_lark(tool: Tool, schema: Mapping[str, object]) -> str:
    """The schema of a tool's arguments as a part of a grammar."""
    return "%json " + json_schemas.guiding(schema, lenient=not is_strict(tool))


def in_lark(schema: Mapping[str, object]) -> str:
    """A schema that is closed already as a part of a grammar."""
    return "%json " + json.dumps({**schema, "x-guidance": json_schemas.OPTIONS}, ensure_ascii=False)


def is_strict(tool: Tool) -> bool:
    return bool(tool["function"].get("strict"))


def _parameters(tool: Tool) -> Schema:
    """The schema of a tool's arguments. A tool that has none takes no arguments."""
    parameters = tool["function"].get("parameters")
    return NO_MEMBERS if parameters is None else parameters or ANY_OBJECT
