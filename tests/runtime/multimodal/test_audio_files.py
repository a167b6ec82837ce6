"""Files of audio are read, whatever they claim, or refused."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
from speech_models import RATE, sound

from aiakq.errors import AiakqError
from aiakq.runtime.multimodal import audio_files
from aiakq.runtime.multimodal.audio_files import as_samples, decode_audio

soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed: pip install 'aiakq[audio]'")


def encoded(samples: np.ndarray, rate: int = RATE, format: str = "WAV", subtype: str = "FLOAT") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=format, subtype=subtype)
    return file.getvalue()


@pytest.mark.parametrize(
    ("format", "subtype", "most"),
    [
        ("WAV", "FLOAT", 0),
        ("WAV", "PCM_16", 1e-4),
        ("FLAC", "PCM_24", 1e-6),
        ("OGG", "VORBIS", 0.1),
        ("AIFF", "PCM_16", 1e-4),
    ],
)
def test_formats_are_read(format, subtype, most):
    samples = sound(0.5)
    found = decode_audio(encoded(samples, format=format, subtype=subtype), "file")
    assert found.dtype == np.float32 and len(found) == len(samples) and np.abs(found - samples).max() <= most


def test_mp3_is_read():
    found = decode_audio(encoded(sound(1.0), format="MP3", subtype="MPEG_LAYER_III"), "file")
    assert abs(len(found) - RATE) < 2500 and np.isfinite(found).all()


@pytest.mark.parametrize("rate", [8000, 44100, 48000])
def test_samples_are_resampled(rate):
    tone = np.sin(2 * np.pi * 440 * np.arange(rate) / rate).astype(np.float32)
    found = decode_audio(encoded(np.stack([tone, tone], 1), rate), "file")
    expected = np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)
    assert len(found) == RATE and np.abs(found - expected)[400:-400].max() < 1e-3
    assert np.abs(found - as_samples(tone, rate, "audio")).max() < 1e-6


def test_channels_are_averaged():
    left, right = sound(0.2, 1), sound(0.2, 2)
    assert np.allclose(decode_audio(encoded(np.stack([left, right], 1)), "file"), (left + right) / 2, atol=1e-7)


#: Files that hold no audio, by what is wrong with them. Their bytes are no ids of tests: they contain the time.
NO_AUDIO = {
    "empty": b"",
    "text": b"no audio at all" * 20,
    "no chunks": b"RIFF" + bytes(200),
    "no frames of MP3": b"\xff\xfb\x90\x00" + bytes(40),
    "cut": encoded(sound(0.2))[:60],
    "no samples": encoded(sound(0.0)),
    "NaN": encoded(np.full(100, np.nan, np.float32)),
    "a low rate": encoded(sound(0.1), 400, subtype="PCM_16"),
    "many channels": encoded(np.zeros((100, 20), np.float32)),
    "another format": encoded(sound(0.1), format="AU", subtype="PCM_16"),
}


@pytest.mark.parametrize("data", NO_AUDIO.values(), ids=NO_AUDIO)
def test_what_is_no_audio_is_refused(data):
    with pytest.raises(AiakqError) as caught:
        decode_audio(data, "file")
    assert caught.value.id == "media_refused"


def test_length_is_limited_by_what_is_there(monkeypatch):
    monkeypatch.setattr(audio_files, "MAX_SECONDS", 1)
    with pytest.raises(AiakqError, match="longer than 1 s"):
        decode_audio(encoded(sound(1.1)), "file")
    with pytest.raises(AiakqError, match="longer than 1 s"):
        as_samples(sound(1.1), RATE, "audio")


def test_numbers_that_become_infinite_are_refused():
    for audio in (np.full(2000, 1e300), np.full((2000, 2), 3e38, np.float32)):
        with pytest.raises(AiakqError, match="its samples are not finite"):
            as_samples(audio, RATE, "audio")
        with pytest.raises(AiakqError, match="its samples are not finite"):
            decode_audio(encoded(audio, subtype="DOUBLE"), "file")
    loud = np.sign(sound(0.2)) * np.float32(3.4e38)
    with pytest.raises(AiakqError, match="its samples are not finite"):
        as_samples(loud, 44100, "audio")


def test_rates_are_integers_of_any_type():
    samples = sound(0.2)
    expected = as_samples(samples, 8000, "audio")
    for rate in (np.int64(8000), 8000.0, np.float32(8000)):
        assert (as_samples(samples, rate, "audio") == expected).all()
    for rate in (8000.5, True, "8000", None, np.nan, np.inf):
        with pytest.raises(AiakqError, match="the rate of the samples is an integer"):
            as_samples(samples, rate, "audio")


def test_audio_of_no_sample_at_the_rate_of_the_model_is_refused():
    with pytest.raises(AiakqError, match="it is empty"):
        as_samples(np.ones(1, np.float32), 192_000, "audio")


@pytest.mark.parametrize("audio", [[1, 2], "abc", np.zeros((2, 2, 2)), np.array([np.inf])])
def test_arrays_of_other_kinds_are_refused(audio):
    with pytest.raises(AiakqError, match="finite floats"):
        as_samples(audio, RATE, "audio")


def test_without_the_packages_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(AiakqError, match="is not installed") as caught:
        decode_audio(b"", "file")
    assert "aiakq[audio]" in str(caught.value)
