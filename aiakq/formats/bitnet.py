"""BitNet b1.58 (Ma et al. 2024, arXiv:2402.17764): ternary weights beside int8 activations, as transformers has them.

For one linear with N outputs and K inputs:

    weight        [N/4, K] uint8, codes 0 to 2 for -1 to 1: bits 2 i and 2 i + 1 of row r are output i * N/4 + r
    weight_scale  [1] float, by which outputs are multiplied, or divided with the linear_class "bitlinear"
    bias          [N] float, optional

Activations are rounded per token, max|x| / 127; transformers takes 1e-5 for a smaller maximum.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aiakq.formats.checks import mismatch, need, positive_number, read_bias
from aiakq.formats.compatibility import Readers
from aiakq.formats.config_keys import check_keys
from aiakq.formats.config_values import read_flag, read_names, read_word, unsupported
from aiakq.formats.headers import Dimensions, Headers, Shapes, matrix
from aiakq.kernels.types import QWeight
from aiakq.spec import QuantSpec

SUFFIXES = ("weight", "weight_scale", "bias")
QUANT_METHODS = ("bitnet",)
RECORDS_METHOD = False

#: Number of outputs in a byte.
_PACKED = 4
_KEYS = frozenset(
    {
        *("quant_method", "linear_class", "quantization_mode", "use_rms_norm", "modules_to_not_convert"),
        "rms_norm_eps",  # of the norm that is refused
    }
)


def holds_codes(headers: Headers) -> bool:
    """Whether a module with these tensors is a packed linear, complete or damaged."""
    is_ternary = matrix(headers, "weight", "U8") is not None and "weight_scale" in headers
    return is_ternary and set(headers) <= set(SUFFIXES)


def matches(headers: Headers) -> bool:
    """Whether the tensors are those of this layout."""
    return holds_codes(headers) and tuple(headers["weight_scale"].shape) == (1,)


def packed_shapes(headers: Headers, spec: QuantSpec, n: int, k: int) -> Shapes:
    """Return suffix -> shape for a linear with N outputs and K inputs."""
    return {"weight": (n // _PACKED, k), "weight_scale": (1,)}


def dimensions(headers: Headers, spec: QuantSpec) -> Dimensions:
    """Return N, K, bits and groups of the weight that is multiplied, int8 with one scale for all."""
    rows, k = headers["weight"].shape
    return Dimensions(_PACKED * rows, k, 8, 1)


def from_config(config: Mapping[str, object]) -> QuantSpec | None:
    """Return the spec of a config by transformers. Raises ``format_unsupported``."""
    check_keys(config, _KEYS, "the quantization_config of BitNet")
    kind = read_word(config, "linear_class", default="bitlinear")
    mode = read_word(config, "quantization_mode", default="offline")
    if kind not in ("bitlinear", "autobitlinear"):
        raise unsupported(f"BitNet with the linear_class {kind!r:.64}")
    if kind == "autobitlinear" and mode != "offline":
        raise unsupported(f"BitNet with the quantization_mode {mode!r:.64}, whose weights are not packed")
    if read_flag(config.get("use_rms_norm"), "use_rms_norm"):
        raise unsupported("BitNet with norms before its linear layers (use_rms_norm)")
    skipped = read_names(config.get("modules_to_not_convert"), "modules_to_not_convert")
    return QuantSpec(
        method="bitnet",
        format="bitnet",
        bits=8,
        activation_bits=8,
        ignore=tuple(f"*{name}*" for name in skipped) or ("lm_head",),
        notes={"multiplies": kind == "autobitlinear"},
    )


def readers(format: str, schemes: object, experts: bool) -> Readers:
    """Describe how other programs read a model in this format."""
    return Readers()


def read(tensors: Mapping[str, Tensor], spec: QuantSpec, name: str = "linear") -> QWeight:
    """Read one linear from its tensors: scheme w8a8, codes [N, K] uint8, scales [N, 1] float32.

    Raises ``tensor_mismatch`` and ``not_finite``.
    """
    packed = need(tensors, "weight", name, 2, torch.uint8)
    n, k = _PACKED * packed.shape[0], packed.shape[1]
    codes = torch.cat([(packed >> shift) & 3 for shift in range(0, 8, 2)])
    if bool((codes == 3).any()):
        raise mismatch(name, "weight has codes of 3, and those of ternary weights are 0 to 2")
    stored = positive_number(tensors, "weight_scale", name)
    if "multiplies" not in spec.notes:
        raise unsupported(f"ternary weights in {name:.200}, and no config of BitNet, which says what their scale is")
    multiplies = spec.notes["multiplies"]
    scale, bias = stored if multiplies else 1 / stored, read_bias(tensors, n, name)
    if bias is not None and multiplies:  # it is added before
        bias = bias * stored.to(bias.dtype)
    return QWeight(scheme="w8a8", codes=codes + 127, scales=scale.expand(n, 1).contiguous(), bias=bias, group_size=k)
