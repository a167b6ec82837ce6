"""Transcription by ``LLM``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from aiakq.errors import error
from aiakq.runtime.multimodal.audio_files import refused, samples_of
from aiakq.runtime.multimodal.spectrogram import RATE, Samples, Spectrogram
from aiakq.runtime.offline import OutputBuilder, RequestOutputBuilder
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.request import Prompt, Request, RequestOptions
from aiakq.runtime.protocol.request_output import RequestOutput
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.speech.transcript import Ask, Transcript, TranscriptOptions, checked_options, rules_of
from aiakq.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from aiakq.runtime.config.engine import EngineConfig

Result = TypeVar("Result")


@dataclass(frozen=True)
class TranscriptSegment:
    """A part of a transcription: seconds and text."""

    start: float
    end: float
    text: str


@dataclass(frozen=True)
class TranscriptionOutput:
    """The text of an audio.

    language  its code, given or detected.
    duration  seconds of audio.
    segments  with times, if they were wanted or the audio is longer than a window.
    """

    text: str
    language: str
    duration: float
    segments: list[TranscriptSegment] = field(default_factory=list)


class OfflineSpeech:
    """Reads the audio of prompts; what reads it is loaded with the first."""

    def __init__(self, config: EngineConfig, limits: ModelLimits) -> None:
        self.config, self.limits = config, limits
        self._spectrogram: Spectrogram | None = None

    @property
    def spectrogram(self) -> Spectrogram:
        """Raises what ``Spectrogram`` raises."""
        if self._spectrogram is None:
            assert self.config.speech is not None, "the limits allow audio"
            self._spectrogram = Spectrogram(self.config.speech)
        return self._spectrogram

    @property
    def end(self) -> int:
        """The token that ends a transcript. Raises ``model_incomplete``."""
        ends = self.limits.eos_token_ids
        if not ends:
            raise error("model_incomplete", path=str(self.config.load.path), missing="no file has an eos_token_id")
        return ends[0]

    def prompt(self, prompt: Any, ids: list[int], place: str) -> Prompt:
        """Return a prompt of ``LLM.generate`` with its audio, which has to fit into a window.

        Raises ``media_refused``, ``invalid_type`` and ``unsupported_parameter``.
        """
        data = prompt.get("multi_modal_data") if isinstance(prompt, dict) else None
        param = f"{place}.multi_modal_data"
        if not isinstance(data, Mapping) or set(data) != {"audio"}:
            raise error("invalid_type", param=param, reason='{"audio": audio} is expected: the model transcribes audio')
        if prompt.get("mm_processor_kwargs"):
            reason = "audio is read in one way"
            raise error("unsupported_parameter", param=f"{place}.mm_processor_kwargs", reason=reason)
        audio = data["audio"]
        samples = samples_of(audio[0] if isinstance(audio, list) and len(audio) == 1 else audio, f"{param}.audio")
        if len(samples) > self.spectrogram.num_samples:
            seconds = self.spectrogram.num_samples / RATE
            raise refused(f"{param}.audio", f"it is longer than the {seconds:g} s of a window; see LLM.transcribe")
        media = self.spectrogram.window(self.spectrogram.of(samples))
        return Prompt(prompt.get("prompt"), ids, media=(media,))

    def with_rules(self, prompt: Prompt, options: RequestOptions) -> RequestOptions:
        """Return the options of a prompt: as in transformers, times come unless its tokens ask for none."""
        assert self.config.speech is not None
        tokens = self.config.speech.tokens
        timed = tokens.no_timestamps not in prompt.token_ids
        return replace_options(options, rules_of(tokens, self.end, timed))


def replace_options(options: RequestOptions, rules: Any) -> RequestOptions:
    """Return ``options`` with the rules of a transcript."""
    import msgspec

    return msgspec.structs.replace(options, rules=rules)


class TranscriptionMethods:
    """Methods of ``LLM`` for models that transcribe audio."""

    tokenizer: Tokenizer
    _speech: OfflineSpeech

    def _run(
        self, requests: list[Request], builder: Callable[[Request], OutputBuilder[Result]], use_tqdm: bool
    ) -> list[Result]:
        """See LLM."""
        raise NotImplementedError

    def _new_request(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> Request:
        """See LLM."""
        raise NotImplementedError

    def transcribe(
        self,
        audio: Any,
        language: str | None = None,
        task: str = "transcribe",
        prompt: str = "",
        timestamps: bool = False,
        sampling_params: SamplingParams | None = None,
    ) -> list[TranscriptionOutput]:
        """Return the text of each audio, of any length.

        audio       one or a list of: the path of a file, its bytes, samples [N] at 16 kHz, or (samples, rate).
        language    code of its language; detected in the first window if not given.
        task        transcribe, or translate to English.
        prompt      text before the audio, whose spelling and style are taken up.
        timestamps  return segments with times.
        sampling_params  as in ``generate``; if not given, greedy with the penalty of generation_config.json.

        Raises ``task_mismatch`` for other models, ``media_refused`` for audio that cannot be read,
        ``invalid_type`` and ``unsupported_parameter``.
        """
        speech = self._speech
        speech.limits.transcribes()
        assert speech.config.speech is not None
        tokens = speech.config.speech.tokens
        for name, text in {"language": language or "", "task": task, "prompt": prompt}.items():
            if not isinstance(text, str):
                reason = f"a text is expected, not {type(text).__name__:.64}"
                raise error("invalid_type", param=name, reason=reason)
        ids = self.tokenizer.encode(f" {prompt.strip()}", add_special_tokens=False) if prompt.strip() else []
        options = checked_options(tokens, speech.end, task, language, ids, speech.config.max_model_len // 2 - 1)
        options = replace(options, timestamps=timestamps)
        stated = speech.config.generation.sampling
        params = sampling_params or SamplingParams(**{**stated, "temperature": 0.0, "max_tokens": None})
        if params.n != 1:
            raise error("unsupported_parameter", param="n", reason="an audio has one transcript")
        if params.stop:
            raise error("unsupported_parameter", param="stop", reason="a transcript ends with its audio")
        params = replace(params, logprobs=0)
        listed = audio if isinstance(audio, list) else [audio]
        samples = [samples_of(each, f"audio[{number}]") for number, each in enumerate(listed)]
        found = [new_transcript(speech.spectrogram, speech.end, tokens, options, each) for each in samples]
        self._transcribe(found, params)
        return [self._output(each, len(heard) / RATE) for each, heard in zip(found, samples, strict=True)]

    def _transcribe(self, transcripts: list[Transcript], params: SamplingParams) -> None:
        """Complete ``transcripts``, window by window, all at the same time."""
        while asked := [(each, ask) for each in transcripts if (ask := each.ask()) is not None]:
            requests = [self._request(ask, params) for _, ask in asked]
            for (transcript, _), output in zip(asked, self._run(requests, RequestOutputBuilder, False), strict=True):
                take_output(transcript, output)

    def _request(self, ask: Ask, params: SamplingParams) -> Request:
        prompt = Prompt(None, ask.token_ids, media=(ask.media,))
        return self._new_request(prompt, ask.params(params), RequestOptions(rules=ask.rules))

    def _output(self, transcript: Transcript, duration: float) -> TranscriptionOutput:
        segments = [
            TranscriptSegment(
                min(each.start, duration),
                min(each.end, duration),
                self.tokenizer.decode(transcript.text_ids(each)),
            )
            for each in transcript.segments
        ]
        segments = [each for each in segments if each.text.strip()]
        text = "".join(each.text for each in segments).strip()
        return TranscriptionOutput(text, transcript.language, duration, segments)


def take_output(transcript: Transcript, output: RequestOutput) -> None:
    """Pass what was generated to a transcript. Raises ``numerical_error`` if it failed."""
    if output.error:
        raise error("numerical_error", reason=output.error)
    [completion] = output.outputs
    rows = completion.logprobs or []
    logprobs = [row[token].logprob for row, token in zip(rows, completion.token_ids, strict=True)]
    scored = 0.0
    if rows and transcript.tokens.no_speech in rows[0]:
        scored = rows[0][transcript.tokens.no_speech].logprob
    transcript.take(completion.token_ids, logprobs, scored)


def new_transcript(
    spectrogram: Spectrogram, end: int, tokens: Any, options: TranscriptOptions, samples: Samples
) -> Transcript:
    """Return the transcript of samples [N], of which nothing is generated yet."""
    computed = spectrogram.of(samples)
    return Transcript(computed, spectrogram.content(samples), spectrogram.num_states, tokens, options, end)
