"""A tokenizer that needs no file: every byte is a token."""

from __future__ import annotations

from server.text.tokenizers.base import BytesTokenizer
from server.text.tokenizers.chat import ChatTemplate
from server.text.tokenizers.special import SpecialToken, SpecialTokens

BOS, EOS, EOT = 256, 257, 258
SPELLINGS = {BOS: "<|bos|>", EOS: "<|eos|>", EOT: "<|eot|>"}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


class ByteTokenizer(BytesTokenizer):
    """Ids 0-255 are bytes, 256 is BOS, 257 EOS, 258 EOT (which ends a turn, and so a generation, too).

    The tokenizer of tests and of the mock engine: every answer can be worked out by hand.
    """

    def __init__(self) -> None:
        special = SpecialTokens(SpecialToken(id, spelling) for id, spelling in SPELLINGS.items())
        super().__init__(
            vocab_size=259,
            bos_token_id=BOS,
            eos_token_ids=(EOS, EOT),
            special=special,
            prefix=[BOS],
            info={"bos_token": SPELLINGS[BOS], "eos_token": SPELLINGS[EOS]},
            chat_template=ChatTemplate(CHAT_TEMPLATE, control_spellings=special.unspoken),
        )

    def encode_plain(self, text: str, *, first: bool) -> list[int]:
        return [*text.encode("utf-8")]

    def find_bytes(self, id: int) -> bytes:
        return bytes([id]) if id < 256 else SPELLINGS[id].encode()
