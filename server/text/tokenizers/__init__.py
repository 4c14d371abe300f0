"""Text to token ids and back.

`load_tokenizer` picks the kind a model brings: ``tokenizer.json`` (`FastTokenizer`), SentencePiece's
``tokenizer.model`` (`SentencePieceTokenizer`), or the one inside a GGUF (either of the two, built from its metadata).
`ByteTokenizer` needs no file and serves tests and the mock engine. The orchestrator owns one tokenizer; it is immutable
and used from several threads.

Decoding has one path for all: a token stands for bytes (`Tokenizer.token_bytes`), bytes are decoded as UTF-8, and a
`Detokenizer` does so incrementally, so that streamed pieces joined are what `Tokenizer.decode` gives at once.
"""

from __future__ import annotations

from server.text.tokenizers.base import Detokenizer, Tokenizer
from server.text.tokenizers.byte import ByteTokenizer
from server.text.tokenizers.chat import ChatTemplate
from server.text.tokenizers.load import load_tokenizer

__all__ = ["ByteTokenizer", "ChatTemplate", "Detokenizer", "Tokenizer", "load_tokenizer"]
