"""DequantizedCheckpoint: a quantized checkpoint that looks like one whose linear layers were stored as floats.

Weights are dequantized when they are read, one at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aiakq import formats
from aiakq.errors import error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.decoded_weight import DecodedWeight, as_floats
from aiakq.formats.model_folder import SOURCE_KEY
from aiakq.formats.quantization_config import CONFIG_KEYS, MLX_KEY
from aiakq.formats.safetensors_file import DTYPE_NAMES, TensorInfo
from aiakq.kernels.types import QWeight
from aiakq.rounding.integers import rows_at_once
from aiakq.spec import QuantSpec

#: Parts of a multimodal config that may have a quantization_config of their own.
_PARTS = ("text_config", "llm_config")
#: Model types whose linear layers are stored as [K, N], and the last parts of these layers' names.
_TRANSPOSED = {"gpt2": ("c_attn", "q_attn", "c_proj", "c_fc"), "openai-gpt": ("c_attn", "c_proj", "c_fc")}


def some_rows(weight: QWeight | DecodedWeight) -> Iterator[Tensor]:
    """Yield the rows [M] int64 of ``weight``, in parts that take little memory as floats."""
    stored = weight.values if isinstance(weight, DecodedWeight) else weight.codes
    yield from torch.arange(weight.n).split(16 * rows_at_once(stored))


def dense_weight(weight: QWeight | DecodedWeight, dtype: torch.dtype) -> Tensor:
    """Return the dequantized weight [N, K] in ``dtype``, computed in float32 with little memory besides."""
    result = torch.empty(weight.n, weight.k, dtype=dtype)
    for rows in some_rows(weight):
        result[rows] = as_floats(weight.with_rows(rows)).to(dtype)
    return result


def is_transposed(config: Mapping[str, object], name: str) -> bool:
    """Whether a 16-bit checkpoint with this config.json stores the linear ``name`` as [K, N]."""
    return name.rpartition(".")[2] in _TRANSPOSED.get(str(config.get("model_type")), ())


def source_record(checkpoint: Checkpoint) -> dict[str, object]:
    """Return what a checkpoint that is made from this quantized one says about it: format, scheme, and method if that
    is known."""
    spec = checkpoint.spec
    assert spec is not None, "only quantized checkpoints are dequantized"
    own = checkpoint.config.get("aiakq")
    stated = own.get("method") if isinstance(own, Mapping) else None
    method = stated or (spec.method if formats.records_method(spec.format) else None)
    known = {} if method is None else {"method": method}
    return {"format": spec.format, "scheme": spec.describe(), **known}


def config_without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without its ``quantization_config``, wherever programs write it."""
    kept = {key: value for key, value in config.items() if key not in (*CONFIG_KEYS, MLX_KEY)}
    for part in _PARTS:
        if isinstance(kept.get(part), Mapping):
            kept[part] = {key: value for key, value in kept[part].items() if key not in CONFIG_KEYS}
    return kept


def dequantized(checkpoint: Checkpoint, dtype: torch.dtype) -> Checkpoint:
    """Return ``checkpoint`` with the quantized linears as floats of ``dtype``; itself if there are none."""
    return checkpoint if checkpoint.spec is None else DequantizedCheckpoint(checkpoint, dtype)


def open_dequantized(path: str | Path, dtype: torch.dtype) -> Checkpoint:
    """Return the checkpoint in the folder ``path`` as ``dequantized`` does. Raises what ``Checkpoint.open`` raises."""
    return dequantized(Checkpoint.open(path), dtype)


class DequantizedCheckpoint(Checkpoint):
    """The view of ``quantized`` in which the tensors of every packed linear are one weight [N, K] of ``dtype``.

    config  that of the checkpoint without its quantization_config; what it was is under ``aiakq``.
    """

    def __init__(self, quantized: Checkpoint, dtype: torch.dtype) -> None:
        own = quantized.config.get("aiakq")
        own = {key: value for key, value in own.items() if key != "method"} if isinstance(own, Mapping) else {}
        config = config_without_quantization(quantized.config)
        super().__init__(quantized.path, {**config, "aiakq": {**own, SOURCE_KEY: source_record(quantized)}})
        self.quantized, self.dtype = quantized, dtype
        self.remarks, self.unread = quantized.remarks, quantized.unread
        packed: dict[str, str] = {}
        self._weights: dict[str, str] = {}
        for prefix in quantized.quantized_linears():
            packed |= dict.fromkeys(quantized.linear_tensors(prefix).values(), prefix)
        for name, info in quantized.inventory.items():
            linear = packed.get(name)
            if linear is None or name == f"{linear}.bias":
                self.inventory[name] = info
            elif f"{linear}.weight" not in self._weights:
                self._weights[f"{linear}.weight"] = linear
                self.inventory[f"{linear}.weight"] = self._info(linear, info)

    def _info(self, prefix: str, info: TensorInfo) -> TensorInfo:
        found, _ = self.quantized.dimensions(prefix)
        shape = (found.k, found.n) if is_transposed(self.config, prefix) else (found.n, found.k)
        return TensorInfo(DTYPE_NAMES[self.dtype], shape, info.file)

    @cached_property
    def spec(self) -> QuantSpec | None:
        """Return None: nothing is quantized."""
        return None

    @property
    def weights_folder(self) -> Path:
        """See Checkpoint."""
        return self.quantized.weights_folder

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return self.quantized.nbytes

    def tensor(self, name: str) -> Tensor:
        """Read one tensor of any shape, or dequantize a weight [N, K]. Raises what ``Checkpoint.read_linear`` raises,
        and ``not_finite``."""
        prefix = self._weights.get(name)
        if prefix is None:
            return self.quantized.tensor(name)
        weight = dense_weight(self.quantized.read_linear(prefix), self.dtype)
        if not bool(torch.isfinite(weight).all()):
            word = str(self.dtype).removeprefix("torch.")
            raise error("not_finite", what=f"{name} as {word}", hint="Use bf16.")
        return weight.T.contiguous() if is_transposed(self.config, prefix) else weight

    def remember(self, files: Iterable[str]) -> None:
        """See Checkpoint."""
        self.quantized.remember(files)

    def changed_files(self) -> list[str]:
        """See Checkpoint."""
        return self.quantized.changed_files()

    def quantized_linears(self) -> list[str]:
        """Return an empty list."""
        return []

    @property
    def packed(self) -> Collection[str]:
        """The weights that are dequantized, by full name."""
        return self._weights.keys()

    def close(self) -> None:
        """See Checkpoint."""
        self.quantized.close()
