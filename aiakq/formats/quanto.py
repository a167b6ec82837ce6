"""optimum-quanto: 8-bit integers and 8-bit floats, as QuantizedModelForCausalLM writes them.

For one linear with N outputs and K inputs:

    weight._data           [N, K] int8, float8_e4m3fn or float8_e5m2
    weight._scale          [N, 1] float: W = data * scale
    input_scale, output_scale   scales of activations, which are not quantized here
    bias                   [N] float, optional

quanto_qmap.json maps the name of each linear to the types of its weights and activations. Those of 2 and 4 bits are
refused: their tensors have the shape of groups, and do not tell the N and K of the linear.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aiakq.formats.checks import finite, mismatch, need, read_bias, shaped
from aiakq.formats.compatibility import Readers
from aiakq.formats.config_keys import check_keys
from aiakq.formats.config_values import read_names, read_object, read_word, unsupported
from aiakq.formats.headers import Dimensions, Headers, Shapes
from aiakq.kernels.types import QWeight
from aiakq.spec import Float8, LayerSpec, QuantSpec

_DATA, _SCALE = "weight._data", "weight._scale"
SUFFIXES = (_DATA, _SCALE, "input_scale", "output_scale", "bias")
QUANT_METHODS = ("quanto",)
CONFIG_FILE = "quanto_qmap.json"
RECORDS_METHOD = False

_FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
#: Type of weights, without quanto's q -> how they are stored.
_TYPES = {
    "int8": LayerSpec(8),
    **dict.fromkeys(("float8", "float8_e4m3fn", "float8_e5m2"), LayerSpec(8, float8=Float8())),
}


def holds_codes(headers: Headers) -> bool:
    """Whether a module with these tensors is a packed linear, complete or damaged."""
    return any(suffix in headers for suffix in (_DATA, _SCALE))


def matches(headers: Headers) -> bool:
    """Whether the tensors are those of this layout; their names suffice, because no other format has them."""
    return holds_codes(headers)


def packed_shapes(headers: Headers, spec: QuantSpec, n: int, k: int) -> Shapes:
    """Return suffix -> shape for a linear with N outputs and K inputs."""
    return {_DATA: (n, k), _SCALE: (n, 1)}


def dimensions(headers: Headers, spec: QuantSpec) -> Dimensions:
    """Return N, K, bits and groups. Raises KeyError or ValueError for headers of another layout."""
    n, k = headers[_DATA].shape
    return Dimensions(n, k, 8, 1)


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
        raise unsupported(f"quanto with weights of type {kind!r:.40}; only those of 8 bits are read")
    return _TYPES[kind]


def readers(format: str, schemes: object, experts: bool) -> Readers:
    """Describe how other programs read a model in this format."""
    return Readers()


# --- tensors ----------------------------------------------------------------------------------------------------------


def read(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str = "linear") -> QWeight:
    """Read one linear from its tensors: codes [N, K] uint8, scales [N, 1] float.

    Raises ``tensor_mismatch`` and ``not_finite``.
    """
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
