"""An endpoint is one file: found, routed to, described, and behind the key, without another word anywhere."""

import asyncio
import sys

import httpx
import pytest

from server.proxy import endpoints, openapi, routes

ECHO = '''
from starlette.responses import JSONResponse
from server.proxy.endpoint import Body, Description, Endpoint
from server.api import fields
from server.proxy.schemas import STRING, object_of, json_content
from server.proxy.transport import read_json

async def echo(proxy, request):
    return JSONResponse({"said": (await read_json(request))["text"]})

ECHO = Endpoint(
    "/echo",
    echo,
    Description(
        "Says it again",
        answer=json_content("Echoed"),
        body=Body("EchoRequest", {"text": fields.TOKENIZE["text"]._replace(required=True)}),
        schemas={"Echoed": object_of(said=STRING)},
    ),
    method="POST",
    also=("/v1/echo",),
)
'''


@pytest.fixture
def drawer(tmp_path, monkeypatch):
    """A folder whose modules count as endpoints."""
    monkeypatch.setattr(endpoints, "__path__", [*endpoints.__path__, str(tmp_path)])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def call(app, path, **options):
    async def one():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            return await client.post(path, json={"text": "a"}, **options)

    return asyncio.run(one())


def test_a_file_is_all_that_an_endpoint_takes(drawer, monkeypatch):
    (drawer / "echo.py").write_text(ECHO)
    found = endpoints.find_endpoints()
    assert {endpoint.path for endpoint in found} - {endpoint.path for endpoint in endpoints.ENDPOINTS} == {"/echo"}
    monkeypatch.setattr(routes, "ENDPOINTS", found)
    app = routes.make_app(["x:1"], api_keys=["key"])
    for path in ("/echo", "/v1/echo"):
        assert call(app, path).status_code == 401
        answer = call(app, path, headers={"authorization": "Bearer key"})
        assert (answer.status_code, answer.json()) == (200, {"said": "a"})
    document = openapi.document(found)
    assert [document["paths"][path]["post"]["operationId"] for path in ("/echo", "/v1/echo")] == ["echo", "v1-echo"]
    assert document["paths"]["/echo"]["post"]["responses"].keys() == {"200", "400", "401", "413", "415", "500", "503"}
    schemas = document["components"]["schemas"]
    assert schemas["EchoRequest"]["required"] == ["text"] and schemas["Echoed"]["required"] == ["said"]


def test_two_endpoints_of_one_path_are_refused(drawer):
    (drawer / "echo.py").write_text(ECHO.replace('"/v1/echo"', '"/v1/tokenize"'))
    with pytest.raises(ValueError, match="two endpoints are POST /v1/tokenize"):
        endpoints.find_endpoints()


def test_two_descriptions_of_one_schema_are_refused(drawer):
    (drawer / "echo.py").write_text(ECHO.replace("Echoed", "Tokens"))
    with pytest.raises(ValueError, match="describes Tokens otherwise"):
        openapi.document(endpoints.find_endpoints())


def test_paths_with_parameters_come_last():
    """Starlette takes the first route that matches."""
    parameters = ["{" in endpoint.path for endpoint in endpoints.ENDPOINTS]
    assert True in parameters and parameters == sorted(parameters)


def test_operations_have_ids_of_their_own():
    paths = openapi.document(endpoints.ENDPOINTS)["paths"].values()
    ids = [one["operationId"] for methods in paths for one in methods.values() if "operationId" in one]
    assert len(ids) == len(set(ids)) == 7
