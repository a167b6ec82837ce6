"""MLX: groups of a row with a scale and a bias (mlx.core.quantize, mlx-lm), and the micro-scaled floats of its modes.

For one linear or embedding with N outputs, K inputs, b bits and groups of G inputs:

    weight   [N, K*b/32] uint32   codes along K in a stream of bits, the lowest first; b is 2, 3, 4, 5, 6 or 8
    scales   [N, K/G] float       mode affine: W = code * scale + bias
             [N, K/G] uint8       mode mxfp4: codes are e2m1, W = value * 2**(scale - 127); nvfp4: the scale is e4m3
    biases   [N, K/G] float       mode affine only; transformers' MetalConfig calls them qbiases
    bias     [N] float, optional

config.json has ``quantization`` and a copy of it, ``quantization_config``, without a quant_method: group_size, bits,
mode, and under the names of layers the same for each of them, or whether it is quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from aiakq.formats.bit_stream import unpack_stream
from aiakq.formats.checks import finite, mismatch, need, read_bias, shaped
from aiakq.formats.compatibility import Readers
from aiakq.formats.config_keys import check_keys
from aiakq.formats.config_values import read_integer, read_names, read_object, read_word, says_nothing, unsupported
from aiakq.formats.headers import Dimensions, Headers, Shapes, matrix
from aiakq.formats.safetensors_file import TensorInfo
from aiakq.kernels.tables import TABLES
from aiakq.kernels.types import QWeight
from aiakq.spec import LayerSpec, QuantSpec

_OFFSETS = ("biases", "qbiases")
SUFFIXES = ("weight", "scales", *_OFFSETS, "bias")
QUANT_METHODS = ("mlx", "metal")
RECORDS_METHOD = False

_BITS = (2, 3, 4, 5, 6, 8)
#: Mode -> its group size.
_FLOAT_MODES = {"mxfp4": 32, "nvfp4": 16}
_KEYS = frozenset("quant_method group_size bits mode modules_to_not_convert".split())
#: Layers outside of all others, whose names have no dot.
_OUTER = ("lm_head",)
_LAYER_KEYS = frozenset("group_size bits mode".split())
_SCALES = (torch.float16, torch.bfloat16, torch.float32)
#: Values of ``model_type`` for which mlx-lm keeps the tensors and their names as they are in Hugging Face's files.
_SAME_TENSORS = frozenset(
    "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 starcoder2 olmo olmo2 stablelm cohere cohere2 smollm3 "
    "granite glm4 helium exaone seed_oss nemotron".split()
)


# --- headers ----------------------------------------------------------------------------------------------------------


def holds_codes(headers: Headers) -> bool:
    """Whether a module with these tensors is a packed linear, complete or damaged."""
    weight = headers.get("weight")
    return weight is not None and weight.dtype == "U32"


def matches(headers: Headers) -> bool:
    """Whether shapes and dtypes match this layout."""
    return matrix(headers, "weight", "U32") is not None and "scales" in headers


def packed_shapes(headers: Headers, spec: QuantSpec, n: int, k: int) -> Shapes:
    """Return suffix -> shape for a linear with N outputs and K inputs."""
    groups = (n, k // spec.group_size)
    shapes: Shapes = {"weight": (n, k * spec.bits // 32), "scales": groups}
    if spec.table is None:
        shapes[next((name for name in _OFFSETS if name in headers), _OFFSETS[0])] = groups
    return shapes


def dimensions(headers: Headers, spec: QuantSpec) -> Dimensions:
    """Return N, K, bits and groups. Raises KeyError or ValueError for headers of another layout."""
    n, words = headers["weight"].shape
    groups = headers["scales"].shape[1]
    if groups * spec.group_size * spec.bits != words * 32:
        raise ValueError("scales have another shape")
    return Dimensions(n, groups * spec.group_size, spec.bits, groups)


# --- config -----------------------------------------------------------------------------------------------------------


def from_config(config: Mapping[str, object]) -> QuantSpec | None:
    """Return the spec of a config. Raises ``format_unsupported``."""
    names = {key: value for key, value in config.items() if key not in _KEYS and _is_layer(key, value)}
    rest = {key: value for key, value in config.items() if key not in names}
    check_keys(rest, _KEYS, "the quantization of MLX")
    base = _layer(config, LayerSpec(4, 64, symmetric=False))
    layers = tuple((name, _override(name, value, base)) for name, value in names.items())
    skipped = read_names(config.get("modules_to_not_convert"), "modules_to_not_convert")
    return QuantSpec(
        method="mlx",
        format="mlx",
        **vars(base),
        ignore=tuple(f"*{name}*" for name in skipped),
        layers=layers,
    )


def _is_layer(key: str, value: object) -> bool:
    """Whether a key is the name of a layer; a setting, too, may be true or false."""
    return isinstance(value, Mapping) or (isinstance(value, bool) and ("." in key or key in _OUTER))


def _override(name: str, value: object, base: LayerSpec) -> LayerSpec | None:
    if isinstance(value, bool):
        return base if value else None
    values = read_object(value, name)
    check_keys(values, _LAYER_KEYS, f"the entry {name!r:.80} of MLX")
    return _layer(values, base)


def _layer(values: Mapping[str, object], base: LayerSpec) -> LayerSpec:
    """Return ``base`` with the values of a config or of the entry of a layer."""
    mode = read_word(values, "mode", default="affine")
    if mode not in ("affine", *_FLOAT_MODES):
        raise unsupported(f"MLX with the mode {mode!r:.40}; affine, mxfp4 and nvfp4 are read")
    bits = _integer(values, "bits", base.bits)
    size = _integer(values, "group_size", base.group_size)
    if mode != "affine":
        if bits != 4 or size != _FLOAT_MODES[mode]:
            raise unsupported(f"MLX's {mode} with {bits} bits in groups of {size}")
        return replace(base, bits=4, group_size=size, table="e2m1", symmetric=True)
    if bits not in _BITS or size < 1 or size * bits % 32:
        raise unsupported(f"MLX with {bits} bits in groups of {size}")
    return replace(base, bits=bits, group_size=size, table=None, symmetric=False)


def _integer(values: Mapping[str, object], key: str, default: int) -> int:
    return default if says_nothing(values.get(key)) else read_integer(values[key], key)


def unreadable(config: Mapping[str, object], inventory: Mapping[str, TensorInfo]) -> str | None:
    """Return why a checkpoint is not read: mlx-lm renames or changes the tensors of many kinds of models."""
    kind = config.get("model_type")
    stored = config.get("quantization_config")
    if str(kind) not in _SAME_TENSORS and not (isinstance(stored, Mapping) and stored.get("quant_method") == "metal"):
        return f"MLX's files of the model type {kind!r:.40}, whose tensors mlx-lm renames or changes"
    return None


def readers(format: str, schemes: object, experts: bool) -> Readers:
    """Describe how other programs read a model in this format."""
    return Readers()


# --- tensors ----------------------------------------------------------------------------------------------------------


def read(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str = "linear") -> QWeight:
    """Read one linear from its tensors: codes [N, K] uint8, scales and offsets [N, K/G] in the stored dtype.

    Raises ``tensor_mismatch`` and ``not_finite``.
    """
    words = need(tensors, "weight", name, 2, torch.uint32)
    n, k = words.shape[0], words.shape[1] * 32 // spec.bits
    groups = (n, k // spec.group_size)
    if groups[1] * spec.group_size * spec.bits != words.shape[1] * 32:
        raise mismatch(name, f"weight has {words.shape[1]} words, no groups of {spec.group_size} {spec.bits}-bit codes")
    codes, bias = unpack_stream(words, spec.bits), read_bias(tensors, n, name)
    if spec.table is not None:
        return _read_floats(tensors, spec, codes, bias, name)
    suffix = next((suffix for suffix in _OFFSETS if suffix in tensors), _OFFSETS[0])
    scales, offsets = (
        finite(shaped(need(tensors, each, name, 2, *_SCALES), groups, each, name), each, name)
        for each in ("scales", suffix)
    )
    return QWeight(
        scheme=f"w{spec.bits}a16",
        codes=codes,
        scales=scales,
        offsets=offsets,
        bias=bias,
        group_size=spec.group_size,
    )


def _read_floats(
    tensors: Mapping[str, Tensor], spec: QuantSpec, codes: Tensor, bias: Tensor | None, name: str
) -> QWeight:
    """Return a weight of e2m1 values, with scales in one byte: powers of two for groups of 32, e4m3 for 16."""
    stored = need(tensors, "scales", name, 2, torch.uint8)
    stored = shaped(stored, (codes.shape[0], codes.shape[1] // spec.group_size), "scales", name)
    if spec.group_size == _FLOAT_MODES["mxfp4"]:
        if bool((stored == 255).any()):
            raise mismatch(name, "scales are not numbers")
        scales = torch.exp2(stored.to(torch.float32) - 127)
    else:
        scales = finite(stored.contiguous().view(torch.float8_e4m3fn).to(torch.float32), "scales", name)
    return QWeight(
        scheme="lut4a16",
        codes=codes,
        scales=scales,
        bias=bias,
        group_size=spec.group_size,
        table=torch.tensor(TABLES["e2m1"], dtype=torch.float32),
    )
