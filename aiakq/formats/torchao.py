"""torchao: flattened tensor subclasses in safetensors, as torchao's safetensors support and transformers write them.

For one linear with N outputs, K inputs and groups of G inputs, ``__metadata__`` of the file holds the class of the
weight and its attributes as JSON, under the name ``MODULE.weight``. They alone say how the tensors are read:

    Int8Tensor                _weight_qdata       [N, K] int8
    IntxUnpackedToInt8Tensor  _weight_scale       [N/R, K/G] float: W = (qdata - zero_point) * scale, blocks of R x G
                              _weight_zero_point  like scale, int8 or float, optional for Int8Tensor
    Float8Tensor              _weight_qdata       [N, K] float8_e4m3fn or float8_e5m2
                              _weight_scale       [N/R, K/G] float32
    Int4Tensor                _weight_qdata       [N, K/2] int8, two codes -8..7 per byte, the first in the low bits
                              _weight_scale, _weight_zero_point  [K/G, N] float: W = code * scale + zero_point
    Int4TilePackedTo4dTensor  _weight_qdata       [N/8, K/128, 32, 4] int32, N and K padded; the order of CUDA's tensor
                                                  cores (``_tile_codes``)
                              _weight_scale_and_zero  [K/G, N, 2] bfloat16: W = (code - 8) * scale + zero
    _weight_act_quant_scale   a scale of all activations, with act_quant_kwargs only
    _weight_act_pre_scale     [K] or [1, K] float: inputs are multiplied by it first (AWQ, SmoothQuant); Int8Tensor,
                              Int4Tensor and Int4TilePackedTo4dTensor only
    bias                      [N] float, optional

W is rounded to ``dtype``, except where torchao multiplies codes before they are scaled (Int8Tensor with whole rows,
Int4Tensor). Activations are rounded as act_quant_kwargs and activation_quantization say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from aiakq.formats import float8, torchao_metadata
from aiakq.formats.checks import finite, mismatch, need, read_bias, shaped, with_live_scales
from aiakq.formats.compatibility import Readers
from aiakq.formats.config_values import unsupported
from aiakq.formats.decoded_weight import DecodedWeight
from aiakq.formats.headers import Dimensions, Headers, Shapes
from aiakq.formats.input_rounding import rounding_of
from aiakq.formats.torchao_metadata import (
    FACTORS,
    FLOAT8,
    INPUT_SCALE,
    INPUT_ZERO,
    INT4,
    INT8,
    INTX,
    PARTS,
    QDATA,
    SCALE,
    SCALE_AND_ZERO,
    TILES,
    ZERO,
    TorchaoTensor,
)
from aiakq.kernels.types import InputRounding, QWeight
from aiakq.spec import QuantSpec

SUFFIXES = (*PARTS, "bias")
QUANT_METHODS = ("torchao",)
RECORDS_METHOD = False
from_config = torchao_metadata.from_config
described = torchao_metadata.described

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_INNER_TILES, _TILE_K, _TILE_N = 8, 16, 8


def holds_codes(headers: Headers) -> bool:
    """Whether a module with these tensors is a packed linear, complete or damaged."""
    return any(suffix in headers for suffix in PARTS)


def matches(headers: Headers) -> bool:
    """Whether the tensors are those of this layout; their names suffice, because no other format has them."""
    return holds_codes(headers)


def packed_shapes(headers: Headers, spec: QuantSpec, n: int, k: int) -> Shapes:
    """Return suffix -> shape of a linear of N x K; ``read`` checks the shapes of what is for inputs."""
    of_inputs = (FACTORS, INPUT_SCALE, INPUT_ZERO) if spec.activation_bits else (FACTORS,)
    stored = {suffix: tuple(headers[suffix].shape) for suffix in of_inputs if suffix in headers}
    return {**_weight_shapes(headers, spec.notes["stored"], n, k), **stored}


def _weight_shapes(headers: Headers, stored: TorchaoTensor, n: int, k: int) -> Shapes:
    rows, group = stored.block
    if stored.kind == TILES:
        k = -(-k // 1024) * 1024
        tiles = -(-n // _TILE_N)
        shape = (tiles, k // (_INNER_TILES * _TILE_K), 32, _INNER_TILES // 2)
        return {QDATA: shape, SCALE_AND_ZERO: (k // group, tiles * _TILE_N, 2)}
    if stored.kind == INT4:
        return {QDATA: (n, k // 2), SCALE: (k // group, n), ZERO: (k // group, n)}
    scales = (-(-n // rows), -(-k // group))
    if (rows, group) == stored.shape:
        scales = (1, 1)
    shapes: Shapes = {QDATA: (n, k), SCALE: scales}
    return shapes | ({ZERO: scales} if ZERO in headers or stored.kind == INTX else {})


def dimensions(headers: Headers, spec: QuantSpec) -> Dimensions:
    """Return N, K, bits and groups."""
    stored: TorchaoTensor = spec.notes["stored"]
    n, k = stored.shape
    return Dimensions(n, k, spec.bits, -(-k // stored.block[1]), static_input=spec.static_input)


def readers(format: str, schemes: object, experts: bool) -> Readers:
    """Describe how other programs read a model in this format."""
    return Readers("torchao")


# --- tensors ----------------------------------------------------------------------------------------------------------


def read(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str = "linear") -> QWeight | DecodedWeight:
    """Read one linear from its tensors: codes [N, K] uint8, scales, zero points or offsets [N, K/G] float.

    spec  what ``described`` returned. Raises ``tensor_mismatch``, ``not_finite`` and ``format_unsupported``.
    """
    stored: TorchaoTensor = spec.notes["stored"]
    if FACTORS in tensors and stored.kind not in (INT8, INT4, TILES):
        raise mismatch(name, f"{FACTORS} is there, and a {stored.kind} has none")
    if stored.kind == FLOAT8:
        weight = float8.read(_renamed(tensors), spec, name)
        return weight if spec.activation_bits else replace(weight, rounded=_rounded(stored))
    read_kind = _read_int4(tensors, stored, name) if stored.kind in (INT4, TILES) else None
    found = read_kind or _read_integers(tensors, stored, spec, name)
    if FACTORS not in tensors:
        return found
    if isinstance(found, DecodedWeight):
        raise unsupported(f"{name:.200} of torchao with act_pre_scale beside zero points that are floats")
    return replace(found, factors=_factors(tensors[FACTORS], found.k, name))


def _factors(stored: Tensor, k: int, name: str) -> Tensor:
    """Return the factors [K] of the inputs. Raises ``tensor_mismatch`` and ``not_finite``."""
    if stored.dtype not in _FLOATS or stored.shape not in ((k,), (1, k), (1, 1, k)):
        raise mismatch(name, f"{FACTORS} is {list(stored.shape)}, not one float for each of {k} inputs")
    return finite(stored.flatten(), FACTORS, name)


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of 8-bit floats under the names of float8.py."""
    names = {QDATA: "weight", SCALE: "weight_scale", "bias": "bias"}
    return {names[suffix]: tensor for suffix, tensor in tensors.items() if suffix in names}


