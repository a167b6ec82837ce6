"""MergedAdapter: a LoRA adapter that is merged into the weights of a model before they are quantized.

Merged in float32, in PEFT's order of operations (Hu et al. 2021, arXiv:2106.09685; Liu et al. 2024, arXiv:2402.09353).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.runtime.lora.adapter_folder import WEIGHTS, AdapterFolder, LoraWeights, open_adapter
from aiakq.runtime.lora.layers import check_fits, find_module
from aiakq.runtime.lora.quantized_base import dora_factors

#: Module path -> the adapter's weights of a layer.
LoraLayers = dict[str, LoraWeights]


class MergedAdapter:
    """The adapter in a folder saved by PEFT, in memory.

    digest  identifies the adapter; see ``AdapterFolder.digest``.

    Raises what ``open_adapter`` raises.
    """

    def __init__(self, path: str | Path) -> None:
        self.folder: AdapterFolder = open_adapter(path)
        self.digest, self._weights = self.folder.read()

    @property
    def name(self) -> str:
        """The last component of its path."""
        return self.folder.path.name

    def layers(
        self,
        modules: Mapping[str, tuple[int, int]],
        model_type: str,
        biased: Collection[str],
        shared: Mapping[str, str],
    ) -> LoraLayers:
        """Return the adapter's weights for each linear layer, by the model's names.

        modules     name -> outputs N and inputs K of every linear layer; ``biased`` ones have a bias.
        model_type  that of the model, as in config.json.
        shared      name -> other module with the same weight, which merging would change too.

        Raises ``adapter_mismatch``, ``adapter_contradiction``, ``adapter_unmergeable``.
        """
        check_fits(self.folder, modules, model_type)
        weights: LoraLayers = {}
        for name, lora in self._weights.items():
            own = find_module(name, modules)
            assert own is not None, name
            reason = None
            if own in shared:
                reason = f"{name} shares its weight with {shared[own]}, which the adapter does not change"
            elif lora.bias is not None and own not in biased:
                reason = f"its lora_B of {name} has a bias, and the layer has none to add it to"
            if reason is not None:
                raise error("adapter_unmergeable", adapter=self.folder.path, reason=reason)
            weights[own] = lora
        return weights

    def check_unchanged(self) -> None:
        """Raise ``source_changed`` unless the files are still those that were read."""
        if self.folder.digest() != self.digest:
            raise error("source_changed", path=str(self.folder.path), files=WEIGHTS)


def merged_weight(weight: Tensor, lora: LoraWeights) -> Tensor:
    """Merge the weight [N, K] of a linear layer with its adapter -> [N, K] float32."""
    merged = weight.float() + (lora.b.float() @ lora.a.float()) * lora.scale
    if lora.magnitude is not None:
        merged *= dora_factors(weight, lora)[:, None]
    return merged


def merged_bias(bias: Tensor, lora: LoraWeights) -> Tensor:
    """Merge the bias [N] of a linear layer with that of its adapter's B -> [N]."""
    return bias if lora.bias is None else bias.to(torch.float32) + lora.bias.float() * lora.scale
