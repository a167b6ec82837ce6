"""Decoding of audio files, which clients may have made to exhaust memory. soundfile (libsndfile) and soxr are imported
with the first one.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from aiakq.errors import AiakqError, error, first_line
from aiakq.runtime.multimodal.spectrogram import RATE, Samples

#: Formats that are read: those of the web and of recorders.
FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3", "AIFF")
#: Largest file, as OpenAI's and vLLM's servers have it, length, rate and number of channels.
MAX_FILE_BYTES, MAX_SECONDS, MAX_RATE, MAX_CHANNELS = 25 << 20, 3600, 192_000, 16
MIN_RATE = 1000
#: Samples that are decoded at once.
_BLOCK = 1 << 16


def decode_audio(data: bytes, param: str) -> Samples:
    """Return the samples [N] of an audio file at 16 kHz, the mean of its channels.

    Raises ``media_refused``, and ``no_soundfile`` without the packages that read it.
    """
    soundfile, _ = load_packages()
    if len(data) > MAX_FILE_BYTES:
        raise refused(param, f"it is larger than {MAX_FILE_BYTES >> 20} MiB")
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if file.format not in FORMATS:
                raise refused(param, f"it is {file.format}, which is not one of {', '.join(FORMATS)}")
            _check(file.samplerate, file.channels, param)
            return _resampled(file, param)
    except AiakqError:
        raise
    except MemoryError:
        raise refused(param, "it takes too much memory") from None
    except Exception as failure:  # decoders raise anything for damaged files
        reason = getattr(failure, "error_string", "") or first_line(failure)
        raise refused(param, f"it is no audio that can be read ({reason.rstrip('.')[:120]})") from None


def as_samples(audio: Any, rate: float, param: str) -> Samples:
    """Return samples [N] or [N, channels] at ``rate`` per second as samples at 16 kHz. Raises as ``decode_audio``, and
    ``invalid_type`` for anything else.
    """
    try:
        array = np.asarray(audio)
    except (ValueError, TypeError, RuntimeError):  # lists of different lengths, tensors that NumPy does not take
        array = np.zeros(0, object)
    if array.ndim not in (1, 2) or array.dtype.kind != "f" or not np.isfinite(array).all():
        raise error("invalid_type", param=param, reason="an array [N] or [N, channels] of finite floats is expected")
    if isinstance(rate, bool) or not isinstance(rate, Real) or rate % 1 != 0:
        raise error("invalid_type", param=param, reason="the rate of the samples is an integer")
    rate = int(rate)
    _check(rate, 1 if array.ndim == 1 else array.shape[1], param)
    if len(array) > MAX_SECONDS * rate:
        raise _too_long(param)
    if len(array) == 0:
        raise refused(param, "it is empty")
    with np.errstate(all="ignore"):
        mono = array.astype(np.float32) if array.ndim == 1 else array.mean(axis=1, dtype=np.float32)
    if rate != RATE:
        mono = load_packages()[1].resample(mono, rate, RATE)
    return _checked(mono, param)


def samples_of(audio: Any, param: str) -> Samples:
    """Return the samples [N] at 16 kHz of a path, the bytes of a file, samples, or (samples, rate).

    Raises ``media_refused`` and ``invalid_type``.
    """
    if isinstance(audio, (str, Path)):
        path = Path(audio)
        if not path.is_file():
            raise refused(param, f"there is no file {str(path)!r:.200}")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise refused(param, f"it is larger than {MAX_FILE_BYTES >> 20} MiB")
        return decode_audio(path.read_bytes(), param)
    if isinstance(audio, bytes):
        return decode_audio(audio, param)
    if isinstance(audio, tuple) and len(audio) == 2:
        return as_samples(audio[0], audio[1], param)
    if isinstance(audio, np.ndarray) or isinstance(audio, Sequence) or hasattr(audio, "__array__"):
        return as_samples(audio, RATE, param)
    reason = f"a path, bytes, samples or (samples, rate) is expected, not {type(audio).__name__:.64}"
    raise error("invalid_type", param=param, reason=reason)


def _check(rate: int, channels: int, param: str) -> None:
    if not MIN_RATE <= rate <= MAX_RATE or not 1 <= channels <= MAX_CHANNELS:
        allowed = f"{MIN_RATE} to {MAX_RATE} and up to {MAX_CHANNELS}"
        raise refused(param, f"it has {rate} samples a second and {channels} channels, of {allowed}")


def _resampled(file: Any, param: str) -> Samples:
    """Read a file block by block, whatever length its header claims."""
    rate = file.samplerate
    stream = None if rate == RATE else load_packages()[1].ResampleStream(rate, RATE, 1, dtype="float32")
    blocks, length = [], 0
    while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
        length += len(block)
        if length > MAX_SECONDS * rate:
            raise _too_long(param)
        with np.errstate(all="ignore"):
            mono = np.ascontiguousarray(block.mean(axis=1, dtype=np.float32))
        blocks.append(mono if stream is None else stream.resample_chunk(mono))
    if stream is not None:
        blocks.append(stream.resample_chunk(np.zeros(0, np.float32), last=True))
    return _checked(np.concatenate(blocks) if blocks else np.zeros(0, np.float32), param)


def _checked(samples: Samples, param: str) -> Samples:
    """Return samples [N] at 16 kHz.

    Raises ``media_refused`` for none, as of one sample at 192 kHz, and for numbers that are not finite, which large
    ones become in float32, in means and between samples.
    """
    if len(samples) == 0:
        raise refused(param, "it is empty")
    if not np.isfinite(samples).all():
        raise refused(param, "its samples are not finite")
    return samples


def _too_long(param: str) -> AiakqError:
    return refused(param, f"it is longer than {MAX_SECONDS} s")


def refused(param: str, reason: str) -> AiakqError:
    """Return the error for audio that cannot be read."""
    return error("media_refused", param=param, reason=reason)


def load_packages() -> tuple[Any, Any]:
    """Return soundfile and soxr. Raises ``no_soundfile``."""
    try:
        import soundfile
        import soxr
    except (ImportError, OSError):  # soundfile without libsndfile
        raise error("no_soundfile") from None
    return soundfile, soxr
