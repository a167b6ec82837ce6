"""Routes that load and unload LoRA adapters while the server runs, enabled by ``--enable-admin-routes``."""

from __future__ import annotations

import functools

from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from aiakq.runtime.protocol.command import UnloadAdapter
from aiakq.server.api.request_model import Integer, RequestModel, parse_body
from aiakq.server.api.routes import UNAVAILABLE, Route
from aiakq.server.api.service import Service
from aiakq.server.http.auth import client_of
from aiakq.server.http.body import read_body


class LoadAdapterRequest(RequestModel):
    """The body of POST /v1/load_lora_adapter."""

    lora_name: str = Field(description="What requests call it, as their model.", min_length=1, max_length=256)
    lora_path: str = Field(description="Its folder, inside that of --lora-root.", min_length=1, max_length=4096)
    load_inplace: bool | None = Field(None, description="Replace an adapter of this name.")


class UnloadAdapterRequest(RequestModel):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: str = Field(description="What requests call it.", max_length=256)
    lora_int_id: Integer | None = Field(None, description="Not used.")


async def load_adapter(service: Service, request: Request) -> Response:
    """Load a LoRA adapter from a folder inside --lora-root. It is validated; then requests may name it."""
    service.state.check_available()
    payload = parse_body(LoadAdapterRequest, await read_body(request, service.max_body_bytes))
    model = service.model
    check = functools.partial(service.state.manager.adapters.check, client=client_of(request))
    replaced = await model.adapters.load(
        payload.lora_name,
        payload.lora_path,
        model.names,
        check,
        service.state.manager.prefetch_adapter,
        bool(payload.load_inplace),
    )
    if replaced is not None:
        service.state.manager.send(UnloadAdapter(replaced.key))
    return PlainTextResponse(f"Success: LoRA adapter '{payload.lora_name}' added successfully.")


async def unload_adapter(service: Service, request: Request) -> Response:
    """Unload a LoRA adapter. New requests that name it are rejected; its memory is freed when running ones finish."""
    payload = parse_body(UnloadAdapterRequest, await read_body(request, service.max_body_bytes))
    adapter = service.model.adapters.remove(payload.lora_name)
    service.state.metrics.adapter_removed(payload.lora_name)
    if adapter is not None:
        service.state.manager.send(UnloadAdapter(adapter.key))
    return PlainTextResponse(f"Success: LoRA adapter '{payload.lora_name}' removed successfully.")


ROUTES = (
    Route(
        "POST",
        "/v1/load_lora_adapter",
        load_adapter,
        "admin",
        request=(LoadAdapterRequest,),
        response="text/plain",
        description="The adapter is loaded.",
        errors=(
            *("lora_root_missing", "lora_disabled", "adapter_exists", "adapter_missing", "adapter_outside_root"),
            *("adapter_malformed", "adapter_unsupported", "adapter_rank", "adapter_mismatch", "adapter_size"),
            *("adapters_in_use", "adapter_changed"),
            *("path_outside_model", "broken_link", "model_malformed", "format_unsupported", *UNAVAILABLE),
        ),
        enabled_by="enable_admin_routes",
    ),
    Route(
        "POST",
        "/v1/unload_lora_adapter",
        unload_adapter,
        "admin",
        request=(UnloadAdapterRequest,),
        response="text/plain",
        description="The name is forgotten.",
        errors=("unknown_adapter",),
        enabled_by="enable_admin_routes",
    ),
)
