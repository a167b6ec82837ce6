"""MistralTensors: the tensors of consolidated*.safetensors in Hugging Face's names and order of rows.

Mistral's attention rotates adjacent elements of a head, Hugging Face's the two halves of it: rows of queries and keys
are put in the other order when they are read. Everything else is only renamed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.formats.mistral.params import unsupported
from aiakq.formats.model_folder import some_of
from aiakq.formats.safetensors_file import TensorInfo

_OUTER = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.gate": "block_sparse_moe.gate",
}
_NAME = re.compile(
    r"(?:layers\.(?P<layer>[0-9]{1,5})\.)?"
    r"(?P<module>[a-z_0-9.]+?)"
    r"\.(?P<suffix>(?:[qkv]|kv)_fake_quantizer\.qscale_act|[a-z_]+)"
)
_EXPERT = re.compile(r"feed_forward\.(experts\.[0-9]{1,5}\.w[123])")
#: Suffixes that have another name; those of compressed-tensors stay.
_SUFFIXES = {"qscale_weight": "weight_scale", "qscale_act": "input_scale"}
_PACKED = {"weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", "input_scale"}
#: Modules whose tensors are 8-bit floats or 16-bit ones, with and without a scale.
_LINEAR = re.compile(r"model\.layers\..*(_proj|\.w[123])|lm_head")


class StoredTensors(Protocol):
    """The tensors of the files: a checkpoint of the folder, whose config nothing uses."""

    path: Path
    inventory: dict[str, TensorInfo]
    mapped: bool
    threads: int

    def tensor(self, name: str) -> Tensor:
        """Read one tensor to the CPU."""

    def changed_files(self) -> list[str]:
        """Return the files that have changed since their headers were read."""

    def close(self) -> None:
        """Close the files."""


def hf_name(name: str) -> str | None:
    """Return the name of a stored tensor in a Hugging Face checkpoint; None for one that such models lack."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, module, suffix = match["layer"], match["module"], match["suffix"]
    if layer is not None and module == "attention" and suffix.endswith("_fake_quantizer.qscale_act"):
        return f"model.layers.{layer}.self_attn.{suffix.partition('_')[0]}_scale"
    if suffix != "weight" and suffix not in _SUFFIXES and suffix not in _PACKED:
        return None
    suffix = _SUFFIXES.get(suffix, suffix)
    if layer is None:
        return f"{_OUTER[module]}.{suffix}" if module in _OUTER else None
    expert = _EXPERT.fullmatch(module)
    target = f"block_sparse_moe.{expert[1]}" if expert else _BLOCK.get(module)
    return None if target is None else f"model.layers.{layer}.{target}.{suffix}"


def halves_order(heads: int, width: int) -> Tensor:
    """Return the rows [heads * width] int64 of a stored projection in the order of Hugging Face's: of each head the
    elements 0, 2, 4, ..., then 1, 3, 5, ...
    """
    return torch.arange(heads * width).view(heads, width // 2, 2).transpose(1, 2).reshape(-1)


def hf_names(stored: Iterable[str]) -> dict[str, str]:
    """Return name -> that of the stored tensor. Raises ``mistral_unsupported`` for tensors that such models lack."""
    names = {name: hf_name(name) for name in stored}
    if unknown := sorted(name for name, target in names.items() if target is None):
        raise unsupported(f"the model has tensors that aiakq's Mistral models lack: {some_of(unknown)}")
    return {str(target): name for name, target in names.items()}


def quantization_config(names: Collection[str], quantization: object) -> dict[str, Any] | None:
    """Return ``quantization_config`` of config.json for what params.json has under ``quantization``.

    names  the tensors of the model.

    Raises ``mistral_unsupported`` for what is unknown.
    """
    if not quantization:
        return None
    if not isinstance(quantization, Mapping):
        raise unsupported(f"quantization is {quantization!r:.60}, not an object")
    method = str(quantization.get("quant_method", "")).lower().replace("_", "-")
    if method == "compressed-tensors":
        return {**quantization, "quant_method": method}
    given = {key: value for key, value in quantization.items() if value is not None}
    weights, inputs = given.pop("qformat_weight", None), given.pop("qscheme_act", "TENSOR")
    if weights != "fp8_e4m3" or inputs not in ("TENSOR", "NO_SCALES") or given:
        raise unsupported(f"the quantization {dict(quantization)!r:.120}")
    linears = sorted(name.removesuffix(".weight") for name in names if _is_linear(name))
    plain = [name for name in linears if f"{name}.weight_scale" not in names]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic" if inputs == "NO_SCALES" else "static",
        "weight_block_size": None,
        "ignored_layers": plain,
    }


class MistralTensors:
    """The tensors of one model.

    inventory  name -> header.
    """

    def __init__(self, stored: StoredTensors, names: Mapping[str, str], orders: Mapping[str, Tensor]) -> None:
        """
        names   name -> that of the stored tensor.
        orders  end of a module's name -> order of the rows of its tensors.
        """
        self._stored, self._names, self._orders = stored, names, orders
        self.inventory = {name: stored.inventory[each] for name, each in names.items()}

    @classmethod
    def of(cls, stored: StoredTensors, config: Mapping[str, Any]) -> MistralTensors:
        """Return the tensors of the files for a model with this config.json.

        Raises ``mistral_unsupported`` for tensors that such models lack, ``model_malformed`` for heads of odd size.
        """
        width = config["head_dim"]
        if width % 2:
            raise error("model_malformed", file="params.json", reason=f"head_dim is {width}, which is odd")
        orders = {
            "self_attn.q_proj": halves_order(config["num_attention_heads"], width),
            "self_attn.k_proj": halves_order(config["num_key_value_heads"], width),
        }
        return cls(stored, hf_names(stored.inventory), orders)

    @property
    def source(self) -> Path:
        """The folder in Mistral's format."""
        return self._stored.path

    folder = source

    def remark(self) -> str:
        """Return nothing: tensors keep their sizes and values."""
        return ""

    def read_with(self, mapped: bool, threads: int, dtype: torch.dtype) -> None:
        """Set how the files are read; no tensor is decoded, whatever ``dtype``."""
        self._stored.mapped, self._stored.threads = mapped, threads

    def read(self, name: str) -> Tensor:
        """Return a tensor. Raises KeyError for an unknown name, and as ``Checkpoint.tensor``."""
        tensor = self._stored.tensor(self._names[name])
        module = name.rpartition(".")[0]
        order = next((order for end, order in self._orders.items() if module.endswith(end)), None)
        # Scales of a whole tensor have no rows.
        if order is None or tensor.dim() == 0 or tensor.shape[0] != len(order):
            return tensor
        if tensor.dtype in _BYTES:  # whose rows torch cannot select
            return tensor.view(torch.uint8)[order].view(tensor.dtype)
        return tensor[order]

    def blocks(self, name: str) -> None:
        """See ForeignTensors: there are no blocks."""

    def table(self, name: str) -> None:
        """Return nothing: no matrix is stored as blocks."""

    def experts(self, name: str) -> None:
        """Return nothing, as ``table``."""

    stacked_experts = ()

    def changed_files(self) -> list[str]:
        """Return the files that have changed since they were opened."""
        return self._stored.changed_files()

    def close(self) -> None:
        """Close the files; tensors that were read remain valid."""
        self._stored.close()


#: Dtypes of one byte.
_BYTES = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})


def _is_linear(name: str) -> bool:
    return name.endswith(".weight") and _LINEAR.fullmatch(name.removesuffix(".weight")) is not None
