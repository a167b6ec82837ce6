"""Tiny random models that hear audio in chats, with a tokenizer, and what transformers computes with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from speech_models import RATE, sound

__all__ = ["RATE", "sound"]

#: Bins and frames of the spectrogram of a window, which is a second long.
BINS, FRAMES = 16, 100
ARCHITECTURES = {
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
    "voxtral": "VoxtralForConditionalGeneration",
}
#: Kind -> its special tokens, after those of the tokenizer; the last one is the placeholder.
_SPECIAL = {
    "qwen2_audio": ["<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>"],
    "voxtral": ["[INST]", "[/INST]", "[BEGIN_AUDIO]", "[AUDIO]"],
}
PLACEHOLDERS = {kind: tokens[-1] for kind, tokens in _SPECIAL.items()}
#: Kind -> an audio in the text of a prompt.
MARKS = {"qwen2_audio": "<|audio_bos|><|AUDIO|><|audio_eos|>", "voxtral": "[BEGIN_AUDIO][AUDIO]"}
_TEXT = {
    **{"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024},
    **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2},
}
#: A template in which audios come as numbered parts, as in that of Qwen2-Audio.
TEMPLATE = (
    "{% set heard = namespace(count=0) %}{% for message in messages %}<s>{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if 'audio' in part or 'audio_url' in part or part['type'] == 'audio' %}"
    "{% set heard.count = heard.count + 1 %}Audio {{ heard.count }}: MARK\n"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer_of(kind: str) -> Any:
    """A tokenizer of single bytes with the special tokens of ``kind``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "</s>", "<pad>", *_SPECIAL[kind]]
    vocab = {token: at for at, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=_SPECIAL[kind],
        chat_template=TEMPLATE.replace("MARK", MARKS[kind]),
        clean_up_tokenization_spaces=False,
    )


def config_of(kind: str) -> Any:
    """The config of the tiny model of ``kind``."""
    from transformers import AutoConfig

    token = 2 + len(_SPECIAL[kind])
    common = {"num_mel_bins": BINS, "max_source_positions": FRAMES // 2}
    if kind == "voxtral":
        tower = {"hidden_size": 32, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 2}
        audio = {"model_type": "voxtral_encoder", **tower, **common}
        text = {"model_type": "llama", **_TEXT, "head_dim": 16}
        return AutoConfig.for_model(kind, text_config=text, audio_config=audio, audio_token_id=token)
    tower = {"d_model": 32, "encoder_ffn_dim": 64, "encoder_layers": 2, "encoder_attention_heads": 2}
    audio = {"model_type": "qwen2_audio_encoder", **tower, **common}
    text = {"model_type": "qwen2", **_TEXT}
    return AutoConfig.for_model(kind, text_config=text, audio_config=audio, audio_token_index=token)


def save_audio_model(kind: str, folder: Path) -> Path:
    """Write a random model of ``kind`` with its tokenizer and the settings of its spectrograms."""
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, ARCHITECTURES[kind])(config_of(kind)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
            else:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(folder)
    tokenizer_of(kind).save_pretrained(folder)
    settings = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": BINS, "chunk_length": 1}
    settings |= {"sampling_rate": RATE, "hop_length": 160, "n_fft": 400, "return_attention_mask": True}
    settings |= {"padding_side": "right", "padding_value": 0.0, "n_samples": RATE, "nb_max_frames": FRAMES}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def save_with_tekken(folder: Path) -> Path:
    """Write a Voxtral whose only tokenizer is Mistral's, as the published ones have it."""
    from mistral_files import SPECIAL, write_tekken

    save_audio_model("voxtral", folder)
    for path in folder.glob("token*.json"):
        path.unlink()
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "config.json").read_text())
    special = [*SPECIAL, "[AUDIO]", "[BEGIN_AUDIO]", "[TRANSCRIBE]"]
    config["audio_token_id"] = special.index("[AUDIO]")
    for each in (config, config["text_config"]):
        each |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 11}
    (folder / "config.json").write_text(json.dumps(config))
    encoding = {"num_mel_bins": BINS, "hop_length": 160, "window_size": 400}
    audio = {"sampling_rate": RATE, "frame_rate": 10.0, "audio_encoding_config": encoding, "chunk_length_s": 1.0}
    return write_tekken(folder, version="v11", special=special, audio=audio)


def features_of(kind: str, folder: Path, audios: Sequence[Any]) -> dict[str, torch.Tensor]:
    """What transformers' processors make of audios of samples, one call for all of a prompt."""
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    if kind == "qwen2_audio":
        made = extractor(list(audios), sampling_rate=RATE, return_attention_mask=True, return_tensors="pt")
        return {"input_features": made["input_features"], "feature_attention_mask": made["attention_mask"]}
    windows = []
    for audio in audios:
        made = extractor(
            audio, sampling_rate=RATE, padding=True, truncation=False, pad_to_multiple_of=RATE, return_tensors="pt"
        )
        windows.append(made["input_features"].reshape(BINS, -1, FRAMES).transpose(0, 1))
    return {"input_features": torch.cat(windows)}


def reference_logprobs(folder: Path, kind: str, ids: list[int], audios: Sequence[Any]) -> torch.Tensor:
    """Log-probabilities [T, V] that transformers computes for a whole sequence with ``audios``, eager, in float32."""
    import transformers

    family = getattr(transformers, ARCHITECTURES[kind])
    model = family.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    given = features_of(kind, folder, audios) if audios else {}
    with torch.inference_mode():
        rows: torch.Tensor = model(
            input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), **given
        ).logits[0]
    return rows.log_softmax(-1)
