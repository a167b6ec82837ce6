"""Quantizes the output layer (``--lm-head``) by round-to-nearest, without calibration."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.kernels.types import QWeight
from aiakq.quantizers.model.outer_layers import embedding_name
from aiakq.quantizers.prepared import Prepared
from aiakq.quantizers.writing import encode, verify
from aiakq.rounding.integers import round_weight
from aiakq.spec import QuantSpec


def head_tensors(prepared: Prepared, spec: QuantSpec) -> dict[str, Tensor]:
    """Return the tensors of the quantized output layer by full name; none if it is not quantized.

    A tied layer is quantized as a copy of the embedding, which itself is not changed.
    """
    name = prepared.head
    if name is None:
        return {}
    own = spec.for_layer(name)
    assert own is not None, name
    model = prepared.model
    weight = model.value(f"{name}.weight" if model.holds(name) else embedding_name(model))
    scales = prepared.plan(own).scales
    codes, steps, zeros = round_weight(weight, own.bits, own.group_size, own.symmetric, scales)
    quantized = QWeight(
        scheme=own.scheme,
        codes=codes,
        scales=steps,
        zeros=None if own.symmetric else zeros.to(torch.uint8),
        group_size=weight.shape[1] if own.group_size == -1 else own.group_size,
    )
    tensors = encode(name, quantized, spec, prepared.storage)
    verify(name, quantized, spec, tensors)
    return tensors
