"""GPTQ, versions 1 and 2, as AutoGPTQ and GPTQModel write them.

For one linear with N outputs, K inputs, b bits and ng groups:

    qweight  [K*b/32, N] int32   codes packed along K
    qzeros   [ng, N*b/32] int32  zero points packed along N; version 1 stores zero - 1, version 2 the zero
    scales   [ng, N] float16
    g_idx    [K] int32           the group of each input; scrambled by act-order
    bias     [N]                 optional

``W[n, k] = scales[g_idx[k], n] * (q[k, n] - zero[g_idx[k], n])``. The bit width is derived from the shapes, because
tools write layers whose width differs from the config's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.formats.checks import (
    derive_group_size,
    finite,
    mismatch,
    need,
    order_from_groups,
    read_bias,
    shaped,
    with_live_scales,
)
from aiakq.formats.compatibility import EXPERTS_NOT_FOUND, Readers, experts_note
from aiakq.formats.config_keys import layer_override
from aiakq.formats.config_values import (
    first_of,
    read_bits,
    read_flag,
    read_group_size,
    read_object,
    read_word,
    says_nothing,
    unsupported,
)
from aiakq.formats.headers import Dimensions, Headers, Shapes, expected_groups, matrix, present, stored_size
from aiakq.kernels.packing import SUPPORTED_BITS, pack, unpack
from aiakq.kernels.types import QWeight
from aiakq.kernels.word_weight import WORD_BITS, WordWeight
from aiakq.patterns import glob_to_regex, is_plain
from aiakq.spec import LayerSpec, QuantSpec

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx", "bias")
QUANT_METHODS = ("gptq",)
#: Its files can hold an order of the inputs (act-order).
INPUT_ORDER = True
#: Of the entries for single layers the first one counts, whether quantized or not.
ORDERED_LAYERS = True
#: Note of a QuantSpec: where transformers (optimum) looks for linears, if it would not find them by itself.
PLACES_NOTE = "gptq_places"
#: Config file of AutoGPTQ and contemporary tools.
CONFIG_FILE = "quantize_config.json"

#: Linears that vLLM fuses -> the name of the fused one, which it looks up in ``dynamic``.
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


# --- headers ----------------------------------------------------------------------------------------------------------


def holds_codes(headers: Headers) -> bool:
    """Whether a module with these tensors is a packed linear, even if some of its tensors are missing or damaged."""
    return "qweight" in headers


def matches(headers: Headers) -> bool:
    """Whether the shapes and dtypes match this layout."""
    codes, scales = matrix(headers, "qweight", "I32"), matrix(headers, "scales")
    return codes is not None and scales is not None and codes.shape[1] == scales.shape[1]


def packed_shapes(headers: Headers, spec: QuantSpec, n: int, k: int) -> Shapes:
    """Return suffix -> shape for a linear with N outputs and K inputs."""
    groups = stored_size(headers, ("scales", "qzeros"), 0, expected_groups(spec, k), lambda size: k % size == 0)
    codes = matrix(headers, "qweight")
    bits, rest = (0, 1) if codes is None else divmod(codes.shape[0] * 32, k)
    if rest or bits not in SUPPORTED_BITS:
        bits = spec.bits
    shapes: Shapes = {"qweight": (k * bits // 32, n), "qzeros": (groups, n * bits // 32), "scales": (groups, n)}
    return shapes | present(headers, g_idx=(k,))


def dimensions(headers: Headers, spec: QuantSpec) -> Dimensions:
    """Return N, K, bits and groups. Raises KeyError, ValueError or ArithmeticError for headers of another layout."""
    rows, n = headers["qweight"].shape
    groups = headers["scales"].shape[0]
    bits = headers["qzeros"].shape[1] * 32 // n
    k = headers["g_idx"].shape[0] if "g_idx" in headers else rows * 32 // bits
    return Dimensions(n, k, rows * 32 // k, groups, has_perm=spec.desc_act)


# --- capabilities -----------------------------------------------------------------------------------------------------


def supports(spec: QuantSpec) -> str | None:
    """Return why this format cannot hold ``spec``, or None."""
    for layer in (spec.layer, *(layer for _, layer in spec.layers if layer is not None)):
        if layer.float8 is not None:
            return "such files hold no 8-bit floats"
        if layer.table is not None:
            return "such files hold no 4-bit floats"
        if layer.activation_bits:
            return "such files hold no quantized activations"
        if spec.format == "gptq" and not layer.symmetric:
            return "readers disagree about zero points in version 1"
    return None


def unportable(spec: QuantSpec, experts: bool) -> str | None:
    """Return why another format is the better default for ``spec``, or None."""
    if spec.layers:
        return "transformers reads no exceptions for single layers in these files"
    # For asymmetric weights there is no better default: transformers does not read them in compressed-tensors either.
    if experts and spec.format == "gptq":
        return "transformers does not read experts in these files"
    return None


def shape_problem(spec: QuantSpec, n: int, k: int) -> str | None:
    """Return why a linear with N outputs and K inputs cannot be written, or None."""
    return "GPTQ files hold multiples of 32 inputs and outputs" if k % 32 or n % 32 else None


def word_shape(spec: QuantSpec) -> tuple[int, int]:
    """Return how many inputs and outputs share a packed word and cannot be split."""
    return 32, 32


def scale_dtype(spec: QuantSpec, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of stored scales: float16, as every reader expects, regardless of ``dtype``."""
    return torch.float16


