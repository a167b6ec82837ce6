"""ScaleFolder: moves scales between the layers of a block without changing its function."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, nn

from aiakq.quantizers.model.groups import Heads, SmoothMapping, fold


class ScaleFolder:
    """Folds scales into one block.

    changed  name inside the block -> an unquantized tensor that was changed by folding.
    columns  name of a balance layer -> the product of all factors of its columns, [K].
    rows     name of a linear that is a smooth layer -> what its rows were divided by in all, [N].
    """

    def __init__(self, module: nn.Module, quantized: Container[str], heads: Heads, storage: torch.dtype) -> None:
        self._module = module
        self._quantized = quantized
        self._heads = heads
        self._storage = storage
        self.changed: dict[str, Tensor] = {}
        self.columns: dict[str, Tensor] = {}
        self.rows: dict[str, Tensor] = {}

    def fold(self, mapping: SmoothMapping, scales: Tensor) -> Tensor:
        """Move ``scales`` [channels] from the smooth layer to the balance layers, preserving the block's function.

        Returns the factors [K] of the balance layers' columns, by which their inputs are now divided. Unquantized
        tensors that were modified are kept in ``changed``. The weights of the block are modified.
        """
        changed, columns = fold(self._module, mapping, scales, self._heads, self._storage)
        self.changed |= changed
        for name in (mapping.smooth_layer, *mapping.balance_layers):
            module = self._module.get_submodule(name)
            # Routers among them are not linears, but also matrices.
            if name not in self._quantized and f"{name}.weight" not in changed:
                assert isinstance(module.weight, Tensor)
                module.weight.data.copy_(module.weight.data.to(self._storage))
                self.changed[f"{name}.weight"] = module.weight.data
                if name == mapping.smooth_layer and isinstance(module.bias, Tensor):
                    self.changed[f"{name}.bias"] = module.bias.data
        for name in mapping.balance_layers:
            self.columns[name] = self.columns[name] * columns if name in self.columns else columns
        smooth_layer = self._module.get_submodule(mapping.smooth_layer)
        if isinstance(smooth_layer, nn.Linear):
            factors = torch.ones(smooth_layer.out_features, device=scales.device)
            factors[mapping.rows(smooth_layer.out_features).to(scales.device)] = scales
            before = self.rows.get(mapping.smooth_layer)
            self.rows[mapping.smooth_layer] = factors if before is None else before * factors
        return columns

    def clear(self) -> None:
        """Discard the record of folded scales; the weights of the block are not modified."""
        self.changed.clear()
        self.columns.clear()
        self.rows.clear()
