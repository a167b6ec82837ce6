"""A model that generates scripted text: the last token of the prompt selects the script, whatever precedes it.

Each token has one successor, in the rows of the output layer; attention and MLP are zero. A piece of a script is one
token, so that pieces may be any text, but no piece may be in two scripts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<|im_end|>"


def write_model(
    folder: Path, scripts: Mapping[str, Sequence[str]], template: str, special: Sequence[str] = (), context: int = 4096
) -> None:
    """Write a model that generates ``scripts[start]`` after a prompt whose last token is ``start``."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = dict.fromkeys([END, *(text for start, script in scripts.items() for text in (start, *script))])
    tokenizer.add_tokens([AddedToken(text, special=text == END or text in special, normalized=False) for text in texts])
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    hidden = -(-size // 32) * 32
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": hidden,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(END),
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    successors: dict[int, int] = {}
    for start, script in scripts.items():
        ids = [tokenizer.token_to_id(text) for text in (start, *script, END)]
        for this, after in zip(ids, ids[1:], strict=False):
            assert successors.setdefault(this, after) == after, f"{tokenizer.id_to_token(this)!r} is in two scripts"
    head = torch.zeros(size, hidden)
    for this, after in successors.items():
        head[after, this] = 20.0
    layer = "model.layers.0"
    shapes = {"q_proj": (32, hidden), "k_proj": (16, hidden), "v_proj": (16, hidden), "o_proj": (hidden, 32)}
    mlp = {"gate_proj": (32, hidden), "up_proj": (32, hidden), "down_proj": (hidden, 32)}
    tensors = {f"{layer}.self_attn.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    tensors |= {f"{layer}.mlp.{name}.weight": torch.zeros(shape) for name, shape in mlp.items()}
    norms = ("model.norm", f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm")
    tensors |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    tensors |= {"model.embed_tokens.weight": torch.eye(size, hidden), "lm_head.weight": head}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
