"""Replaces linear layers of a transformers model by the quantized layers of a checkpoint."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from aiakq.errors import error
from aiakq.kernels.ops.linear import ROW_MULTIPLE, LinearLayer
from aiakq.runtime.hf.fused_experts import Expert, FusedExperts, SeparateExperts, fused_experts
from aiakq.runtime.hf.tensor_names import TensorNames
from aiakq.runtime.loader.weights import CheckpointWeights


class QuantizedModule(nn.Module):
    """A linear layer of aiakq as a module that replaces an nn.Linear."""

    def __init__(self, linear: LinearLayer, out_features: int) -> None:
        super().__init__()
        self.linear = linear
        self.out_features = out_features

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        return self.linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def replace_quantized(hf: Any, weights: CheckpointWeights) -> set[str]:
    """Replace the linear layers that are quantized in the checkpoint, including those of fused experts.

    Returns the names of the removed parameters of ``hf``. Raises ``tensor_mismatch``.
    """
    left = set(weights.checkpoint.quantized_linears())
    names = TensorNames.of(hf, weights.checkpoint)  # of the model before layers are replaced
    replaced = set()
    for fused in fused_experts(hf, "", hf.config.get_text_config().model_type):
        inside = {stored for stored in left if stored.startswith(f"{fused.stored}.")}
        if inside:
            fused.replace(hf, fused.name, _separate(fused, weights))
            replaced |= {f"{fused.name}.{tensor}" for tensor, _ in fused.places}
            left -= inside
    modules = dict(hf.named_modules())
    for stored in sorted(left):
        name = (names.own(f"{stored}.weight") or stored).removesuffix(".weight")
        module = modules.get(name)
        if isinstance(module, nn.Embedding):
            replaced |= _replace_table(hf, name, module, weights.decoded_table(stored, *module.weight.shape))
            continue
        if isinstance(module, Conv1D):
            n, k, bias = module.nf, module.nx, True
        elif isinstance(module, nn.Linear):
            n, k, bias = module.out_features, module.in_features, module.bias is not None
        else:
            reason = f"the model has no module for the quantized layer {stored}"
            raise error("tensor_mismatch", path=weights.checkpoint.path, reason=reason)
        hf.set_submodule(name, QuantizedModule(weights.linear(stored, n, k, bias=bias), n))
        replaced |= {f"{name}.weight", f"{name}.bias"}
    return replaced


def _replace_table(hf: Any, name: str, module: nn.Embedding, table: Tensor) -> set[str]:
    """Replace the weight of an embedding by ``table`` [V, D], and that of an output layer which is tied to it.

    Returns the names of the parameters that are replaced.
    """
    head = hf.get_output_embeddings()
    tied = head is not None and getattr(head, "weight", None) is module.weight
    module.weight = nn.Parameter(table.to(module.weight.dtype), requires_grad=False)
    if not tied:
        return {f"{name}.weight"}
    head.weight = module.weight
    return {f"{name}.weight", *(f"{own}.weight" for own, each in hf.named_modules() if each is head)}


def _separate(fused: FusedExperts, weights: CheckpointWeights) -> SeparateExperts:
    """Return the experts of ``fused`` with one layer of aiakq per projection, quantized or not."""

    def expert(number: int) -> Expert:
        projections = [QuantizedModule(weights.linear(name, n, k), n) for name, n, k in fused.linears(number)]
        return Expert(fused.module.act_fn, fused.spelling, projections)

    experts = [expert(number) for number in range(fused.shape[0])]
    return SeparateExperts(experts, ROW_MULTIPLE, fused.zero_experts, fused.weigh_inputs)
