"""Access control: API keys, allowed hosts and allowed origins.

Access is denied by default: every path needs a key except those listed, so that a new route cannot be forgotten.
Decisions use ``scope["path"]``, as the router does, never a URL built from headers.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import re
from collections.abc import Callable, Iterable, Mapping

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from aiakq.arguments.server import API_KEY_VARIABLE, VLLM_KEY_VARIABLE, ServerArguments
from aiakq.errors import AiakqError, error
from aiakq.server.http.error_shapes import error_body
from aiakq.server.http.listener import is_loopback
from aiakq.server.http.responses import error_response
from aiakq.server.http.root_path import route_path
from aiakq.system.files import read_named_text
from aiakq.system.user_path import user_path

#: Callback for every refused request.
OnRefusal = Callable[[Scope, AiakqError], None]
#: Characters that a header can contain without quoting.
_KEY = re.compile(r"[\x21-\x7e]+")
#: The argument of curl that sends a key.
CURL_KEY = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"'


class Keys:
    """The valid keys, as hashes. Comparisons take constant time."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = {hashlib.sha256(key.encode()).digest() for key in keys}

    @staticmethod
    def joined(*groups: Keys) -> Keys:
        """Return the keys of all ``groups``."""
        keys = Keys(())
        for group in groups:
            keys._digests |= group._digests
        return keys

    def __len__(self) -> int:
        return len(self._digests)

    def owner(self, key: str) -> str | None:
        """Return an identifier of the key ``key`` (a prefix of its hash), or None if the key is invalid."""
        digest = hashlib.sha256(key.encode("latin-1")).digest()
        return digest.hex()[:32] if sum(hmac.compare_digest(digest, own) for own in self._digests) else None


def read_keys(args: ServerArguments, environment: Mapping[str, str]) -> Keys:
    """Return all keys of --api-key, --api-key-file and the environment. Raises ``bad_option``."""
    variable = [key for key in environment.get(API_KEY_VARIABLE, "").split(",") if key]
    keys = [*_checked_keys(args.api_key, "--api-key-file", args.api_key_file), *_checked(variable)]
    of_vllm = environment.get(VLLM_KEY_VARIABLE, "")
    return Keys(keys if keys or not of_vllm else _checked([of_vllm]))


def read_admin_keys(args: ServerArguments) -> Keys:
    """Return all keys of --admin-api-key and --admin-api-key-file. Raises ``bad_option``."""
    return Keys(_checked_keys(args.admin_api_key, "--admin-api-key-file", args.admin_api_key_file))


def _checked_keys(given: list[str] | None, option: str, path: str | None) -> list[str]:
    """Return the keys ``given`` and those in the file ``path``, which ``option`` names."""
    keys = list(given or ())
    if given is not None and not keys:
        hint = "Is a shell variable empty? For a server without keys leave the option out."
        name = option.removesuffix("-file")
        raise error("bad_option", option=name, value="", expected="a key", hint=hint)
    if path is not None:

        def bad(reason: str) -> AiakqError:
            return _bad_keys(option, path, f"a readable file ({reason})")

        lines = read_named_text(user_path(path), 1 << 20, bad).splitlines()
        file_keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not file_keys:
            raise _bad_keys(option, path, "a file with at least one key")
        keys += file_keys
    return _checked(keys)


def _checked(keys: list[str]) -> list[str]:
    if not all(_KEY.fullmatch(key) for key in keys):
        raise _bad_keys("An API key", "...", "printable characters without spaces")
    return keys


def _bad_keys(option: str, value: str, expected: str) -> AiakqError:
    return error("bad_option", option=option, value=value, expected=expected, hint="Write one key per line.")


