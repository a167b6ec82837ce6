"""GET /v1/models."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aiakq.server.api.routes import Route
from aiakq.server.api.service import Service
from aiakq.server.http.responses import JSONResponse


class ModelCard(msgspec.Struct, kw_only=True):
    """One served name, with the model's limits and default sampling values.

    parent            for an adapter: name of its base model.
    input_modalities  what prompts may have: text, and image, video or audio if it reads them; audio alone for a model
                      that transcribes.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["aiakq"] = "aiakq"
    root: str
    parent: str | None = None
    max_model_len: int
    vocab_size: int
    input_modalities: list[Literal["text", "image", "video", "audio"]]
    default_sampling: dict[str, Any]


class ModelList(msgspec.Struct):
    """All served names."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


async def list_models(service: Service, request: Request) -> Response:
    """List the served model, once per name, and its LoRA adapters."""
    return JSONResponse(ModelList([_model_card(service, name) for name in service.model.all_names]))


async def get_model(service: Service, request: Request) -> Response:
    """One served name."""
    name = request.path_params["name"]
    service.model.check_name(name)
    return JSONResponse(_model_card(service, name))


def _model_card(service: Service, name: str) -> ModelCard:
    adapter = service.model.adapter(name)
    return ModelCard(
        id=name,
        created=service.created,
        root=service.model.path if adapter is None else adapter.path,
        parent=None if adapter is None else service.model.adapters.base(name),
        max_model_len=service.model.limits.max_model_len,
        vocab_size=service.model.limits.vocab_size,
        input_modalities=_modalities(service),
        default_sampling=dict(service.model.default_sampling),
    )


def _modalities(service: Service) -> list[Literal["text", "image", "video", "audio"]]:
    if service.model.limits.speech is not None:
        return ["audio"]
    return ["text", *service.max_media]


ROUTES = (
    Route(
        "GET",
        "/v1/models",
        list_models,
        "models",
        response=ModelList,
        description="The model, once per name, and its adapters.",
    ),
    Route(
        "GET",
        "/v1/models/{name:path}",
        get_model,
        "models",
        response=ModelCard,
        description="The model.",
        errors=("unknown_model",),
    ),
)
