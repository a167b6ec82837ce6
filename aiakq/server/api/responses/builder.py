"""Builds the responses of /v1/responses, complete and as stream events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from aiakq.errors import AiakqError
from aiakq.runtime.text.output_processor import Delta
from aiakq.server.api.chat import ChatResponseBuilder
from aiakq.server.api.chat_parsing import events_of
from aiakq.server.api.openai import encoded
from aiakq.server.api.responses.logprobs import TextLogprobs
from aiakq.server.api.responses.output import (
    OutputItem,
    OutputItems,
    StreamEvent,
)
from aiakq.server.api.responses.request import ResponsesRequest
from aiakq.server.api.service import Service
from aiakq.server.process.request_stream import RequestDeltas

ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class InputTokensDetails(msgspec.Struct):
    """``cached_tokens`` is the number of prompt tokens found in the prefix cache."""

    cached_tokens: int


class OutputTokensDetails(msgspec.Struct):
    """``reasoning_tokens`` is the number of tokens before the answer; 0 without a reasoning parser."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    """Why a response ended early."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFailure(msgspec.Struct):
    """Why a response failed; ``code`` is the id of the error in docs/errors.md."""

    code: str
    message: str


class ResponsesResponse(msgspec.Struct, kw_only=True):
    """The complete response. It repeats the effective request settings; ``store`` is always false."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    background: Literal[False] = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: Any
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    temperature: float
    text: Any
    tool_choice: Any
    tools: Any
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None


class ResponseEvent(StreamEvent, kw_only=True):
    """Events response.created, .in_progress, .completed, .incomplete and .failed."""

    response: ResponsesResponse


class ResponsesBuilder(ChatResponseBuilder):
    """Builds responses of /v1/responses from the events of chat."""

    id_prefix = "resp_"
    end_of_stream = b""

    def __init__(self, service: Service, request: ResponsesRequest, *arguments: object) -> None:
        super().__init__(service, request.chat, *arguments)
        self.payload = request
        encrypts = "reasoning.encrypted_content" in (request.include or ())
        self.logprobs = TextLogprobs()
        self.output = OutputItems(
            self.id.removeprefix(self.id_prefix), request.offered.members, encrypts, self.logprobs.of
        )
        self._fixed_fields = self._repeated()
        self._num_events = 0

    def response(self, outputs: Sequence[Delta]) -> msgspec.Struct:
        for _ in self._add(outputs[0], ended=True):
            pass
        return self._response(self._final_status)

    def chunks(self, deltas: RequestDeltas) -> Sequence[msgspec.Struct]:
        events: list[StreamEvent] = [] if self._num_events else [self._event("created"), self._event("in_progress")]
        self._number(events)
        for _, delta in deltas:
            events += self._number(self._add(delta, ended=delta.finish_reason is not None))
        return events

    def final_chunks(self) -> Sequence[msgspec.Struct]:
        return self._number([self._event(self._final_status)])

    def error_chunks(self, failure: AiakqError) -> Sequence[msgspec.Struct]:
        response = self._response("failed")
        response.error = ResponseFailure(failure.id, str(failure))
        return self._number([ResponseEvent(type="response.failed", response=response)])

    def _add(self, delta: Delta, ended: bool) -> Iterator[StreamEvent]:
        """Return the events for more output."""
        state = self.states[0]
        self._update(state, delta)
        logprobs = self._logprobs(delta)
        if logprobs is not None:
            starts, entries = [], []
            for token_id, entry in zip(delta.token_ids, logprobs.content, strict=True):
                data = self.bytes_in_text(token_id)
                if data:  # it is not a special token that is left out
                    starts.append(state.offsets.add(data))
                    entries.append(entry)
            self.logprobs.add(delta.text, starts, entries)
        yield from self.output.add(events_of(self.messages, 0, delta, ended))
        if ended:
            yield from self.output.close("incomplete" if state.finish_reason == "length" else "completed")

    @property
    def _final_status(self) -> ResponseStatus:
        return "incomplete" if self.states[0].finish_reason == "length" else "completed"

    def _event(self, status: ResponseStatus | Literal["created"]) -> ResponseEvent:
        response = self._response("in_progress" if status == "created" else status)
        return ResponseEvent(type=f"response.{status}", response=response)

    def _number(self, events: Iterator[StreamEvent] | Sequence[StreamEvent]) -> list[StreamEvent]:
        numbered = list(events)
        for event in numbered:
            event.sequence_number = self._num_events
            self._num_events += 1
        return numbered

    def _response(self, status: ResponseStatus) -> ResponsesResponse:
        """Return the response so far."""
        response = ResponsesResponse(
            id=self.id,
            created_at=self.created,
            status=status,
            model=self.service.model.shown_name(self.request.model),
            output=list(self.output.items),
            **self._fixed_fields,
        )
        if status == "incomplete":
            response.incomplete_details = IncompleteDetails()
        if status == "completed":
            response.completed_at = int(time.time())
        if status != "in_progress":
            response.usage = self._usage()
        return response

    def _repeated(self) -> dict[str, Any]:
        """Return the request fields that the response repeats."""
        payload, params = self.payload, self.params
        offered = payload.offered
        format: dict[str, object] = {"type": "text"}
        if payload.text is not None and payload.text.format is not None:
            format = payload.text.format.model_dump(by_alias=True, exclude_unset=True)
        effort = payload.effective_effort(self.service.renderer.chat_template, payload.chat.chat_template_kwargs or {})
        return {
            "instructions": payload.instructions,
            "max_output_tokens": payload.max_output_tokens,
            "metadata": payload.metadata or {},
            "parallel_tool_calls": payload.parallel_tool_calls is not False,
            "reasoning": {"effort": effort, "summary": None},
            "temperature": params.temperature,
            "text": encoded({"format": format}),
            "tool_choice": encoded(payload.tool_choice or "auto"),
            "tools": encoded(offered.definitions),
            "top_logprobs": payload.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": payload.truncation or "disabled",
        }

    def _usage(self) -> ResponseUsage:
        usage = self.usage()
        cached = 0 if usage.prompt_tokens_details is None else usage.prompt_tokens_details.cached_tokens
        return ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(cached),
            usage.completion_tokens,
            OutputTokensDetails(self.num_reasoning_tokens),
            usage.total_tokens,
        )
