"""compressed-tensors: ``pack-quantized`` for weight-only schemes, ``int-quantized`` with 8-bit activations,
``float-quantized`` and ``mxfp8-quantized`` for 8-bit floats (float8.py; ``weight`` and ``weight_scale``),
``nvfp4-pack-quantized`` and ``mxfp4-pack-quantized`` for 4-bit floats (float4.py).

For one linear with N outputs, K inputs, b bits and ng groups (one for per-channel scales):

    pack-quantized   weight_packed      [N, ceil(K*b/32)] int32, packed along K, code + 2**(b-1)
                     weight_scale       [N, ng], [N] or [1] float
                     weight_shape       [2] int64: N, K
                     weight_zero_point  [ceil(N*b/32), ng] int32, packed along N, or [N, ng] int8; asymmetric only
                     weight_g_idx       [K] int32, act-order by group only
    int-quantized    weight             [N, K] int8           (``naive-quantized`` is the same on disk)
                     weight_scale       [N, 1], [N] or [1] float
                     weight_zero_point  [N, 1] or [N] int8, asymmetric only
                     input_scale        [1] float, static activations only
    both             bias               [N], optional

3-bit codes are packed without gaps; older versions put ten of them into each word instead. The shapes distinguish the
two, and also determine the bit width, regardless of the config.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.formats import compressed_tensors_config, compressed_tensors_floats, float4, float8
from aiakq.formats.checks import (
    check_scales,
    derive_group_size,
    finite,
    mismatch,
    need,
    order_from_groups,
    read_bias,
    shaped,
)
from aiakq.formats.compatibility import Readers
from aiakq.formats.headers import Dimensions, Headers, Shapes, expected_groups, matrix, present, stored_size
from aiakq.kernels.packing import SUPPORTED_BITS, pack, unpack, words_for
from aiakq.kernels.types import SCHEME_BITS, QWeight
from aiakq.spec import QuantSpec

SUFFIXES = (
    "weight_packed",
    "weight_scale",
    "weight_global_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "weight",
    "input_scale",
    "input_global_scale",
    "input_zero_point",
    "bias",
)
QUANT_METHODS = ("compressed-tensors",)
#: The config does not record the quantization method, so ``QuantSpec.method`` is a guess.
RECORDS_METHOD = False
from_config = compressed_tensors_config.from_config
to_config = compressed_tensors_config.to_config
writer = compressed_tensors_config.writer
WIDTH_MULTIPLE = 4
#: Tables whose indices such files hold.
TABLES = ("e2m1",)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_FP4 = float4.COMPRESSED_TENSORS


# --- headers ----------------------------------------------------------------------------------------------------------


def holds_codes(headers: Headers) -> bool:
    """Whether a module with these tensors is a packed linear, even if some of its tensors are missing or damaged."""
    if "weight_packed" in headers or float8.holds_codes(headers):
        return True
    return "weight" in headers and headers["weight"].dtype == "I8" and "weight_scale" in headers


def matches(headers: Headers) -> bool:
    """Whether the tensors are those of this layout; names suffice, but for the packed ``weight`` of ModelOpt."""
    if "weight_packed" in headers:
        return True
    return "weight_scale" in headers and ("weight" not in headers or headers["weight"].dtype != "U8")


def _is_float4(headers: Headers) -> bool:
    return matrix(headers, _FP4.codes, "U8") is not None


def packed_shapes(headers: Headers, spec: QuantSpec, n: int, k: int) -> Shapes:
    """Return suffix -> shape for a linear with N outputs and K inputs."""
    if float8.holds_codes(headers):
        return float8.packed_shapes(headers, spec, n, k, "weight_scale")
    if _is_float4(headers):
        return float4.packed_shapes(headers, spec, n, k, _FP4)
    num_groups = expected_groups(spec, k)
    groups = stored_size(headers, ("weight_scale", "weight_zero_point"), 1, num_groups, lambda size: k % size == 0)
    stored = headers["weight_scale"].shape if "weight_scale" in headers else (n, groups)
    scale = stored if stored == (1,) or (stored in ((), (n,)) and groups == 1) else (n, groups)
    if "weight_packed" not in headers:
        shapes: Shapes = {"weight": (n, k), "weight_scale": scale}
        if spec.static_input:
            shapes["input_scale"] = headers["input_scale"].shape if "input_scale" in headers else (1,)
        return shapes
    packed = matrix(headers, "weight_packed")
    words = packed.shape[1] if packed is not None else words_for(k, spec.bits)
    fits = any(words in (words_for(k, bits), _gapped_words(k, bits)) for bits in SUPPORTED_BITS)
    shapes = {"weight_packed": (n, words if fits else words_for(k, spec.bits)), "weight_scale": scale}
    shapes |= {"weight_shape": (2,)} | present(headers, weight_g_idx=(k,))
    zero = headers.get("weight_zero_point")
    if zero is not None or not spec.symmetric:
        bits = next((bits for bits in (spec.bits, *SUPPORTED_BITS) if words == words_for(k, bits)), 3)
        rows = n if zero is not None and zero.dtype == "I8" else words_for(n, bits)
        if zero is not None and words != words_for(k, bits):
            rows = _gapped_words(n, bits)
        flat = zero is not None and zero.dtype == "I8" and zero.shape == (n,) and groups == 1
        shapes["weight_zero_point"] = (n,) if flat else (rows, groups)
    return shapes


def _gapped_words(count: int, bits: int) -> int:
    """Return the words for ``count`` codes if none straddles two words, as old versions packed 3 bits."""
    return -(-count // (32 // bits))


def dimensions(headers: Headers, spec: QuantSpec) -> Dimensions:
    """Return N, K, bits and groups. Raises KeyError, ValueError or ArithmeticError for headers of another layout."""
    if float8.holds_codes(headers):
        return float8.dimensions(headers, spec)
    if _is_float4(headers):
        return float4.dimensions(headers, spec, _FP4)
    scale = headers["weight_scale"].shape
    groups = 1 if len(scale) < 2 else scale[1]
    perm, static = "weight_g_idx" in headers, "input_scale" in headers
    if "weight_packed" not in headers:
        n, k = headers["weight"].shape
        return Dimensions(n, k, 8, groups, perm, static)
    n, words = headers["weight_packed"].shape
    # 3-bit words may have gaps, and K may end anywhere in a word: whole groups are more precise than words.
    k = groups * spec.group_size if groups > 1 and spec.group_size > 0 else words * 32 // spec.bits
    bits = words * 32 // k
    return Dimensions(n, k, bits if bits in SCHEME_BITS.values() else spec.bits, groups, perm, static)


# --- capabilities -----------------------------------------------------------------------------------------------------


def supports(spec: QuantSpec) -> str | None:
    """Return why the files cannot hold ``spec``, or None."""
    return compressed_tensors_floats.unwritable(spec)


def shape_problem(spec: QuantSpec, n: int, k: int) -> str | None:
    """Return why a linear of N x K cannot be written, or None: readers want whole groups of 4-bit floats."""
    if spec.table is not None and k % spec.group_size:
        return f"its {k} inputs are no multiple of {spec.group_size}"
    return None


def word_shape(spec: QuantSpec) -> tuple[int, int]:
    """Return how many inputs and outputs share a packed word and cannot be split."""
    if spec.table is not None:
        return 2, 1
    return (1 if spec.activation_bits or spec.float8 else 32 // spec.bits), 1


def scale_dtype(spec: QuantSpec, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of stored scales: float32 with quantized activations or 8-bit floats, else ``dtype``."""
    return torch.float32 if spec.activation_bits or spec.float8 else dtype


