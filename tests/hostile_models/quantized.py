"""Hostile files whose numbers native kernels read: quantized weights, LoRA adapters, EAGLE-3 heads.

``make sanitize`` meets them with a library that checks every access to memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from base import Change, base_tensors, change, family, shown
from safetensors.torch import load_file, save_file
from torch import Tensor

from aiakq import formats
from aiakq.formats import quantization_config
from aiakq.kernels.types import QWeight
from aiakq.spec import QuantSpec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from eagle3_heads import write_head

FILE = "model.safetensors"
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)


def damages(tensor: Tensor) -> Iterator[tuple[str, Tensor | None]]:
    """What may be stored instead of ``tensor``; None: nothing."""
    yield "missing", None
    yield "no rows", tensor[:0]
    yield "one row", tensor[:1]
    yield "a row less", tensor[:-1]
    yield "twice the rows", torch.cat((tensor, tensor))
    yield "flat", tensor.reshape(-1)
    yield "a scalar", tensor.reshape(-1)[0]
    if tensor.dim() == 2:
        yield "no columns", tensor[:, :0]
        yield "a column less", tensor[:, :-1]
        yield "twice the columns", torch.cat((tensor, tensor), 1)
        yield "turned", tensor.T
        yield "as many numbers in other rows", tensor.reshape(tensor.shape[1], tensor.shape[0])
    for dtype in (torch.int64, torch.int32, torch.int8, torch.float32, torch.float64, torch.bool):
        if dtype != tensor.dtype:
            yield f"as {dtype}", tensor.to(dtype)
    floats = (float("nan"), float("inf"), -3e38, 1e-45, 0.0)
    for value in floats if tensor.is_floating_point() else (-1, 0, 1, 7, 255, INT_MAX, INT_MIN):
        number = torch.tensor(value, dtype=torch.float64 if tensor.is_floating_point() else torch.int64)
        filled, last = torch.full_like(tensor, number.to(tensor.dtype)), tensor.clone()
        last.view(-1)[-1] = number.to(tensor.dtype)
        yield f"all {value}", filled
        yield f"{value} at the end", last


def edited(file: str, name: str, tensor: Tensor | None) -> Change:
    """A change of one tensor of a file."""

    def make(folder: Path) -> None:
        tensors = load_file(folder / file)
        tensors.pop(name)
        if tensor is not None:
            tensors[name] = tensor.contiguous()
        (folder / file).unlink()
        save_file(tensors, folder / file)

    return make


def after(first: Change, second: Change) -> Change:
    """Both changes."""

    def make(folder: Path) -> None:
        first(folder)
        second(folder)

    return make


# --- quantized weights ------------------------------------------------------------------------------------------------

SPECS = {
    "gptq": QuantSpec("gptq", "gptq", 4, 32),
    "gptq with g_idx": QuantSpec("gptq", "gptq", 4, 32, desc_act=True),
    "gptq of 3 bits": QuantSpec("gptq", "gptq_v2", 3, 32, symmetric=False),
    "awq": QuantSpec("awq", "awq", 4, 32, symmetric=False),
    "awq gemv": QuantSpec("awq", "awq_gemv", 4, 32, symmetric=False),
    "awq gemv-fast": QuantSpec("awq", "awq_gemv_fast", 4, 32, symmetric=False),
    "packed": QuantSpec("gptq", "compressed-tensors", 4, 32, symmetric=False),
    "int8": QuantSpec("smooth_quant", "compressed-tensors", 8, -1, activation_bits=8),
}
Q = "model.layers.0.self_attn.q_proj."
DOWN = "model.layers.1.mlp.down_proj."


def quantized(spec: QuantSpec) -> Callable[[Path], None]:
    """The base model with weights of random codes in the layout of ``spec``."""

    def make(folder: Path) -> None:
        random, tensors = torch.Generator().manual_seed(0), {}
        for name, tensor in base_tensors().items():
            if "_proj" not in name:
                tensors[name] = tensor
                continue
            (n, k), prefix = tensor.shape, name.removesuffix("weight")
            group = k if spec.group_size == -1 else spec.group_size
            weight = QWeight(
                spec.scheme,
                torch.randint(0, 2**spec.bits, (n, k), generator=random).to(torch.uint8),
                (torch.rand(n, k // group, generator=random) * 0.02 + 0.01).half(),
                None if spec.symmetric else torch.full((n, k // group), 2 ** (spec.bits - 1) - 1, dtype=torch.uint8),
                torch.randperm(k, generator=random) if spec.desc_act else None,
                group_size=group,
            )
            written = formats.load(spec.format).write(weight, spec, torch.float16)
            tensors |= {prefix + suffix: each.contiguous() for suffix, each in written.items()}
        (folder / FILE).unlink()
        save_file(tensors, folder / FILE)
        change(folder, "config.json", quantization_config=quantization_config.write(spec), dtype="float32")

    return make


def _config_changes(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(place, other value) for every number, flag and word of a config."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _config_changes(each, (*at, key))
    elif isinstance(value, bool):
        yield at, not value
    elif isinstance(value, int):
        for other in (0, -1, 1, 2, 3, 8, 16, 48, 64, 128, INT_MAX):
            if other != value:
                yield at, other


def _with(at: tuple[Any, ...], value: Any) -> Change:
    def make(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        place = config["quantization_config"]
        for key in at[:-1]:
            place = place[key]
        place[at[-1]] = value
        (folder / "config.json").write_text(json.dumps(config))

    return make


@family("quantized weights", "load")
def quantized_weights() -> Iterator[tuple[str, Change]]:
    for title, spec in SPECS.items():
        base = quantized(spec)
        yield f"{title}: plain", base
        k = 64
        weight = QWeight(
            spec.scheme,
            torch.ones(k, k, dtype=torch.uint8),
            torch.ones(k, 1 if spec.group_size == -1 else k // spec.group_size).half(),
            None if spec.symmetric else torch.ones(k, k // spec.group_size, dtype=torch.uint8),
            torch.arange(k).flip(0) if spec.desc_act else None,
            group_size=k if spec.group_size == -1 else spec.group_size,
        )
        for suffix, tensor in formats.load(spec.format).write(weight, spec, torch.float16).items():
            for what, damaged in damages(tensor):
                yield f"{title}: {suffix} {what}", after(base, edited(FILE, Q + suffix, damaged))
        for at, value in _config_changes(quantization_config.write(spec)):
            yield f"{title}: {'.'.join(map(str, at))} {value}", after(base, _with(at, value))
    for config in SPECS:
        for weights in SPECS:
            if config != weights:

                def exchange(folder: Path, spec: QuantSpec = SPECS[config]) -> None:
                    change(folder, "config.json", quantization_config=quantization_config.write(spec))

                yield f"{weights} called {config}", after(quantized(SPECS[weights]), exchange)


# --- adapters ---------------------------------------------------------------------------------------------------------

ADAPTER = "adapter/adapter_model.safetensors"
A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


def _adapter(config: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> Change:
    def make(folder: Path) -> None:
        (folder / "adapter").mkdir()
        fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]} | config
        (folder / "adapter" / "adapter_config.json").write_text(json.dumps(fields))
        random = torch.Generator().manual_seed(0)
        plain = {A: torch.randn(4, 64, generator=random), B: torch.randn(64, 4, generator=random)}
        save_file(plain if tensors is None else tensors, folder / ADAPTER)

    return make


@family("adapters", "adapter")
def adapters() -> Iterator[tuple[str, Change]]:
    yield "plain", _adapter({})
    values: dict[str, list[Any]] = {
        "r": [0, -1, 1, 3, 5, 16, 2**31, 2**70, "4", 4.5, True, None],
        "lora_alpha": [0, -1, float("nan"), float("inf"), 1e-300, 2**70, "x", None, True],
        "rank_pattern": [{"q_proj": 0}, {"q_proj": -4}, {"q_proj": 5}, {"q_proj": 2**40}, {"(": 4}, [], 7],
        "alpha_pattern": [{"q_proj": float("nan")}, {"q_proj": "x"}, {"(a+)+$": 1}],
        "target_modules": [[], "all-linear", "(", ["nothing"], 7],
        "use_rslora": [True, "x"],
        "use_dora": [True],
        "lora_bias": [True],
    }
    for key, found in values.items():
        for value in found:
            yield f"{key} {shown(value)}", _adapter({key: value})
    for rank in (0, 1, 17, 65, 5000):
        tensors = {A: torch.ones(rank, 64), B: torch.ones(64, rank)}
        yield f"rank {rank} in config and tensors", _adapter({"r": rank}, tensors)
        yield f"rank {rank} in tensors", _adapter({}, tensors)
    for name, tensor in ((A, torch.ones(4, 64)), (B, torch.ones(64, 4))):
        for what, damaged in damages(tensor):
            yield f"{name[-13:-7]} {what}", after(_adapter({}), edited(ADAPTER, name, damaged))
    for name in ("layers.99.self_attn.q_proj", "layers.-1.self_attn.q_proj", "layers.0.mlp.experts.0.up_proj"):
        tensors = {each.replace("layers.0.self_attn.q_proj", name): torch.ones(4, 4) for each in (A, B)}
        yield name, _adapter({}, tensors)


# --- heads ------------------------------------------------------------------------------------------------------------

HEAD = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 260,
    "draft_vocab_size": 100,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}


def _head(layout: dict[str, Any], **config: Any) -> Change:
    """A head of ``layout``, and other values in its config."""

    def make(folder: Path) -> None:
        write_head(folder / "head", **HEAD, **layout)
        path = folder / "head" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))

    return make


@family("heads", "head")
def heads() -> Iterator[tuple[str, Change]]:
    yield "plain", _head({})
    yield "without an embedding", _head({"embedding": False})
    for key in (*HEAD, "target_hidden_size", "head_dim", "max_position_embeddings"):
        for value in (0, -1, 1, 3, 63, 65, 128, 4096, INT_MAX, 2**40, "64", None, [64]):
            yield f"{key} {shown(value)}", _head({}, **{key: value})
    for layers in ([-1, 0, 1], [0, 1, 3], [1, 0, 2], [0, 0, 1], [2**40, 1, 2], [0], [0, 1], [0, 1, 2, 2], [True, 1, 2]):
        yield f"layers {layers}", _head({}, eagle_aux_hidden_state_layer_ids=layers)
        yield f"outputs of layers {layers}", _head({}, eagle_config={"eagle_aux_hidden_state_layer_ids": layers})
    for key in ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual"):
        yield f"{key} without tensors", _head({}, **{key: True})
    written = {
        "d2t": torch.arange(100) * 0,
        "fc.weight": torch.ones(64, 192),
        "lm_head.weight": torch.ones(100, 64),
        "embed_tokens.weight": torch.ones(260, 64),
        "midlayer.self_attn.q_proj.weight": torch.ones(64, 128),
        "midlayer.self_attn.k_proj.weight": torch.ones(32, 128),
        "midlayer.mlp.down_proj.weight": torch.ones(64, 96),
        "midlayer.hidden_norm.weight": torch.ones(64),
        "norm.weight": torch.ones(64),
    }
    for name, tensor in written.items():
        for what, damaged in damages(tensor):
            yield f"{name} {what}", after(_head({}), edited(f"head/{FILE}", name, damaged))
    for value in (-1000, -101, 160, 259, 2**40, -(2**63), 2**63 - 1):
        ids = torch.zeros(100, dtype=torch.int64)
        ids[-1] = value
        yield f"d2t {value} at the end", after(_head({}), edited(f"head/{FILE}", "d2t", ids))
