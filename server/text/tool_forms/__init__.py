"""How models write tool calls: one module for each form, which tells how it is known, its grammar, and how it is read.

The forms, by the projects that began them::

    hermes        <tool_call>{"name": "f", "arguments": {...}}</tool_call>, any number of them     (Hermes, Qwen)
    mistral       [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]                             (Mistral)
    mistral-args  [TOOL_CALLS]f[ARGS]{...}, any number; perhaps [CALL_ID]id before [ARGS]          (Mistral, since 2025)
    llama3        {"name": "f", "parameters": {...}}, perhaps after <|python_tag|>                 (Llama 3, others)
    generic       {"name": "f", "arguments": {...}}, one after another                             (ours)

A form is a subclass of `ToolForm` in a module of this package; it is found here, so that nothing else has to know of it.
Which form a model has is for ``server/text/tool_use.py`` to say. The orchestrator, which has the tokenizer, writes grammars
(``server/grpc/chat_rendering.py``); the proxy, which has not, reads answers by the form's name.
"""

from __future__ import annotations

import importlib
import pkgutil

from server.text.tool_forms.base import Tokenizer, ToolForm
from server.text.tool_forms.parsing import CallPiece, Parsed, ToolParser

__all__ = ["FALLBACK", "FORMS", "GENERIC", "CallPiece", "Parsed", "ToolForm", "ToolParser", "control_markers"]

FALLBACK = "llama3"  # of a template that shows tools, and in no way that is known here
GENERIC = "generic"  # of a template that shows none


def _forms() -> dict[str, type[ToolForm]]:
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        importlib.import_module(f"{__name__}.{module.name}")
    return {form.name: form for form in ToolForm.__subclasses__()}


FORMS = _forms()  # by name; of those that a template teaches the first is taken


def control_markers(tokenizer: Tokenizer) -> dict[str, int]:
    """The markers that are control tokens, which a text leaves out, with their ids."""
    found = {}
    for marker in dict.fromkeys(marker for form in FORMS.values() for marker in form.markers):
        ids = tokenizer.encode(marker, add_bos=False, parse_special=True)
        if len(ids) == 1 and tokenizer.is_special(ids[0]):
            found[marker] = ids[0]
    return found
