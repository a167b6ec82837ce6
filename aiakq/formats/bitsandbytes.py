"""bitsandbytes: NF4 and FP4 (Dettmers et al. 2023, arXiv:2305.14314) and LLM.int8 (2022, arXiv:2208.07339).

For one linear with N outputs and K inputs, of 4 bits in blocks of B weights, counted along the rows of [N, K]:

    weight                                  [ceil(N*K/2), 1] uint8, two codes per byte, the first in the high bits; with
                                            ``bnb_4bit_quant_storage``, the same bytes as another dtype
    weight.absmax                           [ceil(N*K/B)] float32, or uint8 if doubly quantized
    weight.quant_map                        [16] float32, the values of the codes
    weight.nested_absmax, nested_quant_map  [ceil(N*K/B/256)] and [256] float32, doubly quantized only
    weight.quant_state.bitsandbytes__nf4    [bytes] uint8, JSON; or ..__fp4

    W = quant_map[code] * absmax, rounded to the ``dtype`` in that JSON; doubly quantized:
    absmax = nested_quant_map[code] * nested_absmax + nested_offset.

and of 8 bits:

    weight         [N, K] int8
    SCB            [N] float32: W = weight * SCB / 127
    weight_format  [] uint8, 0: weights are not permuted; absent in old files

LLM.int8 rounds activations to 8 bits, except those inputs of which one token of the batch exceeds llm_int8_threshold:
a token then depends on what it is computed with. Activations are not rounded here, unless the threshold is 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.errors import AiakqError
from aiakq.formats.checks import finite, mismatch, need, read_bias, shaped
from aiakq.formats.compatibility import Readers
from aiakq.formats.config_values import read_flag, read_names, read_word, says_nothing, unsupported
from aiakq.formats.decoded_weight import DecodedWeight
from aiakq.formats.headers import Dimensions, Headers, Shapes
from aiakq.kernels.tables import TABLES
from aiakq.kernels.types import QWeight
from aiakq.spec import QuantSpec

_KINDS = ("nf4", "fp4")
_STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in _KINDS)
_ABSMAX, _MAP = "weight.absmax", "weight.quant_map"
_NESTED, _NESTED_MAP = "weight.nested_absmax", "weight.nested_quant_map"
SUFFIXES = ("weight", _ABSMAX, _MAP, _NESTED, _NESTED_MAP, *_STATES, "SCB", "weight_format", "bias")
OPTIONAL = ("weight_format",)
QUANT_METHODS = ("bitsandbytes",)
RECORDS_METHOD = False

#: The block size where the config has none; files say it for every linear.
_BLOCK = 64
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_MAX_STATE_BYTES = 4096
_STATE_KEYS = frozenset(
    "quant_type blocksize dtype shape nested_blocksize nested_dtype nested_offset".split(),
)
#: The smallest group of a row that is kept; scales of smaller ones would take more memory than decoded weights.
_MIN_GROUP = 16


# --- headers ----------------------------------------------------------------------------------------------------------


def holds_codes(headers: Headers) -> bool:
    """Whether a module with these tensors is a packed linear, complete or damaged."""
    return "SCB" in headers or any(suffix in headers for suffix in (_ABSMAX, _MAP, _NESTED, *_STATES))


def matches(headers: Headers) -> bool:
    """Whether the tensors are those of this layout; their names suffice, because no other format has them."""
    return holds_codes(headers)


def packed_shapes(headers: Headers, spec: QuantSpec, n: int, k: int) -> Shapes:
    """Return suffix -> shape for a linear with N outputs and K inputs."""
    if "SCB" in headers:
        return {"weight": (n, k), "SCB": (n,)}
    info = headers.get("weight")
    elements = (n * k + 1) // 2
    if info is not None and info.shape and info.shape[0] and info.nbytes == elements:
        elements = info.shape[0]
    state = next((suffix for suffix in _STATES if suffix in headers), f"weight.quant_state.bitsandbytes__{spec.table}")
    size = headers[state].shape if state in headers else (1,)
    absmax = headers.get(_ABSMAX)
    blocks = {-(-n * k // size) for size in _BLOCKS}
    expected = -(-n * k // (spec.group_size if spec.group_size > 0 else _BLOCK))
    count = absmax.shape[0] if absmax is not None and len(absmax.shape) == 1 and absmax.shape[0] in blocks else expected
    shapes: Shapes = {"weight": (elements, 1), _ABSMAX: (count,), _MAP: (16,), state: size}
    if absmax is not None and absmax.dtype == "U8":
        shapes |= {_NESTED: (-(-count // 256),), _NESTED_MAP: (256,)}
    return shapes


def dimensions(headers: Headers, spec: QuantSpec) -> Dimensions:
    """Return N, K, bits and groups of 8 bits. Raises KeyError for others, whose headers do not tell."""
    n, k = headers["weight"].shape
    if headers["SCB"].shape != (n,):
        raise ValueError("SCB has another shape")
    return Dimensions(n, k, 8, 1)


def read_dimensions(headers: Headers, spec: QuantSpec, read: Callable[[str], Tensor]) -> Dimensions:
    """Return N, K, bits and groups along K; those of 4 bits are in a tensor, which ``read`` returns."""
    if "SCB" in headers:
        return dimensions(headers, spec)
    suffix = next((suffix for suffix in _STATES if suffix in headers), None)
    if suffix is None:
        raise KeyError("quant_state")
    state = _read_state(read(suffix), suffix, "linear")
    size = math.gcd(state.k, state.block)
    return Dimensions(state.n, state.k, 4, -(-state.k // size))


# --- config -----------------------------------------------------------------------------------------------------------


def from_config(config: Mapping[str, object]) -> QuantSpec | None:
    """Return the spec of a config. Raises ``format_unsupported``."""
    four = read_flag(config.get("load_in_4bit"), "load_in_4bit")
    eight = read_flag(config.get("load_in_8bit"), "load_in_8bit")
    if four == eight:
        raise unsupported("bitsandbytes with both load_in_4bit and load_in_8bit, or neither")
    ignore = tuple(f"*{name}*" for name in read_names(config.get("llm_int8_skip_modules"), "llm_int8_skip_modules"))
    common = {"method": "bitsandbytes", "format": "bitsandbytes", "ignore": ignore or ("lm_head",)}
    if eight:
        return QuantSpec(bits=8, activation_bits=None if _threshold(config) else 8, **common)  # type: ignore[arg-type]
    kind = read_word(config, "bnb_4bit_quant_type", default="fp4")
    if kind not in _KINDS:
        raise unsupported(f"bitsandbytes with bnb_4bit_quant_type {kind!r:.40}")
    return QuantSpec(bits=4, group_size=_BLOCK, table=kind, **common)  # type: ignore[arg-type]


def _threshold(config: Mapping[str, object]) -> float:
    """Return the magnitude above which LLM.int8 does not round an input; 0: it rounds all."""
    stored = config.get("llm_int8_threshold", 6.0)
    if says_nothing(stored):
        return 0.0
    if isinstance(stored, bool) or not isinstance(stored, int | float) or not 0 <= stored < float("inf"):
        raise unsupported(f"bitsandbytes with llm_int8_threshold {stored!r:.40}")
    return float(stored)


def readers(format: str, schemes: object, experts: bool) -> Readers:
    """Describe how other programs read a model in this format."""
    return Readers("bitsandbytes", vllm=True, vllm_note="On GPUs.")


def decoded(headers: Headers, spec: QuantSpec, n: int, k: int) -> str | None:
    """Return why a linear is decoded at load, or None; the number of its scales tells the size of blocks."""
    absmax = headers.get(_ABSMAX)
    block = next((size for size in _BLOCKS if absmax is not None and -(-n * k // size) == math.prod(absmax.shape)), 0)
    return _reason(k, block) if block else None


def _reason(k: int, block: int) -> str | None:
    """Return why blocks are no groups along K inputs, or None."""
    if math.gcd(k, block) < min(_MIN_GROUP, block):
        return f"blocks of {block} weights end within rows of {k}"
    return None


def remark(weight: QWeight | DecodedWeight, name: str) -> str | None:
    """Return how 8-bit weights are computed here."""
    if isinstance(weight, DecodedWeight) or weight.scheme != "w8a16":
        return None
    return (
        "activations are not rounded to 8 bits, as LLM.int8 rounds those that no token of the same batch makes "
        "outliers: the answers are closer to those of the original model, and do not depend on the batch"
    )


# --- tensors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _State:
    """What the JSON beside a weight says: what decoded weights are rounded to, N, K, and the size of blocks."""

    kind: str
    dtype: torch.dtype
    n: int
    k: int
    block: int
    nested_block: int
    offset: float


def read(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str = "linear") -> QWeight | DecodedWeight:
    """Read one linear from its tensors: the scheme is lut4a16, or w8a16 or w8a8 with one scale per row.

    Blocks are groups of a row if they contain a multiple of 16 inputs of it; else the weight is decoded.
    Raises ``tensor_mismatch`` and ``not_finite``.
    """
    if "SCB" in tensors:
        return _read_int8(tensors, spec, name)
    suffix = next((suffix for suffix in _STATES if suffix in tensors), None)
    if suffix is None:
        raise mismatch(name, f"{_STATES[0]} is missing")
    state = _read_state(tensors[suffix], suffix, name)
    packed = tensors.get("weight")
    if packed is None:
        raise mismatch(name, "weight is missing")
    stored = packed.contiguous().view(torch.uint8).flatten()
    count = state.n * state.k
    if stored.numel() < (count + 1) // 2 or stored.numel() > (count + 1) // 2 + 8:
        raise mismatch(name, f"weight has {stored.numel()} bytes, expected {(count + 1) // 2} for {count} weights")
    codes = torch.stack((stored >> 4, stored & 15), dim=-1).flatten()[:count].view(state.n, state.k)
    values = _check_map(tensors, state, name)
    scales = _scales(tensors, state, name)
    bias = read_bias(tensors, state.n, name)
    group = math.gcd(state.k, state.block)
    if (reason := _reason(state.k, state.block)) is not None:
        spread = scales.repeat_interleave(state.block)[:count].view(state.n, state.k)
        return DecodedWeight((values[codes.long()] * spread).to(state.dtype), bias, reason)
    rows = scales if group == state.block else scales.repeat_interleave(state.block // group)
    return QWeight(
        scheme="lut4a16",
        codes=codes.contiguous(),
        scales=rows[: count // group].view(state.n, -1).contiguous(),
        bias=bias,
        group_size=group,
        table=values,
        rounded=None if state.dtype == torch.float32 else state.dtype,
    )


def _read_state(stored: Tensor, suffix: str, name: str) -> _State:
    """Parse the JSON beside a weight, which is untrusted. Raises ``tensor_mismatch``."""

    def wrong(reason: str) -> AiakqError:
        return mismatch(name, f"{suffix} {reason}")

    if stored.dtype != torch.uint8 or stored.dim() != 1 or not 2 <= stored.numel() <= _MAX_STATE_BYTES:
        raise wrong("is not a short text")
    try:
        document = json.loads(bytes(stored.tolist()).decode())
    except (ValueError, RecursionError):
        raise wrong("is not JSON") from None
    if not isinstance(document, dict) or not document.keys() <= _STATE_KEYS:
        raise wrong(f"has other keys than {', '.join(sorted(_STATE_KEYS))}")
    kind, shape, block = document.get("quant_type"), document.get("shape"), document.get("blocksize")
    if kind != suffix.rpartition("__")[2]:
        raise wrong(f"has the quant_type {kind!r:.40}")
    if (
        not isinstance(shape, list)
        or len(shape) != 2
        or not all(type(size) is int and 0 < size < 2**31 for size in shape)
    ):
        raise wrong(f"has the shape {shape!r:.60}")
    if block not in _BLOCKS or document.get("nested_blocksize", 256) != 256:
        raise wrong(f"has the block size {block!r:.40}")
    dtype = _DTYPES.get(str(document.get("dtype")))
    if dtype is None:
        raise wrong(f"has the dtype {document.get('dtype')!r:.40}")
    offset = document.get("nested_offset", 0.0)
    if isinstance(offset, bool) or not isinstance(offset, int | float) or not math.isfinite(offset):
        raise wrong(f"has the nested_offset {offset!r:.40}")
    return _State(str(kind), dtype, shape[0], shape[1], int(block), 256, float(offset))


def _check_map(tensors: Mapping[str, Tensor], state: _State, name: str) -> Tensor:
    """Return the values [16] float32 of the codes. Raises ``tensor_mismatch`` if the file has others."""
    stored = shaped(need(tensors, _MAP, name, 1, torch.float32), (16,), _MAP, name)
    values = torch.tensor(TABLES[state.kind], dtype=torch.float32)
    # Programs compute with the values that the name stands for, whatever the map says.
    if not torch.allclose(stored, values, rtol=0, atol=1e-6):
        raise mismatch(name, f"{_MAP} is not that of {state.kind}")
    return values


def _scales(tensors: Mapping[str, Tensor], state: _State, name: str) -> Tensor:
    """Return the scales [blocks] float32."""
    blocks = -(-state.n * state.k // state.block)
    stored = shaped(need(tensors, _ABSMAX, name, 1, torch.float32, torch.uint8), (blocks,), _ABSMAX, name)
    if stored.dtype == torch.float32:
        return finite(stored, _ABSMAX, name)
    outer = need(tensors, _NESTED, name, 1, torch.float32)
    outer = finite(shaped(outer, (-(-blocks // state.nested_block),), _NESTED, name), _NESTED, name)
    values = need(tensors, _NESTED_MAP, name, 1, torch.float32)
    values = finite(shaped(values, (256,), _NESTED_MAP, name), _NESTED_MAP, name)
    factors = outer.repeat_interleave(state.nested_block)[:blocks]
    return finite(values[stored.long()] * factors + state.offset, _ABSMAX, name)


def _read_int8(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str) -> QWeight:
    weight = need(tensors, "weight", name, 2, torch.int8)
    n = weight.shape[0]
    scales = finite(shaped(need(tensors, "SCB", name, 1, torch.float32), (n,), "SCB", name), "SCB", name)
    order = tensors.get("weight_format")
    if order is not None and (order.numel() != 1 or int(order) != 0):
        raise mismatch(name, "weight_format is not 0: weights are permuted for a kernel; save them in rows")
    if spec.table is not None:
        raise mismatch(name, "weight has 8 bits, and the config says 4")
    return QWeight(
        scheme=spec.scheme,
        codes=(weight.to(torch.int16) + 128).to(torch.uint8),
        scales=(scales / 127).unsqueeze(1),
        bias=read_bias(tensors, n, name),
    )
