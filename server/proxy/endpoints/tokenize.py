"""``POST /tokenize`` and ``/detokenize``, which ``server/proxy/tokenization.py`` reads and writes, and ``GET /tokenizer_info``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from protos import preheat_pb2
from server.api import fields
from server.proxy.endpoint import Body, Description, Endpoint, Proxy, client_metadata
from server.proxy.schemas import INTEGER, STRING, json_content, list_of, object_of, with_optional
from server.proxy.tokenization import detokenize_answer, detokenize_requests, tokenize_answer, tokenize_request
from server.proxy.transport import read_json


async def tokenize(proxy: Proxy, request: Request) -> Response:
    body = await read_json(request)
    asked, pieces = tokenize_request(body)
    answer = await proxy.upstreams.call(lambda preheat: preheat.Tokenize, asked, client_metadata(request))
    return JSONResponse(tokenize_answer(body, answer, pieces=pieces))


async def detokenize(proxy: Proxy, request: Request) -> Response:
    asked, metadata = detokenize_requests(await read_json(request)), client_metadata(request)
    answers = [await proxy.upstreams.call(lambda preheat: preheat.Detokenize, one, metadata) for one in asked]
    return JSONResponse(detokenize_answer([answer.text for answer in answers]))


async def tokenizer_info(proxy: Proxy, request: Request) -> Response:
    answer = await proxy.upstreams.call(lambda preheat: preheat.TokenizerInfo, preheat_pb2.TokenizerInfoRequest(), client_metadata(request))
    return Response(answer.json, media_type="application/json")


PIECE = object_of(id=INTEGER, piece={"anyOf": [STRING, list_of(INTEGER)]})
TOKENS = object_of(tokens=list_of({"anyOf": [INTEGER, PIECE]}), count=INTEGER, max_model_len=INTEGER)
TOKENIZE = Endpoint(
    "/tokenize",
    tokenize,
    Description(
        "Token ids of a text or a conversation",
        answer=json_content("Tokens"),
        body=Body("TokenizeRequest", fields.TOKENIZE),
        errors=(404,),
        schemas={"Tokens": with_optional(TOKENS, token_strs=list_of(STRING))},
    ),
    method="POST",
    also=("/v1/tokenize",),
)
DETOKENIZE = Endpoint(
    "/detokenize",
    detokenize,
    Description(
        "The text of token ids",
        answer=json_content("Text"),
        body=Body("DetokenizeRequest", fields.DETOKENIZE),
        errors=(404,),
        schemas={"Text": object_of(text=STRING, prompt=STRING, content=STRING)},
    ),
    method="POST",
    also=("/v1/detokenize",),
)
TOKENIZER_INFO = Endpoint(
    "/tokenizer_info",
    tokenizer_info,
    Description(
        "What the tokenizer says of itself",
        answer=json_content("TokenizerInfo"),
        schemas={"TokenizerInfo": object_of(tokenizer_class=STRING)},  # and more, as in a tokenizer_config.json
    ),
)