def reader_notes(spec: QuantSpec, experts: bool) -> list[str]:
    """Return notes for users on other programs that read ``spec``."""
    notes = [experts_note(spec.format)] if experts else []
    if spec.format == "gptq_v2":
        notes.append(
            "Asymmetric GPTQ is written as gptq_v2, which aiakq and transformers read and vLLM refuses; "
            "for vLLM use -quant_type awq."
        )
    return notes


def readers(format: str, schemes: Collection[str], experts: bool) -> Readers:
    """Describe how other programs read a model with these schemes; ``experts``: whether it has any."""
    note = EXPERTS_NOT_FOUND if experts else ""
    if format == "gptq_v2":
        reason = "vLLM does not read this format (GPTQ version 2, asymmetric)."
        return Readers("gptqmodel optimum", note, vllm=False, vllm_note=reason)
    fast = set(schemes) <= {"w4a16", "w8a16"}
    return Readers("gptqmodel optimum", note, True, "" if fast else "vLLM's fast kernels take 4 and 8 bits only.")


# --- quantization_config ----------------------------------------------------------------------------------------------


def from_config(config: Mapping[str, Any]) -> QuantSpec | None:
    """Return the spec of a config, or None if it describes another layout. Raises ``format_unsupported``."""
    layout = read_word(config, "checkpoint_format", "format", default="gptq")
    if read_flag(config.get("is_marlin_format"), "is_marlin_format") or layout not in ("gptq", "gptq_v2"):
        return None
    packed = str(first_of(config, "pack_dtype", default="int32")).removeprefix("torch.")
    if packed != "int32":
        raise unsupported(f"GPTQ codes packed into {packed!r:.40}")
    base = LayerSpec(
        bits=read_bits(first_of(config, "bits", "w_bit", "wbits"), "GPTQ"),
        group_size=read_group_size(first_of(config, "group_size", "q_group_size")),
        symmetric=_symmetric(config),
    )
    return QuantSpec(
        method="gptq",
        format=layout,
        **vars(base),
        desc_act=read_flag(config.get("desc_act"), "desc_act"),
        ignore=() if read_flag(config.get("lm_head"), "lm_head") else ("lm_head",),
        layers=tuple(_dynamic(read_object(config.get("dynamic"), "dynamic"), base)),
        rotated=_rotated(config),
        notes=_quantizer_note(config),
    )


def _symmetric(config: Mapping[str, object]) -> bool:
    if config.get("sym") is not None:
        return read_flag(config["sym"], "sym")
    return not read_flag(config.get("zero_point"), "zero_point")


def _dynamic(dynamic: Mapping[str, object], base: LayerSpec) -> Iterable[tuple[str, LayerSpec | None]]:
    """Parse GPTQModel's overrides: regular expressions after ``+:`` or nothing; ``-:`` marks skipped layers."""
    for key, values in dynamic.items():
        layer = None if key.startswith("-:") else layer_override(values, base)
        yield "re:" + key.removeprefix("+:").removeprefix("-:"), layer


def _rotated(config: Mapping[str, object]) -> tuple[str, ...]:
    """Return patterns of the linears whose inputs GPTQModel rotates online; its other rotations are in the weights.

    The key says which matrix rotated the hidden states. The online rotation of GPTQModel's loader is Hadamard's for
    ``random``, too, but no such file has been compared with it yet.
    """
    rotation = config.get("rotation")
    if says_nothing(rotation):
        return ()
    if not isinstance(rotation, str) or rotation.strip().lower() != "hadamard":
        raise unsupported(f"GPTQ with rotation {rotation!r:.40} (only 'hadamard' is supported)")
    return (r"re:.*mlp\.down_proj$",)


