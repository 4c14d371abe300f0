"""SentencePiece models: ``tokenizer.model``, and the ``llama`` tokenizer of a GGUF (rebuilt as a SentencePiece model).

The library encodes plain text. It never parses control tokens, so they are cut out first; each stretch of text between
them gets the model's leading space, as in Llama 2's own code and llama.cpp, or the first one only, where the model's
files say ``"legacy": false``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from server.errors import StartError
from server.text.tokenizers.base import BYTEWISE, BytesTokenizer
from server.text.tokenizers.chat import ChatTemplate
from server.text.tokenizers.special import SpecialTokens

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # SentencePiece's and GGUF's numbers alike


class SentencePieceTokenizer(BytesTokenizer):
    """See `server.text.tokenizers.base.Tokenizer`.

    Args:
        model: serialized.
        source: its file, for errors.
        special: the model's own control pieces, and tokens beyond it.
        legacy: text behind an added token begins with a space, too.
        space_first: a text begins with one; for other than ``legacy``.
    """

    decode_errors = BYTEWISE

    def __init__(
        self,
        model: bytes,
        *,
        source: str,
        special: SpecialTokens,
        bos_token_id: int | None,
        eos_token_ids: Sequence[int],
        prefix: Sequence[int],
        chat_template: ChatTemplate | None,
        info: Mapping[str, object] | None = None,
        legacy: bool = True,
        space_first: bool = True,
    ):
        self.processor = sentencepiece.SentencePieceProcessor()
        try:
            self.processor.LoadFromSerializedProto(model)
        except (RuntimeError, ValueError) as error:
            raise StartError(f"{source} is not a SentencePiece model ({error}); download it again") from None
        self._pieces = self.processor.GetPieceSize()
        super().__init__(
            vocab_size=max([self._pieces, *(id + 1 for id in special.by_id)]),
            bos_token_id=bos_token_id,
            eos_token_ids=eos_token_ids,
            special=special,
            prefix=prefix,
            chat_template=chat_template,
            info=info,
        )
        proto = sentencepiece_model_pb2.ModelProto.FromString(self.processor.serialized_model_proto())
        self._legacy = legacy or not proto.normalizer_spec.add_dummy_prefix
        self._space_first = space_first
        self.strip_leading_space = proto.normalizer_spec.add_dummy_prefix and (legacy or space_first)
        if not self._legacy:
            proto.normalizer_spec.add_dummy_prefix = False
            self._joined = sentencepiece.SentencePieceProcessor()  # puts no space before a text
            self._joined.LoadFromSerializedProto(proto.SerializeToString())
            self._unknown = self._joined.IdToPiece(self._joined.unk_id())
            self._unknown_length = len(self._joined.EncodeAsIds(self._unknown))

    def encode_plain(self, text: str, *, first: bool) -> list[int]:
        if self._legacy or (first and self._space_first):
            return list(self.processor.EncodeAsIds(text))
        if not text.startswith((" ", SPACE)):
            return list(self._joined.EncodeAsIds(text))
        # The library may drop space at the beginning, so that something must come before it.
        return list(self._joined.EncodeAsIds(self._unknown + text)[self._unknown_length :])

    def token_piece(self, id: int) -> str:
        own = 0 <= id < self._pieces and id not in self.special.by_id
        return self.processor.IdToPiece(id) if own else self.token_text(id)

    def find_bytes(self, id: int) -> bytes:
        if id in self.special.by_id:
            return self.special.by_id[id].content.encode("utf-8")
        if id >= self._pieces or self.processor.IsUnused(id):
            return b""
        piece = self.processor.IdToPiece(id)
        if self.processor.IsByte(id):
            return bytes([int(piece[3:-1], 16)])
        return piece.replace(SPACE, " ").encode("utf-8")


def bpe_model(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], *, add_space_prefix: bool) -> bytes:
    """A serialized SentencePiece BPE model of a vocabulary. GGUF's ``llama`` tokenizer is one, taken apart."""
    model = sentencepiece_model_pb2.ModelProto()
    for token, score, kind in zip(tokens, scores, types, strict=True):
        model.pieces.add(piece=token, score=score, type=int(kind))
    model.trainer_spec.model_type = sentencepiece_model_pb2.TrainerSpec.BPE
    model.trainer_spec.vocab_size = len(tokens)
    model.trainer_spec.byte_fallback = BYTE in set(map(int, types))
    unknown = [id for id, kind in enumerate(types) if kind == UNKNOWN]
    if unknown:
        model.trainer_spec.unk_id = unknown[0]
        model.trainer_spec.unk_piece = tokens[unknown[0]]
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = add_space_prefix
    model.normalizer_spec.remove_extra_whitespaces = False
    return bytes(model.SerializeToString())
