"""GPTQ on disk, versions 1 and 2, as AutoGPTQ and GPTQModel write them.

For one linear with N outputs, K inputs, b bits and ng groups:

    qweight  [K*b/32, N] int32   codes packed along K
    qzeros   [ng, N*b/32] int32  zero points packed along N; version 1 stores zero - 1, version 2 the zero
    scales   [ng, N] float16
    g_idx    [K] int32           the group of each input; scrambled by act-order
    bias     [N]                 optional

``W[n, k] = scales[g_idx[k], n] * (q[k, n] - zero[g_idx[k], n])``. The width comes from the shapes, because tools
write layers whose width differs from the config's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.formats.checks import (
    check_scales,
    derive_group_size,
    finite,
    mismatch,
    need,
    order_from_groups,
    read_bias,
    shaped,
)
from aiakq.kernels.packing import SUPPORTED_BITS, pack, unpack
from aiakq.kernels.types import QWeight
from aiakq.spec import QuantSpec

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx", "bias")


def read(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str = "linear") -> QWeight:
    """One linear from its tensors (suffix -> tensor). Raises ``tensor_mismatch`` and ``not_finite``."""
    qweight = need(tensors, "qweight", name, 2, torch.int32)
    qzeros = need(tensors, "qzeros", name, 2, torch.int32)
    scales = need(tensors, "scales", name, 2, torch.float16, torch.bfloat16, torch.float32)
    g_idx = tensors.get("g_idx")
    n = qweight.shape[1]
    groups = scales.shape[0]
    # Without g_idx (auto-round writes none) the width of the zero points says what K is.
    k = int(g_idx.numel()) if g_idx is not None else qweight.shape[0] * n // max(qzeros.shape[1], 1)
    bits, rest = divmod(qweight.shape[0] * 32, max(k, 1))
    if rest or bits not in SUPPORTED_BITS:
        raise mismatch(
            name, f"qweight has {qweight.shape[0]} words for {k} inputs, which is no width of {SUPPORTED_BITS}"
        )
    shaped(scales, (groups, n), "scales", name)
    shaped(qzeros, (groups, n * bits // 32), "qzeros", name)
    group_size = derive_group_size(k, groups, spec.group_size, "scales", name)
    finite(scales, "scales", name)

    codes = unpack(qweight.T, bits)
    perm = None
    if g_idx is not None:
        if g_idx.dtype not in (torch.int32, torch.int64):
            raise mismatch(name, f"g_idx is {g_idx.dtype}, not int32")
        perm = order_from_groups(g_idx, k, groups, group_size, "g_idx", name)
        if perm is not None:
            codes = codes[:, perm].contiguous()
    zeros = _read_zeros(qzeros, bits, spec)
    scales = scales.T.contiguous()
    check_scales(scales, codes, zeros, group_size, bits, "scales", name)
    return QWeight(
        scheme=f"w{bits}a16",
        codes=codes,
        scales=scales,
        zeros=zeros,
        perm=perm,
        bias=read_bias(tensors, n, name),
        group_size=group_size,
    )


def _read_zeros(qzeros: Tensor, bits: int, spec: QuantSpec) -> Tensor | None:
    """Zero points [N, ng] uint8, or None where all are 2**(b-1), as symmetric weights have them.

    Version 1 stored zero - 1, and tools disagree about a zero of 0: GPTQModel subtracts from the whole word, so the
    borrow runs into the next field and only a whole-word addition undoes it (not at 3 bits, where it works by field);
    everyone else wraps each field by itself. Symmetric weights have one known zero point, so there the stored constant
    says which version a file is, whatever its config says.
    """
    half = 2 ** (bits - 1)
    stored = unpack(qzeros, bits)
    first = int(stored[0, 0])
    if spec.symmetric and first in (half - 1, half) and bool((stored == first).all()):
        return None
    if spec.format == "gptq_v2":
        zeros = stored
    elif bits != 3 and not spec.symmetric and str(spec.notes.get("quantizer", "")).startswith("gptqmodel"):
        ones = torch.tensor(sum(1 << shift for shift in range(0, 32, bits)), dtype=torch.int32, device=qzeros.device)
        zeros = unpack(qzeros + ones, bits)
    else:
        zeros = (stored + 1) & (2**bits - 1)
    return None if bool((zeros == half).all()) else zeros.T.contiguous()


def zero_shift(weight: QWeight) -> float:
    """How far the weights of one linear lie off centre, in steps: about 0, or about 1 where the zeros are off by one.

    Weights have a mean near zero, so codes are as much above their zero points as below. Asymmetric files whose version
    is mislabelled show in this and in nothing else. Tells nothing about symmetric weights.
    """
    if weight.zeros is None:
        return 0.0
    groups = weight.scales.shape[1]
    spread = weight.codes.to(torch.float32)
    spread = torch.nn.functional.pad(spread, (0, groups * weight.group_size - weight.k))
    counts = torch.full((groups,), weight.group_size, dtype=torch.float32)
    counts[-1] -= groups * weight.group_size - weight.k
    means = spread.view(weight.n, groups, weight.group_size).sum(-1) / counts.to(spread.device)
    signs = weight.scales.sign().to(torch.float32)
    return float(((means - weight.zeros.to(torch.float32)) * signs).median())


def write(weight: QWeight, spec: QuantSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of one linear. Scales are float16 whatever ``dtype`` is, as every reader expects.

    Raises ``not_finite`` when a scale overflows float16 and ``tensor_mismatch`` for shapes the layout cannot hold.
    """
    bits, n, k = weight.bits, weight.n, weight.k
    if k % 32 or n % 32:
        raise mismatch("linear", f"weight is {n} x {k}; GPTQ files need both to be multiples of 32")
    half = 2 ** (bits - 1)
    groups = weight.scales.shape[1]
    zeros = weight.zeros.T if weight.zeros is not None else torch.full((groups, n), half, dtype=torch.uint8)
    zeros = zeros.to(torch.int16)
    if spec.format == "gptq":
        if int(zeros.min()) < 1:
            raise error(
                "option_conflict",
                option="A zero point of 0",
                other="the GPTQ v1 format",
                reason="readers disagree about it",
                hint="Write gptq_v2.",
            )
        zeros = zeros - 1
    codes = weight.codes
    g_idx = torch.arange(k, dtype=torch.int32) // weight.group_size
    if weight.perm is not None:
        perm = weight.perm.cpu()
        inverse = torch.argsort(perm)
        codes = codes[:, inverse.to(codes.device)]
        g_idx = g_idx[inverse]
    tensors = {
        "qweight": pack(codes.T, bits, dim=0),
        "qzeros": pack(zeros, bits),
        "scales": finite(weight.scales.T.to(torch.float16).contiguous(), "scales (as float16)", "linear"),
        "g_idx": g_idx,
    }
    if weight.bias is not None:
        tensors["bias"] = weight.bias.to(dtype)
    return {suffix: tensor.cpu().contiguous() for suffix, tensor in tensors.items()}