def reader_notes(spec: QuantSpec, experts: bool) -> list[str]:
    """Return notes for users on other programs that read ``spec``."""
    notes = []
    if experts and spec.activation_bits:
        notes.append("aiakq reads this model, but transformers 5.23 refuses experts with quantized activations.")
    stored = (spec.layer, *(layer for _, layer in spec.layers if layer is not None))
    if any(not layer.symmetric for layer in stored):
        notes.append(
            "Asymmetric weights in compressed-tensors are read by aiakq and vLLM, but not by transformers 5.23 without "
            "dequantize=True."
        )
    return notes


def readers(format: str, schemes: Collection[str], experts: bool) -> Readers:
    """Describe how other programs read a model with these schemes; ``experts``: whether it has any."""
    note = ""
    if any(scheme.startswith("fp8") for scheme in schemes):
        note = "On an NVIDIA GPU; it rounds activations from compute capability 8.9 on."
    if any(scheme.startswith("lut4") for scheme in schemes):
        note = (
            "On an NVIDIA GPU; it rounds activations to 4 bits only where the GPU multiplies such numbers (Blackwell)."
        )
        # transformers was not tried with such files.
        return Readers(vllm=True, vllm_note=note)
    if set(schemes) == {"w8a16"}:
        note = "On an NVIDIA GPU; vLLM has no kernel for 8-bit weights alone on a CPU."
    return Readers("compressed-tensors", vllm=True, vllm_note=note)


