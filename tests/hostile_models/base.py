"""A tiny whole model, written without transformers, and what a hostile case is: a change of its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "float32",
}


def base_tensors() -> dict[str, torch.Tensor]:
    """The tensors of ``CONFIG``, of random numbers that are the same every time."""
    make = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (260, 64), "model.norm.weight": (64,), "lm_head.weight": (260, 64)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        linears = {
            "self_attn.q_proj": (64, 64),
            "self_attn.k_proj": (32, 64),
            "self_attn.v_proj": (32, 64),
            "self_attn.o_proj": (64, 64),
            "mlp.gate_proj": (128, 64),
            "mlp.up_proj": (128, 64),
            "mlp.down_proj": (64, 128),
        }
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in linears.items()}
        shapes |= {f"{prefix}{name}.weight": (64,) for name in ("input_layernorm", "post_attention_layernorm")}
    return {name: torch.randn(shape, generator=make) / shape[-1] ** 0.5 for name, shape in shapes.items()}


def base_tokenizer() -> dict[str, Any]:
    """tokenizer.json of single bytes and three special tokens."""
    special = ["<s>", "</s>", "<pad>"]
    vocab = {token: at for at, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": at,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for at, token in enumerate(special)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }


def write_base(folder: Path) -> None:
    """A whole model that loads, quantizes and answers."""
    folder.mkdir()
    put(folder, "config.json", CONFIG)
    put(folder, "generation_config.json", {"eos_token_id": 1, "temperature": 0.7})
    put(folder, "tokenizer.json", base_tokenizer())
    put(
        folder,
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        },
    )
    save_file(base_tensors(), folder / "model.safetensors", metadata={"format": "pt"})


def put(folder: Path, file: str, content: Any) -> None:
    """Replace a file: bytes and text as they are, anything else as JSON."""
    path = folder / file
    path.unlink(missing_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))


def change(folder: Path, file: str, **values: Any) -> None:
    """Change keys of a JSON file; ``DROP`` removes one."""
    found = json.loads((folder / file).read_text()) | values
    put(folder, file, {key: value for key, value in found.items() if value is not DROP})


DROP = object()
Change = Callable[[Path], None]


@dataclass(frozen=True)
class Case:
    """A folder made hostile by ``change``, and the commands that meet it."""

    family: str
    name: str
    change: Change
    commands: tuple[str, ...]


FAMILIES: dict[str, tuple[Callable[[], Iterator[tuple[str, Change]]], tuple[str, ...]]] = {}


def family(name: str, *commands: str) -> Any:
    """Register a generator of (name, change) as a family of cases that ``commands`` meet."""

    def register(make: Callable[[], Iterator[tuple[str, Change]]]) -> Any:
        FAMILIES[name] = (make, commands)
        return make

    return register


def cases() -> list[Case]:
    """All cases, in an order that does not change."""
    return [
        Case(name, title, change, commands) for name, (make, commands) in FAMILIES.items() for title, change in make()
    ]


def changing(file: str, values: Mapping[str, Any]) -> Change:
    """A change of some keys of one JSON file."""
    return lambda folder: change(folder, file, **values)


def shown(value: Any) -> str:
    """A value in the name of a case."""
    return "no value" if value is DROP else f"{value!r:.40}"
