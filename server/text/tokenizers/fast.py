"""Tokenizers of the ``tokenizers`` library: a ``tokenizer.json``, or one built from a GGUF's metadata.

Encoding is the library's. Decoding is not: its decoders work on whole sequences only, so what they do is expressed as
bytes per token here, and a decoder for which that is not possible is refused by name.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Mapping, Sequence

import tokenizers

from server.errors import StartError
from server.text.tokenizers.base import BYTEWISE, BytesTokenizer
from server.text.tokenizers.chat import ChatTemplate
from server.text.tokenizers.special import SpecialToken, SpecialTokens

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"  # SentencePiece's mark of a space


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level BPE (GPT-2): printable Latin-1 as itself, the rest from U+0100
    on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


class FastTokenizer(BytesTokenizer):
    """See `server.text.tokenizers.base.Tokenizer`. ``unused`` are ids that stand for nothing (padding of the vocabulary)."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        source: str,
        bos_token_id: int | None,
        eos_token_ids: Sequence[int],
        prefix: Sequence[int],
        chat_template: ChatTemplate | None,
        info: Mapping[str, object] | None = None,
        unused: frozenset[int] = frozenset(),
    ):
        super().__init__(
            vocab_size=1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1),
            bos_token_id=bos_token_id,
            eos_token_ids=eos_token_ids,
            special=special_tokens(tokenizer),
            prefix=prefix,
            chat_template=chat_template,
            info=info,
        )
        self._parsing = tokenizer
        self._parsing.no_padding()
        self._parsing.no_truncation()
        self._plain = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        self._plain.encode_special_tokens = True  # the library's name for "spelled control tokens are text"
        self._unused = unused
        self.normalizes_special = tokenizer.normalizer is not None and any(
            token.normalized for token in self.special.tokens.values() if token.control
        )
        self._byte_level, self.strip_leading_space = decoder_kind(tokenizer, source)
        if not self._byte_level:
            self.decode_errors = BYTEWISE

    def encode_text(self, text: str, *, parse_special: bool) -> list[int]:
        tokenizer = self._parsing if parse_special else self._plain
        return tokenizer.encode(text, add_special_tokens=False).ids

    def encode_plain(self, text: str, *, first: bool) -> list[int]:
        # Some put a space before the first text only, so that something must come before another one.
        bare, separator = self._bare
        if first:
            return bare.encode(text, add_special_tokens=False).ids
        return bare.encode(separator + text, add_special_tokens=False).ids[1:]

    @functools.cached_property
    def _bare(self) -> tuple[tokenizers.Tokenizer, str]:
        """The tokenizer without added tokens, but for one that nobody can spell. Made for the first message that spells
        a control token.
        """
        content = json.loads(self._parsing.to_str()) | {"added_tokens": [], "post_processor": None}
        bare, separator = tokenizers.Tokenizer.from_str(json.dumps(content)), secrets.token_hex(16)
        bare.add_tokens([tokenizers.AddedToken(separator, normalized=False)])
        return bare, separator

    def token_piece(self, id: int) -> str:
        piece = self._parsing.id_to_token(id) if id >= 0 else None
        return self.token_text(id) if piece is None else piece

    def find_bytes(self, id: int) -> bytes:
        token = self._parsing.id_to_token(id)
        if token is None or id in self._unused:
            return b""
        if id in self.special.by_id:
            return token.encode("utf-8")
        if self._byte_level:
            codes = [BYTE_ALPHABET.get(character) for character in token]
            known = [code for code in codes if code is not None]
            return bytes(known) if len(known) == len(codes) else token.encode("utf-8")
        match = BYTE_PIECE.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else token.replace(SPACE, " ").encode("utf-8")


def special_tokens(tokenizer: tokenizers.Tokenizer) -> SpecialTokens:
    """The added tokens of a tokenizer of the library."""
    return SpecialTokens(
        SpecialToken(
            id,
            token.content,
            token.special,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            single_word=token.single_word,
            normalized=token.normalized,
        )
        for id, token in tokenizer.get_added_tokens_decoder().items()
    )


def decoder_kind(tokenizer: tokenizers.Tokenizer, source: str) -> tuple[bool, bool]:
    """Whether tokens are spelled in the byte-level alphabet, and whether decoding takes a leading space off."""
    if tokenizer.decoder is None:
        raise StartError(f"{source} has no decoder; use the tokenizer files that the model was published with")
    decoder = json.loads(tokenizer.decoder.__getstate__())  # as tokenizer.json has it
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
        return True, False
    strip = False
    for step in steps:
        if step["type"] == "Metaspace" and step.get("replacement", SPACE) == SPACE:
            strip |= step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never") != "never"
        elif step["type"] == "Strip" and (step["content"], step["start"] <= 1, step["stop"]) == (" ", True, 0):
            strip |= step["start"] == 1
        elif step["type"] == "Replace" and (step["pattern"], step["content"]) == ({"String": SPACE}, " "):
            continue
        elif step["type"] not in ("ByteFallback", "Fuse"):
            raise StartError(
                f"{source} has the decoder {json.dumps(step)}, which is not served; "
                "served are ByteLevel, and SentencePiece's Replace, ByteFallback, Fuse, Strip, Metaspace"
            )
    return False, strip
