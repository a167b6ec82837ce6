"""AudioPreprocessor: what an audio is in a prompt and for its encoder. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from aiakq.runtime.multimodal.audio_files import decode_audio, refused
from aiakq.runtime.multimodal.config_keys import completed_config
from aiakq.runtime.multimodal.preprocessor import MediaPreprocessor
from aiakq.runtime.multimodal.processed import Processed, record
from aiakq.runtime.multimodal.spectrogram import RATE, Samples, Spectrogram

if TYPE_CHECKING:
    from aiakq.runtime.config.multimodal import MultimodalConfig
    from aiakq.runtime.text.tokenizer import Tokenizer


class AudioFamily(ABC):
    """How a family reads audio. The rules are those of transformers' processors.

    around  the tokens before and behind an audio, where a prompt is text.
    """

    around = ("", "")

    def __init__(self, config: Mapping[str, Any], spectrogram: Spectrogram) -> None:
        """config: ``audio_config`` of config.json."""
        self.config, self.spectrogram = config, spectrogram

    @abstractmethod
    def processed(self, samples: Samples, param: str) -> Processed:
        """Return samples [N] at 16 kHz preprocessed. Raises ``media_refused``."""


class Qwen2Audio(AudioFamily):
    """One window; the encoder halves the frames that are not silence behind the audio, and so does its pooling."""

    around = ("<|audio_bos|>", "<|audio_eos|>")

    def processed(self, samples: Samples, param: str) -> Processed:
        """See ``AudioFamily``. Transformers' processor would cut off what is behind the window."""
        made = self.spectrogram
        if len(samples) > made.num_samples:
            seconds = made.num_samples / RATE
            raise refused(param, f"it is {len(samples) / RATE:.1f} s long, and the model reads {seconds:g} s")
        states = (made.frames(len(samples)) - 1) // 2 + 1
        count = (states - 2) // 2 + 1
        if count < 1:
            raise refused(param, f"its {len(samples)} samples are too few for the model")
        tensors = {"input_features": record(made.of(samples)), "num_states": record(np.array([states]))}
        return Processed(tensors, count=count)


class Voxtral(AudioFamily):
    """Any number of windows, the last one filled with silence; several states are one embedding."""

    around = ("[BEGIN_AUDIO]", "")

    def processed(self, samples: Samples, param: str) -> Processed:
        """See ``AudioFamily``."""
        made = self.spectrogram
        number = -(-len(samples) // made.num_samples)
        padded = np.pad(samples, (0, number * made.num_samples - len(samples)))
        values = made.of(padded)
        windows = values.reshape(len(values), number, -1).swapaxes(0, 1)
        widths = self.config["hidden_size"], self.config["intermediate_size"]
        count = number * made.num_states * widths[0] // widths[1]
        return Processed({"input_features": record(windows)}, count=count)


#: Architecture -> how it reads audio.
FAMILIES: Mapping[str, type[AudioFamily]] = {
    "Qwen2AudioForConditionalGeneration": Qwen2Audio,
    "VoxtralForConditionalGeneration": Voxtral,
}


class AudioPreprocessor(MediaPreprocessor):
    """Makes spectrograms of audio, as ``WhisperFeatureExtractor`` of transformers does."""

    kind = "audio"

    def __init__(self, config: MultimodalConfig, tokenizer: Tokenizer) -> None:
        """Raises what ``Spectrogram`` raises."""
        super().__init__(config, tokenizer)
        self._family = FAMILIES[config.architecture](
            completed_config(config.raw)[config.part], Spectrogram(config.spectrogram)
        )
        before, behind = self._family.around
        self.placeholder_text = f"{before}{self.placeholder}{behind}"

    def processed(self, media: Samples | bytes, param: str) -> Processed:
        """See ``MediaPreprocessor``."""
        return self._family.processed(decode_audio(media, param) if isinstance(media, bytes) else media, param)
