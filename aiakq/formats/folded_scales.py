"""The factors that quantization folded into the linear layers of a checkpoint, in a file beside its weights.

awq and smooth_quant multiply the input columns of linear layers and divide the outputs of the layers before them. The
function of the model stays, so that other programs need not know the factors; LoRA adapters of the original model do
(docs/quantize.md). The file is in a folder of its own, because programs read every ``*.safetensors`` of a model folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from aiakq.errors import AiakqError, error
from aiakq.formats.model_folder import FOLDED_SCALES as FILE
from aiakq.formats.model_folder import FOLDED_SCALES_KEY as KEY
from aiakq.formats.model_folder import open_file, real_path
from aiakq.formats.safetensors_file import read_header, read_tensor

_COLUMNS, _ROWS = "columns", "rows"


@dataclass(frozen=True)
class LinearScales:
    """The scales of a linear layer [N, K]; None where nothing was scaled.

    columns  [K] float32: its columns were multiplied by these, and its inputs are divided by them.
    rows     [N] float32: its rows were divided by these, and its outputs are.
    """

    columns: Tensor | None = None
    rows: Tensor | None = None

    def check(self, name: str, n: int, k: int) -> None:
        """Raise ``model_malformed`` unless the linear layer ``name`` has N outputs and K inputs."""
        for factors, size, kind in ((self.columns, k, _COLUMNS), (self.rows, n, _ROWS)):
            if factors is not None and len(factors) != size:
                raise _malformed(f"it has {len(factors)} factors for the {size} {kind} of {name}")

    def unfolded(self, weight: Tensor) -> Tensor:
        """[N, K] float32, the weight before the folds; weight [N, K]."""
        weight = weight.float()
        weight = weight if self.columns is None else weight / self.columns
        return weight if self.rows is None else weight * self.rows[:, None]


def records_scales(config: Mapping[str, object]) -> bool:
    """Whether the checkpoint of this config.json says what was folded into it."""
    own = config.get("aiakq")
    return isinstance(own, dict) and own.get(KEY) == FILE


def tensors_of(columns: Mapping[str, Tensor], rows: Mapping[str, Tensor], prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The file's tensors of a block at ``prefix``: name inside the block -> factors of columns [K] and rows [N]."""
    for kind, factors in ((_COLUMNS, columns), (_ROWS, rows)):
        for name, tensor in factors.items():
            yield f"{prefix}.{name}.{kind}", tensor.detach().to("cpu", torch.float32).clone()


def read_scales(folder: Path, config: Mapping[str, object]) -> dict[str, LinearScales]:
    """Linear layer -> its factors, for a checkpoint that records them. Raises ``model_incomplete`` without the file,
    ``model_malformed`` for one that holds something else.
    """
    if not records_scales(config):
        return {}
    if not (folder / FILE).exists():
        raise error("model_incomplete", path=str(folder), missing=f"{FILE}, which its config.json names, is missing")
    scales: dict[str, dict[str, Tensor]] = {}
    header = read_header(real_path(folder, FILE), FILE)
    with open_file(folder, FILE) as stream:
        for tensor_name, info in header.items():
            name, _, kind = tensor_name.rpartition(".")
            if kind not in (_COLUMNS, _ROWS) or info.dtype != "F32" or len(info.shape) != 1:
                raise _malformed(f"{tensor_name} is {info.dtype} {list(info.shape)}")
            factors = read_tensor(stream, info)
            if not (torch.isfinite(factors) & (factors > 0)).all():
                raise _malformed(f"{tensor_name} holds numbers that are not positive")
            scales.setdefault(name, {})[kind] = factors
    return {name: LinearScales(each.get(_COLUMNS), each.get(_ROWS)) for name, each in scales.items()}


def _malformed(reason: str) -> AiakqError:
    return error("model_malformed", file=FILE, reason=reason)