def _quantizer_note(config: Mapping[str, object]) -> dict[str, object]:
    """Return the tool that wrote the file, if recorded; asymmetric version 1 zero points cannot be read without it."""
    meta = config.get("meta")
    written_by = meta.get("quantizer") if isinstance(meta, Mapping) else None
    if isinstance(written_by, list) and written_by:
        written_by = written_by[0]
    return {"quantizer": written_by} if isinstance(written_by, str) else {}


def to_config(spec: QuantSpec) -> dict[str, object]:
    """Return the ``quantization_config`` of ``spec``; overrides are listed in ``dynamic``, as GPTQModel does."""
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": spec.bits,
        "group_size": spec.group_size,
        "desc_act": spec.desc_act,
        "sym": spec.symmetric,
        "checkpoint_format": spec.format,
        "lm_head": not any(map(_is_head, spec.ignore)),
        "true_sequential": True,
        "meta": {"quantizer": [f"aiakq:{spec.notes.get('version', '0')}"]},
    }
    config |= spec.notes.get(PLACES_NOTE, {})
    skipped = [name for name in spec.ignore if not _is_head(name)]
    entries: list[tuple[str, LayerSpec | None]] = [*((name, None) for name in skipped), *spec.layers]
    dynamic: dict[str, dict[str, Any]] = {}
    for pattern, layer in entries:
        if layer is None:
            dynamic[f"-:{_regex(pattern)}"] = {}
        else:
            values = {"bits": layer.bits, "group_size": layer.group_size, "sym": layer.symmetric}
            dynamic[f"+:{_regex(pattern)}"] = values
    return {**config, "dynamic": dynamic} if dynamic else config


def config_files(spec: QuantSpec) -> dict[str, object]:
    """Return JSON files that old readers look for beside config.json, by name."""
    return {CONFIG_FILE: to_config(spec)}


def _is_head(name: str) -> bool:
    """Whether a module is the output layer, of the model or of the language model inside it."""
    return name in ("lm_head", "language_model.lm_head")


def _regex(pattern: str) -> str:
    """Convert a name or pattern to GPTQModel's regular expression; names also match vLLM's fused names."""
    if not is_plain(pattern):
        return pattern[3:] if pattern.startswith("re:") else glob_to_regex(pattern)
    stem, _, last = pattern.rpartition(".")
    fused = _FUSED.get(last)
    if fused is None:
        return f"^{re.escape(pattern)}$"
    return f"^{re.escape(stem + '.')}({last}|{fused})$"


# --- tensors ----------------------------------------------------------------------------------------------------------


