"""Who may use the server: API keys, the names it answers to, and the web pages it talks to.

Everything is refused that is not allowed here: a route needs a key unless it is in ``OPEN``, so a new one cannot be
forgotten. Decisions look at ``scope["path"]``, which is what the router looks at, never at a URL built from headers.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from aiakq.arguments.server import API_KEY_VARIABLE
from aiakq.errors import AiakqError, error
from aiakq.server.http.listener import is_loopback
from aiakq.server.http.streaming import error_answer

#: Told of every request that is refused here.
OnRefusal = Callable[[Scope, AiakqError], None]
#: What a probe without a key may ask.
OPEN = frozenset({"/health", "/ping", "/ready", "/version"})
#: What a header can carry without being quoted.
_KEY = re.compile(r"[\x21-\x7e]+")


class Keys:
    """The keys that are good, as hashes: comparing them takes the same time whatever was sent."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = {hashlib.sha256(key.encode()).digest() for key in keys}

    def __len__(self) -> int:
        return len(self._digests)

    def owner(self, given: str) -> str | None:
        """What stands for ``given`` if it is one of them: the beginning of its hash."""
        digest = hashlib.sha256(given.encode("latin-1")).digest()
        return digest.hex()[:32] if sum(hmac.compare_digest(digest, own) for own in self._digests) else None


def read_keys(args: Mapping[str, Any], environment: Mapping[str, str]) -> Keys:
    """The keys of --api-key, --api-key-file and the environment together. Raises ``bad_option``."""
    keys = list(args["api_key"] or ())
    keys += [key for key in environment.get(API_KEY_VARIABLE, "").split(",") if key]
    if args["api_key_file"] is not None:
        try:
            lines = Path(args["api_key_file"]).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            raise _bad_keys("--api-key-file", args["api_key_file"], "a readable file") from None
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise _bad_keys("--api-key-file", args["api_key_file"], "a file with at least one key")
        keys += found
    for key in keys:
        if not _KEY.fullmatch(key):
            raise _bad_keys("An API key", "...", "printable characters without spaces")
    return Keys(keys)


def _bad_keys(option: str, value: str, expected: str) -> AiakqError:
    return error("bad_option", option=option, value=value, expected=expected, hint="Write one key per line.")


def protected(
    app: ASGIApp, args: Mapping[str, Any], keys: Keys, on_refusal: OnRefusal = lambda scope, refusal: None
) -> ASGIApp:
    """``app`` behind the checks that ``args`` (a checked set of server arguments) ask for."""
    origins = words(args["allowed_origins"])
    if keys:
        app = KeyCheck(app, keys, open_paths(args), on_refusal)
    if origins:
        # Outside the keys: a browser asks without one whether it may send it.
        app = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=words(args["allowed_methods"]) or ["*"],
            allow_headers=words(args["allowed_headers"]) or ["*"],
            allow_credentials=args["allow_credentials"],
            expose_headers=["x-request-id"],
        )
    hosts = words(args["allowed_hosts"])
    if is_loopback(args["host"]):
        hosts = [*hosts, "localhost", args["host"]]
    return HostCheck(app, frozenset(host.lower() for host in hosts), frozenset(origins), on_refusal)


def open_paths(args: Mapping[str, Any]) -> frozenset[str]:
    """The paths that need no key, where any does."""
    return OPEN | {"/metrics"} if args["metrics_without_key"] else OPEN


def words(given: list[str] | None) -> list[str]:
    """A list argument; vLLM's form, a JSON list in one word (which the command line has cut at commas), is one too."""
    text = ",".join(given or ())
    if text.startswith("["):
        try:
            return [str(word) for word in json.loads(text)]
        except ValueError:
            expected = "a list, or a JSON list"
            raise error("bad_option", option="The list", value=text, expected=expected, hint="Like: a,b") from None
    return list(given or ())


class KeyCheck:
    """Asks for a key on every path that is not ``open``; whose it is, is in ``request.state.owner``."""

    def __init__(self, app: ASGIApp, keys: Keys, open: frozenset[str], on_refusal: OnRefusal) -> None:
        self.app = app
        self.keys = keys
        self.open = open
        self.on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self.open:
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            owner = self.keys.owner(key.strip()) if scheme.lower() == "bearer" else None
            if owner is None:
                refusal = error("invalid_api_key")
                self.on_refusal(scope, refusal)
                await error_answer(refusal, {"www-authenticate": "Bearer"})(scope, receive, send)
                return
            scope.setdefault("state", {})["owner"] = owner
        await self.app(scope, receive, send)


class HostCheck:
    """Refuses names that are not the server's own, and web pages from elsewhere.

    A page can make its own name resolve to 127.0.0.1 and so reach a server that listens there only; its requests still
    carry that name. An address in place of a name proves that no name was bent.

    hosts    names that are good, in small letters; none: every name is.
    origins  of other pages that are good; "*" means any.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str], origins: frozenset[str], on_refusal: OnRefusal) -> None:
        self.app = app
        self.hosts = hosts
        self.origins = origins
        self.on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = self._refusal(Headers(scope=scope))
            if refusal is not None:
                self.on_refusal(scope, refusal)
                await error_answer(refusal)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _refusal(self, headers: Headers) -> AiakqError | None:
        host = headers.get("host", "").lower()
        if self.hosts and host and not self._is_ours(host_name(host)):
            return error("host_not_allowed")
        origin = headers.get("origin")
        if origin is not None and not {"*", origin} & self.origins:
            own_page = "://" in origin and origin.lower().partition("://")[2] == host
            if not own_page:
                return error("origin_not_allowed")
        return None

    def _is_ours(self, name: str) -> bool:
        if name in self.hosts or "*" in self.hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def host_name(host: str) -> str:
    """The name in a Host header, without port, brackets and final dot."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")
