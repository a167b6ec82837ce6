"""A model of the shape of SmolVLM-500M with random weights, as a folder and as the two GGUF files of llama.cpp."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch

#: Rows and columns of tiles that the tokenizer of SmolVLM has names for.
_TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
_SPECIAL = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *_TILES]
_FIRST = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TEXT: dict[str, Any] = {
    "architectures": ["VLlama3ForCausalLM"],  # as in the published file
    **{"model_type": "llama", "vocab_size": 49280, "hidden_size": 960, "intermediate_size": 2560, "head_dim": 64},
    **{"num_hidden_layers": 32, "num_attention_heads": 15, "num_key_value_heads": 5, "rms_norm_eps": 1e-5},
    **{"max_position_embeddings": 8192, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "tie_word_embeddings": True},
}
_VISION = {
    **{"model_type": "smolvlm_vision", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
    **{"num_attention_heads": 12, "image_size": 512, "patch_size": 16},
}
#: Images come first, as in the published template.
_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}:"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def folder(longest_edge: int, root: Path) -> Path:
    """The model folder under ``root``, in bfloat16, whose images are enlarged to ``longest_edge`` pixels and cut into
    tiles of 512; created if it does not exist.
    """
    made = root / f"smolvlm-{longest_edge}"
    if not (made / "config.json").is_file():
        partial = made.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        _write(longest_edge, partial)
        partial.rename(made)
    return made


def _write(longest_edge: int, made: Path) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    tokenizer = _tokenizer()
    config = AutoConfig.for_model(
        "smolvlm",
        **{"text_config": _TEXT, "vision_config": _VISION, "scale_factor": 4, "pad_token_id": 2},
        **{"image_token_id": tokenizer.convert_tokens_to_ids("<image>"), "tie_word_embeddings": True},
    )
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    model.tie_weights()
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    size = {"size": {"longest_edge": longest_edge}, "max_image_size": {"longest_edge": 512}}
    SmolVLMImageProcessorPil(**size).save_pretrained(made)


def _tokenizer() -> Any:
    """A tokenizer of single bytes with SmolVLM's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*_FIRST, *alphabet, "\u010a\u010a", *_SPECIAL])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("\u010a", "\u010a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **dict(zip(("unk_token", "bos_token", "eos_token"), _FIRST, strict=True)),
        pad_token=_FIRST[2],
        additional_special_tokens=_SPECIAL,
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    """``vision_shape.py LLAMA.CPP FOLDER FILE [--mmproj]``: convert with llama.cpp's program."""
    sources, model, file, *encoder = sys.argv[1:]
    sys.path[:0] = [sources, f"{sources}/gguf-py"]
    import conversion
    import convert_hf_to_gguf

    (architecture,) = _TEXT["architectures"]
    # The program knows published tokenizers only, by a hash; this one splits text as SmolVLM's does.
    conversion.get_model_class(architecture).get_vocab_base_pre = lambda self, tokenizer: "smollm"
    sys.argv[1:] = [model, "--outfile", file, "--outtype", "f16" if encoder else "bf16", *encoder]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
