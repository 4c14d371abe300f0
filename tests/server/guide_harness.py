"""Whether a grammar lets a whole text be written, token by token, with the byte tokenizer."""

from __future__ import annotations

from server.errors import InvalidRequest
from server.text.guided import Guides
from server.text.tokenizers import ByteTokenizer

EOS = 257
GUIDES = Guides(ByteTokenizer(), (EOS,), 260)


def allows(param, value, text, guides=GUIDES):
    """``text`` may be ids of tokens. A grammar that cannot be compiled raises `InvalidRequest`."""
    matcher = guides.compile(param, value).matcher()
    try:
        for token in text.encode() if isinstance(text, str) else text:
            matcher.accept(token)
        if not matcher.finished:
            matcher.accept(EOS)
    except InvalidRequest:
        return False
    return True
