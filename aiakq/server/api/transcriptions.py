"""/v1/audio/transcriptions and /v1/audio/translations: the text of audio."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal

import numpy as np
from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse, Response

from aiakq.errors import error
from aiakq.runtime.protocol.request import Prompt, Request, RequestOptions
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.speech.transcript import Segment, Transcript, checked_options, compression_ratio
from aiakq.server.api.execution import Execution, answer
from aiakq.server.api.request_media import hold_bytes
from aiakq.server.api.routes import PROMPT_ERRORS, Route
from aiakq.server.api.service import Service
from aiakq.server.api.transcription_formats import (
    AudioUsage,
    TranscriptDelta,
    TranscriptDone,
    Transcription,
    TranscriptionSegment,
    VerboseTranscription,
    subtitles,
)
from aiakq.server.api.transcription_request import TranscriptionRequest, TranslationRequest, read_audio_form
from aiakq.server.http.body import read_form
from aiakq.server.http.responses import ErrorResponse, JSONResponse
from aiakq.server.http.streaming import EventStream, encode_events
from aiakq.server.process.text_messages import Spectrum, TextRequest

Task = Literal["transcribe", "translate"]


class Transcribing:
    """Result builder of requests with audio.

    model         of the form's fields.
    content_type  of the request's body.
    """

    _execution: Execution
    _payload: TranslationRequest
    _transcript: Transcript
    _spectrum: Spectrum

    def __init__(self, model: type[TranslationRequest], task: Task, content_type: str) -> None:
        self._model, self._task, self._content_type = model, task, content_type
        self._count = 0

    async def respond(self, execution: Execution, body: bytes) -> Response:
        """See ResultBuilder."""
        self._execution = execution
        execution.service.model.limits.transcribes()
        with execution.record.phase("tokenize"):
            await self._read(body)
        if self._payload.stream:
            # An error before the first text gets its own HTTP status.
            first = await self._step()
            return self._stream(first)
        while await self._step() is not None:
            pass
        response = self._response()
        execution.finish("stop")
        return response

    async def _read(self, body: bytes) -> None:
        """Read the form, and the audio in a worker of the text process."""
        execution, service = self._execution, self._execution.service
        fields, file = read_audio_form(self._model, body, self._content_type)
        self._payload = payload = execution.parse(self._model, fields)
        payload.check()
        prompt = (payload.prompt or "").strip()
        texts = [f" {prompt}"] if prompt else []
        reply = await service.renderer.text.run(
            TextRequest(
                0, texts=texts, add_special_tokens=False, audio=file, max_ids=service.model.limits.max_model_len
            )
        )
        assert reply.spectrum is not None
        self._spectrum = spectrum = reply.spectrum
        hold_bytes(len(spectrum.data), "file")
        limits, speech = service.model.limits, service.renderer.text.speech
        assert speech is not None
        if not limits.eos_token_ids:
            raise error("model_incomplete", path=service.model.path, missing="no file has an eos_token_id")
        ids = reply.token_ids[0] if prompt else []
        end, longest = limits.eos_token_ids[0], limits.max_model_len // 2 - 1
        options = checked_options(speech.tokens, end, self._task, payload.language, ids, longest)
        timed, verbose = payload.format not in ("json", "text"), payload.format == "verbose_json"
        self._transcript = Transcript(
            np.frombuffer(spectrum.data, np.float32).reshape(spectrum.num_bins, -1),
            spectrum.content,
            speech.num_states,
            speech.tokens,
            replace(options, timestamps=timed, silence=verbose),
            end,
        )

    @cached_property
    def _params(self) -> SamplingParams:
        return self._payload.sampling_params(self._execution.service.model.default_sampling)

    async def _step(self) -> list[Segment] | None:
        """Generate the next text and return the new segments; None if there is nothing left to generate."""
        transcript = self._transcript
        ask = transcript.ask()
        if ask is None:
            return None
        self._count += 1
        execution = self._execution
        params = ask.params(self._params)
        if ask.allowed:
            params = replace(params, detokenize=False)
        prompt = Prompt(None, ask.token_ids, media=(ask.media,))
        name = f"trsc-{execution.id}-{self._count}"
        options = RequestOptions(rules=ask.rules)
        stream = await execution.execute(Request(name, [prompt], params, options, final_only=True, within_context=True))
        [output] = await stream.collect()
        rows = output.logprobs or []
        logprobs = [row[token].logprob for row, token in zip(rows, output.token_ids, strict=True)]
        scored = rows[0].get(transcript.tokens.no_speech) if rows else None
        return transcript.take(output.token_ids, logprobs, 0.0 if scored is None else scored.logprob)

    def _text(self, segments: Sequence[Segment]) -> str:
        tokenizer, transcript = self._execution.service.renderer.tokenizer, self._transcript
        return "".join(tokenizer.decode(transcript.text_ids(each)) for each in segments)

    @property
    def _usage(self) -> AudioUsage:
        return AudioUsage(math.ceil(self._spectrum.seconds))

    def _response(self) -> Response:
        format, segments = self._payload.format, self._transcript.segments
        text = self._text(segments).strip()
        if format == "json":
            return JSONResponse(Transcription(text, self._usage))
        if format == "text":
            return PlainTextResponse(f"{text}\n")
        listed = self._segments()
        if format != "verbose_json":
            return PlainTextResponse(subtitles(listed, format), media_type="text/vtt" if format == "vtt" else None)
        language, seconds = self._transcript.language, self._spectrum.seconds
        return JSONResponse(VerboseTranscription(self._task, language, seconds, text, listed, self._usage))

    def _segments(self) -> list[TranscriptionSegment]:
        """Return the segments with a text."""
        windows: dict[int, list[Segment]] = {}
        seconds = self._spectrum.seconds  # behind which a model may find something, too
        for segment in self._transcript.segments:
            windows.setdefault(segment.seek, []).append(segment)
        ratios = {seek: compression_ratio(self._text(parts)) for seek, parts in windows.items()}
        found: list[TranscriptionSegment] = []
        for segment in self._transcript.segments:
            if text := self._text([segment]):
                found.append(
                    TranscriptionSegment(
                        id=len(found),
                        seek=segment.seek,
                        start=round(min(segment.start, seconds), 3),
                        end=round(min(segment.end, seconds), 3),
                        text=text,
                        tokens=list(segment.token_ids),
                        temperature=self._params.temperature,
                        avg_logprob=segment.mean_logprob,
                        compression_ratio=ratios[segment.seek],
                        no_speech_prob=segment.silence or 0.0,
                    )
                )
        return found

    def _stream(self, first: list[Segment] | None) -> EventStream:
        execution = self._execution
        execution.record.streamed = True

        async def events() -> AsyncIterator[bytes]:
            said, step = "", first
            while step is not None:
                text = self._text(step)
                text = text if said else text.lstrip()
                if text:
                    said += text
                    yield encode_events([TranscriptDelta("transcript.text.delta", text)])
                step = await self._step()
            yield encode_events([TranscriptDone("transcript.text.done", said, self._usage)]) + b"data: [DONE]\n\n"

        def on_end(outcome: str) -> None:
            execution.finish("stop" if outcome == "complete" else outcome)

        keep_alive = execution.service.options.keep_alive_seconds
        return EventStream(events(), lambda failure: [ErrorResponse.from_error(failure)], on_end, keep_alive)


async def transcriptions(service: Service, request: HTTPRequest) -> Response:
    """Transcribe audio in its language."""
    content_type = request.headers.get("content-type", "")
    return await answer(service, request, Transcribing(TranscriptionRequest, "transcribe", content_type), read_form)


async def translations(service: Service, request: HTTPRequest) -> Response:
    """Translate audio to English."""
    content_type = request.headers.get("content-type", "")
    return await answer(service, request, Transcribing(TranslationRequest, "translate", content_type), read_form)


_ERRORS = (*PROMPT_ERRORS, "no_soundfile", "form_malformed", "form_expected", "model_incomplete")
ROUTES = tuple(
    Route(
        "POST",
        path,
        handler,
        "audio",
        form=model,
        response=VerboseTranscription,
        description="The text and its segments; with response_format json, the default, without the segments; text, "
        "srt and vtt are plain texts. With stream=true as server-sent events, the last of which is [DONE].",
        streams=(TranscriptDelta, TranscriptDone),
        errors=_ERRORS,
        generates=True,
    )
    for path, handler, model in (
        ("/v1/audio/transcriptions", transcriptions, TranscriptionRequest),
        ("/v1/audio/translations", translations, TranslationRequest),
    )
)
