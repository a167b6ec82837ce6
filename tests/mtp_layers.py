"""Tiny models with a layer for multi-token prediction, and a reference of it around transformers' own decoder layer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

#: Names of the parts in DeepSeek's layout -> in that of Qwen3-Next and Qwen3.5.
QWEN = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}
#: In that of MiMo.
MIMO = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "shared_head.norm": "final_layernorm",
}


def write_model(longer: Path, folder: Path, own: bool = False, **changes: Tensor) -> MtpReference:
    """Make of the model in ``longer`` one with a layer less, and its last layer the one for multi-token prediction.

    own      whether that has an embedding and an output layer of its own.
    changes  tensors of the layer, by the part of their names behind its number.
    """
    count, parts = write_files(longer, folder, own, **changes)
    return MtpReference(longer, count, parts)


def is_qwen(folder: Path) -> bool:
    """Whether models like that in ``folder`` have the layout of Qwen3-Next."""
    return "qwen3" in json.loads((folder / "config.json").read_text())["model_type"]


def is_mimo(folder: Path) -> bool:
    """Whether the model in ``folder`` is a MiMo."""
    return json.loads((folder / "config.json").read_text())["model_type"] == "mimo"


def write_files(longer: Path, folder: Path, own: bool = False, **changes: Tensor) -> tuple[int, dict[str, Tensor]]:
    """``write_model`` without the reference, also of a quantized model. Returns the number of layers, and the tensors
    that it added.
    """
    shutil.copytree(longer, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    count = config["num_hidden_layers"] - 1
    config |= {"num_hidden_layers": count, "num_nextn_predict_layers": 1}
    for name in ("mlp_layer_types", "layer_types"):
        if config.get(name):
            config[name] = config[name][:count]
    (folder / "config.json").write_text(json.dumps(config))
    width, vocab = config["hidden_size"], config["vocab_size"]
    draw = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.2) + (len(shape) == 1)

    parts = {
        "enorm": random(width),
        "hnorm": random(width),
        "eh_proj": random(width, 2 * width),
        "shared_head.norm": random(width),
    }
    if own:
        parts |= {"embed_tokens": random(vocab, width), "shared_head.head": random(vocab, width)}
    parts |= changes
    tensors = load_file(folder / "model.safetensors")
    layer = f"model.layers.{count}."
    if is_qwen(folder):
        tensors = {name.replace(layer, "mtp.layers.0."): tensor for name, tensor in tensors.items()}
        added = {f"mtp.{QWEN[name]}.weight": tensor for name, tensor in parts.items()}
    elif is_mimo(folder):
        mimo = "model.mtp_layers.0."
        tensors = {name.replace(layer, mimo): tensor for name, tensor in tensors.items()}
        added = {f"{mimo}{MIMO[name]}.weight": tensor for name, tensor in parts.items()}
    else:
        added = {f"{layer}{name}.weight": tensor for name, tensor in parts.items()}
    save_file(tensors | added, folder / "model.safetensors", {"format": "pt"})
    return count, parts


class MtpReference:
    """The layer over whole sequences, without a cache."""

    def __init__(self, longer: Path, count: int, parts: dict[str, Tensor]) -> None:
        model = AutoModelForCausalLM.from_pretrained(longer, dtype=torch.float32, attn_implementation="eager")
        self._model, self._layer, self._parts = model, model.model.layers[count], parts
        model.model.layers = model.model.layers[:count]
        model.config.num_hidden_layers = count
        self._is_qwen, self._is_mimo = is_qwen(longer), is_mimo(longer)
        model.eval()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self._model.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (self._parts[name] + self._is_qwen)

    def hidden(self, tokens: list[int]) -> Tensor:
        """The model's hidden states [T, hidden] behind its final norm, or before it for MiMo."""
        if self._is_mimo:
            found: list[Tensor] = []
            hook = self._model.model.norm.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0][0]))
            self._model.model(torch.tensor([tokens]))
            hook.remove()
            return found[0]
        return self._model.model(torch.tensor([tokens])).last_hidden_state[0]

    def step(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [T, hidden] and the tokens [T] behind it -> logits [T, vocabulary], own hidden [T, hidden]."""
        model, T = self._model, len(tokens)
        embedding = self._parts.get("embed_tokens", model.model.embed_tokens.weight)
        embedded = embedding[tokens].clone()
        embedded[0] *= self._is_qwen
        parts = [self._norm(embedded, "enorm"), self._norm(hidden, "hnorm")]
        both = torch.cat(parts[::-1] if self._is_mimo else parts, -1)
        x = (both @ self._parts["eh_proj"].T)[None]
        positions = torch.arange(T)[None]
        mask = torch.full((T, T), -torch.inf).triu(1)[None, None]
        angles = model.model.rotary_emb(x, positions)
        out = self._layer(x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        last = self._norm((out[0] if isinstance(out, tuple) else out)[0], "shared_head.norm")
        return last @ self._parts.get("shared_head.head", model.lm_head.weight).T, last

    @torch.inference_mode()
    def chain(self, tokens: list[int], count: int) -> tuple[list[int], Tensor]:
        """``count`` greedy draft tokens behind ``tokens``, whose last one has no hidden states yet, and their
        log-probabilities [count, vocabulary].
        """
        hidden, following = self.hidden(tokens[:-1]), list(tokens[1:])
        found, rows = [], []
        for _ in range(count):
            logits, own = self.step(hidden, torch.tensor(following))
            rows.append(F.log_softmax(logits[-1], 0))
            found.append(int(logits[-1].argmax()))
            hidden, following = torch.cat([hidden, own[-1:]]), [*following, found[-1]]
        return found, torch.stack(rows)
