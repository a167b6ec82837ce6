"""HttpServer: uvicorn on a bound socket, with TLS, connection limits and access control."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from aiakq.arguments.server import ServerArguments
from aiakq.errors import AiakqError, error
from aiakq.server.http.auth import Keys, OnRefusal, add_access_control
from aiakq.server.http.connection import GuardedConnection, Limits
from aiakq.server.http.error_shapes import ErrorShapes, error_body
from aiakq.server.http.listener import fitting_backlog
from aiakq.server.http.pages import playground_page
from aiakq.server.http.request_ids import RequestIds
from aiakq.server.http.responses import ErrorBody, error_response, not_ready_response
from aiakq.server.http.root_path import route_path
from aiakq.server.http.status_counts import StatusCounts
from aiakq.server.http.tls import CertificateFiles
from aiakq.server.telemetry.logs import WithoutPaths
from aiakq.system.files import check_named

#: Methods that a route of the server may have.
METHODS = "GET, HEAD, OPTIONS, POST"
#: Seconds to flush responses that are already written.
FLUSH_SECONDS = 2
#: Seconds of delay of the sweep from which on the event loop counts as blocked.
LATE_SECONDS = 0.5


class Gateway:
    """The initial application: responds 503 ``loading`` until ``app`` is set, except on /live and the playground.

    It also answers OPTIONS for the server as a whole.

    progress    progress of loading, for /ready.
    on_refusal  called with requests that access control refuses.
    counts      counters of responses by status; None until they are enabled.
    """

    def __init__(self, args: ServerArguments) -> None:
        self.args = args
        self.root_path = args.root_path
        self.app: ASGIApp | None = None
        self.progress: Callable[[], dict[str, object]] = dict
        self.on_refusal: OnRefusal = lambda scope, refusal: None
        self.counts: StatusCounts | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["path"] == "*" and scope["method"] == "OPTIONS":
            app = Response(status_code=204, headers={"allow": METHODS})
        elif app is None:
            failure = error("loading")
            path = route_path(scope["path"], self.root_path)
            if path == "/live":
                app = Response()
            elif path == "/" and not self.args.disable_playground:
                app = playground_page(self.args.playground_servers or ())
            elif path == "/ready":
                app = not_ready_response(failure, self.progress())
            else:
                app = error_response(failure, body=error_body(scope, failure))
        await app(scope, receive, send)


class HeadRequests:
    """Middleware that handles HEAD like GET. The server sends no body, since it knows the method."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "HEAD":
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, send)


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: connections must stay open until running requests are finished."""

    def __init__(self, config: uvicorn.Config, limits: Limits, certificates: CertificateFiles | None = None) -> None:
        """certificates: files that are reloaded when they change."""
        super().__init__(config)
        self.limits = limits
        self._certificates = certificates
        self._swept = math.inf

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on ``sockets`` as uvicorn does, with a timeout for TLS handshakes."""
        config, loop = self.config, asyncio.get_running_loop()

        def connection() -> asyncio.Protocol:
            make: Callable[..., asyncio.Protocol] = config.http_protocol_class
            return make(config=config, server_state=self.server_state, app_state={}, _loop=loop)

        handshake = self.limits.header_seconds if config.ssl else None
        self.servers = [
            await loop.create_server(
                connection, sock=sock, ssl=config.ssl, ssl_handshake_timeout=handshake, backlog=config.backlog
            )
            for sock in sockets or ()
        ]
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        """Called ten times per second; every other time, close the connections that have timed out."""
        if counter % 10 == 0 and self._certificates is not None:
            self._certificates.refresh(cast(ssl.SSLContext, self.config.ssl))
        if counter % 2 == 0:
            now = asyncio.get_running_loop().time()
            late = max(0.0, now - self._swept - LATE_SECONDS)
            self._swept = now
            for connection in list(self.server_state.connections):
                cast(GuardedConnection, connection).sweep(now, late)
        return await super().on_tick(counter)


