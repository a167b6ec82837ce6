"""The pages / and /docs, and GET /playground/settings."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import aiakq
from aiakq.server.api.chat_request import ChatCompletionRequest
from aiakq.server.api.completions import CompletionRequest
from aiakq.server.api.openapi import request_schema, resolve_limits
from aiakq.server.api.request_model import RequestModel
from aiakq.server.api.routes import Route
from aiakq.server.api.sampling_fields import SAMPLING_FIELDS
from aiakq.server.api.service import Service
from aiakq.server.http.pages import page_response, playground_page
from aiakq.server.http.responses import JSONResponse


class PlaygroundFields(msgspec.Struct):
    """The JSON schemas of the sampling fields, by name."""

    chat: dict[str, dict[str, Any]]
    completion: dict[str, dict[str, Any]]


class PlaygroundSettings(msgspec.Struct):
    """Features that the page can offer.

    task            generate, or what the model does instead.
    chat            whether there is a chat template.
    tools           auto, forced (the model may not decide to call them), or none.
    structured      whether structured output is available.
    max_images      images that a prompt may have; 0 if the model reads text only.
    docs            whether there is /docs.
    servers         other servers to compare with.
    """

    models: list[str]
    task: str
    version: str
    max_model_len: int
    max_logprobs: int
    default_sampling: dict[str, Any]
    chat: bool
    tools: str
    structured: bool
    max_images: int
    docs: bool
    servers: list[str]
    fields: PlaygroundFields


async def playground(service: Service, request: Request) -> Response:
    """Return the playground, a page that sends requests to this server."""
    return playground_page(service.options.playground_servers)


async def docs(service: Service, request: Request) -> Response:
    """Return the API documentation, a page generated from /openapi.json."""
    return page_response("docs.html")


async def settings(service: Service, request: Request) -> Response:
    """Return what the playground can offer: sampling fields, tools, structured output, other servers."""
    limits, loaded = service.model.limits, service.renderer.text.loaded
    decides = service.renderer.message_format.auto_tool_choice
    return JSONResponse(
        PlaygroundSettings(
            models=list(service.model.names),
            task=limits.task,
            version=aiakq.__version__,
            max_model_len=limits.max_model_len,
            max_logprobs=limits.max_logprobs,
            default_sampling=dict(service.model.default_sampling),
            chat=loaded.has_template,
            tools=("auto" if decides else "forced") if loaded.has_template else "none",
            max_images=service.max_media.get("image", 0),
            structured=not loaded.grammar_failure,
            docs=any(route.path == "/openapi.json" for route in request.app.routes),
            servers=list(service.options.playground_servers),
            fields=PlaygroundFields(_fields(service, ChatCompletionRequest), _fields(service, CompletionRequest)),
        )
    )


def _fields(service: Service, request: type[RequestModel]) -> dict[str, dict[str, object]]:
    """Return the schemas of the sampling fields, with the limits of the model."""
    properties = resolve_limits(request_schema(request), service.model)["properties"]
    return {name: properties[name] for name in SAMPLING_FIELDS if name in properties}


ROUTES = (
    Route(
        "GET",
        "/",
        playground,
        "playground",
        response="text/html",
        description="The page.",
        needs_key=False,
        disabled_by="disable_playground",
    ),
    Route(
        "GET",
        "/playground/settings",
        settings,
        "playground",
        response=PlaygroundSettings,
        description="What the page can offer.",
        disabled_by="disable_playground",
    ),
    Route(
        "GET",
        "/docs",
        docs,
        "playground",
        response="text/html",
        description="The page.",
        needs_key=False,
        disabled_by="disable_fastapi_docs",
    ),
)
