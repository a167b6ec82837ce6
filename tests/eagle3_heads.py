"""Random EAGLE-3 heads in the published layouts, and a reference implementation in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

#: A head of other sizes than the tiny target models, which have 128 wide hidden states and 320 tokens.
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 320,
    "draft_vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def write_head(folder: Path, layer: str = "midlayer", embedding: bool = True, **changes: Any) -> dict[str, Tensor]:
    """A random head in ``folder``; returns its tensors."""
    config = {**CONFIG, **changes}
    sizes = config.get("transformer_layer_config", config)
    hidden, inner, vocab = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    target = config.get("target_hidden_size") or hidden
    dim = hidden // sizes["num_attention_heads"]
    kv = sizes["num_key_value_heads"] * dim
    draft_vocab = config["draft_vocab_size"]
    num_aux = len(config.get("eagle_aux_hidden_state_layer_ids", "..."))
    shapes = {
        "fc.weight": (hidden, num_aux * target),
        **({"input_norm.weight": (num_aux * target,)} if config.get("norm_before_fc") else {}),
        **({f"fc_norm.{at}.weight": (target,) for at in range(num_aux)} if config.get("fc_norm") else {}),
        f"{layer}.hidden_norm.weight": (hidden,),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.self_attn.q_proj.weight": (hidden, 2 * hidden),
        f"{layer}.self_attn.k_proj.weight": (kv, 2 * hidden),
        f"{layer}.self_attn.v_proj.weight": (kv, 2 * hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, hidden),
        f"{layer}.mlp.gate_proj.weight": (inner, hidden),
        f"{layer}.mlp.up_proj.weight": (inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab, hidden),
        **({"embed_tokens.weight": (vocab, hidden)} if embedding else {}),
    }
    draw = torch.Generator().manual_seed(11)
    tensors = {
        name: torch.randn(shape, generator=draw) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1) + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    chosen = torch.randperm(vocab, generator=draw)[:draft_vocab].sort().values
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, chosen, True)
    tensors["d2t"] = chosen - torch.arange(draft_vocab)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


class ReferenceHead:
    """The head as its authors describe it, over whole sequences and without a cache.

    norm_output  whether its own hidden states are those behind its last norm (EAGLE-3.1).
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        layer: str = "midlayer",
        norm_before_residual: bool = False,
        norm_output: bool = False,
    ) -> None:
        self._tensors, self._layer, self._normed, self._norm_output = tensors, layer, norm_before_residual, norm_output

    def _weight(self, name: str) -> Tensor:
        name = f"{name}.weight"
        return self._tensors.get(f"{self._layer}.{name}", self._tensors.get(name))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self._weight(name)

    def fuse(self, aux: list[Tensor]) -> Tensor:
        """Hidden states [T, target hidden] of the auxiliary layers -> [T, hidden]."""
        if "fc_norm.0.weight" in self._tensors:
            aux = [self._norm(states, f"fc_norm.{at}") for at, states in enumerate(aux)]
        side_by_side = torch.cat(aux, -1)
        if "input_norm.weight" in self._tensors:
            side_by_side = self._norm(side_by_side, "input_norm")
        return side_by_side @ self._weight("fc").T

    def step(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [T, hidden] and the tokens [T] behind it -> logits [T, draft vocabulary], own hidden [T, hidden]."""
        T = len(tokens)
        normed = self._norm(hidden, "hidden_norm")
        residual = normed if self._normed else hidden
        x = torch.cat([self._norm(self._weight("embed_tokens")[tokens], "input_layernorm"), normed], -1)
        q, k, v = (x @ self._weight(f"self_attn.{name}_proj").T for name in "qkv")
        D = q.shape[1] // 4
        q, k, v = (part.view(T, -1, D).transpose(0, 1) for part in (q, k, v))
        angles = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, D, 2) / D)
        cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
        q, k = (part * cos + torch.cat([-part[..., D // 2 :], part[..., : D // 2]], -1) * sin for part in (q, k))
        k, v = (part.repeat_interleave(2, 0) for part in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(T, -1)
        h = residual + attended @ self._weight("self_attn.o_proj").T
        inner = self._norm(h, "post_attention_layernorm")
        gate, up = (inner @ self._weight(f"mlp.{name}_proj").T for name in ("gate", "up"))
        h = h + (F.silu(gate) * up) @ self._weight("mlp.down_proj").T
        last = self._norm(h, "norm")
        return last @ self._weight("lm_head").T, last if self._norm_output else h

    def chain(self, aux: list[Tensor], tokens: list[int], count: int) -> tuple[list[int], list[Tensor]]:
        """Greedy draft tokens behind ``tokens``, whose last one has no hidden states in ``aux``, and their logits."""
        hidden, following = self.fuse(aux), list(tokens[1:])
        ids = torch.arange(len(self._tensors["d2t"])) + self._tensors["d2t"]
        found, rows = [], []
        for _ in range(count):
            logits, own = self.step(hidden, torch.tensor(following))
            rows.append(logits[-1])
            found.append(int(ids[logits[-1].argmax()]))
            hidden, following = torch.cat([hidden, own[-1:]]), [*following, found[-1]]
        return found, rows