def start_http(
    gateway: Gateway,
    listener: socket.socket,
    args: ServerArguments,
    keys: Keys,
    keyless_paths: frozenset[str],
    error_shapes: Mapping[str, type[ErrorBody]],
) -> tuple[HttpServer, asyncio.Task[None]]:
    """Serve ``gateway`` on ``listener``; for the last two parameters, see ``KeyCheck`` and ``ErrorShapes``.

    Raises ``bad_option`` if the certificate cannot be used.
    """
    limits = Limits(
        connections=args.max_connections,
        per_address=args.max_connections_per_address if args.uds is None else args.max_connections,
        header_seconds=args.header_timeout,
        body_seconds=args.body_timeout,
        idle_seconds=args.idle_timeout,
        write_seconds=args.write_timeout,
        lingering=fitting_backlog(),
    )
    level = args.uvicorn_log_level

    def on_refusal(scope: Scope, refusal: AiakqError) -> None:
        gateway.on_refusal(scope, refusal)

    app = add_access_control(gateway, args, keys, keyless_paths, on_refusal)
    app = HeadRequests(ErrorShapes(app, error_shapes, args.root_path))
    app = gateway.counts = StatusCounts(app, args.root_path)
    config = uvicorn.Config(
        RequestIds(app, args.enable_request_id_headers),
        http=cast(Any, functools.partial(GuardedConnection, limits=limits)),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=level,
        access_log=level in ("info", "debug") and not args.disable_uvicorn_access_log,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=24 * 3600,  # GuardedConnection has its own timeout
        timeout_graceful_shutdown=FLUSH_SECONDS,
        backlog=fitting_backlog(),
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        ssl_ciphers=args.ssl_ciphers or "TLSv1",  # uvicorn's default
    )
    if args.disable_access_log_for_endpoints:
        logging.getLogger("uvicorn.access").addFilter(WithoutPaths(args.disable_access_log_for_endpoints))
    try:
        config.load()
    except (OSError, ValueError) as failure:
        raise _bad_certificate(args, failure) from None
    certificates = None
    if args.ssl_certfile and args.enable_ssl_refresh:
        certificates = CertificateFiles(args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs)
    server = HttpServer(config, limits, certificates)
    return server, asyncio.create_task(server.serve(sockets=[listener]))


def check_tls(args: ServerArguments) -> None:
    """Raise ``option_conflict`` for TLS options without effect, or that prevent all clients from connecting."""
    hint = "Give --ssl-certfile FILE and --ssl-keyfile FILE."
    if not args.ssl_certfile:
        without_effect = {
            "--ssl-keyfile": args.ssl_keyfile,
            "--ssl-ca-certs": args.ssl_ca_certs,
            "--ssl-cert-reqs": args.ssl_cert_reqs,
            "--ssl-ciphers": args.ssl_ciphers,
            "--enable-ssl-refresh": args.enable_ssl_refresh,
        }
        for flag, value in without_effect.items():
            if value:
                reason = "TLS needs a certificate"
                raise error("option_conflict", option=flag, other="no --ssl-certfile", reason=reason, hint=hint)
    elif args.ssl_cert_reqs and not args.ssl_ca_certs:
        reason = "client certificates could not be verified"
        hint = "Give --ssl-ca-certs FILE."
        raise error("option_conflict", option="--ssl-cert-reqs", other="no --ssl-ca-certs", reason=reason, hint=hint)
    files = {
        "--ssl-certfile": args.ssl_certfile,
        "--ssl-keyfile": args.ssl_keyfile,
        "--ssl-ca-certs": args.ssl_ca_certs,
    }
    for option, path in files.items():
        if path:
            _check_readable(option, path)
    if args.ssl_ciphers:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).set_ciphers(args.ssl_ciphers)
        except ssl.SSLError:
            expected = "a list of cipher suites as openssl ciphers takes it"
            ciphers = args.ssl_ciphers
            raise error("bad_option", option="--ssl-ciphers", value=ciphers, expected=expected, hint="") from None


def _check_readable(option: str, path: str) -> None:
    """Raise ``bad_option`` for what is no file: a named pipe would be waited for."""

    def bad(reason: str) -> AiakqError:
        return error("bad_option", option=option, value=path, expected=f"a readable file ({reason})", hint="")

    check_named(Path(path), bad)


def _bad_certificate(args: ServerArguments, failure: Exception) -> AiakqError:
    reason = failure.reason if isinstance(failure, ssl.SSLError) else getattr(failure, "strerror", None)
    return error(
        "bad_option",
        option="--ssl-certfile",
        value=args.ssl_certfile,
        expected=f"a certificate that can be used ({reason or failure})",
        hint="Give PEM files: the certificate chain, and its key with --ssl-keyfile.",
    )
