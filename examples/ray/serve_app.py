"""aiakq behind Ray Serve: every replica is an ``aiakq serve`` of its own, whose ranks run where Serve reserves room.

    serve run examples.ray.serve_app:build model=out/awq tensor_parallel_size=2 cpus_per_rank=8 num_replicas=2

Requests and streams pass through as they are, so clients of the OpenAI API use http://HOST:8000/v1. Needs ray[serve].
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import httpx
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

from aiakq.server.background import start_in_background

#: Headers that belong to one connection and not to the message.
CONNECTION_HEADERS = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


@serve.deployment(max_ongoing_requests=256, health_check_period_s=5)
class Replica:
    """A server that answers on this node only, behind Serve's proxy."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        group = ray.util.get_current_placement_group()
        if group is not None:  # the engine is another process, which does not know it
            os.environ["AIAKQ_RAY_PLACEMENT_GROUP"] = group.id.hex()
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        self._server = start_in_background({**arguments, "host": "127.0.0.1", "port": 0})
        self._client = httpx.AsyncClient(base_url=self._server.url, timeout=None)

    async def __call__(self, request: Request) -> StreamingResponse:
        """Pass on one request, and the answer as it comes."""
        headers = [(name, value) for name, value in request.headers.items() if name not in CONNECTION_HEADERS]
        url = httpx.URL(path=request.url.path, query=request.url.query.encode())
        passed = self._client.build_request(request.method, url, headers=headers, content=await request.body())
        answer = await self._client.send(passed, stream=True)

        async def body() -> AsyncIterator[bytes]:
            try:
                async for part in answer.aiter_raw():
                    yield part
            finally:  # also when the client has gone: its request is then aborted
                await answer.aclose()

        kept = {name: value for name, value in answer.headers.items() if name not in CONNECTION_HEADERS}
        return StreamingResponse(body(), answer.status_code, kept)

    async def check_health(self) -> None:
        """Serve starts another replica when this raises; lost ranks are started anew by the server itself."""
        (await self._client.get("/health")).raise_for_status()

    def __del__(self) -> None:
        if hasattr(self, "_server"):
            self._server.stop()


def build(arguments: dict[str, Any]) -> serve.Application:
    """The application. ``arguments`` are those of ``aiakq serve``, besides num_replicas and cpus_per_rank."""
    given = dict(arguments)
    replicas, cpus = int(given.pop("num_replicas", 1)), int(given.pop("cpus_per_rank", 1))
    ranks = int(given.get("tensor_parallel_size", 1)) * int(given.get("pipeline_parallel_size", 1))
    bound = Replica.options(
        num_replicas=replicas,
        ray_actor_options={"num_cpus": cpus},
        placement_group_bundles=[{"CPU": cpus}] * ranks,  # the first one is the replica's own
        placement_group_strategy="PACK",
    )
    return bound.bind({"distributed_executor_backend": "ray", **given})