def add_access_control(
    app: ASGIApp, args: ServerArguments, keys: Keys, keyless_paths: frozenset[str], on_refusal: OnRefusal
) -> ASGIApp:
    """Wrap ``app`` in the access checks of the server arguments ``args``. ``keyless_paths`` need no key."""
    origins = parse_list(args.allowed_origins)
    admin_keys = read_admin_keys(args)
    if admin_keys:
        app = AdminCheck(app, admin_keys)
    if keys:
        app = KeyCheck(app, Keys.joined(keys, admin_keys), keyless_paths, on_refusal, args.root_path)
    if origins:
        # Outside the key check, because browsers send preflight requests without a key.
        app = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=parse_list(args.allowed_methods) or ["*"],
            allow_headers=parse_list(args.allowed_headers) or ["*"],
            allow_credentials=args.allow_credentials,
            expose_headers=["x-request-id", "x-ignored-fields"],
        )
    hosts = parse_list(args.allowed_hosts)
    # No host check on a Unix domain socket: web pages cannot reach it, and its clients may send any host.
    if args.uds is None and is_loopback(args.host):
        hosts = [*hosts, "localhost", args.host]
    return HostCheck(app, frozenset(host.lower() for host in hosts), frozenset(origins), on_refusal)


def parse_list(value: list[str] | None) -> list[str]:
    """Parse a list argument. vLLM's format, a JSON list (which the command line splits at commas), is accepted too."""
    text = ",".join(value or ())
    if text.startswith("["):
        try:
            return [str(entry) for entry in json.loads(text)]
        except ValueError:
            expected = "a list, or a JSON list"
            raise error("bad_option", option="The list", value=text, expected=expected, hint="Like: a,b") from None
    return list(value or ())


def client_of(request: Request) -> str:
    """Return an identifier of the client: its API key if keys are used, otherwise its address.

    An IPv6 address is reduced to its /64 network, all of which one machine may own. Without an address, as on a Unix
    domain socket, all requests belong to one client.
    """
    name = getattr(request.state, "owner", "")
    if not name:
        name = request.client.host if request.client else ""
        if ":" in name:
            name = str(ipaddress.ip_network((name.partition("%")[0], 64), strict=False))
    return hashlib.sha256(name.encode()).hexdigest()[:16]


class KeyCheck:
    """Requires a key on every path not in ``keyless_paths``. Sets ``request.state.owner`` to the key's identifier."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        keyless_paths: frozenset[str],
        on_refusal: OnRefusal,
        root_path: str = "",
    ) -> None:
        self.app = app
        self.keys = keys
        self.keyless_paths = keyless_paths
        self.on_refusal = on_refusal
        self.root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and route_path(scope["path"], self.root_path) not in self.keyless_paths:
            owner = owner_of(self.keys, Headers(scope=scope))
            if owner is None:
                refusal = error("invalid_api_key")
                self.on_refusal(scope, refusal)
                body = error_body(scope, refusal)
                await error_response(refusal, {"www-authenticate": "Bearer"}, body)(scope, receive, send)
                return
            scope.setdefault("state", {})["owner"] = owner
        await self.app(scope, receive, send)


class AdminCheck:
    """Sets ``request.state.administrates``, without which the application refuses the routes to administrate."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            administrates = owner_of(self.keys, Headers(scope=scope)) is not None
            scope.setdefault("state", {})["administrates"] = administrates
        await self.app(scope, receive, send)


def owner_of(keys: Keys, headers: Headers) -> str | None:
    """Return the identifier of the key, sent as OpenAI's or Anthropic's clients do; None without a valid key."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    owner = keys.owner(key.strip()) if scheme.lower() == "bearer" else None
    return owner or keys.owner(headers.get("x-api-key", ""))


class HostCheck:
    """Rejects unknown host names, against DNS rebinding, and requests from web pages of other origins.

    A web page can make its own host name resolve to 127.0.0.1 to reach a server that only listens there, but its
    requests contain that name. An IP address in the Host header is always accepted, since it cannot be rebound.

    hosts    allowed names in lowercase; empty allows all.
    origins  allowed origins besides the server's own; "*" allows all.
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
                await error_response(refusal, body=error_body(scope, refusal))(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _refusal(self, headers: Headers) -> AiakqError | None:
        host = headers.get("host", "").lower()
        if self.hosts and host and not self._is_allowed(host_name(host)):
            return error("host_not_allowed")
        origin = headers.get("origin")
        if origin is not None and not {"*", origin} & self.origins:
            same_origin = "://" in origin and origin.lower().partition("://")[2] == host
            if not same_origin:
                return error("origin_not_allowed")
        return None

    def _is_allowed(self, name: str) -> bool:
        if name in self.hosts or "*" in self.hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def host_name(host: str) -> str:
    """Return the name in a Host header, without port, brackets and trailing dot."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")
