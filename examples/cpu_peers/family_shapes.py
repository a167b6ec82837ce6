"""Models of about a billion random parameters in the shapes of newer families, as folders and as GGUF files."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

_COMMON: dict[str, Any] = {"vocab_size": 32000, "bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 2048}
#: Name -> model_type and config. Mixtures of experts have fewer experts than the published models, of the same size.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    # That of google/gemma-3-1b, with its vocabulary.
    "Gemma 3": (
        "gemma3_text",
        {
            **(_COMMON | {"vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912}),
            **{"num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256},
            **{"sliding_window": 512, "query_pre_attn_scalar": 256, "tie_word_embeddings": True},
        },
    ),
    "GPT-OSS": (
        "gpt_oss",
        {
            **(_COMMON | {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 12}),
            **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": False},
            **{
                "num_local_experts": 24,
                "num_experts_per_tok": 4,
                "sliding_window": 128,
                "initial_context_length": 2048,
            },
            "max_position_embeddings": 131072,
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "truncate": False},
                **{"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096},
            },
        },
    ),
    "Qwen3-MoE": (
        "qwen3_moe",
        {
            **(_COMMON | {"hidden_size": 1024, "moe_intermediate_size": 512, "intermediate_size": 3072}),
            **{"num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128},
            **{"num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True, "tie_word_embeddings": False},
        },
    ),
    "DeepSeek V3": (
        "deepseek_v3",
        {
            **(_COMMON | {"hidden_size": 1024, "intermediate_size": 4096, "moe_intermediate_size": 512}),
            **{
                "num_hidden_layers": 15,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "first_k_dense_replace": 1,
            },
            **{"n_routed_experts": 32, "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2},
            **{"q_lora_rank": 512, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128},
            # vLLM needs the last two, which transformers assumes.
            **{"v_head_dim": 128, "tie_word_embeddings": False, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        },
    ),
    # That of Qwen/Qwen3.5-0.8B, with its vocabulary: three of four layers are gated delta layers.
    "Qwen3.5": (
        "qwen3_5_text",
        {
            **(_COMMON | {"vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584}),
            **{"num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256},
            **{"linear_num_key_heads": 16, "linear_num_value_heads": 16, "tie_word_embeddings": True},
        },
    ),
    # Layers as in google/gemma-4-31B (no inputs per layer, full attention with wider heads), as wide as Gemma 3's.
    "Gemma 4": (
        "gemma4_text",
        {
            **(_COMMON | {"vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912}),
            **{"num_hidden_layers": 24, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256},
            **{"global_head_dim": 512, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
            **{"sliding_window": 512, "hidden_size_per_layer_input": 0, "tie_word_embeddings": True},
        },
    ),
}


def slug(name: str) -> str:
    """The name of a shape's folder."""
    return name.lower().replace(" ", "-")


def folder(name: str, root: Path) -> Path:
    """The model folder of a shape under ``root``, in bfloat16; created if it does not exist."""
    made = root / slug(name)
    if not (made / "config.json").is_file():
        partial = made.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        _write(name, partial)
        partial.rename(made)
    return made


def _write(name: str, made: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    kind, values = SHAPES[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values), dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
        for path, buffer in model.named_buffers():
            if "correction_bias" in path:
                buffer.zero_()
    model.tie_weights()
    model.save_pretrained(made)
    words = {f"w{number}": number for number in range(values["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="w0", eos_token="w1").save_pretrained(made)


def main() -> None:
    """``family_shapes.py LLAMA.CPP FOLDER FILE``: convert with llama.cpp's program, without the tokenizer."""
    sources, model, file = sys.argv[1:]
    sys.path[:0] = [sources, f"{sources}/gguf-py"]
    import conversion
    import convert_hf_to_gguf
    import gguf

    config = json.loads((Path(model) / "config.json").read_text())
    writer = conversion.get_model_class(config["architectures"][0])
    writer.set_vocab = lambda self: self._set_vocab_none()
    finish = gguf.GGUFWriter.write_header_to_file

    def write_header(writer: Any, **arguments: Any) -> None:
        """Write the header with the size of the vocabulary, which some architectures take from the tokenizer alone."""
        key = gguf.Keys.LLM.VOCAB_SIZE.format(arch=writer.arch)
        if not any(key in part for part in writer.kv_data):
            writer.add_vocab_size(config["vocab_size"])
        finish(writer, **arguments)

    gguf.GGUFWriter.write_header_to_file = write_header
    drafts = ["--no-mtp"] if hasattr(writer, "opt_num_mtp_layers") else []
    sys.argv[1:] = [model, "--outfile", file, "--outtype", "bf16", *drafts]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
