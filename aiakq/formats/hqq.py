"""HQQ (Badri and Shaji 2023), as transformers and hqq write it to safetensors.

For one linear with N outputs, K inputs, b bits and groups of G weights, counted along the rows of [N, K]:

    W_q          codes [N*K/G, G] (axis 1) or [G, N*K/G] (axis 0), of which 8/b rows (3 bits: 10) share a byte (3 bits:
                 an int32), the first R rows in its high bits; 5, 6 and 8 bits: one code per byte; with view_as_float,
                 the same bytes as another dtype
    scale, zero  [N*K/G, 1] or [1, N*K/G] float: W = (code - zero) * scale
    shape        [2] int64: N, K
    nbits, axis  [] int32; nbits may be a float: 1.58 is 2 bits
    bias         [N] float, optional

and further tensors that repeat what the config says. Groups of axis 0 run across outputs, and are decoded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from aiakq.formats.checks import finite, mismatch, need, read_bias
from aiakq.formats.compatibility import Readers
from aiakq.formats.config_keys import check_keys
from aiakq.formats.config_values import read_integer, read_names, read_object, says_nothing, unsupported
from aiakq.formats.decoded_weight import DecodedWeight
from aiakq.formats.headers import Dimensions, Headers, Shapes
from aiakq.kernels.types import QWeight
from aiakq.spec import LayerSpec, QuantSpec

#: Tensors that repeat the config, or say how programs hold the others.
_RECORDS = tuple(
    "group_size packing unpack_view_dtype view_as_float quant_scale quant_zero compute_dtype offload_meta "
    "encoded_state_dict stores_quant_config channel_wise optimize round_zero".split()
)
SUFFIXES = ("W_q", "scale", "zero", "shape", "nbits", "axis", "bias", *_RECORDS)
OPTIONAL = _RECORDS
QUANT_METHODS = ("hqq",)
RECORDS_METHOD = False

_BITS = (1, 2, 3, 4, 5, 6, 8)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_PARAMETERS = frozenset("nbits group_size axis channel_wise optimize round_zero view_as_float".split())
_ENTRY = frozenset("weight_quant_params scale_quant_params zero_quant_params offload_meta".split())
_MIN_GROUP = 16


def holds_codes(headers: Headers) -> bool:
    """Whether a module with these tensors is a packed linear, complete or damaged."""
    return "W_q" in headers


def matches(headers: Headers) -> bool:
    """Whether the tensors are those of this layout; their names suffice, because no other format has them."""
    return "W_q" in headers


def packed_shapes(headers: Headers, spec: QuantSpec, n: int, k: int) -> Shapes:
    """Return suffix -> shape for a linear with N outputs and K inputs; the axis is that of the scales."""
    stored = headers["scale"].shape if "scale" in headers else ()
    blocks = math.prod(stored)
    fits = 0 < blocks == max((1, *stored)) and n * k % blocks == 0
    scale = stored if fits else (n if spec.group_size == -1 else n * k // spec.group_size, 1)
    blocks = math.prod(scale)
    rows, columns = (n, k) if blocks == 1 else (blocks, n * k // blocks)
    if len(scale) == 2 and scale[0] == 1 < blocks:
        rows, columns = columns, rows
    per_word = {2: (4, 8), 3: (10,), 4: (2,)}.get(spec.bits, (1,))
    words = headers.get("W_q")
    size = 1 if words is None or not math.prod(words.shape) else words.nbytes // math.prod(words.shape)
    counts = [-(-rows // count) for count in per_word]
    height = words.shape[0] if words is not None and words.shape and words.shape[0] in counts else counts[0]
    width = columns * (4 if spec.bits == 3 else 1) // size
    return {"shape": (2,), "nbits": (), "axis": (), "W_q": (height, width), "scale": scale, "zero": scale}


def dimensions(headers: Headers, spec: QuantSpec) -> Dimensions:
    """Raise KeyError: headers do not tell; see ``read_dimensions``."""
    raise KeyError("shape")


def read_dimensions(headers: Headers, spec: QuantSpec, read: Callable[[str], Tensor]) -> Dimensions:
    """Return N, K, bits and groups along K, for which ``read`` returns small tensors."""
    n, k = _shape(read("shape"), "linear")
    groups = math.prod(headers["scale"].shape)
    size = math.gcd(k, n * k // groups)
    return Dimensions(n, k, max(2, _bits(read("nbits"), "linear")), k // size)


def decoded(headers: Headers, spec: QuantSpec, n: int, k: int) -> str | None:
    """Return why a linear is decoded at load, or None; the axis is that of the scales."""
    stored = headers["scale"].shape
    blocks = math.prod(stored)
    return _reason(blocks > 1 and stored[0] == 1, n * k // blocks, k)


def _reason(crosses_outputs: bool, size: int, k: int) -> str | None:
    """Return why groups of ``size`` weights are no groups along K inputs, or None."""
    if crosses_outputs:
        return "the groups of HQQ with axis 0 run across outputs"
    if math.gcd(k, size) < min(_MIN_GROUP, size):
        return f"groups of {size} weights end within rows of {k}"
    return None


# --- config -----------------------------------------------------------------------------------------------------------


def from_config(config: Mapping[str, object]) -> QuantSpec | None:
    """Return the spec of a config of transformers. Raises ``format_unsupported``."""
    skipped = read_names(config.get("skip_modules"), "skip_modules")
    entries = read_object(config.get("quant_config"), "quant_config")
    if not entries:
        raise unsupported("HQQ without a quant_config")
    layers: dict[str, LayerSpec] = {}
    for name, entry in ({"": entries} if "weight_quant_params" in entries else entries).items():
        layers[name] = _layer(read_object(entry, f"the quant_config {name!r:.40}"))
    base = next(iter(layers.values()))
    # The names of transformers' dynamic_config are the last two parts of modules: self_attn.q_proj.
    named = tuple((f"*{name}", layer) for name, layer in layers.items() if name)
    return QuantSpec(
        method="hqq",
        format="hqq",
        **vars(base),
        ignore=tuple(f"*{name}*" for name in skipped),
        layers=named if len(layers) > 1 else (),
    )


def _layer(entry: Mapping[str, object]) -> LayerSpec:
    """Return how the layers of one entry are quantized."""
    check_keys(entry, _ENTRY, "the quant_config of HQQ")
    for key in ("scale_quant_params", "zero_quant_params"):
        if not says_nothing(entry.get(key)):
            reason = "which hqq writes to pickles only; quantize the model again without them"
            raise unsupported(f"HQQ with quantized scales or zero points ({key}), {reason}")
    values = read_object(entry.get("weight_quant_params", entry), "weight_quant_params")
    check_keys(values, _PARAMETERS, "the quant_config of HQQ")
    stored = values.get("nbits", 4)
    bits = 2 if stored == 1.58 else read_integer(stored, "nbits")
    if bits not in _BITS:
        raise unsupported(f"HQQ with {stored!r:.20} bits")
    size = -1 if says_nothing(values.get("group_size")) else read_integer(values["group_size"], "group_size")
    return LayerSpec(bits=max(2, bits), group_size=size if size > 0 else -1, symmetric=False)


def readers(format: str, schemes: object, experts: bool) -> Readers:
    """Describe how other programs read a model in this format."""
    return Readers("hqq")


# --- tensors ----------------------------------------------------------------------------------------------------------


def read(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str = "linear") -> QWeight | DecodedWeight:
    """Read one linear from its tensors: codes [N, K] uint8, scales and float zero points [N, K/G]; one bit is held in
    two.

    Raises ``tensor_mismatch`` and ``not_finite``.
    """
    for suffix in ("shape", "nbits", "axis", "scale", "zero"):
        if suffix not in tensors:
            raise mismatch(name, f"{suffix} is missing, or is quantized itself")
    n, k = _shape(tensors["shape"], name)
    bits, axis = _bits(tensors["nbits"], name), _number(tensors["axis"], "axis", name)
    scale, zero = (_numbers(tensors, suffix, name) for suffix in ("scale", "zero"))
    blocks = scale.numel()
    if axis not in (0, 1) or zero.numel() != blocks or n * k % blocks:
        raise mismatch(name, f"scale has {blocks} elements and axis {axis}, for {n} x {k} weights")
    size = n * k // blocks
    shape = (n, k) if blocks == 1 else (blocks, size) if axis == 1 else (size, blocks)
    codes = _codes(tensors, bits, shape, name)
    bias = read_bias(tensors, n, name)
    group = math.gcd(k, size)
    if (reason := _reason(blocks > 1 and axis == 0, size, k)) is not None:
        points, factors = (zero, scale) if axis == 0 else (zero[:, None], scale[:, None])
        return DecodedWeight(((codes.to(torch.float32) - points) * factors).reshape(n, k), bias, reason)
    scale, zero = (value.repeat_interleave(size // group).view(n, k // group) for value in (scale, zero))
    return QWeight(
        scheme=f"w{max(2, bits)}a16",
        codes=codes.view(n, k),
        scales=scale.contiguous(),
        zeros=zero.contiguous(),
        bias=bias,
        group_size=group,
    )


def _codes(tensors: Mapping[str, Tensor], bits: int, shape: tuple[int, int], name: str) -> Tensor:
    """Return the codes, with ``shape``, uint8: row i of the first R is in the high bits of row i of W_q, the next R
    rows in the bits below.
    """
    stored = need(tensors, "W_q", name, 2, torch.uint8, torch.int32, *_FLOATS)
    word, count = (torch.int32, 10) if bits == 3 else (torch.uint8, 8 // bits if bits in (1, 2, 4) else 1)
    words = stored.contiguous().view(word)
    if words.shape[1] != shape[1] or not shape[0] <= words.shape[0] * count < shape[0] + count:
        raise mismatch(name, f"W_q has shape {list(stored.shape)}, which does not hold {shape[0]} x {shape[1]} codes")
    width = 8 if count == 1 else bits
    parts = [(words >> (width * (count - 1 - part))) & (2**width - 1) for part in range(count)]
    codes = torch.cat(parts)[: shape[0]].to(torch.uint8)
    if count == 1 and bits < 8 and int(codes.max()) >= 2**bits:
        raise mismatch(name, f"W_q has codes of more than {bits} bits")
    return codes.contiguous()


def _numbers(tensors: Mapping[str, Tensor], suffix: str, name: str) -> Tensor:
    """Return a scale or zero point of every group, in float32."""
    stored = tensors[suffix]
    if stored.dtype not in _FLOATS or not stored.numel() or max((1, *stored.shape)) != stored.numel():
        raise mismatch(name, f"{suffix} has shape {list(stored.shape)}, not one float for each group")
    return finite(stored, suffix, name).flatten().to(torch.float32)


def _shape(stored: Tensor, name: str) -> tuple[int, int]:
    if stored.shape != (2,) or stored.dtype not in (torch.int32, torch.int64) or not 0 < int(stored.min()) < 2**31:
        raise mismatch(name, "shape is not that of a matrix")
    n, k = stored.tolist()
    return n, k


def _bits(stored: Tensor, name: str) -> int:
    bits = 2 if stored.numel() == 1 and abs(float(stored) - 1.58) < 1e-3 else _number(stored, "nbits", name)
    if bits not in _BITS:
        raise mismatch(name, f"nbits is {bits}")
    return bits


def _number(stored: Tensor, suffix: str, name: str) -> int:
    if stored.numel() != 1 or not math.isfinite(float(stored)) or float(stored) != int(stored):
        raise mismatch(name, f"{suffix} is not a whole number")
    return int(stored)
