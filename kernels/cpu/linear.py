"""CPU linear layers with quantized weights: every group size, zero point and activation order.

Weight-only schemes use the math that the problem allows (``--cpu-math``). Not exact: activations are quantized to 8
bits in blocks of 32, each with its own scale, and integers are multiplied. Exact: floats are multiplied. w8a8 always
multiplies integers, with one activation scale per row, as the scheme defines. Codes that are 8-bit floats are always
multiplied as floats, with activations rounded to e4m3 if the scheme is fp8a8. Values of a table are multiplied as
floats or, where activations may be rounded, as integers: as they are if they are such, of at most 8 bits, times a power
of two, and else rounded to 16 bits, which adds less than a hundredth of the error of the activations.
"""

from __future__ import annotations

from ctypes import Structure

import torch
from torch import Tensor

from aiakq.kernels.block_weight import BlockWeight
from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.blocks import pack_blocks
from aiakq.kernels.cpu.embedding import NativeEmbedding
from aiakq.kernels.cpu.library import TYPES, OpList, address, load_library, new_op
from aiakq.kernels.cpu.memory import empty_on_large_pages
from aiakq.kernels.cpu.scale_steps import in_steps, narrow
from aiakq.kernels.cpu.tiles import TILE, in_tiles
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.types import LinearInput, LinearProblem, QWeight
from aiakq.kernels.word_weight import WordWeight

BLOCK = 32
#: Maximum number of inputs whose float products are accumulated as one group.
MAX_GROUP = 128
#: Inputs whose groups may share a step, see scale_steps.py.
_STEP = 256
#: See ops/linear.py.
ROW_MULTIPLE = 1
HAS_OFFSETS = READS_BLOCKS = True


class NativeLinear(LinearLayer):
    """A weight packed into tiles, and the operation that multiplies with it, which points to ``tensors``."""

    def __init__(self, op: Structure, tensors: list[Tensor]) -> None:
        self.op, self.ops, self.scratch_per_row = op, OpList(op), load_library().scratch_bytes(op)
        self.tensors = tensors

    def __call__(self, x: LinearInput) -> Tensor:
        """x [M, K] -> [M, N] of the same dtype."""
        assert isinstance(x, Tensor)
        return library.matmul(x, self.op, self.ops, self.scratch_per_row)

    def embedding(self, dtype: torch.dtype) -> NativeEmbedding:
        """Return a lookup of the weight's rows that decodes them to ``dtype``; see ``looks_up_rows``."""
        return NativeEmbedding.of_linear(self.op, self.tensors, dtype)


def looks_up_rows(weight: QWeight, problem: LinearProblem) -> bool:
    """Whether a layer of ``weight`` has an ``embedding``, with the values that its format defines."""
    plain = weight.code_type is None and weight.perm is None and not weight.rotated and weight.input_scale is None
    whole = weight.group_size % 16 == 0 and weight.k % weight.group_size == 0
    if not plain or not whole or weight.scheme == "w8a8":
        return False
    math = _math(weight, problem)[0]
    return math != library.TABLE_OF_16_BITS and _is_unpadded(_group_size(weight, math), weight, math)


def supports(problem: LinearProblem) -> str | None:
    """Return None, or why not."""
    if problem.has_zeros and (problem.scheme == "lut4a16" or problem.scheme.startswith("fp8")):
        return f"it has no {problem.scheme} with zero points"
    if problem.has_offsets and problem.scheme.startswith("fp8"):
        return f"it has no {problem.scheme} with offsets"
    return None


