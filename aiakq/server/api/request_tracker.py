"""RequestTracker: track one generation request for metrics, log and traces."""

from __future__ import annotations

import time

from starlette.types import Scope

from aiakq.errors import AiakqError
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.server.api.service import Service
from aiakq.server.errors import as_aiakq_error
from aiakq.server.http.request_ids import client_id_of
from aiakq.server.http.root_path import route_path
from aiakq.server.process.request_stream import RequestStream
from aiakq.server.telemetry.request_records import RequestRecord, SequenceRecord

#: Number of characters of a key's hash in the log.
_KEY_CHARS = 8


class RequestTracker:
    """Counts one request in ``num_in_flight`` and the request metrics, and records it for the service's observers.

    arrival_time  when its headers were read (``time.monotonic``); under load, this is well before it is handled.
    record        its data for observers.
    """

    def __init__(self, service: Service, scope: Scope) -> None:
        request, state = scope["state"], service.state
        self.arrival_time: float = request["arrival_time"]
        self._model, self._state = service.model, state
        self._streams: list[RequestStream] = []
        self._open = True
        headers = {}
        if state.observers:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.record = RequestRecord(
            route=route_path(scope["path"], service.options.root_path),
            request_id=request["request_id"],
            arrival_time=self.arrival_time,
            client_request_id=client_id_of(headers),
            key=request.get("owner", "")[:_KEY_CHARS],
            headers=headers,
        )
        state.num_in_flight += 1
        state.metrics.received.inc()
        for observer in state.observers:
            observer.begin(self.record)
        if self.record.traceparent:
            request["traceparent"] = self.record.traceparent

    def start(self, response_id: str, params: SamplingParams, model: str | None, stream: RequestStream) -> None:
        """Record that ``stream`` is in the engine's queue; a request may have several streams."""
        record = self.record
        record.response_id, record.params = response_id, params
        record.model = model or self._model.names[0]
        self._streams.append(stream)

    def finish(self, reason: str, failure: BaseException | None = None) -> None:
        """Record the end of the request; ``reason`` is one of ``metrics.FINISH_REASONS``. Later calls do nothing."""
        if not self._open:
            return
        self._open = False
        state, record = self._state, self.record
        state.num_in_flight -= 1
        adapter = self._streams[0].request.options.adapter if self._streams else None
        known_adapter = None if adapter is None or self._model.adapters.get(adapter.name) is None else adapter.name
        state.metrics.request_ended(reason, time.monotonic() - self.arrival_time, known_adapter)
        if not state.observers:
            return
        record.sequences = [
            SequenceRecord(
                sequence.num_prompt_tokens,
                sequence.num_cached_tokens,
                sequence.num_generated,
                sequence.num_preemptions,
                sequence.finish_reason,
                sequence.times,
            )
            for stream in self._streams
            for group in stream.sequences
            for sequence in group
        ]
        known = failure if failure is None or isinstance(failure, AiakqError) else as_aiakq_error(failure)
        record.end(reason, known)
        for observer in state.observers:
            observer.finish(record)
