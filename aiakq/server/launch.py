"""``aiakq serve``: bind, load, serve, drain, exit. Prints nothing; progress is reported as events."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import prometheus_client

from aiakq.arguments.server import ServerArguments
from aiakq.errors import AiakqError, error
from aiakq.server.api.app import count_refusals, create_app
from aiakq.server.api.routes import error_shapes, keyless_paths, load_routes
from aiakq.server.api.service import Service
from aiakq.server.http.auth import CURL_KEY, read_admin_keys, read_keys
from aiakq.server.http.body_budget import BodyBudget
from aiakq.server.http.http_server import Gateway, start_http
from aiakq.server.http.listener import (
    allow_many_connections,
    bind,
    bind_unix,
    fitting_connections,
    is_loopback,
    url_of,
)
from aiakq.server.loading import load_service, startup_facts
from aiakq.server.process.replicas import Supervisors
from aiakq.server.shutdown import Signals, serve_until_end
from aiakq.server.start_checks import check_named_files
from aiakq.server.telemetry.events import OnEvent, ServerEvent
from aiakq.server.telemetry.logs import configure_logging, logging_as_events

_Result = TypeVar("_Result")


def serve(args: ServerArguments, on_event: OnEvent) -> int:
    """Serve until a signal arrives, and return the exit code.

    args      arguments validated by ``aiakq.arguments.server.checked(..., server=True)``.
    on_event  called on the event loop with every event, in order.
    Returns 0 after a graceful shutdown, 130 or 143 if a signal arrived during loading or a second one interrupted the
    drain, and 9 if the engine exited too often. Raises the AiakqError that the server failed to start with: no_key,
    bad_option, option_conflict, port_in_use, engine_start, plugin and the errors of loading a model.
    """
    allow_many_connections()
    prometheus_client.disable_created_metrics()
    with logging_as_events(on_event):
        if args.log_config_file is not None:
            configure_logging(args.log_config_file)
        return asyncio.run(_serve(args, on_event))


async def _serve(args: ServerArguments, on_event: OnEvent) -> int:
    start_time = time.monotonic()
    keys = read_keys(args, os.environ)
    args = replace(args, fair_share=bool(keys) if args.fair_share is None else args.fair_share)
    local = args.uds is not None or is_loopback(args.host)
    if not keys and not local and not args.allow_no_key:
        raise error("no_key", host=args.host)
    check_named_files(args)
    listener = bind(args.host, args.port) if args.uds is None else bind_unix(args.uds)
    url = url_of(listener, args.host, tls=bool(args.ssl_certfile))
    on_event(ServerEvent("listening", f"Listening on {url}; loading the model.", url=url))
    if not keys and not local:
        text = f"Anyone who can reach {args.host} can use this server, because it requires no key."
        on_event(ServerEvent("warning", text))
    _check_admin_keys(args, bool(keys), on_event)
    args = replace(args, max_connections=_checked_connections(args.max_connections, on_event))
    routes = load_routes(args)
    open_paths = keyless_paths(routes, args)
    gateway = Gateway(args)
    with Signals() as signals:
        server, server_task = start_http(gateway, listener, args, keys, open_paths, error_shapes(routes))
        supervisors = Supervisors(args, on_event)
        await supervisors.start()
        gateway.progress = lambda: supervisors.progress.as_dict()
        try:
            loading = asyncio.create_task(load_service(supervisors, args, on_event))
            if not await signals.wait_or(loading):
                # The task fails because of the shutdown; its result is not used.
                loading.add_done_callback(lambda task: task.cancelled() or task.exception())
                supervisors.kill()
                return 128 + signals.received[0]
            service, ready = _result_or_kill(loading, supervisors)
            engine = asyncio.create_task(supervisors.run(service.state.manager, ready))
            await asyncio.sleep(0)  # until the manager has the engine
            await _load_adapters(service, args, engine)
            gateway.on_refusal = count_refusals(service, routes, args.root_path)
            if gateway.counts is not None:
                gateway.counts.start((route.path for route in routes), service.state.metrics.count_status)
            app = create_app(
                service,
                routes,
                root_path=args.root_path,
                keyless_paths=open_paths if keys else None,
                with_docs=not args.disable_fastapi_docs,
            )
            gateway.app = budget = BodyBudget(app, service.max_total_body_bytes)
            _freeze_garbage_collector()
            seconds = time.monotonic() - start_time
            facts = startup_facts(service, ready)
            page = "" if args.disable_playground or args.uds is not None else f"{url}/"
            event = _ready_event(service, facts, url, bool(keys), seconds, supervisors.all[0].engine.pid)
            on_event(replace(event, page=page))
            state = service.state
            return await serve_until_end(state, supervisors, engine, args, signals, server_task, on_event, budget)
        finally:
            server.should_exit = True
            await asyncio.gather(supervisors.stop(), server_task, return_exceptions=True)
            if args.uds is not None:
                Path(args.uds).unlink(missing_ok=True)


def _check_admin_keys(args: ServerArguments, asks_for_key: bool, on_event: OnEvent) -> None:
    """Warn if every key administrates. Raises ``option_conflict`` for keys to administrate without routes for it."""
    admin_keys = read_admin_keys(args)
    if admin_keys and not args.enable_admin_routes:
        reason, hint = "there is nothing to administrate", "Give --enable-admin-routes too."
        other = "no --enable-admin-routes"
        raise error("option_conflict", option="--admin-api-key", other=other, reason=reason, hint=hint)
    if asks_for_key and args.enable_admin_routes and not admin_keys:
        text = "Every API key can administrate this server: --admin-api-key gives administration a key of its own."
        on_event(ServerEvent("warning", text))


def _checked_connections(requested: int, on_event: OnEvent) -> int:
    """Return the maximum number of connections that the limit of open files allows, at most ``requested``."""
    fitting = fitting_connections(requested)
    if fitting < requested:
        text = (
            f"The limit of open files leaves room for {fitting} connections, not {requested}: raise it with ulimit -n."
        )
        on_event(ServerEvent("warning", text))
    return fitting


def _result_or_kill(loading: asyncio.Task[_Result], supervisors: Supervisors) -> _Result:
    """Return the result of ``loading``. If it fails, kill the engines, which may still be reading weights."""
    try:
        return loading.result()
    except BaseException:
        supervisors.kill()
        raise


async def _load_adapters(service: Service, args: ServerArguments, engine: asyncio.Task[AiakqError]) -> None:
    """Load the adapters of --lora-modules. If one fails, the end of the engine is no failure of its own."""
    try:
        await service.model.adapters.start(args, service.model.names, service.state.manager.adapters.check)
    except BaseException:
        engine.cancel()
        raise


def _freeze_garbage_collector() -> None:
    """Exclude all current objects from garbage collection, because they live as long as the process."""
    gc.collect()
    gc.freeze()
    gc.collect()  # resets the counts that decide when the next full collection is due


def _ready_event(
    service: Service, facts: dict[str, str], url: str, asks_for_key: bool, seconds: float, engine_pid: int
) -> ServerEvent:
    body = json.dumps({"model": service.model.names[0], "prompt": "Once upon a time", "max_tokens": 16})
    key = CURL_KEY if asks_for_key else ""
    # Over a Unix domain socket the host of the address does not matter.
    address = f"--unix-socket {url.removeprefix('unix:')} http://localhost" if url.startswith("unix:") else url
    curl = f"curl {address}/v1/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    return ServerEvent(
        "ready",
        f"Ready after {seconds:.1f} s: {url}",
        seconds=seconds,
        url=url,
        curl=curl,
        facts=facts,
        engine_pid=engine_pid,
    )
