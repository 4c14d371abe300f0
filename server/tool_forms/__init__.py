"""How models write tool calls: one module for each form, which tells how it is known, its grammar, and how it is read.

The forms, by the projects that began them::

    hermes        <tool_call>{"name": "f", "arguments": {...}}</tool_call>, any number of them     (Hermes, Qwen)
    mistral       [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]                             (Mistral)
    mistral-args  [TOOL_CALLS]f[ARGS]{...}, any number; perhaps [CALL_ID]id before [ARGS]          (Mistral, since 2025)
    llama3        {"name": "f", "parameters": {...}}, perhaps after <|python_tag|>                 (Llama 3, others)

A form is a subclass of `ToolForm` in a module of this package; it is found here, so that nothing else has to know of it.
The orchestrator, which has the tokenizer, writes grammars (``server/chat_rendering.py``); the proxy, which has not, reads
answers by the form's name.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from server.tool_forms.base import Tokenizer, ToolForm
from server.tool_forms.parsing import CallPiece, Parsed, ToolParser

__all__ = ["FORMS", "CallPiece", "Parsed", "ToolForm", "ToolParser", "control_markers", "tool_form"]

FALLBACK = "llama3"  # of a template that shows tools, and in no way that is known here


def _forms() -> dict[str, type[ToolForm]]:
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        importlib.import_module(f"{__name__}.{module.name}")
    return {form.name: form for form in ToolForm.__subclasses__()}


FORMS = _forms()  # by name, the first that a template teaches is taken


def tool_form(tokenizer: Tokenizer, templates: Mapping[str, str]) -> ToolForm | None:
    """How a model writes calls, by its chat templates; `None`: they know nothing of tools."""
    source = templates.get("tool_use") or templates.get("default", "")
    if "tools" not in source:
        return None
    form = next((form for form in FORMS.values() if form.is_taught_by(source)), FORMS[FALLBACK])
    return form(control_markers(tokenizer), source)


def control_markers(tokenizer: Tokenizer) -> dict[str, int]:
    """The markers that are control tokens, which a text leaves out, with their ids."""
    found = {}
    for marker in dict.fromkeys(marker for form in FORMS.values() for marker in form.markers):
        ids = tokenizer.encode(marker, add_bos=False, parse_special=True)
        if len(ids) == 1 and tokenizer.is_special(ids[0]):
            found[marker] = ids[0]
    return found
