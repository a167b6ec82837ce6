"""CPU linear layers with quantized weights: every group size, zero point and activation order.

Weight-only schemes use the math that the problem allows (``--cpu-math``). Not exact: activations are quantized to 8
bits in blocks of 32, each with its own scale, and integers are multiplied. Exact: floats are multiplied. w8a8 always
multiplies integers, with one activation scale per row, as the scheme defines. Codes that are 8-bit floats are always
multiplied as floats, with activations rounded to e4m3 if the scheme is fp8a8.
"""

from __future__ import annotations

from ctypes import Structure

import torch
from torch import Tensor

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.library import TYPES, OpList, address, load_library, new_op
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.types import LinearInput, LinearProblem, QWeight

BLOCK = 32
TILE = 32
#: Maximum number of inputs whose float products are accumulated as one group.
MAX_GROUP = 128
#: See ops/linear.py.
ROW_MULTIPLE = 1


class NativeLinear(LinearLayer):
    """A weight packed into tiles, and the operation that multiplies with it, which points to ``tensors``."""

    def __init__(self, op: Structure, tensors: list[Tensor]) -> None:
        self.op, self.ops, self.scratch_per_row = op, OpList(op), load_library().scratch_bytes(op)
        self.tensors = tensors

    def __call__(self, x: LinearInput) -> Tensor:
        """x [M, K] -> [M, N] of the same dtype."""
        assert isinstance(x, Tensor)
        return library.matmul(x, self.op, self.ops, self.scratch_per_row)


def supports(problem: LinearProblem) -> str | None:
    """Return None, or why not."""
    if problem.has_offsets or problem.scheme in ("lut4a16", "w5a16", "w6a16"):
        return f"it has no {problem.scheme}{' with offsets' if problem.has_offsets else ''}"
    return None


def prepare(weight: QWeight, problem: LinearProblem) -> NativeLinear:
    """Pack ``weight`` (not modified) into tiles."""
    n, k = weight.n, weight.k
    size = _group_size(weight, problem)
    # Groups computed in parts repeat their scale and zero point for each part.
    weight_scales, zeros = (
        None if values is None else values.repeat_interleave(weight.group_size // size, dim=1)
        for values in (weight.scales, weight.zeros)
    )
    assert weight_scales is not None
    groups = weight_scales.shape[1]
    # Groups and blocks must end together: otherwise groups are padded.
    unpadded = size % BLOCK == 0 or (size in (8, 16) and weight.code_type is None)
    padded = size if unpadded else -(-size // BLOCK) * BLOCK
    blocks = -(-groups * padded // BLOCK)
    columns = _columns(k, size, padded, groups, blocks)
    tiles = -(-n // TILE)
    codes = weight.codes.contiguous()
    packed = library.empty_on_large_pages(tiles * blocks * 2 * 64 * weight.bits, dtype=torch.uint8)
    load_library().cdll.aiakq_pack_codes(
        codes.data_ptr(),
        n,
        k,
        weight.bits,
        columns.data_ptr(),
        blocks,
        packed.data_ptr(),
        torch.get_num_threads(),
    )
    scales = _tiled(weight_scales if weight_scales.dtype in TYPES else weight_scales.float(), tiles)
    if zeros is not None:
        zeros = _tiled(zeros if zeros.dtype == torch.uint8 else zeros.float(), tiles)
    source = columns
    if weight.perm is not None:
        taken = weight.perm.to(torch.int32)[columns.clamp(min=0).long()]
        source = torch.where(columns < 0, columns, taken)
    identity = bool((source[:k] == torch.arange(k, dtype=torch.int32)).all()) if blocks * BLOCK >= k else False
    bias = None if weight.bias is None else _padded(weight.bias.float(), tiles * TILE)
    scale = None if weight.input_scale is None else weight.input_scale.float().reshape(1).contiguous()
    op = new_op("linear")
    op.n, op.k, op.bits = n, k, weight.bits
    op.math = _math(weight, problem)
    if weight.scheme == "fp8a8":
        op.rounded = weight.rounding.group or k
        op.powers_of_two = weight.rounding.powers_of_two
        op.bound, op.min_scale = weight.rounding.bound, weight.rounding.min_scale
    op.group, op.groups = padded, groups
    op.scale_type = TYPES[scales.dtype]
    op.zero_type = TYPES[torch.uint8 if zeros is None else zeros.dtype]
    op.tiles, op.scales, op.zeros = address(packed), address(scales), address(zeros)
    op.source = None if identity else address(source)
    op.bias, op.input_scale = address(bias), address(scale)
    kept = [t for t in (packed, scales, zeros, None if identity else source, bias, scale) if t is not None]
    return NativeLinear(op, kept)


def _math(weight: QWeight, problem: LinearProblem) -> int:
    """Return the LinearMath (src/ops.def) of a layer."""
    if weight.code_type is not None:
        return {torch.float8_e4m3fn: library.E4M3, torch.float8_e5m2: library.E5M2}[weight.code_type]
    return library.ROWS if weight.scheme == "w8a8" else library.EXACT if problem.exact else library.BLOCKS


def _group_size(weight: QWeight, problem: LinearProblem) -> int:
    """Return the number of inputs whose products are accumulated before the zero point is applied.

    In float math, both sums of a long group are large if the activations have a nonzero mean, and their difference
    loses digits, so long groups are computed in parts. 8-bit codes without zero points are signed and need no such sum.
    """
    size = weight.group_size
    signed = weight.bits == 8 and weight.zeros is None
    if not problem.exact or weight.scheme == "w8a8" or signed or size % BLOCK:
        return size
    parts = [part for part in range(BLOCK, MAX_GROUP + 1, BLOCK) if size % part == 0]
    return size if size <= MAX_GROUP else parts[-1]


def _columns(k: int, size: int, padded: int, groups: int, blocks: int) -> Tensor:
    """Return the column of the codes at each position of the tiles [blocks * 32] int32, -1 for padding."""
    position = torch.arange(blocks * BLOCK, dtype=torch.int32)
    inside = position % padded
    column = position // padded * size + inside
    return torch.where((inside < size) & (column < k) & (position < groups * padded), column, -1).to(torch.int32)


def _padded(values: Tensor, count: int) -> Tensor:
    """Pad values [N] with zeros to [count]."""
    return torch.nn.functional.pad(values, (0, count - len(values))).contiguous()


def _tiled(values: Tensor, tiles: int) -> Tensor:
    """Rearrange values [N, groups] -> [tiles, groups, 32]; missing outputs are 0."""
    values = torch.nn.functional.pad(values, (0, 0, 0, tiles * TILE - len(values)))
    return values.view(tiles, TILE, -1).transpose(1, 2).contiguous()
