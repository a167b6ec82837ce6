"""The table of routes: what holds for every route, and what a route of another package can do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from starlette.responses import Response

from aiakq.arguments.server import checked
from aiakq.errors import REGISTRY, AiakqError, error
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.server.api import routes as table
from aiakq.server.api.app import create_app
from aiakq.server.api.model_info import ModelInfo
from aiakq.server.api.openapi import error_ids
from aiakq.server.api.routes import Route, keyless_paths, load_routes
from aiakq.server.api.unknown_fields import UnknownFields

KEY = {"authorization": "Bearer secret"}
MAX_BODY_BYTES = 10_000
ARGS = checked({"model": "m", "enable_admin_routes": True}, server=True)
ROUTES = load_routes(ARGS)
KEYLESS = keyless_paths(ROUTES, ARGS)

every_route = pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)


@pytest.fixture(scope="module")
def guarded(start_server) -> Iterator[httpx.Client]:
    """A client of a server with every route, a key, and a small limit of bodies."""
    options = {"enable_admin_routes": True, "api_key": ["secret"], "max_body_bytes": MAX_BODY_BYTES}
    with (
        start_server(**options, num_gpu_blocks_override=65) as server,
        httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client,
    ):
        yield client


def url(route: Route) -> str:
    return route.openapi_path.replace("{name}", "tinybooks")


def check(answer: httpx.Response, route: Route, status: int, id: str, **fields: str) -> None:
    """The answer is the error ``id`` in the shape of the route."""
    assert answer.status_code == status
    found, expected = answer.json(), msgspec.to_builtins(route.error_body.from_error(error(id, **fields)))
    if fields:
        assert found == expected
    assert found.keys() == expected.keys() and found["error"].keys() == expected["error"].keys()
    assert found["error"].get("code", id) == id and found["error"]["type"] == expected["error"]["type"]


@every_route
def test_other_methods_are_refused_with_the_allowed_ones(guarded, route):
    for method in {"GET", "POST", "PUT", "DELETE", "PATCH"} - set(route.methods):
        answer = guarded.request(method, url(route), headers=KEY)
        check(answer, route, 405, "method_not_allowed", path=url(route), method=method)
        assert set(answer.headers["allow"].split(", ")) - {"HEAD"} == set(route.methods)
        assert ("HEAD" in answer.headers["allow"]) == ("GET" in route.methods)


@every_route
def test_a_key_is_required_unless_the_table_says_otherwise(guarded, route):
    for method in route.methods:
        answer = guarded.request(method, url(route))
        if route.path in KEYLESS:
            assert answer.status_code == 200
        else:
            check(answer, route, 401, "invalid_api_key")


@every_route
def test_bodies_are_limited_in_size_and_type(guarded, route):
    if not (route.request or route.form):
        return
    too_large = guarded.post(url(route), headers=KEY, content=b" " * (MAX_BODY_BYTES + 1))
    check(too_large, route, 413, "request_too_large", limit=MAX_BODY_BYTES)
    text = guarded.post(url(route), headers=KEY | {"content-type": "text/plain"}, content=b"{}")
    check(text, route, 415, "form_expected" if route.form else "unsupported_media_type")
    if route.form:
        return
    values = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "tokens": [1], "input": "a"}
    values |= {"max_tokens": 1, "query": "a", "documents": ["a"], "lora_name": "a", "lora_path": "a", "enabled": True}
    required = {name: values[name] for name, field in route.request[0].model_fields.items() if field.is_required()}
    name = next(iter(route.request[0].model_fields))
    unknown = guarded.post(url(route), headers=KEY, json={**required, name.upper(): 1})
    check(unknown, route, 400, "unknown_field", param=name.upper(), hint=f"Did you mean {name}?")


@every_route
def test_the_openapi_document_has_every_route_with_its_errors(guarded, route):
    document = guarded.get("/openapi.json", headers=KEY).json()
    operations = document["paths"][route.openapi_path]
    assert set(operations) == {method.lower() for method in route.methods}
    needs_key = route.path not in KEYLESS
    for operation in operations.values():
        assert operation["summary"] == route.summary and operation["tags"] == [route.tag]
        assert ("security" in operation) == needs_key
        assert ("requestBody" in operation) == bool(route.request or route.form)
        for id in error_ids(route, needs_key):
            assert id in operation["responses"][str(REGISTRY[id].http_status)]["description"].split(", ")


def test_routes_that_no_option_enables_do_not_exist():
    args = checked({"model": "m"}, server=True)
    assert {route.path for route in ROUTES} - {route.path for route in load_routes(args)} == {
        "/abort_requests",
        "/reset_prefix_cache",
        "/speculation",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }


def test_an_option_can_lift_the_need_for_a_key():
    args = checked({"model": "m", "metrics_without_key": True}, server=True)
    assert keyless_paths(ROUTES, args) == KEYLESS | {"/metrics"}


def test_two_routes_with_one_path_are_refused(monkeypatch):
    again = SimpleNamespace(ROUTES=(ROUTES[0],))
    monkeypatch.setattr(type(table.ROUTE_MODULES), "load", lambda self, name: again)
    with pytest.raises(AiakqError, match=ROUTES[0].path):
        load_routes(ARGS)


class OtherError(msgspec.Struct):
    """Another shape of errors, as other APIs have."""

    kind: str

    @classmethod
    def from_error(cls, failure: AiakqError) -> OtherError:
        return cls(failure.id)


async def refuse(service, request) -> Response:
    """Always refused."""
    raise error("unknown_model", param="model", name="a", known="b")


def test_a_route_can_have_errors_of_another_shape():
    model = ModelInfo(("a",), "m", "float32", ModelLimits(10, 20, 30), {}, "assistant")
    route = Route("GET", "/other", refuse, "other", errors=("unknown_model",), error_body=OtherError)
    app = create_app(SimpleNamespace(model=model, renderer=SimpleNamespace(unknown_fields=UnknownFields())), [route])

    async def get(path: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.get(path)

    answer = asyncio.run(get("/other"))
    assert (answer.status_code, answer.json()) == (404, {"kind": "unknown_model"})
    document = asyncio.run(get("/openapi.json")).json()
    responses = document["paths"]["/other"]["get"]["responses"]
    assert responses["404"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/OtherError"}


def test_a_request_that_is_cancelled_at_the_end_of_the_server_is_told_so():
    """An admin request, for which nobody waits before the server ends."""
    state = SimpleNamespace(closing=None)

    async def wait_for_ever(service, request):
        await asyncio.sleep(60)

    app = create_app(SimpleNamespace(state=state), [Route("GET", "/other", wait_for_ever, "other")])

    async def ask(closing) -> httpx.Response:
        state.closing = None
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as client:
            task = asyncio.create_task(client.get("/other"))
            await asyncio.sleep(0.05)
            state.closing = closing
            task.cancel()
            return await task

    answer = asyncio.run(ask(error("shutting_down")))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(ask(None))
