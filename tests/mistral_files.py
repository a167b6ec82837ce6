"""Writes tiny models in Mistral's format, and computes what they mean as mistral-inference does, in float32.

Nothing here is shared with the code under test.
"""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PARAMS: dict[str, Any] = {
    "dim": 64,
    "n_layers": 2,
    "head_dim": 32,
    "hidden_dim": 96,
    "n_heads": 4,
    "n_kv_heads": 2,
    "norm_eps": 1e-05,
    "vocab_size": 320,
    "rope_theta": 10000.0,
    "max_seq_len": 256,
}


def write_mistral(folder: Path, fp8: bool = False, **changes: Any) -> Path:
    """Write a model with random weights; ``fp8``: linears in 8-bit floats, with the scales of Mistral's releases."""
    folder.mkdir(parents=True, exist_ok=True)
    params = {key: value for key, value in (PARAMS | changes).items() if value is not ...}
    generator = torch.Generator().manual_seed(7)
    tensors: dict[str, Tensor] = {}

    def matrix(name: str, n: int, k: int, scaled: bool = True) -> None:
        weight = torch.randn(n, k, generator=generator) / math.sqrt(k)
        if not (fp8 and scaled):
            tensors[f"{name}.weight"] = weight.bfloat16()
            return
        scale = weight.abs().max() / 448
        tensors[f"{name}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}.qscale_weight"] = scale
        tensors[f"{name}.qscale_act"] = torch.tensor(4.0 / 448)

    dim, hidden, width = params["dim"], params["hidden_dim"], params["head_dim"]
    matrix("tok_embeddings", params["vocab_size"], dim, scaled=False)
    if not params.get("tied_embeddings"):
        matrix("output", params["vocab_size"], dim, scaled=False)
    norms = ["norm"]
    for layer in range(params["n_layers"]):
        at = f"layers.{layer}"
        norms += [f"{at}.attention_norm", f"{at}.ffn_norm"]
        matrix(f"{at}.attention.wq", params["n_heads"] * width, dim)
        matrix(f"{at}.attention.wk", params["n_kv_heads"] * width, dim)
        matrix(f"{at}.attention.wv", params["n_kv_heads"] * width, dim)
        matrix(f"{at}.attention.wo", dim, params["n_heads"] * width)
        experts = range(params["moe"]["num_experts"]) if "moe" in params else ()
        for mlp in [f"experts.{expert}." for expert in experts] or [""]:
            matrix(f"{at}.feed_forward.{mlp}w1", hidden, dim)
            matrix(f"{at}.feed_forward.{mlp}w3", hidden, dim)
            matrix(f"{at}.feed_forward.{mlp}w2", dim, hidden)
        if experts:
            matrix(f"{at}.feed_forward.gate", len(experts), dim, scaled=False)
    for name in norms:
        tensors[f"{name}.weight"] = (1 + torch.randn(dim, generator=generator) / 8).bfloat16()
    if fp8:
        params["quantization"] = {"qformat_weight": "fp8_e4m3"}
    (folder / "params.json").write_text(json.dumps(params))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "consolidated.safetensors")
    return folder


