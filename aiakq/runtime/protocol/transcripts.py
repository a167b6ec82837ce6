"""What a model that transcribes audio accepts, and which tokens its transcripts may have. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from aiakq.errors import error

if TYPE_CHECKING:
    from aiakq.runtime.protocol.media import MediaItem


class TranscriptRules(msgspec.Struct, frozen=True):
    """Which tokens may come next in a transcript of Whisper.

    end                  the token that ends it; all text has smaller ones.
    suppressed           never.
    first_suppressed     not as the first.
    timestamps           the token of 0 s, which all later times follow; None: a transcript without timestamps.
    max_first_timestamp  the largest number of the first timestamp; None: any.
    """

    end: int
    suppressed: list[int] = []
    first_suppressed: list[int] = []
    timestamps: int | None = None
    max_first_timestamp: int | None = None


class SpeechLimits(msgspec.Struct, frozen=True):
    """What a model that transcribes audio accepts: one audio for each prompt.

    num_states  states of its encoder.
    """

    num_states: int

    def check(self, media: Sequence[MediaItem]) -> None:
        """Raise ``media_refused`` unless a prompt has one audio."""
        if len(media) != 1 or media[0].kind != "audio" or media[0].num_states != self.num_states:
            reason = "a prompt of a model that transcribes has one audio"
            raise error("media_refused", param="prompt", reason=reason)
