"""An audio takes as many tokens as transformers' processors give it, and its encoder gets what they make of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from audio_models import (
    ARCHITECTURES,
    BINS,
    FRAMES,
    MARKS,
    PLACEHOLDERS,
    RATE,
    config_of,
    features_of,
    save_audio_model,
    sound,
    tokenizer_of,
)

from aiakq.errors import AiakqError, error
from aiakq.runtime.config.multimodal import MultimodalConfig
from aiakq.runtime.multimodal.audio import AudioPreprocessor
from aiakq.runtime.multimodal.preprocessor import MediaInput, PromptMedia
from aiakq.runtime.text.tokenizer import Tokenizer

#: Samples of audio: few, at the ends of frames, of states and of embeddings, and of a whole window.
LENGTHS = (321, 480, 481, 640, 799, 800, 801, 960, 1600, 7777, RATE - 160, RATE - 1, RATE)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return {kind: save_audio_model(kind, tmp_path_factory.mktemp(kind)) for kind in ARCHITECTURES}


def preprocessor(kind: str, folder: Any) -> AudioPreprocessor:
    token = tokenizer_of(kind).convert_tokens_to_ids(PLACEHOLDERS[kind])
    given: dict[str, Any] = {"kind": "audio", "folder": str(folder), "token_ids": {"audio": token}}
    config = MultimodalConfig(architecture=ARCHITECTURES[kind], raw=config_of(kind).to_dict(), **given)
    return AudioPreprocessor(config, Tokenizer.load(folder))


def expanded(kind: str, folder: Any, ids: Any, audios: list[np.ndarray]) -> Any:
    """The tokens of a prompt with audio, and the items."""
    media = [MediaInput("audio", samples, "") for samples in audios]
    return PromptMedia(Tokenizer.load(folder), [preprocessor(kind, folder)]).expanded(ids, media)


def tensor_of(item: Any, name: str = "input_features") -> np.ndarray:
    record = item.tensors[name]
    return np.frombuffer(record.data, record.dtype).reshape(record.shape)


def test_prompts_have_the_tokens_of_transformers_processor(folders):
    from transformers import WhisperFeatureExtractor
    from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor

    folder, tokenizer = folders["qwen2_audio"], tokenizer_of("qwen2_audio")
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    processor = Qwen2AudioProcessor(extractor, tokenizer, audio_token=PLACEHOLDERS["qwen2_audio"])
    audios = [sound(2.0, seed)[:length] for seed, length in enumerate(LENGTHS)]
    text = "".join(f"{number}: {MARKS['qwen2_audio']}\n" for number in range(len(audios)))
    expected = processor(text=text, audio=audios, sampling_rate=RATE)
    ids, items = expanded("qwen2_audio", folder, tokenizer(text)["input_ids"], audios)
    assert ids == list(expected["input_ids"][0])
    for item, features, mask in zip(items, expected["input_features"], expected["feature_attention_mask"], strict=True):
        assert np.abs(tensor_of(item) - np.asarray(features)).max() < 1e-5
        assert tensor_of(item, "num_states") == [(int(np.sum(np.asarray(mask))) - 1) // 2 + 1]


@pytest.mark.parametrize("length", [1, 5000, RATE, RATE + 1, 3 * RATE, 3 * RATE + 77])
def test_windows_of_voxtral_are_those_of_transformers(folders, length):
    samples = sound(3.1, 1)[:length]
    token = tokenizer_of("voxtral").convert_tokens_to_ids("[AUDIO]")
    ids, [item] = expanded("voxtral", folders["voxtral"], [7, token, 8], [samples])
    expected = features_of("voxtral", folders["voxtral"], [samples])["input_features"].numpy()
    assert tensor_of(item).shape == expected.shape == (-(-length // RATE), BINS, FRAMES)
    assert np.abs(tensor_of(item) - expected).max() < 1e-5
    assert ids == [7, *[token] * (10 * len(expected)), 8] and item.places == [(1, 10 * len(expected))]


def test_the_placeholder_of_texts_has_the_tokens_around_it(folders):
    for kind, mark in MARKS.items():
        assert preprocessor(kind, folders[kind]).placeholder_text == mark


@pytest.mark.parametrize(("length", "reason"), [(0, "too few"), (320, "too few"), (RATE + 1, "the model reads 1 s")])
def test_what_qwen2_audio_does_not_read_is_refused(folders, length, reason):
    with pytest.raises(AiakqError, match=reason):
        preprocessor("qwen2_audio", folders["qwen2_audio"]).processed(sound(2.0)[:length], "audio")


def test_settings_in_the_file_of_transformers_5_are_read(folders, tmp_path):
    from transformers import WhisperFeatureExtractor

    for path in folders["voxtral"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    WhisperFeatureExtractor.from_pretrained(tmp_path).save_pretrained(tmp_path)
    settings = (tmp_path / "preprocessor_config.json").read_text()
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(AiakqError, match=r"preprocessor_config\.json is missing"):
        preprocessor("voxtral", tmp_path)
    (tmp_path / "processor_config.json").write_text(f'{{"feature_extractor": {settings}}}')
    assert preprocessor("voxtral", tmp_path).placeholder == "[AUDIO]"


def test_a_server_without_the_packages_serves_text_and_names_the_remedy(folders, monkeypatch):
    from aiakq.server.process import text_loading

    def missing() -> None:
        raise error("no_soundfile")

    monkeypatch.setattr(text_loading, "load_packages", missing)
    setup: Any = SimpleNamespace(media=SimpleNamespace(refusal="", kind="audio", max_items={"audio": 1}))
    loaded: Any = SimpleNamespace(media_failures={})
    assert text_loading.load_media(setup, Tokenizer.load(folders["voxtral"]), [], loaded) is None
    assert "aiakq[audio]" in str(loaded.media_failures["audio"].error())
