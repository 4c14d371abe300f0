"""SentencePiece models: ``tokenizer.model``, and the ``llama`` tokenizer of a GGUF (rebuilt as a SentencePiece model).

The library encodes plain text. It never parses control tokens, so those of a rendered chat are cut out first; each
stretch of text between them gets the model's leading space, as Llama 2's own code does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from server.errors import StartError
from server.tokenizers.base import BYTEWISE, BytesTokenizer
from server.tokenizers.chat import ChatTemplate
from server.tokenizers.special import SpecialToken, SpecialTokens

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # SentencePiece's and GGUF's numbers alike


class SentencePieceTokenizer(BytesTokenizer):
    """See `server.tokenizers.base.Tokenizer`.

    ``model`` is the serialized model; ``added`` are tokens beyond it. The model's own control pieces are special tokens
    too.
    """

    decode_errors = BYTEWISE

    def __init__(
        self,
        model: bytes,
        *,
        source: str,
        added: Iterable[SpecialToken],
        bos_token_id: int | None,
        eos_token_ids: Sequence[int],
        prefix: Sequence[int],
        chat_template: ChatTemplate | None,
        info: Mapping[str, Any] | None = None,
    ):
        self.processor = sentencepiece.SentencePieceProcessor()
        try:
            self.processor.LoadFromSerializedProto(model)
        except (RuntimeError, ValueError) as error:
            raise StartError(f"{source} is not a SentencePiece model ({error}); download it again") from None
        self._pieces = self.processor.GetPieceSize()
        own = (
            SpecialToken(id, self.processor.IdToPiece(id))
            for id in range(self._pieces)
            if self.processor.IsControl(id) or self.processor.IsUnknown(id)
        )
        special = SpecialTokens([*own, *added])
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
        self.strip_leading_space = proto.normalizer_spec.add_dummy_prefix

    def encode_text(self, text: str, *, parse_special: bool, first: bool = True) -> list[int]:
        ids: list[int] = []
        for part in self.special.split(text, parse_special=parse_special):
            ids += [part] if isinstance(part, int) else self.processor.EncodeAsIds(part)
        return ids

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
    return model.SerializeToString()