# --- tensors ----------------------------------------------------------------------------------------------------------


def read(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str = "linear") -> QWeight:
    """Read one linear from its tensors.

    tensors  suffix -> tensor, with the shapes and dtypes in the module's docstring; not modified.
    name     of the linear, for messages.

    Returns codes [N, K] uint8, scales [N, ng] in the stored dtype, zeros [N, ng] uint8 or None, perm [K] int64 or None.
    Raises ``tensor_mismatch``, ``not_finite``, and ``format_unsupported`` for activations that nothing computes.
    """
    if "weight_packed" in tensors:
        if tensors["weight_packed"].dtype == torch.uint8:
            return _read_float4(tensors, spec, name)
        return _read_packed(tensors, spec, name)
    if "weight" in tensors and tensors["weight"].dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        _check_input_zeros(tensors, name)
        weight = float8.read(tensors, spec, name)
    else:
        weight = _read_int8(tensors, spec, name)
    _check_order(tensors, weight, name)
    return weight


def _read_float4(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str) -> QWeight:
    _check_input_zeros(tensors, name)
    weight = float4.read(tensors, spec, name, _FP4)
    _check_order(tensors, weight, name)
    return weight


def _check_order(tensors: Mapping[str, Tensor], weight: QWeight, name: str) -> None:
    """Raise ``format_unsupported`` for an order of the inputs of weights that are not packed into words."""
    if "weight_g_idx" in tensors:
        groups, size = weight.scales.shape[1], weight.group_size
        if order_from_groups(tensors["weight_g_idx"], weight.k, groups, size, "weight_g_idx", name) is not None:
            reason = f"{name} has an input order of its own (weight_g_idx), and weights that are not packed integers"
            raise error("format_unsupported", reason=reason)


def _check_input_zeros(tensors: Mapping[str, Tensor], name: str) -> None:
    """Raise ``format_unsupported`` for activations or 8-bit floats with zero points other than 0."""
    for suffix in ("input_zero_point", "weight_zero_point"):
        stored = tensors.get(suffix)
        if stored is not None and bool((stored.to(torch.float32) != 0).any()):
            of = "activations" if suffix.startswith("input") else "floats as weights"
            raise error("format_unsupported", reason=f"{name} has {of} with a zero point")