def prepare(weight: QWeight, problem: LinearProblem) -> NativeLinear:
    """Pack ``weight`` (not modified) into tiles."""
    math, table, factor = _math(weight, problem)
    if isinstance(weight, BlockWeight):
        return _of_blocks(weight, math, table, factor)
    n, k, size = weight.n, weight.k, _group_size(weight, math)
    scales = _of_parts(_times(weight.scales, factor, math), weight.group_size // size)
    zeros = _of_parts(weight.zeros, weight.group_size // size)
    offsets = _of_parts(_offsets(weight, math), weight.group_size // size)
    assert scales is not None
    groups = scales.shape[1]
    # Groups and blocks must end together: otherwise groups are padded.
    padded = size if _is_unpadded(size, weight, math) else -(-size // BLOCK) * BLOCK
    blocks = -(-groups * padded // BLOCK)
    columns = _columns(k, size, padded, groups, blocks)
    tiles = -(-n // TILE)
    packed = _packed(weight, math, columns, blocks)
    count = _STEP // size if size in (16, 32) else 0
    scales, scale_steps = _with_steps(scales, count)
    offsets, offset_steps = _with_steps(offsets, count)
    zeros = _tiled(zeros, torch.uint8)
    source = columns
    if weight.perm is not None:
        taken = weight.perm.to(torch.int32)[columns.clamp(min=0).long()]
        source = torch.where(columns < 0, columns, taken)
    identity = bool((source[:k] == torch.arange(k, dtype=torch.int32)).all()) if blocks * BLOCK >= k else False
    bias = None if weight.bias is None else _padded(weight.bias.float(), tiles * TILE)
    scale = None if weight.input_scale is None else weight.input_scale.float().reshape(1).contiguous()
    op = new_op("linear")
    op.n, op.k, op.bits = n, k, weight.bits
    op.math = math
    if weight.scheme == "fp8a8":
        op.rounded = weight.rounding.group or k
        op.powers_of_two = weight.rounding.powers_of_two
        op.bound, op.min_scale = weight.rounding.bound, weight.rounding.min_scale
    op.group, op.groups = padded, groups
    types = (torch.float32 if values is None else values.dtype for values in (scales, zeros, offsets))
    op.scale_type, op.zero_type, op.offset_type = (TYPES[dtype] for dtype in types)
    if count:
        op.steps, op.step_shift = -(-groups // count), count.bit_length() - 1
    op.scale_steps, op.offset_steps = address(scale_steps), address(offset_steps)
    op.tiles, op.scales, op.zeros, op.offsets = (address(values) for values in (packed, scales, zeros, offsets))
    op.table = address(table)
    op.source = None if identity else address(source)
    op.bias, op.input_scale = address(bias), address(scale)
    steps, ordered = (scale_steps, offset_steps), None if identity else source
    pointed_to = (packed, scales, zeros, offsets, *steps, table, ordered, bias, scale)
    return NativeLinear(op, [tensor for tensor in pointed_to if tensor is not None])


def _of_blocks(weight: BlockWeight, math: int, table: Tensor | None, factor: float) -> NativeLinear:
    """Return the layer of rows of blocks, with the tiles that ``prepare`` makes of the unpacked weight."""
    tiles, size = -(-weight.n // TILE), weight.group_size
    packed = empty_on_large_pages(tiles * weight.k // BLOCK * 2 * 64 * weight.bits, dtype=torch.uint8)
    found = pack_blocks(weight, math, packed, factor)
    bias = None if weight.bias is None else _padded(weight.bias.float(), tiles * TILE)
    op = new_op("linear")
    op.n, op.k, op.bits, op.math = weight.n, weight.k, weight.bits, math
    op.group, op.groups = size, weight.k // size
    op.scale_type = op.offset_type = TYPES[found.scales.dtype]
    op.zero_type = TYPES[torch.float32]
    if found.scale_steps is not None:
        op.steps, op.step_shift = weight.k // weight.kind.values, (weight.kind.values // size).bit_length() - 1
    op.tiles, op.table, op.bias = address(packed), address(table), address(bias)
    op.scales, op.offsets = address(found.scales), address(found.offsets)
    op.scale_steps, op.offset_steps = address(found.scale_steps), address(found.offset_steps)
    pointed_to = (packed, *vars(found).values(), table, bias)
    return NativeLinear(op, [tensor for tensor in pointed_to if tensor is not None])


def _is_unpadded(size: int, weight: QWeight, math: int) -> bool:
    """Whether the kernels compute groups of ``size`` inputs as they are."""
    if size == 8:
        return math in (library.EXACT, library.BLOCKS) and weight.bits not in (5, 6)
    return size % BLOCK == 0 or (size == 16 and weight.code_type is None)


def _math(weight: QWeight, problem: LinearProblem) -> tuple[int, Tensor | None, float]:
    """Return the LinearMath (src/ops.def) of a layer, its table in the layout of ops.def or None, and a factor of its
    scales.
    """
    if weight.code_type is not None:
        return {torch.float8_e4m3fn: library.E4M3, torch.float8_e5m2: library.E5M2}[weight.code_type], None, 1.0
    if weight.table is None:
        return (
            library.ROWS if weight.scheme == "w8a8" else library.EXACT if problem.exact else library.BLOCKS,
            None,
            1.0,
        )
    values = weight.table.float().contiguous()
    factor = _common_factor(values)
    integers = values / factor
    if not problem.exact and not weight.has_offsets:
        for math, top in ((library.TABLE_OF_5_BITS, 16), (library.TABLE_OF_8_BITS, 128)):
            if -top <= integers.min() and integers.max() < top:
                return math, (integers + top).to(torch.uint8), factor
    if not problem.exact and not weight.has_offsets:
        factor = float(values.abs().max()) / 32767 or 1.0
        words = (values / factor).round().to(torch.int16)
        return library.TABLE_OF_16_BITS, words.view(torch.uint8).view(len(words), 2).T.flatten(), factor
    floats = values.view(torch.uint8).view(len(values), 4)
    return library.TABLE, torch.cat([floats.flatten(), floats.T.flatten()]), 1.0


def _common_factor(values: Tensor) -> float:
    """Return the largest power of two of which all float32 ``values`` are multiples, 1 if all are zero."""
    mantissas, exponents = (values[values != 0].double() if values.any() else torch.ones(1).double()).frexp()
    integers = (mantissas * 2**24).long()
    lowest = (integers & -integers).double().log2().long()  # the lowest bit that is set
    return float(2.0 ** int((exponents + lowest).min() - 24))


def _times(scales: Tensor, factor: float, math: int) -> Tensor:
    """Multiply scales with a power of two exactly, in float32 if their own dtype cannot hold the products; that of
    TABLE_OF_16_BITS is none.
    """
    if math == library.TABLE_OF_16_BITS:
        return scales.float() * factor
    scaled = scales * factor
    return scaled if torch.equal(scaled / factor, scales) else scales.float() * factor


def _offsets(weight: QWeight, math: int) -> Tensor | None:
    """Return the offsets relative to the numbers that are multiplied, which are codes - 128 for EXACT with 8 bits."""
    if weight.offsets is None or math != library.EXACT or weight.bits != 8:
        return weight.offsets
    return (weight.offsets.double() + 128 * weight.scales.double()).float()


def _of_parts(values: Tensor | None, parts: int) -> Tensor | None:
    """Repeat the values [N, groups] of groups that are computed in parts for each part."""
    return None if values is None else values.repeat_interleave(parts, dim=1)


def _group_size(weight: QWeight, math: int) -> int:
    """Return the number of inputs whose products are accumulated before zero point or offset are applied.

    In float math, both sums of a long group are large if the activations have a nonzero mean, and their difference
    loses digits, so long groups are computed in parts. Tables and 8-bit codes without zero points are signed and need
    no such sum.
    """
    size = weight.group_size
    signed = weight.zeros is None and not weight.has_offsets and (weight.bits == 8 or weight.table is not None)
    if math not in (library.EXACT, library.TABLE) or signed or size % BLOCK:
        return size
    parts = [part for part in range(BLOCK, MAX_GROUP + 1, BLOCK) if size % part == 0]
    return size if size <= MAX_GROUP else parts[-1]


def _packed(weight: QWeight, math: int, columns: Tensor, blocks: int) -> Tensor:
    """Pack the codes into tiles; ``columns`` as from _columns."""
    packed = empty_on_large_pages(-(-weight.n // TILE) * blocks * 2 * 64 * weight.bits, dtype=torch.uint8)
    if isinstance(weight, WordWeight) and torch.equal(columns, torch.arange(weight.k, dtype=torch.int32)):
        words, threads = weight.words, torch.get_num_threads()
        load_library().cdll.aiakq_pack_words(
            words.data_ptr(), *words.stride(), weight.n, weight.k, weight.bits, packed.data_ptr(), threads
        )
        return packed
    codes = weight.codes.contiguous()
    load_library().cdll.aiakq_pack_codes(
        codes.data_ptr(),
        weight.n,
        weight.k,
        weight.bits,
        math,
        columns.data_ptr(),
        blocks,
        packed.data_ptr(),
        torch.get_num_threads(),
    )
    return packed


def _columns(k: int, size: int, padded: int, groups: int, blocks: int) -> Tensor:
    """Return the column of the codes at each position of the tiles [blocks * 32] int32, -1 for padding."""
    position = torch.arange(blocks * BLOCK, dtype=torch.int32)
    inside = position % padded
    column = position // padded * size + inside
    return torch.where((inside < size) & (column < k) & (position < groups * padded), column, -1).to(torch.int32)


def _padded(values: Tensor, count: int) -> Tensor:
    """Pad values [N] with zeros to [count]."""
    return torch.nn.functional.pad(values, (0, count - len(values))).contiguous()


def _with_steps(values: Tensor | None, count: int) -> tuple[Tensor | None, Tensor | None]:
    """Return values [N, groups] and their steps, for each ``count`` groups (0: without steps), as tiles.

    They take as few bytes as hold them exactly.
    """
    if values is None:
        return None, None
    values = narrow(values)
    found = in_steps(values, count) if count and values.dtype == torch.float32 else None
    if found is None:
        return _tiled(values), None
    return in_tiles(found.integers), in_tiles(found.steps)


def _tiled(values: Tensor | None, *also: torch.dtype) -> Tensor | None:
    """Rearrange values [N, groups] -> [tiles, groups, 32], as float32 unless they are of a dtype of ``also`` or of a
    16-bit one; missing outputs are 0.
    """
    if values is None:
        return None
    return in_tiles(values if values.dtype in (torch.float16, torch.bfloat16, *also) else values.float())
