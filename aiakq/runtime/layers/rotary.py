"""Tables of rotary position embedding (Su et al. 2021, arXiv:2104.09864), with the scalings that checkpoints use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.kernels.types import RotaryTables

#: Elements of a head whose frequencies are computed when only the settings are checked: a config may claim any number.
_MAX_CHECKED = 4096


def rotary_tables(rope: Mapping[str, Any], head_dim: int, max_position: int, device: torch.device) -> RotaryTables:
    """Cosines and sines [max_position, R / 2] float32 for the first R elements of heads of ``head_dim``.

    rope  rope_type default, linear, dynamic, llama3 or yarn, with that type's parameters.
    Raises ``model_unsupported`` for other types.
    """
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if device.type == "meta":
        # Only the settings are checked; a range on this device would make torch import its compiler.
        _frequencies(rope, min(rotated, _MAX_CHECKED), max_position)
        empty = torch.empty(max_position, rotated // 2, device=device)
        return RotaryTables(empty, empty)
    frequencies, magnitude = _frequencies(rope, rotated, max_position)
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
    return RotaryTables((angles.cos() * magnitude).to(device), (angles.sin() * magnitude).to(device))


def _frequencies(rope: Mapping[str, Any], dim: int, max_position: int) -> tuple[Tensor, float]:
    """Inverse frequencies [dim / 2] float32, and the factor on cosines and sines."""
    kind = rope.get("rope_type", "default")
    base = float(rope.get("rope_theta", 10000.0))
    inverse = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    if kind == "default":
        return inverse, 1.0
    if kind == "linear":
        return inverse / float(rope["factor"]), 1.0
    if kind == "dynamic":
        return _dynamic(rope, base, dim, max_position), 1.0
    if kind == "llama3":
        return _llama3(inverse, rope), 1.0
    if kind == "yarn":
        return _yarn(inverse, rope, base, dim, max_position)
    raise error(
        "model_unsupported",
        architecture=f"rope_type {kind}",
        reason="its rotary scaling is not known",
        known="default, linear, dynamic, llama3 and yarn scaling",
    )


def _dynamic(rope: Mapping[str, Any], base: float, dim: int, length: int) -> Tensor:
    """NTK-aware scaling for a context of ``length``: the base grows, so that slow dimensions turn no further.

    transformers lets the base grow with the text. Here pages outlive steps, so it is that of the longest text from the
    start, as in vLLM.
    """
    factor, original = float(rope["factor"]), float(rope.get("original_max_position_embeddings") or length)
    if length > original:
        base *= (factor * length / original - (factor - 1)) ** (dim / (dim - 2))
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)


def _llama3(inverse: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Llama 3.1: long waves are stretched by ``factor``, short ones kept, those between blended."""
    factor, original = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    wavelength = 2 * math.pi / inverse
    blend = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * inverse / factor + blend * inverse


def _yarn(inverse: Tensor, rope: Mapping[str, Any], base: float, dim: int, max_position: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): interpolate slow dimensions, keep fast ones."""
    factor = float(rope["factor"])
    original = float(rope.get("original_max_position_embeddings") or max_position)

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dimension(float(rope.get("beta_fast") or 32))), 0)
    high = min(math.ceil(dimension(float(rope.get("beta_slow") or 1))), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    magnitude = rope.get("attention_factor")
    if magnitude is None:
        magnitude = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return inverse / factor * ramp + inverse * (1 - ramp), float(magnitude)