def _rounded(stored: TorchaoTensor) -> torch.dtype | None:
    return None if stored.dtype == torch.float32 else stored.dtype


def _read_integers(
    tensors: Mapping[str, Tensor], stored: TorchaoTensor, spec: QuantSpec, name: str
) -> QWeight | DecodedWeight:
    """Read an Int8Tensor or an IntxUnpackedToInt8Tensor."""
    (n, k), (rows, group) = stored.shape, stored.block
    codes = shaped(need(tensors, QDATA, name, 2, torch.int8), (n, k), QDATA, name)
    shape = (n // rows, k // group)
    scales = finite(shaped(need(tensors, SCALE, name, 2, *_FLOATS), shape, SCALE, name), SCALE, name)
    zeros = torch.zeros(shape)
    if ZERO in tensors or stored.kind == INTX:
        given = need(tensors, ZERO, name, 2, torch.int8, *_FLOATS)
        zeros = finite(shaped(given, shape, ZERO, name).to(torch.float32), ZERO, name)
        if stored.dtype != torch.float32 and bool((zeros != zeros.round()).any()):
            return _decoded(tensors, stored, spec, name)
    # The smallest width that holds the codes: those of 1 and 7 bits are held in 2 and 8.
    bits = 8 if spec.bits == 7 else spec.bits
    half = 2 ** (bits - 1)
    low, high = int(codes.min()), int(codes.max())
    if low < -half or high >= half:
        raise mismatch(name, f"{QDATA} is {low if low < -half else high}, outside the {bits} bits of the metadata")
    unsigned = (codes.to(torch.int16) + half).to(torch.uint8)
    spread = (zeros + half).expand(n, shape[1]) if shape[0] == 1 else zeros + half
    spread = spread.to(torch.uint8) if bool((spread == spread.round()).all() and (spread >= 0).all()) else spread
    scales = scales.expand(n, shape[1]).contiguous()
    points = None if bool((zeros == 0).all()) else spread.contiguous()
    # Whole rows of an Int8Tensor are scaled after they were multiplied.
    whole = stored.kind == INT8 and group == k
    if whole and points is not None:
        raise unsupported(f"{name:.200} of torchao with zero points of whole rows, which its own product leaves out")
    weight = QWeight(
        scheme=f"w{bits}a16",
        codes=unsigned,
        scales=scales,
        zeros=points,
        bias=read_bias(tensors, n, name),
        group_size=group,
        rounded=None if whole else _rounded(stored),
    )
    with_live_scales(weight, SCALE, name)
    return _with_inputs(weight, tensors, stored, spec, name) if spec.activation_bits else weight


def _decoded(tensors: Mapping[str, Tensor], stored: TorchaoTensor, spec: QuantSpec, name: str) -> DecodedWeight:
    """Decode codes with float zero points as torchao does, each step rounded to the dtype."""
    if spec.activation_bits:
        raise unsupported(f"{name:.200} of torchao with zero points that are floats beside rounded activations")
    (n, k), (rows, group) = stored.shape, stored.block
    scales, zeros = (
        tensors[suffix].expand(n // rows, k // group).repeat_interleave(rows, 0).repeat_interleave(group, 1)
        for suffix in (SCALE, ZERO)
    )
    values = ((tensors[QDATA].to(stored.dtype) - zeros.to(stored.dtype)) * scales).to(stored.dtype)
    return DecodedWeight(values, read_bias(tensors, n, name), "zero points are floats, and differences are rounded")


def _with_inputs(
    weight: QWeight, tensors: Mapping[str, Tensor], stored: TorchaoTensor, spec: QuantSpec, name: str
) -> QWeight:
    """Return a weight-only weight with the rounding of activations that ``spec`` says."""
    if stored.kind == INT8 and weight.zeros is not None:
        raise unsupported(f"{name:.200} of torchao with zero points beside rounded activations")
    info = torch.finfo(torch.float32)
    smallest = info.eps if stored.kind == INT8 else info.smallest_normal
    rounding = replace(rounding_of(spec), min_scale=smallest, inverse=True)
    scale = tensors.get(INPUT_SCALE)
    point = tensors.get(INPUT_ZERO)
    if scale is not None:
        if scale.numel() != 1 or scale.dtype not in _FLOATS or float(scale) <= 0:
            raise mismatch(name, f"{INPUT_SCALE} is not one positive number")
        scale = finite(scale.reshape(()).to(torch.float32), INPUT_SCALE, name)
        rounding = _with_point(rounding, point, name)
    elif point is not None:
        raise mismatch(name, f"{INPUT_ZERO} has no scale")
    # Products are computed before they are scaled, and weights are not rounded.
    rounded = None if stored.kind == INT8 else weight.rounded
    scheme = weight.scheme.replace("a16", "a8")
    return replace(weight, scheme=scheme, rounding=rounding, input_scale=scale, rounded=rounded)


def _with_point(rounding: InputRounding, point: Tensor | None, name: str) -> InputRounding:
    """Return ``rounding`` with the zero point of a stored scale."""
    if point is None:
        return rounding
    if point.numel() != 1 or point.is_floating_point() or not -128 <= int(point) <= 127:
        raise mismatch(name, f"{INPUT_ZERO} is not one integer of 8 bits")
    if rounding.elements == "int8" and int(point):
        raise mismatch(name, f"{INPUT_ZERO} is not 0, and activations are symmetric")
    return replace(rounding, zero=int(point))


def _read_int4(tensors: Mapping[str, Tensor], stored: TorchaoTensor, name: str) -> QWeight:
    """Read an Int4Tensor or an Int4TilePackedTo4dTensor: offsets take the place of zero points."""
    (n, k), group = stored.shape, stored.block[1]
    if stored.kind == INT4:
        packed = shaped(need(tensors, QDATA, name, 2, torch.int8, torch.uint8), (n, k // 2), QDATA, name)
        halves = packed.contiguous().view(torch.uint8)
        codes = torch.stack([halves & 15, halves >> 4], dim=-1).flatten(1) ^ 8
        numbers = {suffix: need(tensors, suffix, name, 2, *_FLOATS) for suffix in (SCALE, ZERO)}
        scales, zeros = (shaped(each, (k // group, n), suffix, name).T for suffix, each in numbers.items())
    else:
        words = need(tensors, QDATA, name, 4, torch.int32)
        padded = _padded(words)
        if (
            words.shape[2:] != (32, _INNER_TILES // 2)
            or padded[0] - n not in range(_TILE_N)
            or padded[1] < k
            or padded[1] % group
        ):
            raise mismatch(name, f"{QDATA} has shape {list(words.shape)}, for {n} x {k} weights")
        codes = _tile_codes(words)[:n, :k].contiguous()
        pairs = need(tensors, SCALE_AND_ZERO, name, 3, torch.bfloat16)
        pairs = shaped(pairs, (padded[1] // group, padded[0], 2), SCALE_AND_ZERO, name)[: k // group, :n]
        scales, zeros = pairs[..., 0].T, pairs[..., 1].T
    scales, zeros = (finite(each.to(torch.float32), SCALE, name) for each in (scales, zeros))
    return QWeight(
        scheme="w4a16",
        codes=codes,
        scales=scales.contiguous(),
        offsets=(zeros - 8 * scales).contiguous(),
        bias=read_bias(tensors, n, name),
        group_size=group,
        rounded=_rounded(stored) if stored.kind == TILES else None,
    )


def _padded(words: Tensor) -> tuple[int, int]:
    """Return the padded N and K of tiles [N/8, K/128, 32, 4]."""
    return words.shape[0] * _TILE_N, words.shape[1] * _INNER_TILES * _TILE_K


def _tile_codes(words: Tensor) -> Tensor:
    """Return the codes [N, K] uint8 of words [N/8, K/128, 32, 4] int32, each of 8 codes of one output.

    Lane t of 32 holds, of output t div 4, inputs 2c, 2c + 1, 2c + 8 and 2c + 9 with c = t mod 4, of two tiles of 16
    inputs; those in even places are in the low half of the word.
    """
    rows, outer = words.shape[:2]
    nibbles = torch.stack([(words >> (4 * place)) & 15 for place in range(8)], dim=-1).to(torch.uint8)
    # Place p of a word: pair p mod 4 of inputs, of which p div 4 is the second.
    parts = nibbles.view(rows, outer, 8, 4, _INNER_TILES // 2, 2, 2, 2)  # n, c, word, second, tile, upper half
    return parts.permute(0, 2, 1, 4, 6, 7, 3, 5).reshape(rows * _TILE_N, -1).contiguous()
