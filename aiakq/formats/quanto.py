"""optimum-quanto: integers of 2, 4 and 8 bits and 8-bit floats, as QuantizedModelForCausalLM writes them.

For one linear with N outputs and K inputs, of 8 bits:

    weight._data           [N, K] int8, float8_e4m3fn or float8_e5m2
    weight._scale          [N, 1] float: W = data * scale

of 2 and 4 bits, in groups of G inputs:

    weight._data._data     codes [N*K/G, G] uint8, 8/b rows in a byte, the first R rows in its low bits
    weight._scale          [N*K/G, 1] float
    weight._shift          like scale: W = code * scale - shift; or integers: W = (code - shift) * scale

and of all

    input_scale, output_scale   scales of activations, which are not quantized here
    bias                   [N] float, optional

quanto_qmap.json maps the name of each linear to the types of its weights and activations. Tensors in groups do not tell
N and K, which are those of the model. W is computed in the dtype of the scales, each step rounded, as quanto does.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aiakq.formats.checks import finite, mismatch, need, read_bias, shaped
from aiakq.formats.compatibility import Readers
from aiakq.formats.config_keys import check_keys
from aiakq.formats.config_values import read_names, read_object, read_word, unsupported
from aiakq.formats.decoded_weight import DecodedWeight
from aiakq.formats.headers import Dimensions, Headers, Shapes
from aiakq.kernels.types import QWeight
from aiakq.spec import Float8, LayerSpec, QuantSpec

_DATA, _SCALE = "weight._data", "weight._scale"
_PACKED, _SHIFT = "weight._data._data", "weight._shift"
OPTIONAL = ("input_scale", "output_scale")
SUFFIXES = (_DATA, _SCALE, _PACKED, _SHIFT, *OPTIONAL, "bias")
QUANT_METHODS = ("quanto",)
CONFIG_FILE = "quanto_qmap.json"
RECORDS_METHOD = False

_FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_REASON = "quanto rounds products of 16 bits before shifts are subtracted"
#: Type of weights, without quanto's q -> how they are stored.
_TYPES = {
    "int2": LayerSpec(2, symmetric=False),
    "int4": LayerSpec(4, symmetric=False),
    "int8": LayerSpec(8),
    **dict.fromkeys(("float8", "float8_e4m3fn", "float8_e5m2"), LayerSpec(8, float8=Float8())),
}


def holds_codes(headers: Headers) -> bool:
    """Whether a module with these tensors is a packed linear, complete or damaged."""
    return any(suffix in headers for suffix in (_DATA, _SCALE, _PACKED))


def matches(headers: Headers) -> bool:
    """Whether the tensors are those of this layout; their names suffice, because no other format has them."""
    return holds_codes(headers)


def packed_shapes(headers: Headers, spec: QuantSpec, n: int, k: int) -> Shapes:
    """Return suffix -> shape for a linear with N outputs and K inputs."""
    if spec.bits == 8:
        return {_DATA: (n, k), _SCALE: (n, 1)}
    group = _group(k)
    blocks = n * k // group
    return {_PACKED: (-(-blocks * spec.bits // 8), group), _SCALE: (blocks, 1), _SHIFT: (blocks, 1)}


def _group(k: int) -> int:
    """Return G for K inputs: the largest of 128, 96, 64 and 32 that divides more inputs than 128, else K."""
    return next((size for size in (128, 96, 64, 32) if k > 128 and k % size == 0), k)


def dimensions(headers: Headers, spec: QuantSpec) -> Dimensions:
    """Return N, K, bits and groups; fewer than 8 bits need the model's N and K. Raises KeyError or ValueError for
    headers of another layout, and ``format_unsupported``.
    """
    if spec.bits == 8:
        n, k = headers[_DATA].shape
        return Dimensions(n, k, 8, 1)
    n, k = _shape(spec, "a linear")
    return Dimensions(n, k, spec.bits, k // _group(k))


def _shape(spec: QuantSpec, name: str) -> tuple[int, int]:
    """Return the N and K of the model. Raises ``format_unsupported`` if nothing says them."""
    if "shape" not in spec.notes:
        raise unsupported(f"quanto with {spec.bits} bits, and nothing says the shape of {name:.200}")
    n, k = spec.notes["shape"]
    return n, k


def decoded(headers: Headers, spec: QuantSpec, n: int, k: int) -> str | None:
    """Return why a linear is decoded at load, or None."""
    kinds = {headers[suffix].dtype for suffix in (_SCALE, _SHIFT) if suffix in headers}
    is_shifted = _SHIFT in headers and headers[_SHIFT].dtype in ("F16", "BF16", "F32")
    return _REASON if spec.bits < 8 and is_shifted and kinds != {"F32"} else None


# --- config -----------------------------------------------------------------------------------------------------------


def from_config(config: Mapping[str, object]) -> QuantSpec | None:
    """Return the spec of quanto_qmap.json, or of transformers' QuantoConfig. Raises ``format_unsupported``."""
    entries = {key: value for key, value in config.items() if isinstance(value, Mapping)}
    skipped = read_names(config.get("modules_to_not_convert"), "modules_to_not_convert")
    rest = {key: value for key, value in config.items() if key not in entries}
    check_keys(rest, {"quant_method", "weights", "activations"}, "the config of quanto")
    layers = {name: _layer(read_object(entry, name), name) for name, entry in entries.items()}
    base = next(iter(layers.values())) if layers else _layer(rest, "the config of quanto")
    others = ("*", None) if layers else None
    return QuantSpec(
        method="quanto",
        format="quanto",
        **vars(base),
        ignore=tuple(f"*{name}*" for name in skipped),
        layers=(*layers.items(), *((others,) if others else ())),
    )


