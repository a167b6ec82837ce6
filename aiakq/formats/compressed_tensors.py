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

Codes of 3, 5, 6 and 7 bits are packed without gaps; older versions put as many as fit into each word instead. The
shapes distinguish the two, and also determine the bit width where the config's does not fit. Beside rounded
activations, codes of fewer than 8 bits are packed, or one in each byte.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.formats import compressed_tensors_config, compressed_tensors_floats, float4, float8
from aiakq.formats import compressed_tensors_integers as integers
from aiakq.formats.checks import (
    finite,
    mismatch,
    order_from_groups,
)
from aiakq.formats.compatibility import Readers
from aiakq.formats.compressed_tensors_integers import gapped_words, width
from aiakq.formats.headers import Dimensions, Headers, Shapes, expected_groups, matrix, present, stored_size
from aiakq.kernels.packing import pack, words_for
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
    inputs: Shapes = {}
    if spec.static_input:
        inputs["input_scale"] = headers["input_scale"].shape if "input_scale" in headers else (1,)
    if "weight_packed" not in headers:
        return {"weight": (n, k), "weight_scale": scale} | inputs
    packed = matrix(headers, "weight_packed")
    words = packed.shape[1] if packed is not None else words_for(k, spec.bits)
    fits = width(words, k, spec.bits) is not None
    shapes: Shapes = {"weight_packed": (n, words if fits else words_for(k, spec.bits)), "weight_scale": scale}
    shapes |= inputs | {"weight_shape": (2,)} | present(headers, weight_g_idx=(k,))
    zero = headers.get("weight_zero_point")
    if zero is not None or not spec.symmetric:
        bits = width(words, k, spec.bits) or spec.bits
        rows = n if zero is not None and zero.dtype == "I8" else words_for(n, bits)
        if zero is not None and zero.dtype != "I8" and words != words_for(k, bits):
            rows = gapped_words(n, bits)
        flat = zero is not None and zero.dtype == "I8" and zero.shape == (n,) and groups == 1
        shapes["weight_zero_point"] = (n,) if flat else (rows, groups)
    return shapes


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
        return Dimensions(n, k, spec.bits if spec.activation_bits else 8, groups, perm, static)
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
        return integers.read_packed(tensors, spec, name)
    if "weight" in tensors and tensors["weight"].dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        _check_input_zeros(tensors, name)
        weight = float8.read(tensors, spec, name)
    else:
        weight = integers.read_int8(tensors, spec, name)
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


def write(weight: QWeight, spec: QuantSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of one linear: ``int-quantized`` for w8a8, ``pack-quantized`` for the rest.

    Packed scales are stored in ``dtype``, in which they must already be representable; w8a8 scales are float32.
    """
    if weight.perm is not None:
        raise mismatch("linear", "weight has its own input order, which compressed-tensors readers refuse")
    if weight.code_type is not None:
        stored = float8.write(weight, spec, dtype, "weight_scale")
        # The scale of a whole weight has one element there, not none; transformers refuses it otherwise.
        return stored | {"weight_scale": torch.atleast_1d(stored["weight_scale"])}
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
