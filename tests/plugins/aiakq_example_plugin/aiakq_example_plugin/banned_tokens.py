"""A feature in one file: requests may ban tokens, a limited number of such requests run at once, and a route sets it.

Request field   {"vllm_xargs": {"ban": [5, 6]}}, offline SamplingParams(extra_args={"ban": [5, 6]})
Row transform   the tokens are never sampled
Resource        requests wait while as many with banned tokens run as may
Engine command  POST /ban_limit {"limit": 2}
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor

from aiakq.runtime.config.scheduler import SchedulerConfig
from aiakq.runtime.engine.pages import PagePool
from aiakq.runtime.engine.resources import Resource
from aiakq.runtime.engine.sequence import Sequence
from aiakq.runtime.executor.row_transforms import Outputs, RowTransform
from aiakq.runtime.protocol.command import Command, PluginCommand
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.server.api.request_model import RequestModel, parse_body
from aiakq.server.api.routes import Route
from aiakq.server.api.service import Service
from aiakq.server.http.body import read_body


def banned(spec: RequestSpec) -> list[int]:
    """The tokens that a request bans."""
    return list((spec.sampling.extra_args or {}).get("ban", ()))


class BannedTokens(RowTransform):
    """Tokens that are not sampled."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    def apply(self, logits: Tensor, outputs: Outputs) -> None:
        logits[self._token_ids] = -float("inf")


def new_transform(spec: RequestSpec) -> BannedTokens | None:
    return BannedTokens(banned(spec)) if banned(spec) else None


class BanLimit(Resource):
    """How many requests with banned tokens run at once."""

    def __init__(self) -> None:
        self.limit = 1
        self._running: set[Sequence] = set()

    def admits(self, sequence: Sequence) -> bool:
        return not banned(sequence.spec) or len(self._running) < self.limit

    def acquire(self, sequence: Sequence) -> None:
        if banned(sequence.spec):
            self._running.add(sequence)

    def release(self, sequence: Sequence) -> None:
        self._running.discard(sequence)

    def handle(self, command: Command) -> bool:
        if not isinstance(command, PluginCommand) or command.feature != "bans":
            return False
        self.limit = int(command.values["limit"])
        return True


def new_resource(config: SchedulerConfig, pool: PagePool) -> BanLimit:
    return BanLimit()


class BanLimitRequest(RequestModel):
    """The body of POST /ban_limit."""

    limit: int


async def set_limit(service: Service, request: Request) -> Response:
    """Set how many requests with banned tokens run at once."""
    body = parse_body(BanLimitRequest, await read_body(request, service.max_body_bytes))
    service.state.manager.send(PluginCommand("bans", {"limit": body.limit}))
    return Response()


ROUTES = (Route("POST", "/ban_limit", set_limit, "admin", request=(BanLimitRequest,)),)
