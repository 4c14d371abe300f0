"""``GET /v1/models`` and ``GET /v1/models/{name}``: the served model and its adapters."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.api import parsing
from server.proxy.answer_formats import Json
from server.proxy.endpoint import Description, Endpoint, Proxy, client_metadata
from server.proxy.schemas import INTEGER, STRING, fixed, json_content, list_of, object_of, or_null, ref


async def models(proxy: Proxy, request: Request) -> Response:
    return JSONResponse({"object": "list", "data": list((await cards(proxy, request)).values())})


async def model(proxy: Proxy, request: Request) -> Response:
    known, name = await cards(proxy, request), request.path_params["name"]
    served, *adapters = known
    parsing.check_model_name(name, served, adapters)
    return JSONResponse(known[name])


async def cards(proxy: Proxy, request: Request) -> dict[str, Json]:
    """The served model and its adapters, by name."""
    card = await proxy.upstreams.model_card(client_metadata(request))
    shared = {
        "object": "model",
        "created": card.created,
        "owned_by": "preheat",
        "max_model_len": card.max_len if card.HasField("max_len") else None,
    }
    adapters = {name: {"id": name, **shared, "parent": card.name} for name in card.adapters}
    return {card.name: {"id": card.name, **shared, "parent": None}, **adapters}


CARD = object_of(
    id=STRING,
    object=fixed("model"),
    created=INTEGER,
    owned_by=STRING,
    max_model_len=or_null(INTEGER),
    parent=or_null(STRING),  # the served model, of an adapter
)
SCHEMAS = {"Model": CARD, "Models": object_of(object=fixed("list"), data=list_of(ref("Model")))}
NAME: Json = {"name": "name", "in": "path", "required": True, "schema": STRING}
MODELS = Endpoint(
    "/v1/models",
    models,
    Description("The served model and its adapters", answer=json_content("Models"), schemas=SCHEMAS),
)
MODEL = Endpoint(
    "/v1/models/{name:path}",
    model,
    Description(
        "The served model or an adapter by name",
        answer=json_content("Model"),
        errors=(404,),
        parameters=(NAME,),
        schemas=SCHEMAS,
    ),
)
