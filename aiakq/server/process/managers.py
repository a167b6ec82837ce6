"""The request manager of a server that has started its engines."""

from __future__ import annotations

from collections.abc import Sequence

from aiakq.runtime.text.output_processor import OutputProcessor
from aiakq.runtime.text.tokenizer import Tokenizer
from aiakq.server.process.ipc import Ready
from aiakq.server.process.queue_limits import QueueLimits
from aiakq.server.process.replicas import Replicas, Requests
from aiakq.server.process.request_manager import RequestManager
from aiakq.server.telemetry.metrics import Metrics


def requests_of(
    reports: Sequence[Ready], tokenizer: Tokenizer, vocabulary: bytes, metrics: Metrics, queue: QueueLimits
) -> Requests:
    """Return the request manager for one engine or several, which have sent ``reports``."""
    managers = [
        RequestManager(OutputProcessor(tokenizer, each.limits), each.limits, metrics.of_engine(number), queue)
        for number, each in enumerate(reports)
    ]
    for manager in managers:
        manager.vocabulary = vocabulary
    return managers[0] if len(managers) == 1 else Replicas(managers, int(reports[0].settings["block_size"]))
