"""Projection: the Dense modules of a sentence-transformers model, applied to pooled rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from aiakq.errors import error
from aiakq.formats.model_folder import open_file, real_path
from aiakq.formats.safetensors_file import read_header, read_tensor
from aiakq.formats.torch_file import read_torch_file
from aiakq.runtime.pooling.sentence_transformers import DenseModule

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": torch.nn.functional.gelu,
    "SiLU": torch.nn.functional.silu,
    "Sigmoid": torch.sigmoid,
}


@dataclass
class _Dense:
    """A linear layer: weight [N, K] float32, bias [N] float32 or None, and its activation.

    residual  returns what is added to its output, from its input; None: nothing is.
    """

    weight: Tensor
    bias: Tensor | None
    activation: Callable[[Tensor], Tensor]
    residual: Callable[[Tensor], Tensor] | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [R, K] -> [R, N]."""
        out = self.activation(linear(rows, self.weight, self.bias))
        return out if self.residual is None else out + self.residual(rows)


class Projection:
    """A sequence of linear layers with activations, in float32."""

    def __init__(self, layers: Sequence[_Dense]) -> None:
        self._layers = layers

    @staticmethod
    def load(folder: Path, modules: Sequence[DenseModule]) -> Projection | None:
        """Load the ``modules`` of the model in ``folder``; return None if there are none.

        Raises ``model_*`` and ``tensor_mismatch``.
        """
        return Projection([_load(folder, module) for module in modules]) if modules else None

    def __call__(self, rows: Tensor) -> Tensor:
        """Project the pooled rows of one prompt, [R, K] -> [R, N]."""
        for layer in self._layers:
            rows = layer(rows)
        return rows


def _load(folder: Path, module: DenseModule) -> _Dense:
    tensors = _tensors(folder, module.path)
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (module.outputs, module.inputs)}
    if module.bias:
        shapes["linear.bias"] = (module.outputs,)
    projects = module.residual and module.inputs != module.outputs
    if projects:
        shapes["residual.weight"] = (module.outputs, module.inputs)
    for name, shape in shapes.items():
        actual = list(tensors[name].shape) if name in tensors else None
        if actual != list(shape):
            reason = f"{name} of {module.path} has the shape {actual}, its config.json says {list(shape)}"
            raise error("tensor_mismatch", path=folder, reason=reason)
        if not tensors[name].is_floating_point():
            reason = f"{name} of {module.path} holds {str(tensors[name].dtype).removeprefix('torch.')} without a scale"
            raise error("tensor_mismatch", path=folder, reason=reason)
    bias = tensors["linear.bias"].float() if module.bias else None
    residual: Callable[[Tensor], Tensor] | None = None
    if module.residual:
        residual = partial(linear, weight=tensors["residual.weight"].float()) if projects else _ACTIVATIONS["Identity"]
    return _Dense(tensors["linear.weight"].float(), bias, _ACTIVATIONS[module.activation], residual)


def _tensors(folder: Path, module: str) -> dict[str, Tensor]:
    """Return the tensors of a module by name, from model.safetensors or pytorch_model.bin."""
    file = f"{module}/model.safetensors"
    if not (folder / file).exists():
        file = f"{module}/pytorch_model.bin"
    read = read_torch_file if file.endswith(".bin") else read_header
    header = read(real_path(folder, file), file)
    with open_file(folder, file) as stream:
        return {name: read_tensor(stream, info) for name, info in header.items()}
