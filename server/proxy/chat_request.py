"""A chat's fields as the request that has its messages rendered."""

from __future__ import annotations

import json

from protos import preheat_pb2
from server.api.chat_types import ToolName
from server.api.fields import RequestFields


def chat_request(parsed: RequestFields) -> preheat_pb2.RenderChatRequest:
    """What ``RenderChat`` is asked for; tools are left out where ``tool_choice`` is ``none``."""
    request = preheat_pb2.RenderChatRequest(
        messages=_compact(parsed.messages),
        template_kwargs=_compact(parsed.chat_template_kwargs or {}),
        add_generation_prompt=parsed.add_generation_prompt,
        continue_final_message=parsed.continue_final_message,
        add_special_tokens=bool(parsed.add_special_tokens),
    )
    if parsed.tools and parsed.tool_choice != "none":
        request.tools = _compact(parsed.tools)
        request.parallel_tool_calls = parsed.parallel_tool_calls
        request.tools_optional = parsed.tool_choice == "auto" and parsed.guided_json is None
        if isinstance(parsed.tool_choice, ToolName):
            request.tool_name = parsed.tool_choice.name
    return request


def _compact(value: object) -> str:
    # ASCII: a lone surrogate in a message stays an escape, and is refused where the text is tokenized.
    return json.dumps(value, separators=(",", ":"))
