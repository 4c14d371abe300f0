"""Mistral's ``tekken.json``: byte-level BPE in tiktoken's manner, behind a block of special tokens.

What the file has::

    config           pattern (how text is cut into words), default_vocab_size, default_num_special_tokens
    vocab            rank, token_bytes (base64), of more tokens than the vocabulary takes
    special_tokens   rank, token_str; absent before version 7; the block's rest is <SPECIAL_n>

Ids are the ranks of the special tokens, then those of the others, shifted by the size of the block. tiktoken merges the
two neighbours whose joined bytes have the lowest rank; the ``tokenizers`` library goes by a list of pairs, so the list
has every cut of every token into two known ones, in the order of the tokens' ranks.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

from server.errors import StartError
from server.text.tokenizers.base import BytesTokenizer
from server.text.tokenizers.chat import ChatTemplate
from server.text.tokenizers.fast import BYTE_ALPHABET
from server.text.tokenizers.special import SpecialToken, SpecialTokens

BOS, EOS = "<s>", "</s>"
OLDER = (
    "<unk>", BOS, EOS, "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
SPELLED = {byte: character for character, byte in BYTE_ALPHABET.items()}


class TekkenTokenizer(BytesTokenizer):
    """See `server.text.tokenizers.base.Tokenizer`.

    Args:
        content: of the file.
        source: its name, for errors.
        special: the file's block of special tokens, `special_tokens`, and those of the files around it.
        eos_token_ids: beside the tokenizer's own.
        add_bos: BOS comes before a text.
        chat_template: of the files around it.

    Raises:
        StartError: the file is not a tekken.json.
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        *,
        source: str,
        special: SpecialTokens,
        eos_token_ids: Sequence[int],
        add_bos: bool,
        chat_template: ChatTemplate | None,
        info: Mapping[str, object] | None = None,
    ):
        try:
            pattern, size, block = (
                content["config"][name] for name in ("pattern", "default_vocab_size", "default_num_special_tokens")
            )
            tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in content["vocab"]]
            ranks = [entry["rank"] for entry in content["vocab"]]
        except (KeyError, TypeError, binascii.Error) as error:
            raise StartError(f"{source} is not a tekken.json ({error!r}); download it again") from None
        tokens = tokens[: size - block]
        if len(tokens) < size - block or ranks != list(range(len(ranks))) or len(set(tokens)) < len(tokens):
            raise StartError(
                f"{source} is incomplete: {size - block} different tokens by rising rank are needed; download it again"
            )
        if {bytes([byte]) for byte in range(256)} - set(tokens):
            raise StartError(f"{source} lacks tokens of single bytes; download it again")
        ids = {token.content: token.id for token in special.tokens.values()}
        super().__init__(
            vocab_size=max([size, *(id + 1 for id in special.by_id)]),
            bos_token_id=ids.get(BOS),
            eos_token_ids=tuple(dict.fromkeys((*eos_token_ids, *([ids[EOS]] if EOS in ids else [])))),
            special=special,
            prefix=[ids[BOS]] if add_bos and BOS in ids else [],
            chat_template=chat_template,
            info=info,
        )
        self._tokens = tokens
        self._block = block
        self._words = _bpe(tokens, pattern, source)

    def encode_plain(self, text: str, *, first: bool) -> list[int]:
        return [self._block + id for id in self._words.encode(text, add_special_tokens=False).ids]

    def find_bytes(self, id: int) -> bytes:
        if id in self.special.by_id:
            return self.special.by_id[id].content.encode("utf-8")
        return self._tokens[id - self._block] if self._block <= id < self._block + len(self._tokens) else b""


def special_tokens(content: Mapping[str, Any]) -> SpecialTokens:
    """The block of special tokens of a tekken.json. Raises `KeyError` or `TypeError` where the file is another kind."""
    named = content.get("special_tokens")
    if named is None:
        named = [{"rank": rank, "token_str": spelling} for rank, spelling in enumerate(OLDER)]
    block = [SpecialToken(token["rank"], token["token_str"]) for token in named]  # all control, as in Mistral's library
    rest = range(len(block), content["config"]["default_num_special_tokens"])
    return SpecialTokens([*block, *(SpecialToken(id, f"<SPECIAL_{id}>") for id in rest)])


def _bpe(tokens: Sequence[bytes], pattern: str, source: str) -> tokenizers.Tokenizer:
    """The tokens as a model of the library, ids as they are ranked."""
    rank = {token: place for place, token in enumerate(tokens)}
    spelled = ["".join(map(SPELLED.__getitem__, token)) for token in tokens]
    merges = []
    for token in tokens:
        cuts = [(rank.get(token[:cut]), rank.get(token[cut:])) for cut in range(1, len(token))]
        known = sorted((left, right) for left, right in cuts if left is not None and right is not None)
        merges += [(spelled[left], spelled[right]) for left, right in known]
    vocab = {token: place for place, token in enumerate(spelled)}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    try:
        words = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    except Exception as error:  # the library has no type of its own for this
        raise StartError(f"{source}: its pattern cannot be compiled ({error}); download it again") from None
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([words, spell])
    return made