def read(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str = "linear") -> QWeight:
    """Read one linear from its tensors.

    tensors  suffix -> tensor, with the shapes and dtypes in the module's docstring; not modified.
    name     of the linear, for messages.

    Returns codes [N, K] uint8, scales [N, ng] in the stored dtype, zeros [N, ng] uint8 or None, perm [K] int64 or None;
    a WordWeight without perm, if no code straddles words.
    Raises ``tensor_mismatch`` and ``not_finite``.
    """
    qweight = need(tensors, "qweight", name, 2, torch.int32)
    qzeros = need(tensors, "qzeros", name, 2, torch.int32)
    scales = need(tensors, "scales", name, 2, torch.float16, torch.bfloat16, torch.float32)
    g_idx = tensors.get("g_idx")
    n = qweight.shape[1]
    groups = scales.shape[0]
    # Without g_idx (auto-round writes none), K follows from the width of the zero points.
    k = int(g_idx.numel()) if g_idx is not None else qweight.shape[0] * n // max(qzeros.shape[1], 1)
    bits, rest = divmod(qweight.shape[0] * 32, max(k, 1))
    if rest or bits not in SUPPORTED_BITS:
        raise mismatch(
            name, f"qweight has {qweight.shape[0]} words for {k} inputs, which is no width of {SUPPORTED_BITS}"
        )
    shaped(scales, (groups, n), "scales", name)
    shaped(qzeros, (groups, n * bits // 32), "qzeros", name)
    group_size = derive_group_size(k, groups, spec.group_size, "scales", name)
    finite(scales, "scales", name)

    perm = None
    if g_idx is not None:
        if g_idx.dtype not in (torch.int32, torch.int64):
            raise mismatch(name, f"g_idx is {g_idx.dtype}, not int32")
        perm = order_from_groups(g_idx, k, groups, group_size, "g_idx", name)
    zeros, bias = _read_zeros(qzeros, bits, spec), read_bias(tensors, n, name)
    scales, rotated = scales.T.contiguous(), spec.rotates(name)
    weight: QWeight
    if bits in WORD_BITS and perm is None and not rotated:
        weight = WordWeight(qweight.T, bits, k, scales, zeros, bias, group_size)
    else:
        codes = unpack(qweight.T, bits)
        codes = codes if perm is None else codes[:, perm].contiguous()
        weight = QWeight(f"w{bits}a16", codes, scales, zeros, perm, bias, group_size, rotated=rotated)
    return with_live_scales(weight, "scales", name)


def _read_zeros(qzeros: Tensor, bits: int, spec: QuantSpec) -> Tensor | None:
    """Return zero points [N, ng] uint8, or None if all are 2**(b-1), as for symmetric weights.

    Version 1 stores zero - 1, and tools differ for a zero of 0: GPTQModel subtracts from the whole word, so the borrow
    propagates into the next field and only a whole-word addition undoes it (not at 3 bits, where it works per field);
    all others wrap each field separately. Symmetric weights have one known zero point, so the stored constant
    determines the version of a file, regardless of its config.
    """
    half = 2 ** (bits - 1)
    stored = unpack(qzeros, bits)
    first = int(stored[0, 0])
    if spec.symmetric and first in (half - 1, half) and bool((stored == first).all()):
        return None
    if spec.format == "gptq_v2":
        zeros = stored
    elif bits != 3 and not spec.symmetric and str(spec.notes.get("quantizer", "")).startswith("gptqmodel"):
        ones = torch.tensor(sum(1 << shift for shift in range(0, 32, bits)), dtype=torch.int32, device=qzeros.device)
        zeros = unpack(qzeros + ones, bits)
    else:
        zeros = (stored + 1) & (2**bits - 1)
    return None if bool((zeros == half).all()) else zeros.T.contiguous()


def remark(weight: QWeight, name: str) -> str | None:
    """Return a sentence on asymmetric zero points that look off by one, as in files labelled with the wrong version."""
    shift = zero_shift(weight)
    if abs(shift) <= 0.5:
        return None
    return (
        f"the weights of {name} lie {shift:+.1f} steps off centre: its zero points may be of the other GPTQ "
        "version than checkpoint_format says"
    )


def zero_shift(weight: QWeight) -> float:
    """Return how far the weights of one linear are off-center, in steps: about 1 if the zeros are off by one, else 0.

    Weights have a mean near zero, so codes are symmetric about their zero points on average. Nothing else reveals an
    asymmetric file with a mislabelled version. Returns 0 for symmetric weights.
    """
    if weight.zeros is None:
        return 0.0
    groups = weight.scales.shape[1]
    spread = weight.codes.to(torch.float32)
    spread = torch.nn.functional.pad(spread, (0, groups * weight.group_size - weight.k))
    counts = torch.full((groups,), weight.group_size, dtype=torch.float32)
    counts[-1] -= groups * weight.group_size - weight.k
    means = spread.view(weight.n, groups, weight.group_size).sum(-1) / counts.to(spread.device)
    signs = weight.scales.sign().to(torch.float32)
    return float(((means - weight.zeros.to(torch.float32)) * signs).median())


def write(weight: QWeight, spec: QuantSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of one linear on the CPU, with shapes and dtypes as in the module docstring; bias in
    ``dtype``.

    Raises ``not_finite`` when a scale overflows float16, ``tensor_mismatch`` for shapes the layout cannot hold and
    ``option_conflict`` for a zero point of 0 in version 1.
    """
    bits, n, k = weight.bits, weight.n, weight.k
    if shape_problem(spec, n, k):
        raise mismatch("linear", f"weight is {n} x {k}; GPTQ files need both to be multiples of 32")
    half = 2 ** (bits - 1)
    groups = weight.scales.shape[1]
    zeros = weight.zeros.T if weight.zeros is not None else torch.full((groups, n), half, dtype=torch.uint8)
    zeros = zeros.to(torch.int16)
    if spec.format == "gptq":
        if int(zeros.min()) < 1:
            raise error(
                "option_conflict",
                option="A zero point of 0",
                other="the GPTQ v1 format",
                reason="readers disagree about it",
                hint="Write gptq_v2.",
            )
        zeros = zeros - 1
    codes = weight.codes
    g_idx = torch.arange(k, dtype=torch.int32) // weight.group_size
    if weight.perm is not None:
        perm = weight.perm.cpu()
        inverse = torch.argsort(perm)
        codes = codes[:, inverse.to(codes.device)]
        g_idx = g_idx[inverse]
    tensors = {
        "qweight": pack(codes.T, bits, dim=0),
        "qzeros": pack(zeros, bits),
        "scales": finite(weight.scales.T.to(scale_dtype(spec, dtype)).contiguous(), "scales (as float16)", "linear"),
        "g_idx": g_idx,
    }
    if weight.bias is not None:
        tensors["bias"] = weight.bias.to(dtype)
    return {suffix: tensor.cpu().contiguous() for suffix, tensor in tensors.items()}
