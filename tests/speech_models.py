"""Tiny random models that transcribe audio: Whisper with windows of one second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

#: Samples of a second, and the bins and frames of the spectrogram of a window.
RATE, BINS, FRAMES = 16000, 16, 100
START, EN, DE, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH, NO_TIMESTAMPS = range(259, 267)
TIMESTAMPS = NO_TIMESTAMPS + 1
SPECIAL = (
    *("<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>", "<|startofprev|>"),
    *("<|nospeech|>", "<|notimestamps|>"),
)
CONFIG: dict[str, Any] = {
    "vocab_size": TIMESTAMPS + FRAMES // 2 + 1,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 128,
    "num_mel_bins": BINS,
    "max_source_positions": FRAMES // 2,
    "max_target_positions": 64,
    "decoder_start_token_id": START,
    "pad_token_id": 1,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
GENERATION: dict[str, Any] = {
    "lang_to_id": {"<|en|>": EN, "<|de|>": DE},
    "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE},
    "no_timestamps_token_id": NO_TIMESTAMPS,
    "prev_sot_token_id": PREVIOUS,
    "is_multilingual": True,
    "suppress_tokens": [5, 6, START, *range(EN, NO_TIMESTAMPS)],
    "begin_suppress_tokens": [7, 1],
    "max_initial_timestamp_index": 20,
    "decoder_start_token_id": START,
    **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"), 1),
    "max_length": 64,
    "return_timestamps": False,
}


def save_whisper(folder: Path, tokenizer: Any, **changes: Any) -> Path:
    """Write a random Whisper with the byte tokenizer of the tiny models and the tokens that Whisper adds."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(WhisperConfig(**{**CONFIG, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
            else:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL]})
    tokenizer.add_tokens([f"<|{step / 50:.2f}|>" for step in range(FRAMES // 2 + 1)])
    tokenizer.save_pretrained(folder)
    features = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": BINS,
        "sampling_rate": RATE,
        "hop_length": RATE // FRAMES,
        "chunk_length": 1,
        "n_fft": 400,
        "padding_value": 0.0,
        "return_attention_mask": False,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(features))
    return folder


def sound(seconds: float, seed: int = 0, rate: int = RATE) -> np.ndarray:
    """Return some audio [seconds * rate] float32: tones that change, and noise."""
    random = np.random.default_rng(seed)
    at = np.arange(int(seconds * rate)) / rate
    tones = sum(np.sin(2 * np.pi * random.uniform(100, 3000) * at * (1 + random.uniform(0, 1) * at)) for _ in range(4))
    return (0.2 * tones + 0.02 * random.standard_normal(len(at))).astype(np.float32)
