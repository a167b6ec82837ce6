"""Tiny random JinaBERT, which transformers does not have, and what it computes, from the published equations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from encoder_models import encoder_tokenizer
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

#: 6 heads: no power of two.
D, HEADS, FF, LAYERS, VOCAB = 96, 6, 160, 2, 320
CONFIG: dict[str, Any] = {
    "architectures": ["JinaBertForMaskedLM"],
    "model_type": "bert",
    "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
    **{"vocab_size": VOCAB, "hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS},
    **{"intermediate_size": FF, "max_position_embeddings": 600, "type_vocab_size": 2, "layer_norm_eps": 1e-12},
    **{"position_embedding_type": "alibi", "feed_forward_type": "geglu", "emb_pooler": "mean", "hidden_act": "gelu"},
    **{"attn_implementation": "torch", "model_max_length": 600, "pad_token_id": 1},
}


def save_jina_bert(folder: Path, has_norms: bool = False, outer: str = "", **changes: Any) -> dict[str, Tensor]:
    """Save a model; return its tensors, named without ``outer``. With norms: that of jina-embeddings-v2-base-code."""
    torch.manual_seed(7)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCAB, D),
        "embeddings.token_type_embeddings.weight": (2, D),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(LAYERS):
        base = f"encoder.layer.{layer}."
        for name in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            shapes |= {f"{base}{name}.weight": (D, D), f"{base}{name}.bias": (D,)}
        first, second = ("mlp.up_gated_layer", "mlp.down_layer") if has_norms else ("mlp.gated_layers", "mlp.wo")
        shapes |= {
            f"{base}{first}.weight": (2 * FF, D),
            f"{base}{second}.weight": (D, FF),
            f"{base}{second}.bias": (D,),
        }
        norms.append(f"{base}attention.output.LayerNorm")
        others = ("attention.self.layer_norm_q", "attention.self.layer_norm_k", "layer_norm_1", "layer_norm_2")
        norms += [base + name for name in (others if has_norms else ("mlp.layernorm",))]
    for name in norms:
        shapes |= {f"{name}.weight": (D,), f"{name}.bias": (D,)}
    tensors = {name: torch.randn(shape) * (1.5 / shape[-1] ** 0.5) for name, shape in shapes.items()}
    for name in norms:
        tensors[f"{name}.weight"] += 1
    folder.mkdir(exist_ok=True)
    save_file({outer + name: tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    encoder_tokenizer(True).save_pretrained(folder)
    return tensors


def jina_bert_states(tensors: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Hidden states [T, D] of a text."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (D,), tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-12)

    slopes = torch.tensor([2.0 ** -(2 * head + 2) for head in range(4)] + [2.0**-1, 2.0**-3])
    at = torch.arange(len(ids))
    bias = -slopes[:, None, None] * (at[:, None] - at[None]).abs()
    words = tensors["embeddings.word_embeddings.weight"][torch.tensor(ids)]
    x = norm("embeddings.LayerNorm", words + tensors["embeddings.token_type_embeddings.weight"][0])
    for layer in range(LAYERS):
        base = f"encoder.layer.{layer}."
        q, k, v = (linear(f"{base}attention.self.{name}", x) for name in ("query", "key", "value"))
        has_norms = f"{base}layer_norm_1.weight" in tensors
        if has_norms:
            q, k = norm(f"{base}attention.self.layer_norm_q", q), norm(f"{base}attention.self.layer_norm_k", k)
        q, k, v = (part.view(len(ids), HEADS, -1).transpose(0, 1) for part in (q, k, v))
        scores = q @ k.transpose(1, 2) / (D // HEADS) ** 0.5 + bias
        attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(ids), D)
        out = norm(f"{base}attention.output.LayerNorm", linear(f"{base}attention.output.dense", attended) + x)
        if has_norms:
            out = norm(f"{base}layer_norm_1", out + x)
            up, gate = linear(f"{base}mlp.up_gated_layer", out).chunk(2, -1)
            x = norm(f"{base}layer_norm_2", linear(f"{base}mlp.down_layer", F.gelu(gate) * up) + out)
        else:
            gate, up = linear(f"{base}mlp.gated_layers", out).chunk(2, -1)
            x = norm(f"{base}mlp.layernorm", linear(f"{base}mlp.wo", F.gelu(gate) * up) + out)
    return x
