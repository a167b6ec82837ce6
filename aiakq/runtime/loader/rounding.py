"""RoundingAtLoad: which weights of a 16- or 32-bit checkpoint are rounded while they are loaded, and how."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.dequantized import is_transposed
from aiakq.kernels.types import QWeight
from aiakq.rounding.at_load import rounded
from aiakq.spec import LayerSpec, QuantSpec

#: Sizes of groups; the first that divides the number of inputs counts.
_GROUPS = (128, 64, 32)
#: Modules whose linear layers compute a few coefficients per token.
_COEFFICIENTS = frozenset({"router", "altup"})


class RoundingAtLoad:
    """Rounds the linear layers in the decoder blocks as ``spec`` says, as ``aiakq quantize`` would.

    Routers, gates beside experts, AltUp's coefficients (Gemma 3n) and layers outside the blocks stay as they are.
    """

    def __init__(self, checkpoint: Checkpoint, spec: QuantSpec) -> None:
        """Raises ``unsupported`` for a checkpoint whose layers are not all stored as [N, K]."""
        _check_layout(checkpoint, spec)
        self.checkpoint, self.spec = checkpoint, spec
        #: Modules that hold experts, whose own linears are routers and gates.
        self._mixtures = {name.partition(".experts.")[0] for name in checkpoint.inventory if ".experts." in name}

    @property
    def remark(self) -> str:
        """What the start-up table says about it."""
        return f"weights were rounded to {self.spec.describe()} while they were loaded"

    def takes(self, name: str) -> bool:
        """Whether the linear ``name`` is in a decoder block and transforms activations."""
        parts = name.split(".")
        if not any(part.isdigit() for part in parts[:-1]) or not _COEFFICIENTS.isdisjoint(parts) or parts[-2] == "gate":
            return False
        stored = self.checkpoint.locate(f"{name}.weight") or f"{name}.weight"
        return stored.removesuffix(".weight").rpartition(".")[0] not in self._mixtures

    def rounded(self, name: str, weight: Tensor, bias: Tensor | None) -> QWeight:
        """Return the linear ``name``: weight [N, K], bias [N]. Raises ``not_finite``."""
        layer = layer_of(self.spec, weight.shape[1])
        # At 8 bits scales come from the full range, which is not finite if a weight is not: the weights are read once.
        found = rounded(weight, bias, layer) if layer.bits == 8 else None
        if not bool(torch.isfinite(weight.abs().amax() if found is None else found.scales).all()):
            raise error("not_finite", what=f"{name}.weight", hint="The checkpoint is damaged; fetch it again.")
        return rounded(weight, bias, layer) if found is None else found

    def weights(self) -> dict[str, int]:
        """Return the number of weights of every tensor that is rounded, by its name in the checkpoint."""
        found = {}
        for name, info in self.checkpoint.inventory.items():
            module, _, last = name.rpartition(".")
            if last == "weight" and len(info.shape) == 2 and self.takes(module):
                found[name] = math.prod(info.shape)
        return found


#: Small tensors [H, N, K] of recurrent layers, with a part for each head (Zamba, RecurrentGemma), which stay floats.
_BY_HEAD = frozenset({"A_log", "x_proj_weight", "dt_proj_weight", "input_gate_weight", "recurrent_gate_weight"})


def layer_of(spec: QuantSpec, k: int) -> LayerSpec:
    """Return how a layer with K inputs is rounded: in the largest groups that divide K, if not in whole rows."""
    if spec.group_size == -1:
        return spec.layer
    return replace(spec.layer, group_size=next((size for size in _GROUPS if k % size == 0), -1))


def _check_layout(checkpoint: Checkpoint, spec: QuantSpec) -> None:
    for name, info in checkpoint.inventory.items():
        module, _, last = name.rpartition(".")
        reason = ""
        if name in checkpoint.beside_text:
            continue
        if len(info.shape) == 3 and "conv" not in name and last not in _BY_HEAD:
            reason = "its experts are fused into one tensor"
        elif last == "weight" and is_transposed(checkpoint.config, module):
            reason = "its layers are stored transposed"
        if reason:
            what = f"Rounding the weights of this model while they are loaded ({spec.method}), because {reason},"
            hint = "Quantize it once: aiakq quantize -i MODEL -o DIR -quant_type weight_only_int8, then load DIR."
            raise error("unsupported", what=what, hint=hint)
