"""What the engine gets of an HTTP request besides prompts and sampling parameters."""

from __future__ import annotations

import hashlib
from typing import Any

from starlette.requests import Request

from aiakq.runtime.protocol.adapters import AdapterRef
from aiakq.runtime.protocol.pooling_params import Pooling
from aiakq.runtime.protocol.request import RequestOptions
from aiakq.server.api.service import Service
from aiakq.server.http.auth import client_of


def options_of(
    service: Service, request: Request, payload: Any, adapter: AdapterRef | None, pooling: Pooling | None = None
) -> RequestOptions:
    """Return what the engine gets of an HTTP request besides prompts and sampling parameters."""
    return RequestOptions(
        priority=payload.priority or 0,
        cache_salt=_cache_salt(getattr(request.state, "owner", ""), getattr(payload, "cache_salt", None)),
        client=client_of(request) if service.fair_share else "",
        pooling=pooling,
        adapter=adapter,
    )


def _cache_salt(owner: str, salt: str | None) -> str:
    """Return the salt of the prefix hashes: requests share pages only with equal API keys and ``cache_salt``."""
    return hashlib.sha256(f"{owner} {salt or ''}".encode()).hexdigest()[:32] if owner or salt else ""
