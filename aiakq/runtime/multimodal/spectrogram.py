"""Spectrogram: the log-mel spectrogram of audio, as Whisper reads it, and its windows. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiakq.errors import error
from aiakq.formats.model_folder import read_json
from aiakq.runtime.config.speech import SpectrogramConfig
from aiakq.runtime.protocol.media import MediaItem, TensorRecord, media_key

Samples = NDArray[np.float32]
#: Samples per second.
RATE = 16000
#: Keys of a feature extractor -> the only values that are computed; None: checked otherwise, or without an effect.
_KEYS: Mapping[str, tuple[object, ...] | None] = {
    "sampling_rate": (RATE,),
    "padding_value": (0, 0.0),
    "padding_side": ("right",),
    "dither": (0, 0.0, None),
    "do_normalize": (False, None),
    "feature_extractor_type": ("WhisperFeatureExtractor",),
    **dict.fromkeys(("feature_size", "hop_length", "n_fft", "chunk_length"), None),
    # These follow from the others.
    **dict.fromkeys(("n_samples", "nb_max_frames", "mel_filters"), None),
    **dict.fromkeys(("return_attention_mask", "processor_class", "_processor_class"), None),
}
_DEFAULTS = {"feature_size": 80, "hop_length": 160, "n_fft": 400, "chunk_length": 30}
#: Frames that are transformed at once.
_BLOCK = 3000


class Spectrogram:
    """The log-mel spectrogram of Whisper (Radford et al. 2022, arXiv:2212.04356, section 2.2)."""

    def __init__(self, config: SpectrogramConfig) -> None:
        """Raises ``processor_key_unsupported`` for settings that are not computed, and ``model_malformed`` for those
        that are not the model's.
        """
        file, settings = _settings(Path(config.folder))
        self._hop, self._width = settings["hop_length"], settings["n_fft"]
        self.num_states = config.num_states
        #: Samples of a window.
        self.num_samples = settings["chunk_length"] * RATE
        stated = settings["feature_size"], self.num_samples // self._hop
        if stated != (config.num_bins, config.num_frames):
            reason = (
                f"a window has {stated[0]} x {stated[1]} numbers, and config.json says {config.num_bins} x "
                f"{config.num_frames}"
            )
            raise error("model_malformed", file=file, reason=reason)
        self._filters = _mel_filters(self._width, config.num_bins)
        # Periodic, as torch.hann_window is.
        self._window = np.hanning(self._width + 1)[:-1]

    def of(self, samples: Samples) -> NDArray[np.float32]:
        """Return the spectrogram [bins, frames] of samples [N] at 16 kHz: of one window if they fit into it, with
        silence behind them; else of all.

        As in transformers, frames are centered, the ends reflected, and values limited to 80 dB below the loudest one.
        """
        if len(samples) < self.num_samples:
            samples = np.pad(samples, (0, self.num_samples - len(samples)))
        count, half = len(samples) // self._hop, self._width // 2
        padded = np.pad(samples, half, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(padded, self._width)[:: self._hop][:count]
        powers = np.empty((self._filters.shape[1], count), np.float32)
        for first in range(0, count, _BLOCK):
            spectrum = np.fft.rfft(frames[first : first + _BLOCK] * self._window)
            power = spectrum.real**2 + spectrum.imag**2
            powers[:, first : first + _BLOCK] = np.log10(np.maximum(power @ self._filters, 1e-10)).T
        limited: NDArray[np.float32] = (np.maximum(powers, powers.max() - 8) + 4) / 4
        return limited

    def window(self, spectrogram: NDArray[np.float32], first: int = 0) -> MediaItem:
        """Return what the encoder reads of a spectrogram [bins, frames] from frame ``first`` on; behind its end, zeros
        as in transformers.
        """
        return window_of(spectrogram, first, self.num_states)

    def frames(self, num_samples: int) -> int:
        """Return the number of frames whose first sample is one of ``num_samples``, as the masks of transformers."""
        return -(-num_samples // self._hop)

    def content(self, samples: Samples) -> int:
        """Return the number of frames of the spectrogram of samples [N] that are not silence behind them."""
        return max(1, len(samples) // self._hop)


def window_of(spectrogram: NDArray[np.float32], first: int, num_states: int) -> MediaItem:
    """See ``Spectrogram.window``; the encoder makes ``num_states`` states of two frames each."""
    num_frames = 2 * num_states
    part = spectrogram[:, first : first + num_frames]
    part = np.ascontiguousarray(np.pad(part, ((0, 0), (0, num_frames - part.shape[1]))), "<f4")
    tensors = {"input_features": TensorRecord("float32", list(part.shape), part.tobytes())}
    return MediaItem("audio", media_key("audio", tensors), [], tensors, num_states=num_states)


def _settings(folder: Path) -> tuple[str, dict[str, int]]:
    """Return the sizes of the feature extractor, and their file. Raises as ``Spectrogram``."""
    name, stated = _extractor_config(folder)
    for key, value in stated.items():
        allowed = _KEYS.get(key)
        if key not in _KEYS or (allowed is not None and value not in allowed):
            fields = {"file": name, "key": key[:64], "value": f"{value!r:.64}", "kind": "the spectrogram of Whisper"}
            raise error("processor_key_unsupported", **fields)
    sizes = {key: stated.get(key, default) for key, default in _DEFAULTS.items()}
    for key, value in sizes.items():
        if type(value) is not int or not 0 < value < 2**16:
            raise error("model_malformed", file=name, reason=f"{key} is {value!r:.64}")
    return name, sizes


def _extractor_config(folder: Path) -> tuple[str, Mapping[str, Any]]:
    """Return the file of the feature extractor and its settings: the processor's, as transformers 5 writes it, else
    that of the extractor alone. Raises ``model_incomplete`` and ``model_malformed``.
    """
    name, processor = "preprocessor_config.json", "processor_config.json"
    if (folder / processor).is_file():
        stated = read_json(folder / processor, processor).get("feature_extractor")
        if isinstance(stated, Mapping):
            return processor, stated
    if not (folder / name).is_file():
        raise error("model_incomplete", path=folder, missing=f"{name} is missing")
    return name, read_json(folder / name, name)


def _mel_filters(width: int, bins: int) -> NDArray[np.float64]:
    """Return Slaney's filters [width // 2 + 1, bins] up to 8 kHz."""
    from transformers.audio_utils import mel_filter_bank

    filters: NDArray[np.float64] = mel_filter_bank(
        num_frequency_bins=1 + width // 2,
        num_mel_filters=bins,
        min_frequency=0.0,
        max_frequency=8000.0,
        sampling_rate=RATE,
        norm="slaney",
        mel_scale="slaney",
    )
    return filters
