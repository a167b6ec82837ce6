"""The spectrogram is that of transformers' feature extractor."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from speech_models import BINS, DE, FRAMES, GENERATION, NO_TIMESTAMPS, RATE, TRANSCRIBE, sound

from aiakq.errors import AiakqError
from aiakq.runtime.config.speech import SpeechConfig, SpeechTokens
from aiakq.runtime.multimodal.spectrogram import Spectrogram

SETTINGS = {"feature_size": BINS, "sampling_rate": RATE, "hop_length": 160, "chunk_length": 1, "n_fft": 400}


@pytest.fixture
def spectrogram(tmp_path):
    """``spectrogram(**settings)`` -> one with other settings than ``SETTINGS``."""

    def make(**settings) -> Spectrogram:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({**SETTINGS, **settings}))
        (tmp_path / "generation_config.json").write_text(json.dumps(GENERATION))
        tokens = SpeechTokens.read(tmp_path, 400, {})
        return Spectrogram(
            SpeechConfig(folder=str(tmp_path), raw={}, tokens=tokens, num_states=FRAMES // 2, num_bins=BINS)
        )

    return make


@pytest.mark.parametrize("seconds", [0.01, 0.3, 1.0, 2.705])
def test_it_is_that_of_transformers(spectrogram, tmp_path, seconds):
    from transformers import WhisperFeatureExtractor

    samples, made = sound(seconds), spectrogram()
    padding = "max_length" if seconds <= 1 else "longest"
    extractor = WhisperFeatureExtractor.from_pretrained(tmp_path)
    expected = extractor(samples, sampling_rate=RATE, truncation=False, padding=padding, return_tensors="np")
    found = made.of(samples)
    assert found.dtype == np.float32 and np.abs(found - expected.input_features[0]).max() < 1e-5


def test_the_file_of_a_processor_comes_first(spectrogram, tmp_path):
    """Transformers 5 writes the settings of the feature extractor into it."""
    stated = {"feature_extractor": SETTINGS, "processor_class": "WhisperProcessor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(stated))
    assert spectrogram(n_fft=200).of(sound(0.1)).shape == (BINS, FRAMES)
    (tmp_path / "processor_config.json").write_text(json.dumps({"feature_extractor": {**SETTINGS, "dither": 0.1}}))
    with pytest.raises(AiakqError, match=r"processor_config\.json.*dither"):
        spectrogram()


def test_windows_end_with_zeros(spectrogram):
    made = spectrogram()
    whole = made.of(sound(1.5))
    item = made.window(whole, FRAMES)
    [record] = item.tensors.values()
    values = np.frombuffer(record.data, np.float32).reshape(record.shape)
    assert values.shape == (BINS, FRAMES) and item.num_embeddings == FRAMES // 2 and not item.places
    assert np.array_equal(values[:, :50], whole[:, FRAMES:]) and not values[:, 50:].any()
    assert item.key == made.window(whole, FRAMES).key != made.window(whole).key


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sampling_rate": 8000}, "sampling_rate"),
        ({"dither": 0.1}, "dither"),
        ({"do_normalize": True}, "do_normalize"),
        ({"preemphasis": 0.97}, "preemphasis"),
        ({"chunk_length": 30}, "16 x 3000"),
        ({"n_fft": "400"}, "n_fft"),
    ],
)
def test_other_settings_are_refused(spectrogram, settings, words):
    with pytest.raises(AiakqError, match=words):
        spectrogram(**settings)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"no_timestamps_token_id": None}, "no no_timestamps_token_id"),
        ({"suppress_tokens": [-1]}, "suppress_tokens"),
        ({"lang_to_id": {"<|en|>": "a"}}, "lang_to_id"),
        ({"begin_suppress_tokens": [4000]}, "4000"),
        ({"language": "klingon"}, "klingon"),
        ({"language": ["de", "en"]}, "language"),
        ({"forced_decoder_ids": [[1, 40]]}, "40 where lang_to_id has a language"),
        ({"forced_decoder_ids": 7}, "forced_decoder_ids"),
    ],
)
def test_damaged_tokens_are_refused(tmp_path, changes, words):
    (tmp_path / "generation_config.json").write_text(json.dumps({**GENERATION, **changes}))
    with pytest.raises(AiakqError, match=words):
        SpeechTokens.read(Path(tmp_path), 400, {})


@pytest.mark.parametrize(
    ("changes", "config", "language"),
    [
        ({}, {}, None),
        ({"language": "de"}, {}, "de"),
        ({"language": "<|de|>", "task": "transcribe"}, {}, "de"),
        ({"language": "German"}, {}, "de"),
        ({"forced_decoder_ids": [[1, DE], [2, TRANSCRIBE]]}, {}, "de"),
        ({"forced_decoder_ids": [[1, None], [2, TRANSCRIBE]]}, {"forced_decoder_ids": [[1, DE]]}, None),
        ({"forced_decoder_ids": None}, {"forced_decoder_ids": [[1, DE]]}, "de"),
        ({"task": "transcribe"}, {"forced_decoder_ids": [[1, DE]]}, None),
        ({"is_multilingual": False}, {"forced_decoder_ids": [[1, NO_TIMESTAMPS]]}, None),
    ],
)
def test_files_of_fine_tuned_models_fix_the_language(tmp_path, changes, config, language):
    (tmp_path / "generation_config.json").write_text(json.dumps({**GENERATION, **changes}))
    tokens = SpeechTokens.read(Path(tmp_path), 400, config)
    assert tokens.language == language
    assert bool(tokens.languages) == bool(tokens.tasks) == ("is_multilingual" not in changes)
