"""From chat messages to token ids, through the model's chat template.

The template spells control tokens (``<|im_start|>``) as text, which `Tokenizer.encode` then turns into ids. What a user wrote must not:
a message that spells a control token stays text. So such spellings are taken out of the messages before the template
sees them, each replaced by a mark, and put back as plain text after the template's own control tokens have become ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from server.errors import InvalidRequest
from server.tokenizers import Tokenizer

# Two private-use characters around a number. They mean nothing in text, and a text that has them keeps them: see `_marks`.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"


class ChatEncoder:
    """Renders and tokenizes chats of one model. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        spelled = {tokenizer.token_text(token) for token in range(tokenizer.vocab_size) if tokenizer.is_special(token)}
        alternatives = sorted((text for text in spelled if text), key=len, reverse=True)
        # The marks themselves are taken out as well, so that a user cannot write one.
        self._special = re.compile("|".join(map(re.escape, [*alternatives, _OPEN, _CLOSE])))

    def encode(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None,
               add_generation_prompt: bool = True, template_kwargs: Mapping[str, Any] | None = None) -> tuple[str, list[int]]:
        """The rendered text and its token ids.

        Raises:
            InvalidRequest: the model has no chat template, or the template refuses the messages.
        """
        template = self._tokenizer.chat_template
        if template is None:
            raise InvalidRequest("messages cannot be rendered: the model has no chat template; use /v1/completions",
                                 param="messages")
        kept: list[str] = []
        text = template.render(
            [self._protect(message, kept) for message in messages], tools=tools,
            add_generation_prompt=add_generation_prompt, **self._protect(dict(template_kwargs or {}), kept))
        if not kept:
            return text, self._tokenizer.encode(text, add_bos=False, parse_special=True)
        pieces = re.split(f"({_OPEN}[0-9]+{_CLOSE})", text)
        texts: list[str] = []
        ids: list[int] = []
        for index, piece in enumerate(pieces):
            marked = index % 2 == 1
            if marked:
                piece = kept[int(piece[1:-1])]
            if piece:
                texts.append(piece)
                ids += self._tokenizer.encode(piece, add_bos=False, parse_special=not marked)
        return "".join(texts), ids

    def _protect(self, value: Any, kept: list[str]) -> Any:
        """The value with every spelled control token in its strings replaced by a mark; ``kept`` collects them."""
        if isinstance(value, str):
            def mark(match: re.Match[str]) -> str:
                kept.append(match.group())
                return f"{_OPEN}{len(kept) - 1}{_CLOSE}"

            return self._special.sub(mark, value)
        if isinstance(value, Mapping):
            return {key: self._protect(item, kept) for key, item in value.items()}
        if isinstance(value, list):
            return [self._protect(item, kept) for item in value]
        return value
