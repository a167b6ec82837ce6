"""What the options of logs and traces enable: observers of requests, and the log of prompts."""

from __future__ import annotations

import logging
import math

from aiakq.arguments.server import ServerArguments
from aiakq.errors import error
from aiakq.server.telemetry.events import OnEvent
from aiakq.server.telemetry.logs import RequestLog, request_logger
from aiakq.server.telemetry.request_records import RequestObserver
from aiakq.server.telemetry.traces import Tracer


def open_observers(args: ServerArguments, on_event: OnEvent) -> list[RequestObserver]:
    """Return the observers of requests: log and traces. Raises option_conflict, traces_missing and bad_option."""
    observers: list[RequestObserver] = []
    if args.otlp_traces_endpoint:
        names = args.served_names
        observers.append(Tracer(args.otlp_traces_endpoint, args.collect_detailed_traces or (), names[0]))
    elif args.collect_detailed_traces:
        reason = "without a collector there are no traces"
        hint = "Give --otlp-traces-endpoint URL."
        other = "no --otlp-traces-endpoint"
        raise error("option_conflict", option="--collect-detailed-traces", other=other, reason=reason, hint=hint)
    if args.log_format == "json":
        observers.append(RequestLog(on_event))  # after the tracer, whose ids it writes
    return observers


def enable_request_log(args: ServerArguments) -> float | None:
    """Enable the request log for --enable-log-requests. Returns ``log_prompts`` of ``ServiceOptions``."""
    if not args.enable_log_requests:
        if args.enable_log_outputs:
            other, reason = "no --enable-log-requests", "outputs are logged with their requests"
            hint = "Give both."
            raise error("option_conflict", option="--enable-log-outputs", other=other, reason=reason, hint=hint)
        return None
    request_logger.setLevel(logging.INFO)
    return math.inf if args.max_log_len is None else args.max_log_len
