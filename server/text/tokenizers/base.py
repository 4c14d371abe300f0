"""What a tokenizer is, and what all kinds share: decoding through bytes, and the parsing of special tokens.

Bytes that are no UTF-8 become U+FFFD exactly as the tokenizer's own library shows them: byte-level BPE (Rust's
``from_utf8_lossy``) one for each maximal ill-formed part, which is Python's ``replace``; SentencePiece one for each
byte.
"""

from __future__ import annotations

import abc
import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from server.errors import InvalidRequest
from server.text.tokenizers.chat import ChatTemplate, unmark
from server.text.tokenizers.special import SpecialTokens

BYTEWISE = "preheat-bytewise"  # codec error handler: one U+FFFD for each byte


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(BYTEWISE, _replace_each_byte)


class Tokenizer(Protocol):
    """What the server needs of a tokenizer."""

    vocab_size: int  # ids the tokenizer knows are below this; the model's vocabulary may be larger (padding)
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: ChatTemplate | None
    info: Mapping[str, object]  # what it says of itself, by the names of a tokenizer_config.json

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of a raw text.

        ``add_bos``: begin with what the model's own tokenizer begins with; one BOS, never two. ``parse_special``:
        control tokens spelled in the text become their ids, else they are text. Raises `InvalidRequest` for text that
        is not Unicode (lone surrogates).
        """

    def encode_chat(self, text: str, *, add_bos: bool = False) -> list[int]:
        """Ids of what a `ChatTemplate` rendered: the template's control tokens become ids, those that messages spell
        are marked and stay text.
        """

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ids. Ids that the tokenizer does not know stand for nothing."""

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token stands for, of a special token its spelling; empty for unknown ids."""

    def token_text(self, id: int) -> str:
        """A token as log-probs show it: its text, ``bytes:\\xe2\\x82`` for part of a character, ``token_id:7`` for
        unknown ids.
        """

    def token_piece(self, id: int) -> str:
        """A token as the vocabulary spells it, such as ``Ġthe``; `token_text` of unknown ids."""

    def is_special(self, id: int) -> bool:
        """Whether a token is a control token, which `decode` leaves out."""

    @property
    def special_ids(self) -> frozenset[int]:
        """All control tokens."""

    def detokenizer(self, *, continues: bool = False, shown: frozenset[int] = frozenset()) -> Detokenizer:
        """A new incremental decoder of one sequence.

        ``continues``: the tokens follow others, so that a space before them is text. ``shown``: control tokens that are
        shown.
        """


class Detokenizer:
    """Decodes one sequence token by token; what it has returned, joined, is `Tokenizer.decode` of the ids, where they
    are a text of their own. O(1) per token.
    """

    def __init__(self, tokenizer: BytesTokenizer, *, continues: bool = False, shown: frozenset[int] = frozenset()):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(tokenizer.decode_errors)
        self._strip = tokenizer.strip_leading_space and not continues
        self._shown = shown

    def push(self, id: int) -> str:
        """The text that this token completes; empty while a character is incomplete, and for special tokens."""
        if self._tokenizer.is_special(id) and id not in self._shown:
            return ""
        return self._stripped(self._decoder.decode(self._tokenizer.token_bytes(id)))

    def flush(self) -> str:
        """What is left at the end of the sequence: U+FFFD for a character that was never completed."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class BytesTokenizer(abc.ABC):
    """Base of the tokenizers. A subclass encodes plain text and knows the bytes of each token."""

    decode_errors = "replace"
    strip_leading_space = False  # the tokenizer puts a space before every text, so decoding takes one off
    normalizes_special = False  # text that does not spell a control token may be one when it is normalized

    def __init__(
        self,
        *,
        vocab_size: int,
        bos_token_id: int | None,
        eos_token_ids: Sequence[int],
        special: SpecialTokens,
        prefix: Sequence[int],
        chat_template: ChatTemplate | None,
        info: Mapping[str, object] | None = None,
    ):
        self.vocab_size = vocab_size
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.chat_template = chat_template
        self.info: Mapping[str, object] = {"tokenizer_class": type(self).__name__, **(info or {})}
        self.special = special
        self.prefix = list(prefix)  # what an encoded text begins with: BOS, mostly
        self._bytes: dict[int, bytes] = {}  # as they are asked for

    @abc.abstractmethod
    def encode_plain(self, text: str, *, first: bool) -> list[int]:
        """Ids of a text, of which added tokens are part as if there were none. ``first``: nothing comes before it;
        where not, an added token does.
        """

    def encode_text(self, text: str, *, parse_special: bool) -> list[int]:
        """Ids of a text without anything added. Added tokens are found, control tokens with ``parse_special`` only."""
        ids: list[int] = []
        for part in self.special.split(text, parse_special=parse_special):
            ids += [part] if isinstance(part, int) else self.encode_plain(part, first=not ids)
        return ids

    @abc.abstractmethod
    def find_bytes(self, id: int) -> bytes:
        """The bytes of a token, ``0 <= id < vocab_size``."""

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        _check_unicode(text)
        ids = self.encode_text(text, parse_special=parse_special)
        return self._with_prefix(ids) if add_bos else ids

    def encode_chat(self, text: str, *, add_bos: bool = False) -> list[int]:
        _check_unicode(text)
        if unmark(text) == text and not self.normalizes_special:
            ids = self.encode_text(text, parse_special=True)
        else:
            ids = []
            for part in self.special.split(text, parse_special=True):
                if isinstance(part, int):
                    ids.append(part)
                else:
                    ids += self.encode_plain(unmark(part), first=not ids)
        return self._with_prefix(ids) if add_bos else ids

    def _with_prefix(self, ids: list[int]) -> list[int]:
        """BOS comes first, once: ids that a text spelled count."""
        return ids if ids[: len(self.prefix)] == self.prefix else self.prefix + ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        data = b"".join(self.token_bytes(id) for id in ids if not (skip_special and self.is_special(id)))
        text = data.decode("utf-8", self.decode_errors)
        return text.removeprefix(" ") if self.strip_leading_space else text

    def token_bytes(self, id: int) -> bytes:
        known = self._bytes.get(id)
        if known is None:
            if not 0 <= id < self.vocab_size:
                return b""
            known = self._bytes[id] = self.find_bytes(id)
        return known

    def token_text(self, id: int) -> str:
        data = self.token_bytes(id)
        if not data:
            return f"token_id:{id}"
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def token_piece(self, id: int) -> str:
        return self.token_text(id)

    def is_special(self, id: int) -> bool:
        return id in self.special.control_ids

    @property
    def special_ids(self) -> frozenset[int]:
        return self.special.control_ids

    def detokenizer(self, *, continues: bool = False, shown: frozenset[int] = frozenset()) -> Detokenizer:
        return Detokenizer(self, continues=continues, shown=shown)


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text has a lone surrogate at character {error.start}, which is no Unicode text; remove it", param="prompt"
        ) from None