def _read_packed(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str) -> QWeight:
    if spec.table is not None:
        raise error("format_unsupported", reason=f"{name} has integers as weights, and the config says floats")
    if spec.activation_bits:
        raise error("format_unsupported", reason=f"{name} has packed weights together with quantized activations")
    packed = need(tensors, "weight_packed", name, 2, torch.int32)
    shape = need(tensors, "weight_shape", name, 1, torch.int64, torch.int32).tolist()
    scales = tensors.get("weight_scale")
    if scales is None or scales.dtype not in _FLOATS:
        raise mismatch(name, "weight_scale is missing or not a float")
    bits = _width(packed.shape[1], shape[1], spec.bits) if len(shape) == 2 and shape[0] == packed.shape[0] else None
    if bits is None:
        raise mismatch(name, f"weight_shape is {shape}, weight_packed {list(packed.shape)} at {spec.bits} bits")
    n, k = shape
    scales = _rows(scales, n, name)
    groups = scales.shape[1]
    group_size = derive_group_size(k, groups, spec.group_size, "weight_scale", name)
    codes = _unpack(packed, bits, k)
    perm = None
    if "weight_g_idx" in tensors:
        perm = order_from_groups(tensors["weight_g_idx"], k, groups, group_size, "weight_g_idx", name)
        if perm is not None:
            codes = codes[:, perm].contiguous()
    zeros = None
    if "weight_zero_point" in tensors:
        point = tensors["weight_zero_point"]
        if point.dtype == torch.int8 and point.shape == (n,):
            tensors = {**tensors, "weight_zero_point": point.unsqueeze(1)}
        zeros = _read_zeros(need(tensors, "weight_zero_point", name, 2, torch.int32, torch.int8), n, groups, bits, name)
    elif not spec.symmetric:
        raise mismatch(name, "weight_zero_point is missing")
    check_scales(scales, codes, zeros, group_size, bits, "weight_scale", name)
    return QWeight(
        scheme=f"w{bits}a16",
        codes=codes,
        scales=scales,
        zeros=zeros,
        perm=perm,
        bias=read_bias(tensors, n, name),
        group_size=group_size,
    )


def _width(words: int, k: int, likely: int) -> int | None:
    """Return the bits per code for K codes in this many words, ``likely`` if possible; None if no width fits."""
    if k <= 0:
        return None
    fitting = [bits for bits in SUPPORTED_BITS if words in (words_for(k, bits), _gapped_words(k, bits))]
    return likely if likely in fitting else fitting[0] if fitting else None


