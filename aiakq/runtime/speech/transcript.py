"""Transcript: the windows of an audio that a model reads one after the other, and the segments that it finds in them.

It runs no model: its caller generates what ``ask`` returns, and passes the tokens to ``take``. No torch.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from aiakq.errors import error
from aiakq.runtime.config.speech import FRAMES_PER_STATE, SpeechTokens
from aiakq.runtime.multimodal.spectrogram import window_of
from aiakq.runtime.protocol.media import MediaItem
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.protocol.transcripts import TranscriptRules

#: Seconds of a frame of a spectrogram, and of a step of timestamps.
FRAME, STEP = 0.01, 0.02


@dataclass(frozen=True)
class TranscriptOptions:
    """What a client asks for.

    task         transcribe, or translate to English.
    language     code of the language of the audio; None: that of the model's files, or it is detected.
    prompt_ids   tokens of a text before the audio.
    timestamps   whether times of segments are wanted.
    silence      whether the probability that there is no speech is wanted.
    """

    task: str = "transcribe"
    language: str | None = None
    prompt_ids: tuple[int, ...] = ()
    timestamps: bool = False
    silence: bool = False


@dataclass(frozen=True)
class Segment:
    """A part of a transcript.

    seek          frame at which the window begins.
    start, end    seconds.
    token_ids     with timestamps.
    mean_logprob  of the tokens of the window and its end.
    silence       probability that there is no speech in the window; None if it is not known.
    """

    seek: int
    start: float
    end: float
    token_ids: Sequence[int]
    mean_logprob: float = 0.0
    silence: float | None = None


@dataclass(frozen=True)
class Ask:
    """A text to generate: ``token_ids`` with the audio ``media``.

    rules    which tokens may come.
    allowed  the only tokens that may come, of which one is generated; empty for the text of a window.
    scored   the token whose probability is wanted beside it.
    """

    token_ids: list[int]
    media: MediaItem
    rules: TranscriptRules | None = None
    allowed: Sequence[int] = ()
    scored: int = 0

    def params(self, given: SamplingParams) -> SamplingParams:
        """Return how the text is sampled, which ``given`` says for that of a window."""
        if not self.allowed:
            return given
        return SamplingParams(
            temperature=0.0, max_tokens=1, allowed_token_ids=list(self.allowed), logprob_token_ids=[self.scored]
        )


@dataclass
class Transcript:
    """The transcript of one audio.

    spectrogram  [bins, frames], of a whole window at least.
    num_content  the frames of it that are not padding.
    end          the token that ends texts.
    language     code of the language, once it is known.
    seek         frame from which on nothing is transcribed yet.
    """

    spectrogram: NDArray[np.float32]
    num_content: int
    num_states: int
    tokens: SpeechTokens
    options: TranscriptOptions
    end: int
    language: str = ""
    segments: list[Segment] = field(default_factory=list)
    seek: int = 0

    def __post_init__(self) -> None:
        known = "" if self.tokens.languages else "en"
        self.language = self.options.language or self.tokens.language or known
        self._frames = FRAMES_PER_STATE * self.num_states
        self._timed = self.options.timestamps or self.spectrogram.shape[1] > self._frames
        self._window: MediaItem | None = None
        self._silence: float | None = None

    def ask(self) -> Ask | None:
        """Return what is to be generated next; None if the transcript is complete."""
        if self.seek >= self.num_content:
            return None
        if self._window is None:
            self._window = window_of(self.spectrogram, self.seek, self.num_states)
        tokens, options = self.tokens, self.options
        if self._is_unheard:
            allowed = sorted(tokens.languages.values()) or [self.end]
            return Ask([tokens.start], self._window, None, allowed, tokens.no_speech)
        prompt = [tokens.start]
        if options.prompt_ids:
            assert tokens.previous is not None, "see checked_options"
            prompt = [tokens.previous, *options.prompt_ids, tokens.start]
        if tokens.languages:
            prompt += [tokens.languages[self.language], tokens.tasks[options.task]]
        if not self._timed:
            prompt.append(tokens.no_timestamps)
        return Ask(prompt, self._window, rules_of(tokens, self.end, self._timed))

    @property
    def _is_unheard(self) -> bool:
        """Whether the language, or the silence of the window, is still to be found."""
        return not self.language or (self.options.silence and self._silence is None)

    def take(self, token_ids: Sequence[int], logprobs: Sequence[float], scored: float = 0.0) -> list[Segment]:
        """Take what was generated, and return the new segments.

        logprobs  of all tokens, that of the end among them.
        scored    log-probability of ``Ask.scored``.
        """
        if self._is_unheard:
            self._silence = math.exp(scored)
            if not self.language:
                self.language = next(code for code, id in self.tokens.languages.items() if id == token_ids[0])
            return []
        found, moved = self._segments([token for token in token_ids if token != self.end])
        mean, offset = sum(logprobs) / max(len(logprobs), 1), self.seek * FRAME
        silence = self._silence if self.options.silence else None
        segments = [
            Segment(self.seek, offset + start * STEP, offset + end * STEP, part, mean, silence)
            for start, end, part in found
        ]
        self.segments += segments
        self.seek += moved
        self._window = self._silence = None
        return segments

    def text_ids(self, segment: Segment) -> list[int]:
        """Return the tokens of a segment without timestamps."""
        return [token for token in segment.token_ids if token < self.tokens.timestamps]

    def _segments(self, text: list[int]) -> tuple[Sequence[tuple[float, float, list[int]]], int]:
        """Return (start, end, tokens) of the segments of a window, in steps, and by how many frames to move on.

        As transformers' Whisper does: behind the last pair of timestamps, the text is not complete, and is read again
        in the next window.
        """
        zero, rest = self.tokens.timestamps, min(self.num_content - self.seek, self._frames)
        if not self._timed:
            return [(0, rest / FRAMES_PER_STATE, text)], self.num_content
        is_time = [token >= zero for token in text]
        cuts = [at + 1 for at in range(len(text) - 1) if is_time[at] and is_time[at + 1]]
        ends_with_one = is_time[-2:] == [False, True]
        if not cuts:
            times = [token - zero for token in text if token >= zero]
            end = times[-1] if times and times[-1] else rest // FRAMES_PER_STATE
            return [(0, end, text)], rest
        if ends_with_one:
            cuts.append(len(text))
        found, begin = [], 0
        for cut in cuts:
            found.append((text[begin] - zero, text[cut - 1] - zero, text[begin:cut]))
            begin = cut
        moved = rest if ends_with_one else (text[cuts[-1] - 1] - zero) * FRAMES_PER_STATE
        return found, moved or rest


def rules_of(tokens: SpeechTokens, end: int, timed: bool) -> TranscriptRules:
    """Return the rules of a transcript, with timestamps if it is ``timed``."""
    return TranscriptRules(
        end=end,
        suppressed=list(tokens.suppressed),
        first_suppressed=list(tokens.first_suppressed),
        timestamps=tokens.timestamps if timed else None,
        max_first_timestamp=tokens.max_first_timestamp,
    )


def checked_options(
    tokens: SpeechTokens, end: int, task: str, language: str | None, prompt_ids: Sequence[int], max_prompt: int
) -> TranscriptOptions:
    """Return the options of a transcript; of a prompt, the last ``max_prompt`` tokens are read, as in OpenAI's.

    end  the token that ends texts; as in transformers, a prompt has neither it nor those of tasks, which follow it.

    Raises ``unsupported_parameter`` for what the model does not have.
    """
    if language is not None:
        language = language.strip().lower()
        known = tokens.languages or {"en": 0}
        if language not in known:
            reason = f"{language!r:.32} is none of {', '.join(sorted(known))}"
            raise error("unsupported_parameter", param="language", reason=reason)
    if task not in tokens.tasks and (tokens.languages or task != "transcribe"):
        raise error("unsupported_parameter", param="task", reason=f"the model does not {task:.32}")
    if prompt_ids and tokens.previous is None:
        reason = "generation_config.json has no prev_sot_token_id, behind which it would be"
        raise error("unsupported_parameter", param="prompt", reason=reason)
    if any(token == end or token >= tokens.start for token in prompt_ids):
        reason = "it contains special tokens, which are not text"
        raise error("unsupported_parameter", param="prompt", reason=reason)
    return TranscriptOptions(task, language, tuple(prompt_ids[max(0, len(prompt_ids) - max_prompt) :]))


def compression_ratio(text: str) -> float:
    """Return how many times as long as its compressed form a text is: much for one that repeats itself."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))
