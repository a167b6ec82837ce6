"""Checks shared by all formats: shapes, group indices, finite scales. Failures name the tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from aiakq.errors import AiakqError, error
from aiakq.formats.config_values import unsupported
from aiakq.formats.unread_formats import ACTIVATION_FACTORS
from aiakq.kernels.types import QWeight


def mismatch(name: str, reason: str) -> AiakqError:
    """Return a ``tensor_mismatch`` about the linear ``name``; ``Checkpoint`` adds the folder's path."""
    return error("tensor_mismatch", path=name, reason=f"{name}.{reason}")


def need(tensors: Mapping[str, Tensor], suffix: str, name: str, dims: int, *dtypes: torch.dtype) -> Tensor:
    """Return the tensor ``suffix``, which must have ``dims`` dimensions and one of ``dtypes``, or raise
    ``tensor_mismatch``."""
    tensor = tensors.get(suffix)
    if tensor is None:
        raise mismatch(name, f"{suffix} is missing")
    if tensor.dim() != dims or 0 in tensor.shape:
        raise mismatch(name, f"{suffix} has shape {list(tensor.shape)}, not {dims} dimensions")
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise mismatch(name, f"{suffix} is {str(tensor.dtype).removeprefix('torch.')}, not {allowed}")
    return tensor


def shaped(tensor: Tensor, shape: tuple[int, ...], suffix: str, name: str) -> Tensor:
    """Return ``tensor`` if it has exactly this shape. Raises ``tensor_mismatch``."""
    if tuple(tensor.shape) != shape:
        raise mismatch(name, f"{suffix} has shape {list(tensor.shape)}, expected {list(shape)}")
    return tensor


def finite(tensor: Tensor, suffix: str, name: str) -> Tensor:
    """Return ``tensor``, of any shape, if it contains no NaN and no infinity. Raises ``not_finite``."""
    if not bool(torch.isfinite(tensor).all()):
        raise error(
            "not_finite",
            what=f"{name}.{suffix}".lstrip("."),
            hint="The checkpoint is damaged; download it or quantize the model again.",
        )
    return tensor


def positive_number(tensors: Mapping[str, Tensor], suffix: str, name: str) -> Tensor:
    """Return a tensor of one number, a scale of all weights or inputs, as a scalar float32. Raises ``tensor_mismatch``
    if it is missing, of another dtype or not positive, and ``not_finite``.
    """
    stored = tensors.get(suffix)
    if stored is None or stored.numel() != 1 or stored.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise mismatch(name, f"{suffix} is missing or not one number")
    number = finite(stored.reshape(()).to(torch.float32), suffix, name)
    if float(number) <= 0:
        raise mismatch(name, f"{suffix} is {float(number)}, which is no scale")
    return number


def with_live_scales(weight: QWeight, suffix: str, name: str) -> QWeight:
    """Return ``weight``, whose codes are integers, after rejecting a scale of 0 unless all weights of its group are 0,
    as some tools write for dead inputs.

    Any other scale of 0 underflowed its dtype, and the weights are lost. Raises ``tensor_mismatch``.
    """
    size, half = weight.group_size, 2 ** (weight.bits - 1)
    for output, group in (weight.scales == 0).nonzero().tolist():
        zero = half if weight.zeros is None else weight.zeros[output, group]
        if bool((weight.codes[output, group * size : (group + 1) * size] != zero).any()):
            raise mismatch(name, f"{suffix} is 0 for output {output}, group {group}, whose codes are not")
    return weight


def read_bias(tensors: Mapping[str, Tensor], n: int, name: str) -> Tensor | None:
    """Return the bias [N] of the linear, or None. Raises ``tensor_mismatch`` and ``not_finite``."""
    bias = tensors.get("bias")
    if bias is None:
        return None
    if not bias.is_floating_point():
        raise mismatch(name, f"bias is {str(bias.dtype).removeprefix('torch.')}, not a float")
    return finite(shaped(bias, (n,), "bias", name), "bias", name)


def derive_group_size(k: int, groups: int, configured: int, suffix: str, name: str) -> int:
    """Return G for K inputs in ``groups`` groups: the ``configured`` one if it fits; tools omit overrides.

    Raises ``tensor_mismatch`` if no G fits.
    """
    if groups == 1:
        return k
    if configured > 0 and -(-k // configured) == groups:
        return configured
    if groups > 0 and k % groups == 0:
        return k // groups
    raise mismatch(name, f"{suffix} holds {groups} groups, which do not divide {k} inputs")


def order_from_groups(g_idx: Tensor, k: int, groups: int, group_size: int, suffix: str, name: str) -> Tensor | None:
    """Return the order of inputs that makes the groups contiguous.

    g_idx [K] integer, the group of each input -> perm [K] int64 with ``g_idx[perm[j]] == j // G``, or None if groups
    are already contiguous. Every group except the last must have exactly G inputs. Raises ``tensor_mismatch``.
    """
    shaped(g_idx, (k,), suffix, name)
    index = g_idx.to(torch.int64)
    lowest, highest = int(index.min()), int(index.max())
    if lowest < 0 or highest >= groups:
        bad = lowest if lowest < 0 else highest
        raise mismatch(name, f"{suffix} points to group {bad}, outside 0..{groups - 1}")
    natural = torch.arange(k, device=index.device) // group_size
    if torch.equal(index, natural):
        return None
    perm = torch.argsort(index, stable=True)
    if not torch.equal(index[perm], natural):
        raise mismatch(name, f"{suffix} does not give every group {group_size} channels")
    return perm


def check_activation_factors(names: Iterable[str], read: Callable[[str], Tensor]) -> None:
    """Raise ``format_unsupported`` if AutoAWQ divides the outputs of an activation function by factors.

    names  tensors of the checkpoint, which ``read`` returns.
    """
    for name in names:
        if name.endswith(ACTIVATION_FACTORS) and not bool((read(name) == 1).all()):
            raise unsupported(f"AWQ with factors for an activation function ({name:.200})")