class Reference:
    """The model in a folder, computed token by token as its author's code does."""

    def __init__(self, folder: Path) -> None:
        self.params = json.loads((folder / "params.json").read_text())
        self.tensors = load_file(folder / "consolidated.safetensors")

    def log_probabilities(self, ids: list[int]) -> Tensor:
        """Return [T, V]."""
        params = self.params
        x = self.tensors["tok_embeddings.weight"].float()[ids]
        for layer in range(params["n_layers"]):
            at = f"layers.{layer}"
            x = x + self._attention(self._norm(x, f"{at}.attention_norm"), at, layer)
            x = x + self._feed_forward(self._norm(x, f"{at}.ffn_norm"), f"{at}.feed_forward")
        head = "tok_embeddings" if params.get("tied_embeddings") else "output"
        return torch.log_softmax(self._linear(self._norm(x, "norm"), head), -1)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        weight = self.tensors[f"{name}.weight"].float()
        if (scale := self.tensors.get(f"{name}.qscale_weight")) is None:
            return x @ weight.T
        step = self.tensors[f"{name}.qscale_act"]
        rounded = (x / step).clamp(-448, 448).to(torch.float8_e4m3fn).float() * step
        return rounded @ (weight * scale).T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.params["norm_eps"])
        return scaled * self.tensors[f"{name}.weight"].float()

    def _feed_forward(self, x: Tensor, name: str) -> Tensor:
        if "moe" not in self.params:
            return self._gated(x, name)
        scores = self._linear(x, f"{name}.gate")
        values, chosen = torch.topk(scores, self.params["moe"]["num_experts_per_tok"])
        weights, out = torch.softmax(values, -1), torch.zeros_like(x)
        for token in range(len(x)):
            for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
                out[token] += weight * self._gated(x[token : token + 1], f"{name}.experts.{expert}")[0]
        return out

    def _gated(self, x: Tensor, name: str) -> Tensor:
        gate = torch.nn.functional.silu(self._linear(x, f"{name}.w1"))
        return self._linear(gate * self._linear(x, f"{name}.w3"), f"{name}.w2")

    def _attention(self, x: Tensor, at: str, layer: int) -> Tensor:
        params, width = self.params, self.params["head_dim"]
        positions = torch.arange(len(x))
        q, k, v = (self._linear(x, f"{at}.attention.{name}").view(len(x), -1, width) for name in ("wq", "wk", "wv"))
        q, k = self._rotated(q, positions), self._rotated(k, positions)
        if scaling := params.get("llama_4_scaling"):
            steps = torch.floor(positions / scaling["original_max_position_embeddings"])
            q = q * (1 + scaling["beta"] * torch.log(1 + steps)).view(-1, 1, 1)
        repeats = params["n_heads"] // params["n_kv_heads"]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(width)
        distance = positions.view(-1, 1) - positions
        seen = distance >= 0
        window = params.get("sliding_window")
        window = window[layer % len(window)] if isinstance(window, list) else window
        if window is not None:
            seen = seen & (distance < window)
        mixed = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
        return self._linear(torch.einsum("hts,shd->thd", mixed, v).flatten(1), f"{at}.attention.wo")

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate adjacent elements of [T, H, D] as complex numbers."""
        width, theta = self.params["head_dim"], self.params["rope_theta"]
        frequencies = theta ** (-torch.arange(0, width, 2).float() / width)
        scale = 1.0
        if yarn := self.params.get("yarn"):
            frequencies, scale = self._yarn(frequencies, yarn)
        angles = positions.view(-1, 1, 1) * frequencies
        turned = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones(()), angles)
        return torch.view_as_real(turned).flatten(-2) * scale

    def _yarn(self, frequencies: Tensor, yarn: dict[str, Any]) -> tuple[Tensor, float]:
        width, theta = self.params["head_dim"], self.params["rope_theta"]
        original, factor = yarn["original_max_position_embeddings"], yarn["factor"]

        def dimension(turns: float) -> float:
            return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = max(math.floor(dimension(yarn["beta"])), 0), min(math.ceil(dimension(yarn["alpha"])), width - 1)
        ramp = ((torch.arange(width // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
        scale = 0.1 * math.log(factor) + 1 if yarn.get("apply_scale", True) else 1.0
        return frequencies / factor * ramp + frequencies * (1 - ramp), scale


#: The first tokens of tekken vocabularies of version 13.
SPECIAL = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT] "
    "[CALL_ID] [ARGS] [THINK] [/THINK]"
).split()
_WORDS = (b"he", b"ll", b"hell", b"hello", b" w", b"or", b" wor", b"ld", b" world", b"\xc3\xa9", b"  ", b"th", b" th")
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def write_tekken(folder: Path, version: str = "v13", special: list[str] = SPECIAL, **other: Any) -> Path:
    """Write a tekken.json with all bytes and some words: 300 tokens. ``other``: further keys."""
    words = [bytes([byte]) for byte in range(256)] + list(_WORDS)
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
        for rank, word in enumerate(words)
    ]
    config = {
        "pattern": PATTERN,
        "num_vocab_tokens": len(words),
        "default_vocab_size": len(words) + 31,
        "default_num_special_tokens": 31,
        "version": version,
    }
    tokens = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(special)]
    content = {"vocab": vocab, "special_tokens": tokens, "config": config, "version": 1, "type": "Tekken", **other}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tekken.json").write_text(json.dumps(content))
    return folder