def _layer(entry: Mapping[str, object], name: str) -> LayerSpec:
    """Return how one linear is stored."""
    if entry.get("quant_method") is None:
        check_keys(entry, {"weights", "activations"}, f"the entry {name!r:.80} of quanto")
    if (activations := read_word(entry, "activations", default="none")) != "none":
        raise unsupported(f"quanto with activations of type {activations!r:.40}")
    kind = read_word(entry, "weights", default="int8").removeprefix("q")
    if kind not in _TYPES:
        raise unsupported(f"quanto with weights of type {kind!r:.40}")
    return _TYPES[kind]


def readers(format: str, schemes: object, experts: bool) -> Readers:
    """Describe how other programs read a model in this format."""
    return Readers()


# --- tensors ----------------------------------------------------------------------------------------------------------


def read(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str = "linear") -> QWeight | DecodedWeight:
    """Read one linear from its tensors: codes [N, K] uint8, scales [N, K/G] float; decoded where 16-bit steps are
    rounded.

    Raises ``tensor_mismatch`` and ``not_finite``.
    """
    if spec.bits < 8:
        return _read_groups(tensors, spec, name)
    data = need(tensors, _DATA, name, 2, torch.int8, *_FLOAT8)
    n = data.shape[0]
    scales = finite(shaped(need(tensors, _SCALE, name, 2, *_FLOATS), (n, 1), _SCALE, name), _SCALE, name)
    is_float = data.dtype in _FLOAT8
    if is_float != (spec.float8 is not None):
        raise mismatch(name, f"{_DATA} is {str(data.dtype).removeprefix('torch.')}, and the config says another type")
    bias = read_bias(tensors, n, name)
    if is_float:
        finite(data.to(torch.float32), _DATA, name)
        bits = data.contiguous().view(torch.uint8)
        return QWeight(scheme="fp8a16", codes=bits, scales=scales, bias=bias, code_type=data.dtype)
    codes = (data.to(torch.int16) + 128).to(torch.uint8)
    return QWeight(scheme="w8a16", codes=codes, scales=scales, bias=bias)


def _read_groups(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str) -> QWeight | DecodedWeight:
    """Read a linear of 2 or 4 bits, whose N and K are in ``spec.notes``."""
    n, k = _shape(spec, name)
    group = _group(k)
    shapes = packed_shapes({}, spec, n, k)
    packed = shaped(need(tensors, _PACKED, name, 2, torch.uint8), shapes[_PACKED], _PACKED, name)
    scales = shaped(need(tensors, _SCALE, name, 2, *_FLOATS), shapes[_SCALE], _SCALE, name)
    shifts = shaped(need(tensors, _SHIFT, name, 2, torch.int8, torch.uint8, *_FLOATS), shapes[_SHIFT], _SHIFT, name)
    parts = [(packed >> bits) & (2**spec.bits - 1) for bits in range(0, 8, spec.bits)]
    codes = torch.cat(parts)[: n * k // group]
    scales, bias = finite(scales, _SCALE, name), read_bias(tensors, n, name)
    if not shifts.is_floating_point():
        values = shifts.to(torch.int16)
        if int(values.min()) < 0 or int(values.max()) >= 2**spec.bits:
            raise mismatch(name, f"{_SHIFT} is outside 0..{2**spec.bits - 1}")
    elif scales.dtype != torch.float32 or shifts.dtype != torch.float32:
        values = codes * scales - finite(shifts, _SHIFT, name)
        return DecodedWeight(values.view(n, k), bias, _REASON)
    zeros = None if shifts.is_floating_point() else shifts.to(torch.uint8).view(n, -1).contiguous()
    return QWeight(
        scheme=f"w{spec.bits}a16",
        codes=codes.reshape(n, k).contiguous(),
        scales=scales.view(n, -1).contiguous(),
        zeros=zeros,
        offsets=-finite(shifts, _SHIFT, name).view(n, -1) if zeros is None else None,
        bias=bias,
        group_size=group,
        rounded=None if scales.dtype == torch.float32 else scales.dtype,
    )
