"""Cos/sin tables of rotary position embeddings (Su et al. 2021, arXiv:2104.09864), with the scalings in use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aiakq.errors import AiakqError, error
from aiakq.kernels.types import RotaryTables

#: Elements of a head whose frequencies are computed when only the settings are checked: a config may claim any number.
_MAX_CHECKED = 4096


def rotary_tables(
    rope: Mapping[str, Any],
    head_dim: int,
    max_position: int,
    device: torch.device,
    context: int | None = None,
    rows: int | None = None,
) -> RotaryTables:
    """Cosines and sines [rows, R / 2] float32 for the first R elements of heads of ``head_dim``.

    rope          rope_type default, linear, dynamic, llama3, yarn or longrope, with that type's parameters.
    max_position  positions that the config states.
    context       positions of the longest sequence, on which scalings depend; None: max_position.
    rows          positions of the tables; None: context.
    Raises ``unsupported`` for other types, ``model_malformed`` for absent or impossible parameters.
    """
    context = max_position if context is None else context
    rows = context if rows is None else rows
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    lengths = _Lengths(max_position, context)
    try:
        if device.type == "meta":
            # Only the settings are checked; a range on this device would make torch import its compiler.
            _inverse_frequencies(rope, min(rotated, _MAX_CHECKED), lengths)
            empty = torch.empty(rows, rotated // 2, device=device)
            return RotaryTables(empty, empty)
        inv_freq, magnitude = _inverse_frequencies(rope, rotated, lengths)
    except AiakqError:
        raise
    except (KeyError, TypeError, ValueError, ArithmeticError) as problem:
        missing = f"{problem.args[0]} is missing" if isinstance(problem, KeyError) else str(problem)
        reason = f"{missing} in the parameters of rope_type {rope.get('rope_type')}"
        raise error("model_malformed", file="config.json", reason=reason) from problem
    freqs = torch.outer(torch.arange(rows, dtype=torch.float32), inv_freq)
    # In place: contexts of millions of positions have tables of gigabytes.
    return RotaryTables(freqs.cos().mul_(magnitude).to(device), freqs.sin_().mul_(magnitude).to(device))


@dataclass(frozen=True)
class _Lengths:
    """Positions that the config states, and those of the longest sequence."""

    stated: int
    context: int


def _inverse_frequencies(rope: Mapping[str, Any], dim: int, lengths: _Lengths) -> tuple[Tensor, float]:
    """Inverse frequencies [dim / 2] float32, and the factor on cosines and sines."""
    kind = rope.get("rope_type", "default")
    base = float(rope.get("rope_theta", 10000.0))
    inv_freq = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    if kind == "default":
        return inv_freq, 1.0
    if kind == "linear":
        return inv_freq / float(rope["factor"]), 1.0
    if kind == "dynamic":
        return _dynamic(rope, base, dim, lengths), 1.0
    if kind == "llama3":
        return _llama3(inv_freq, rope), 1.0
    if kind == "yarn":
        return _yarn(inv_freq, rope, base, dim, lengths.stated)
    if kind == "longrope":
        return _longrope(rope, base, dim, lengths)
    raise error(
        "unsupported",
        what=f"The rotary scaling {kind!r} (rope_type in config.json)",
        hint="Supported are default, linear, dynamic, llama3, yarn and longrope.",
    )


def _dynamic(rope: Mapping[str, Any], base: float, dim: int, lengths: _Lengths) -> Tensor:
    """NTK-aware scaling: the base grows with the longest sequence, so that slow dimensions turn no further.

    transformers lets the base grow with the text beyond what the config states. Where --rope-scaling asks for more
    (``grows_from``), pages outlive steps, so it is that of the longest text from the start, as in vLLM.
    """
    trained = float(rope.get("grows_from") or lengths.stated)
    if lengths.context > trained:
        base *= (float(rope["factor"]) * lengths.stated / trained - (float(rope["factor"]) - 1)) ** (dim / (dim - 2))
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)


def _longrope(rope: Mapping[str, Any], base: float, dim: int, lengths: _Lengths) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): factors of each dimension, one set for short texts, one for long.

    The longest sequence that is served chooses, as in vLLM, so that a text is computed alike beside any other. In
    transformers each step chooses by its own longest sequence.
    """
    original = float(rope.get("original_max_position_embeddings") or lengths.stated)
    length = "long" if lengths.context > original else "short"
    factors = torch.tensor(rope[f"{length}_factor"], dtype=torch.float32)
    if factors.shape != (dim // 2,) and dim < _MAX_CHECKED:
        raise ValueError(f"{len(factors)} factors for {dim // 2} frequencies")
    magnitude = rope.get(f"{length}_mscale", rope.get("attention_factor"))  # Phi-3.5-MoE has one for each
    factor = float(rope.get("factor") or lengths.stated / original)
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    powers = base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    return 1.0 / (factors[: dim // 2] * powers), float(magnitude)


def _llama3(inv_freq: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Llama 3.1: long waves are stretched by ``factor``, short ones kept, those between blended."""
    factor, original = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    wavelength = 2 * math.pi / inv_freq
    blend = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * inv_freq / factor + blend * inv_freq


def _yarn(inv_freq: Tensor, rope: Mapping[str, Any], base: float, dim: int, max_position: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): interpolate slow dimensions, keep fast ones."""
    original = float(rope.get("original_max_position_embeddings") or max_position)
    factor = float(rope.get("factor") or max_position / original)

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(float(rope.get("beta_fast") or 32)), dimension(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    magnitude = rope.get("attention_factor")
    if magnitude is None:
        magnitude = _yarn_ratio(factor, rope.get("mscale"), rope.get("mscale_all_dim"))
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), float(magnitude)


def _yarn_ratio(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """The factor on cosines and sines; the two scales are DeepSeek's."""
    if mscale and mscale_all_dim:
        return yarn_magnitude(factor, float(mscale)) / yarn_magnitude(factor, float(mscale_all_dim))
    return yarn_magnitude(factor)


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """YaRN's factor on queries and on keys of a context that is ``factor`` times longer."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
