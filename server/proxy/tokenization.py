"""``/tokenize`` and ``/detokenize`` in the spellings of their clients.

What is tokenized comes as ``text`` (this server's own field), ``prompt`` or ``messages`` (vLLM's) or ``content``
(llama.cpp's); the name decides what is absent: BOS is added to ``text`` and ``prompt``, not to ``content``, and to
``messages`` where the template has it. The answer has the fields of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from protos import preheat_pb2
from server.api import fields, parsing
from server.api.fields import RequestFields
from server.errors import InvalidRequest
from server.proxy.answer_formats import Json
from server.proxy.chat_request import chat_request


def tokenize_request(body: Mapping[str, object]) -> tuple[preheat_pb2.TokenizeRequest, bool]:
    """What to ask of the orchestrator, and whether tokens are to be answered as llama.cpp's pieces.

    Raises:
        InvalidRequest: a field is not allowed, or none or several of the spellings are given.
    """
    values = parsing.checked(body, fields.TOKENIZE)
    given = [name for name in fields.SPELLINGS if name in values]
    if not given:
        raise InvalidRequest("text is required (or prompt, content or messages)", param="text")
    if len(given) > 1:
        raise InvalidRequest(f"{given[0]} and {given[1]} exclude each other: give one of them", param=given[1])
    pieces = values.pop("with_pieces", False)
    request = preheat_pb2.TokenizeRequest(describe=values.pop("return_token_strs", False) or pieces)
    if "model" in values:
        request.model = values.pop("model")
    add_special = values.pop("add_special", None)
    if add_special is not None and values.setdefault("add_special_tokens", add_special) != add_special:
        raise InvalidRequest("add_special and add_special_tokens differ: give one of them", param="add_special")
    if given == ["messages"]:
        if values.pop("parse_special", False):
            raise InvalidRequest("parse_special must be false with messages: what they spell stays text",
                                 param="parse_special")  # fmt: skip
        parsing.check_chat(values)
        request.chat.CopyFrom(chat_request(RequestFields(**values)))
    else:
        request.text = values[given[0]]
        request.add_bos = values.get("add_special_tokens", given != ["content"])
        request.parse_special = values.get("parse_special", True)
    return request, pieces


def tokenize_answer(body: Mapping[str, object], answer: preheat_pb2.TokenizeResponse, *, pieces: bool) -> Json:
    """See the module. ``pieces``: each token with its text, or its bytes where they are no text by themselves."""
    tokens: list[object] = list(answer.token_ids)
    if pieces:
        tokens = [
            {"id": id, "piece": _text_or_bytes(token.raw)} for id, token in zip(tokens, answer.tokens, strict=True)
        ]
    result = {"tokens": tokens, "count": len(tokens), "max_model_len": answer.max_len}
    if body.get("return_token_strs"):
        result["token_strs"] = [token.piece for token in answer.tokens]
    return result


def _text_or_bytes(raw: bytes) -> str | list[int]:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return list(raw)


def detokenize_requests(body: Mapping[str, object]) -> tuple[preheat_pb2.DetokenizeRequest, ...]:
    """One request where the client says whether control tokens are shown, else two: without them and with them.

    Raises:
        InvalidRequest: a field is not allowed.
    """
    values = parsing.checked(body, fields.DETOKENIZE)
    parsing.require(values, fields.DETOKENIZE)
    skip = values.get("skip_special_tokens")
    return tuple(
        preheat_pb2.DetokenizeRequest(token_ids=values["tokens"], skip_special_tokens=value, model=values.get("model"))
        for value in ((True, False) if skip is None else (skip,))
    )


def detokenize_answer(texts: list[str]) -> Json:
    """``text`` leaves control tokens out; ``prompt`` (vLLM's) and ``content`` (llama.cpp's) show them."""
    return {"text": texts[0], "prompt": texts[-1], "content": texts[-1]}
