"""How a model is shown tools, and how it calls them: by its chat template, or by a system turn where that knows none.

A template that is given tools shows them, and the calls and results of the conversation, in the words that its model was
trained on; the form of the calls is known by it. Where the template knows no tools, they are told: the system turn lists them
and says how a call is written, calls of the past are spelled in the assistant's turns, and results come as the user's. The form is
``generic`` then. ``--tool-format`` takes any other; what the template does not show is told in that form.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from server.errors import InvalidRequest
from server.text.tokenizers import ChatTemplate, Tokenizer
from server.text.tool_forms import FALLBACK, FORMS, GENERIC, ToolForm, control_markers
from server.text.tool_forms.base import Tool

Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ToolUse:
    """What is known of a model.

    ``told``: tools are told, because its chat template shows none, or in another form. ``spelled``: so are the calls and
    results of the conversation.
    """

    form: ToolForm
    told: bool
    spelled: bool
    has_system: bool  # the template shows system turns
    reason: str  # why it is this form, for the log

    @classmethod
    def of(cls, tokenizer: Tokenizer, name: str | None = None) -> ToolUse | None:
        """How a model calls tools, by its chat template or, where it is given, the form's name; `None`: it has no
        template."""
        template = tokenizer.chat_template
        if template is None:
            return None
        shown = _shows_tools(template)
        source = template.sources.get("tool_use") or template.sources.get("default", "")
        if name is not None:
            kind, reason = FORMS[name], "--tool-format"
        elif shown:
            kind = next((form for form in FORMS.values() if form.is_taught_by(source)), FORMS[FALLBACK])
            reason = "by the chat template"
        else:
            kind, reason = FORMS[GENERIC], "the chat template knows no tools"
        told = not shown or kind.name == GENERIC
        form = kind(control_markers(tokenizer), "" if told else source)
        spelled = told and (shown or not any("tool_calls" in source for source in template.sources.values()))
        return cls(form, told, spelled, _shows_system_turns(template), reason)

    def explain(self) -> str:
        """One line for the log."""
        where = "the system turn" if self.has_system else "the first turn"
        shown = f"told in {where}" if self.told else "shown by the chat template"
        return f"tools: calls in the form {self.form.name} ({self.reason}); tools are {shown}"

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, parallel: bool, optional: bool, called: str = ""
    ) -> tuple[list[Message], Sequence[Tool] | None]:
        """The messages and the tools that the template is to render.

        Args:
            tools: all that are shown; none: only what was called before is spelled.
            parallel: several may be called at once.
            optional: none has to be.
            called: the name of the one that has to be; empty: any of them.
        """
        if not self.told:
            return list(messages), tools or None
        turns = self._spelled(messages) if self.spelled else list(messages)
        if tools:
            turns = self._opened(turns, self._instructions(tools, parallel=parallel, optional=optional, called=called))
        return turns, None

    def _instructions(self, tools: Sequence[Tool], *, parallel: bool, optional: bool, called: str) -> str:
        example = ("FUNCTION", '{"ARGUMENT": VALUE}')
        lines = ["You can call these functions, whose parameters are JSON schemas:"]
        for tool in tools:
            function = tool["function"]
            shown = {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
            lines.append(json.dumps(shown, ensure_ascii=False))
        lines += ["", "To call one, write this and nothing else:", self.form.spelled([example])]
        if parallel:
            lines += ["To call several at once:", self.form.spelled([example, example])]
        lines.append("You will be given what they return.")
        if called:
            lines.append(f"Now call {called}.")
        elif optional:
            lines.append("If none is of use, answer in your own words.")
        return "\n".join(lines)

    def _opened(self, turns: list[Message], text: str) -> list[Message]:
        """The conversation with a text before it, joined to what the client says there."""
        role = "system" if self.has_system else "user"
        if turns and turns[0].get("role") == "system":
            text = f"{turns[0].get('content') or ''}\n\n{text}".lstrip()
            turns = turns[1:]
        if role == "user" and turns and turns[0].get("role") == "user":
            return [{**turns[0], "content": f"{text}\n\n{turns[0].get('content') or ''}"}, *turns[1:]]
        return [{"role": role, "content": text}, *turns]

    def _spelled(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation in turns of text only. What tools returned is the user's turn, joined to that which follows."""
        turns: list[Message] = []
        names: dict[str, str] = {}
        returned = False  # the last turn is what tools returned
        for message in messages:
            role, content = message.get("role"), message.get("content") or ""
            if role == "tool":
                name = names.get(str(message.get("tool_call_id")), message.get("name") or "The function")
                content, role = f"{name} returned:\n{content}", "user"
            elif role == "assistant" and (calls := _calls(message)):
                names |= {identifier: name for identifier, name, _ in calls}
                spelled = self.form.spelled([(name, arguments) for _, name, arguments in calls])
                content = f"{content}\n{spelled}" if content else spelled
            else:
                content = message.get("content")
            if returned and role == "user":
                content = f"{turns.pop()['content']}\n\n{content}"
            rest = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id", "name")}
            turns.append({**rest, "role": role, "content": content})
            returned = message.get("role") == "tool" or (returned and role == "user")
        return turns


def _calls(message: Message) -> list[tuple[str, str, str]]:
    """Ids, names and arguments of the calls of a turn."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            arguments = function.get("arguments") or {}
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            calls.append((str(call.get("id")), str(function.get("name")), text))
    return calls


def _shows_tools(template: ChatTemplate) -> bool:
    """Whether a template does anything with tools."""
    if not any("tools" in source for source in template.sources.values()):
        return False
    name = "a_function_that_nobody_has"
    tool = {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object", "properties": {}}}}
    try:
        return name in template.render([{"role": "user", "content": ""}], tools=[tool])
    except InvalidRequest:
        return True  # it refuses this conversation, which says nothing of others


def _shows_system_turns(template: ChatTemplate) -> bool:
    text = "a text that nobody writes"
    try:
        return text in template.render([{"role": "system", "content": text}, {"role": "user", "content": ""}])
    except InvalidRequest:
        return False
