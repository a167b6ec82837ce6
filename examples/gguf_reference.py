"""A Llama in float64 from a GGUF file, with weights that the package ``gguf`` decodes: what answers are compared with.

It shares no code with aiakq. With ``rounded``, inputs of linear layers are first rounded as llama.cpp's CPU code rounds
them (ggml-quants.c and ggml-cpu), by the kind of the weight:

    Q8_0   for Q4_0, Q5_0, Q8_0, IQ4_NL, MXFP4: 32 values, codes x * 127 / max |x|, float16 scale max |x| / 127
    Q8_1   for Q4_1, Q5_1: the same, and their sum in float16, by which minima of the weights are multiplied
    Q8_K   for Q2_K to Q6_K, IQ4_XS: 256 values, codes x * -127 / m with m the value of the largest magnitude
    F16    for F16

Only plain files of the architecture llama are read: no scaled rotary embedding, biases or experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found, unused-ignore]
import numpy
import torch
from torch import Tensor

#: How llama.cpp rounds inputs, by the kind of the weight; those of other kinds stay as they are.
ROUNDED_AS = dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "MXFP4"), "Q8_0")
ROUNDED_AS |= dict.fromkeys(("Q4_1", "Q5_1"), "Q8_1")
ROUNDED_AS |= dict.fromkeys(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"), "Q8_K") | {"F16": "F16"}


def round_32(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [T, K / 32, 32] and scales [T, K / 32, 1] float32 of inputs [T, K] float32."""
    blocks = x.unflatten(-1, (-1, 32))
    peak = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.where(peak > 0, 127 / peak, torch.zeros_like(peak))
    return (blocks * inverse).round(), peak / 127


def round_256(x: Tensor) -> Tensor:
    """Return inputs [T, K] float32 rounded to Q8_K, in float64."""
    blocks = x.unflatten(-1, (-1, 256))
    peak = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    factor = torch.where(peak != 0, -127 / peak, torch.zeros_like(peak))
    codes = (blocks * factor).round().clamp(max=127).double()
    return (codes * torch.where(peak != 0, 1 / factor, torch.zeros_like(peak)).double()).flatten(-2)


class Linear:
    """A weight [N, K] of a file, in float64."""

    def __init__(self, tensor: Any) -> None:
        self.kind = tensor.tensor_type.name
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        self.weight = torch.from_numpy(numpy.array(values, numpy.float64)).view(*reversed(tensor.shape.tolist()))
        self.minima = None
        if self.kind in ("Q4_1", "Q5_1"):
            blocks = torch.from_numpy(numpy.array(tensor.data)).view(
                self.weight.shape[0], self.weight.shape[1] // 32, -1
            )
            self.minima = blocks[..., 2:4].contiguous().view(torch.float16).squeeze(-1).double()

    def __call__(self, x: Tensor, rounded: bool) -> Tensor:
        """x [T, K] float64 -> [T, N]."""
        kind = ROUNDED_AS.get(self.kind) if rounded else None
        if kind == "F16":
            return x.half().double() @ self.weight.T
        if kind == "Q8_K":
            return round_256(x.float()) @ self.weight.T
        if kind is None:
            return x @ self.weight.T
        codes, scales = round_32(x.float())
        halves = scales.half().double()
        y = (codes.double() * halves).flatten(-2) @ self.weight.T
        if self.minima is not None:
            # Minima count the sum as it was rounded, not the sum of what was rounded.
            sums = codes.sum(-1, keepdim=True)
            y += ((scales * sums).half().double() - halves * sums.double()).squeeze(-1) @ self.minima.T
        return y


class Llama:
    """The model of a file. Raises SystemExit for one that it does not compute."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.linears = {name: Linear(each) for name, each in tensors.items() if len(each.shape) == 2}
        self.norms = {
            name: torch.tensor(numpy.array(tensors[name].data)).double() for name in tensors if "norm" in name
        }
        if reader.fields["general.architecture"].contents() != "llama" or len(self.linears) + len(self.norms) != len(
            tensors
        ):
            raise SystemExit(f"{path}: only plain files of the architecture llama are computed in float64")
        values = {key: field.contents() for key, field in reader.fields.items() if key.startswith("llama.")}
        if any("scaling" in key or "expert" in key for key in values):
            raise SystemExit(f"{path}: scaled rotary embeddings and experts are not computed in float64")
        self.layers, self.heads = values["llama.block_count"], values["llama.attention.head_count"]
        self.groups = values["llama.attention.head_count_kv"]
        self.epsilon = values["llama.attention.layer_norm_rms_epsilon"]
        self.theta = values.get("llama.rope.freq_base", 10000.0)

    def logprobs(self, ids: Sequence[int], rounded: bool) -> Tensor:
        """Return the log-probabilities [T, V] of the token after each of ``ids``."""
        x = self.linears["token_embd.weight"].weight[torch.tensor(ids)]
        for layer in range(self.layers):
            name = f"blk.{layer}."
            x = x + self.attention(name, self.norm(name + "attn_norm.weight", x), rounded)
            hidden = self.norm(name + "ffn_norm.weight", x)
            gate = torch.nn.functional.silu(self.linears[name + "ffn_gate.weight"](hidden, rounded))
            up = self.linears[name + "ffn_up.weight"](hidden, rounded)
            x = x + self.linears[name + "ffn_down.weight"](gate * up, rounded)
        head = self.linears.get("output.weight", self.linears["token_embd.weight"])
        return torch.log_softmax(head(self.norm("output_norm.weight", x), rounded), dim=-1)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Return x [T, K] over its root mean square, times a weight."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon) * self.norms[name]

    def attention(self, name: str, x: Tensor, rounded: bool) -> Tensor:
        """Return the attention of a layer, x [T, K] -> [T, K]."""
        q, k, v = (self.linears[f"{name}attn_{each}.weight"](x, rounded) for each in "qkv")
        q, k, v = (each.unflatten(-1, (-1, v.shape[-1] // self.groups)).transpose(0, 1) for each in (q, k, v))
        k, v = (each.repeat_interleave(self.heads // self.groups, dim=0) for each in (self.turned(k), v))
        scores = self.turned(q) @ k.mT / q.shape[-1] ** 0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        return self.linears[name + "attn_output.weight"](mixed.transpose(0, 1).flatten(-2), rounded)

    def turned(self, x: Tensor) -> Tensor:
        """Apply the rotary embedding to pairs of neighbours of x [H, T, D]."""
        steps = torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1]
        angles = torch.outer(torch.arange(x.shape[-2], dtype=torch.float64), self.theta**-steps)
        even, odd = x[..., ::2], x[..., 1::2]
        both = even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
        return torch.stack(both, dim=-1).flatten(-2)
