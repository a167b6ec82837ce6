"""The responses of transcriptions, in OpenAI's formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from aiakq.server.http.streaming import NamedEvent


class AudioUsage(msgspec.Struct):
    """Seconds of audio, rounded up."""

    seconds: int
    type: Literal["duration"] = "duration"


class Transcription(msgspec.Struct):
    """The text of an audio."""

    text: str
    usage: AudioUsage


class TranscriptionSegment(msgspec.Struct):
    """A part of the text.

    seek                frame of 10 ms at which its window begins.
    start, end          seconds.
    tokens              with those of the times.
    avg_logprob         mean log-probability of the tokens of its window.
    compression_ratio   how many times as long as its compressed form the text of its window is.
    no_speech_prob      probability that there is no speech in its window.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class VerboseTranscription(msgspec.Struct):
    """The text of an audio and its segments; ``duration`` is in seconds, ``language`` a code."""

    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: list[TranscriptionSegment]
    usage: AudioUsage


class TranscriptDelta(NamedEvent):
    """More of the text."""

    delta: str


class TranscriptDone(NamedEvent):
    """The whole text."""

    text: str
    usage: AudioUsage


def subtitles(segments: Sequence[TranscriptionSegment], format: str) -> str:
    """Return the segments as srt or vtt."""
    if format == "vtt":
        cues = [f"{_time(each.start, '.')} --> {_time(each.end, '.')}\n{each.text.strip()}\n\n" for each in segments]
        return "WEBVTT\n\n" + "".join(cues)
    return "".join(
        f"{number}\n{_time(each.start, ',')} --> {_time(each.end, ',')}\n{each.text.strip()}\n\n"
        for number, each in enumerate(segments, 1)
    )


def _time(seconds: float, mark: str) -> str:
    """Return seconds as hours:minutes:seconds, and milliseconds behind ``mark``."""
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}{mark}{milliseconds % 1000:03}"