def _unpack(words: Tensor, bits: int, count: int, dim: int = -1) -> Tensor:
    """``unpack`` for words with or without gaps."""
    if words.shape[dim] == words_for(count, bits):
        return unpack(words, bits, dim=dim, count=count)
    rows = words.movedim(dim, -1)
    shifts = torch.arange(0, 32 // bits * bits, bits, dtype=torch.int32, device=words.device)
    codes: Tensor = ((rows.unsqueeze(-1) >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(-2)
    return codes[..., :count].movedim(-1, dim).contiguous()


def _read_zeros(stored: Tensor, n: int, groups: int, bits: int, name: str) -> Tensor | None:
    """Return zero points [N, ng] uint8 as codes, or None if all are 0, which is the code 2**(b-1)."""
    half = 2 ** (bits - 1)
    if stored.dtype == torch.int8:
        shaped(stored, (n, groups), "weight_zero_point", name)
        low, high = int(stored.min()), int(stored.max())
        if low < -half or high >= half:
            raise mismatch(name, f"weight_zero_point is {low if low < -half else high}, outside {-half}..{half - 1}")
        zeros = (stored.to(torch.int16) + half).to(torch.uint8)
    else:
        if _width(stored.shape[0], n, bits) != bits:
            shaped(stored, (words_for(n, bits), groups), "weight_zero_point", name)
        zeros = _unpack(shaped(stored, (stored.shape[0], groups), "weight_zero_point", name), bits, n, dim=0)
    return None if bool((zeros == half).all()) else zeros


def _rows(scales: Tensor, n: int, name: str) -> Tensor:
    """Return scales [N, ng]; a single number is repeated for all."""
    if scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(n, 1).contiguous()
    elif scales.shape == (n,):
        scales = scales.unsqueeze(1)
    if scales.dim() != 2:
        raise mismatch(name, f"weight_scale has shape {list(scales.shape)}, not 2 dimensions")
    return finite(shaped(scales, (n, scales.shape[1]), "weight_scale", name), "weight_scale", name)


def _read_int8(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str) -> QWeight:
    weight = need(tensors, "weight", name, 2, torch.int8)
    n, k = weight.shape
    scales = tensors.get("weight_scale")
    if scales is None or scales.dtype not in _FLOATS:
        raise mismatch(name, "weight_scale is missing or not a float")
    scales = _rows(scales, n, name)
    groups = scales.shape[1]
    group_size = derive_group_size(k, groups, spec.group_size, "weight_scale", name)
    zeros = None
    if "weight_zero_point" in tensors:
        point = need(tensors, "weight_zero_point", name, tensors["weight_zero_point"].dim(), torch.int8)
        point = point.reshape(1, 1).expand(n, 1) if point.numel() == 1 else point
        point = point.unsqueeze(1) if point.shape == (n,) else point
        zeros = _read_zeros(point, n, groups, 8, name)
    if spec.activation_bits and (zeros is not None or groups != 1):
        reason = f"{name} has 8-bit activations, and weights that are asymmetric or in groups"
        raise error("format_unsupported", reason=reason)
    input_scale = None
    if spec.static_input:
        stored = tensors.get("input_scale")
        if stored is None or stored.numel() != 1:
            raise mismatch(name, "input_scale is missing or not one number")
        input_scale = finite(stored.reshape(()).to(torch.float32), "input_scale", name)
        if float(input_scale) <= 0:
            raise mismatch(name, f"input_scale is {float(input_scale)}, which is no scale")
    input_zero = tensors.get("input_zero_point")
    if input_zero is not None and bool((input_zero != 0).any()):
        raise error("format_unsupported", reason=f"{name} has activations with a zero point")
    codes = (weight.to(torch.int16) + 128).to(torch.uint8)
    check_scales(scales, codes, zeros, group_size, 8, "weight_scale", name)
    return QWeight(
        scheme="w8a8" if spec.activation_bits else "w8a16",
        codes=codes,
        scales=scales,
        zeros=zeros,
        bias=read_bias(tensors, n, name),
        group_size=group_size,
        input_scale=input_scale,
    )


def write(weight: QWeight, spec: QuantSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of one linear: ``int-quantized`` for w8a8, ``pack-quantized`` for the rest.

    Packed scales are stored in ``dtype``, in which they must already be representable; w8a8 scales are float32.
    """
    if weight.perm is not None:
        raise mismatch("linear", "weight has its own input order, which compressed-tensors readers refuse")
    if weight.code_type is not None:
        return float8.write(weight, spec, dtype, "weight_scale")
    if weight.table is not None:
        return float4.write(weight, spec, dtype, _FP4)
    tensors: dict[str, Tensor] = {}
    if weight.scheme == "w8a8":
        tensors["weight"] = (weight.codes.to(torch.int16) - 128).to(torch.int8)
        tensors["weight_scale"] = weight.scales.to(torch.float32)
        if weight.zeros is not None:
            tensors["weight_zero_point"] = (weight.zeros.to(torch.int16) - 128).to(torch.int8)
        if weight.input_scale is not None:
            tensors["input_scale"] = weight.input_scale.to(torch.float32).reshape(1)
    else:
        tensors["weight_packed"] = pack(weight.codes, weight.bits)
        tensors["weight_scale"] = weight.scales.to(dtype)
        tensors["weight_shape"] = torch.tensor([weight.n, weight.k], dtype=torch.int64)
        if weight.zeros is not None:
            tensors["weight_zero_point"] = pack(weight.zeros, weight.bits, dim=0)
    finite(tensors["weight_scale"], f"weight_scale (as {tensors['weight_scale'].dtype})", "linear")
    if weight.bias is not None:
        tensors["bias"] = weight.bias.to(dtype)
    return {suffix: tensor.cpu().contiguous() for suffix, tensor in tensors.items()}
