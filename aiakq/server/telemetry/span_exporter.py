"""ReportingExporter: passes spans to an exporter of OpenTelemetry, and logs in few lines what was lost and why."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # an optional dependency
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

logger = logging.getLogger("aiakq.traces")

#: Seconds between lines about a collector that stays away.
REPORT_SECONDS = 60.0
#: The part of a message of OpenTelemetry that says why spans were not taken.
_REASON = re.compile(
    r"\[Errno -?\d+\] ([\w ]+)|StatusCode\.(\w+)|code: (\d+, reason: [\w ]+)|([Rr]ead timed out)|(it redirects [\w ]+)"
)


class ReportingExporter:
    """An exporter as OpenTelemetry's span processors use it, around ``exporter``.

    OpenTelemetry's own lines, several per batch and full of its internals, are replaced: one line when spans are lost,
    one a minute while that lasts, and one when spans arrive again.
    """

    def __init__(self, exporter: SpanExporter, address: str) -> None:
        """address: the collector's, for the log."""
        self._exporter = exporter
        self._address = address
        self._messages: list[str] = []  # of the exporter, since the last batch began
        self._num_lost = 0
        self._next_report = 0.0
        self._log = _OpenTelemetryLog(self)
        self._log.attach()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        self._messages.clear()
        try:
            result = self._exporter.export(spans)
        except Exception as failure:  # an older version raises what a newer one logs
            from opentelemetry.sdk.trace.export import SpanExportResult

            self._messages.append(str(failure))
            result = SpanExportResult.FAILURE
        if result.name != "SUCCESS":
            self.lost(len(spans), _reason(self._messages))
        elif self._num_lost:
            logger.warning("Traces arrive at %s again. Spans lost: %d.", self._address, self._num_lost)
            self._num_lost, self._next_report = 0, 0.0
        return result

    def lost(self, count: int, reason: str) -> None:
        """Count lost spans, and log it if that was not done within the last minute."""
        self._num_lost += count
        now = time.monotonic()
        if now >= self._next_report:
            self._next_report = now + REPORT_SECONDS
            text = "Traces do not arrive at %s: %s. Spans lost so far: %d. Requests are not affected."
            logger.warning(text, self._address, reason, self._num_lost)

    def note(self, message: str) -> None:
        """Keep what the exporter logged about the current batch."""
        self._messages.append(message)

    def shutdown(self) -> None:
        """Shut the exporter down; what is lost until then is logged."""
        self._exporter.shutdown()
        self._log.detach()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Whether the exporter holds nothing back."""
        return self._exporter.force_flush(timeout_millis)


class _OpenTelemetryLog(logging.Handler):
    """Takes OpenTelemetry's records about spans that were not sent; the others go on to its root logger."""

    _ROOT = logging.getLogger("opentelemetry")
    _CHILDREN = tuple(logging.getLogger(f"opentelemetry.{name}") for name in ("exporter", "sdk"))

    def __init__(self, owner: ReportingExporter) -> None:
        super().__init__()
        self._owner = owner

    def attach(self) -> None:
        for child in self._CHILDREN:
            child.addHandler(self)
            child.propagate = False

    def detach(self) -> None:
        for child in self._CHILDREN:
            child.removeHandler(self)
            child.propagate = True

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("opentelemetry.exporter"):
            self._owner.note(record.getMessage())
        elif str(record.msg).startswith("Queue"):
            self._owner.lost(1, "they come faster than they can be sent")
        else:
            self._ROOT.handle(record)


def _reason(messages: Sequence[str]) -> str:
    """The cause among ``messages`` about one batch, without addresses and class names."""
    for message in messages:
        if found := _REASON.search(message):
            return next(text for text in found.groups() if text)
    return messages[-1][:200].rstrip(".") if messages else "unknown reason"
