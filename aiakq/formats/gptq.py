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
from aiakq.formats.checks import derive_group_size, finite, mismatch, need, order_from_groups, read_bias, shaped
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
    # Without g_idx (auto-round writes none) K is only known through the config's width.
    k = int(g_idx.numel()) if g_idx is not None else qweight.shape[0] * 32 // spec.bits
    bits, rest = divmod(qweight.shape[0] * 32, max(k, 1))
    if rest or bits not in SUPPORTED_BITS:
        raise mismatch(
            name, f"qweight has {qweight.shape[0]} words for {k} inputs, which is no width of {SUPPORTED_BITS}"
        )
    shaped(scales, (groups, n), "scales", name)
    shaped(qzeros, (groups, n * bits // 32), "qzeros", name)
    group_size = derive_group_size(k, groups, spec.group_size, "scales", name)
    finite(scales, "scales", name)

    codes = unpack(qweight, bits, dim=0).T.contiguous()
    perm = None
    if g_idx is not None:
        if g_idx.dtype not in (torch.int32, torch.int64):
            raise mismatch(name, f"g_idx is {g_idx.dtype}, not int32")
        perm = order_from_groups(g_idx, k, groups, group_size, "g_idx", name)
        if perm is not None:
            codes = codes[:, perm].contiguous()
    zeros: Tensor | None = _read_zeros(qzeros, bits, spec).T.contiguous()
    if zeros is not None and bool((zeros == 2 ** (bits - 1)).all()):
        zeros = None
    return QWeight(
        scheme=f"w{bits}a16",
        codes=codes,
        scales=scales.T.contiguous(),
        zeros=zeros,
        perm=perm,
        bias=read_bias(tensors, n, name),
        group_size=group_size,
    )


def _read_zeros(qzeros: Tensor, bits: int, spec: QuantSpec) -> Tensor:
    """Zero points [ng, N] uint8.

    Version 1 stored zero - 1, and tools disagree about a zero of 0: GPTQModel subtracts from the whole word, so the
    borrow runs into the next field and only a whole-word addition undoes it (not at 3 bits, where it works by field);
    everyone else wraps each field by itself.
    """
    if spec.format == "gptq_v2":
        return unpack(qzeros, bits)
    by_word = bits != 3 and not spec.symmetric and str(spec.notes.get("quantizer", "")).startswith("gptqmodel")
    if by_word:
        ones = torch.tensor(sum(1 << shift for shift in range(0, 32, bits)), dtype=torch.int32, device=qzeros.device)
        return unpack(qzeros + ones, bits)
    return (unpack(qzeros, bits) + 1) & (2**bits - 1)


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
