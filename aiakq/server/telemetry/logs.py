"""Forwards log records as server events instead of writing them to standard error."""

from __future__ import annotations

import contextlib
import json
import logging
import logging.config
import time
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

from aiakq.errors import AiakqError, error
from aiakq.runtime.text.output_processor import Delta
from aiakq.server.telemetry.events import OnEvent, ServerEvent
from aiakq.server.telemetry.request_records import RequestRecord, log_fields
from aiakq.system.files import read_named_text

#: Lines about single requests, with --enable-log-requests; a logger of its own, so that it has its own level.
request_logger = logging.getLogger("aiakq.requests")

#: Logger of Python's warnings.
WARNINGS = "py.warnings"
#: At most ``MAX_LINES`` records with the same message are shown per ``WINDOW_SECONDS``.
MAX_LINES, WINDOW_SECONDS = 5, 10.0


class RequestLog:
    """Reports every finished request as an event. An observer of requests, see ``RequestObserver``."""

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event

    def begin(self, record: RequestRecord) -> None:
        """Only the end is reported."""

    def finish(self, record: RequestRecord) -> None:
        """One event, without anything of the prompt or the text."""
        text = f"{record.route} ended: {record.status} {record.error or record.reason}"
        self._on_event(ServerEvent("request", text, values=log_fields(record)))

    def stop(self, seconds: float) -> None:
        """Nothing is held back."""


class EventLogHandler(logging.Handler):
    """Turns log records into events, with a limit per kind of message: some can be caused by clients at any rate.

    Lines about single requests are not limited. They are only logged on request.
    """

    def __init__(self, on_event: OnEvent) -> None:
        super().__init__()
        self._on_event = on_event
        self._window_start = 0.0
        self._counts: Counter[tuple[str, str]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now - self._window_start > WINDOW_SECONDS:
            self._window_start = now
            left_out = sum(max(0, count - MAX_LINES) for count in self._counts.values())
            self._counts.clear()
            if left_out:
                self._on_event(ServerEvent("log", f"{left_out} more lines like these were left out.", detail="warning"))
        if record.name == "uvicorn.access" and isinstance(record.args, tuple):
            # Client, method, path, version, status. Queries may hold keys and prompts that clients put there.
            record.args = tuple(str(each).partition("?")[0] if at == 2 else each for at, each in enumerate(record.args))
        if record.name == WARNINGS:  # place, category and text, and then the line of source code
            record.msg, record.args = record.getMessage().partition("\n")[0], None
        kind = (record.name, str(record.msg)[:64])
        self._counts[kind] += 1
        if self._counts[kind] <= MAX_LINES or record.name in ("uvicorn.access", request_logger.name):
            self._on_event(ServerEvent("log", self.format(record), name=record.name, detail=record.levelname.lower()))


class OutputLog:
    """Logs the text of every sequence of a request when it ends, for --enable-log-outputs."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._texts: dict[tuple[int, int], list[str]] = {}

    def clear(self) -> None:
        """Discard all text: the request starts again."""
        self._texts.clear()

    def put(self, prompt_index: int, delta: Delta) -> None:
        """Add output of a sequence."""
        texts = self._texts.setdefault((prompt_index, delta.index), [])
        texts.append(delta.text)
        if delta.finish_reason is not None:
            text, which = "".join(texts), f"{prompt_index}.{delta.index}"
            request_logger.info(
                "request %s: output %s %r, finish_reason %s", self._request_id, which, text, delta.finish_reason
            )


class WithoutPaths(logging.Filter):
    """Drops lines of the access log about paths of --disable-access-log-for-endpoints."""

    def __init__(self, paths: Collection[str]) -> None:
        super().__init__()
        self._paths = frozenset(paths)

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args
        return not isinstance(args, tuple) or len(args) < 3 or str(args[2]).partition("?")[0] not in self._paths


def configure_logging(file: str) -> None:
    """Apply the file of --log-config-file. Raises ``bad_option``."""

    def bad(reason: str) -> AiakqError:
        expected = f"a JSON file with a configuration of logging ({reason})"
        return error("bad_option", option="--log-config-file", value=file, expected=expected, hint="")

    text = read_named_text(Path(file), 1 << 20, bad)
    try:
        logging.config.dictConfig({"disable_existing_loggers": False, **json.loads(text)})
    except (ValueError, TypeError, AttributeError, ImportError, RecursionError, OSError) as problem:
        raise bad(" ".join(str(problem.__cause__ or problem).split())[:200]) from None


@contextlib.contextmanager
def logging_as_events(on_event: OnEvent) -> Iterator[None]:
    """Within the context, warnings and the logs of uvicorn, aiakq and opentelemetry only go to ``on_event``."""
    handler = EventLogHandler(on_event)
    logging.captureWarnings(True)
    loggers = [logging.getLogger(name) for name in ("uvicorn", "aiakq", "opentelemetry", WARNINGS)]
    propagated = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger, propagate in zip(loggers, propagated, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate
