"""Cos/sin tables of rotary position embeddings (Su et al. 2021, arXiv:2104.09864), with the common scaling methods."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aiakq.errors import AiakqError, error
from aiakq.kernels.types import RotaryTables

#: Maximum head size for which frequencies are computed when only validating a config, which may claim any number.
_MAX_CHECKED = 4096


def rotary_tables(
    rope: Mapping[str, Any],
    head_dim: int,
    max_position: int,
    device: torch.device,
    context: int | None = None,
    rows: int | None = None,
) -> RotaryTables:
    """Return cosines and sines [rows, R / 2] float32 for the first R elements of heads of size ``head_dim``.

    rope          rope_type default, linear, dynamic, llama3, yarn, longrope or proportional, with its parameters.
    max_position  max_position_embeddings of the config.
    context       length of the longest sequence, on which scaling depends; None for max_position.
    rows          number of positions in the tables; None for context.

    Raises ``unsupported`` for other types, ``model_malformed`` for missing or invalid parameters.
    """
    context = max_position if context is None else context
    rows = context if rows is None else rows
    is_proportional = rope.get("rope_type") == "proportional"
    rotated = head_dim if is_proportional else int(head_dim * rope.get("partial_rotary_factor", 1.0))
    lengths = _Lengths(max_position, context)
    try:
        if device.type == "meta":
            # Only validates the settings: torch.arange on the meta device would make torch import its compiler.
            _inverse_frequencies(rope, min(rotated, _MAX_CHECKED), lengths)
            empty = torch.empty(rows, rotated // 2, device=device)
            return RotaryTables(empty, empty)
        inv_freq, magnitude = _inverse_frequencies(rope, rotated, lengths)
    except AiakqError:
        raise
    except (KeyError, TypeError, ValueError, ArithmeticError) as problem:
        missing = f"{problem.args[0]} is missing" if isinstance(problem, KeyError) else str(problem)
        reason = f"{missing} in the parameters of rope_type {rope.get('rope_type')!s:.64}"
        raise error("model_malformed", file="config.json", reason=reason) from problem
    freqs = torch.outer(torch.arange(rows, dtype=torch.float32), inv_freq)
    # In place, because the tables of very long contexts take gigabytes.
    return RotaryTables(freqs.cos().mul_(magnitude).to(device), freqs.sin_().mul_(magnitude).to(device))


@dataclass(eq=False)
class GridRotary:
    """Rows of rotary tables for tokens with three positions (M-RoPE; Wang et al. 2024, arXiv:2409.12191), on one of
    which each frequency depends. Such a token has the number of its row as its position.

    tables  whose rows from ``first`` on are written in every step with such tokens; empty without attention.
    axes    [R / 2] int64, which of the three positions each frequency depends on.
    """

    tables: Sequence[RotaryTables]
    axes: Tensor
    first: int

    def write(self, positions: Tensor) -> None:
        """Write the rows of tokens with the positions [N, 3] int64."""
        rows = slice(self.first, self.first + len(positions))
        for tables in self.tables:
            for table in (tables.cosines, tables.sines):
                table[rows] = table.gather(0, positions[:, self.axes])


def new_grid_rotary(
    rope: Mapping[str, Any], usual: Sequence[int], alternate: bool, tables: Sequence[RotaryTables], first: int
) -> GridRotary:
    """Return the rows of ``tables`` from ``first`` on.

    rope       rotary parameters, maybe with mrope_section: how many frequencies depend on each position.
    usual      these numbers where it has none.
    alternate  whether frequencies of the three positions alternate instead of following each other.

    Raises ``model_malformed`` if config.json distributes the frequencies otherwise than transformers' class can.
    """
    count = tables[0].cosines.shape[1] if tables else 0
    sizes, stated = rope.get("mrope_section", list(usual)), rope.get("mrope_interleaved", alternate)
    wrong = not isinstance(sizes, (list, tuple)) or len(sizes) != 3 or any(type(each) is not int for each in sizes)
    if wrong or min(sizes) < 0 or stated is not alternate or (tables and not alternate and sum(sizes) != count):
        reason = f"mrope_section is {sizes!r:.64} and mrope_interleaved {stated!r:.16} for {count} frequencies"
        raise error("model_malformed", file="config.json", reason=reason)
    if alternate:
        axes = [number % 3 if number < 3 * sizes[number % 3] else 0 for number in range(count)]
    else:
        axes = [axis for axis, size in enumerate(sizes) for _ in range(size)]
    device = tables[0].cosines.device if tables else torch.device("cpu")
    return GridRotary(tables, torch.tensor(axes, device=device), first)


@dataclass(frozen=True)
class _Lengths:
    """Maximum positions: ``stated`` by the config, and ``context``, the length of the longest sequence."""

    stated: int
    context: int


def _inverse_frequencies(rope: Mapping[str, Any], dim: int, lengths: _Lengths) -> tuple[Tensor, float]:
    """Return the inverse frequencies [dim / 2] float32, and the factor on cosines and sines."""
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
    if kind == "proportional":
        return _proportional(inv_freq, rope), 1.0
    raise error(
        "unsupported",
        what=f"The rotary scaling {kind!r:.64} (rope_type in config.json)",
        hint="Supported: default, linear, dynamic, llama3, yarn, longrope and proportional.",
    )


def _dynamic(rope: Mapping[str, Any], base: float, dim: int, lengths: _Lengths) -> Tensor:
    """Dynamic NTK-aware scaling: the base grows with the longest sequence, so that low frequencies stay in their range.

    transformers recomputes the base for each text beyond the length in the config. Cached keys outlive a step here, so
    with --rope-scaling (``grows_from``) the base is that of the longest possible sequence from the start, as in vLLM.
    """
    trained = float(rope.get("grows_from") or lengths.stated)
    if lengths.context > trained:
        base *= (float(rope["factor"]) * lengths.stated / trained - (float(rope["factor"]) - 1)) ** (dim / (dim - 2))
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)


def _longrope(rope: Mapping[str, Any], base: float, dim: int, lengths: _Lengths) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): one factor per dimension, in a short and a long set.

    The ``context`` selects the set. transformers selects it in each step by the longest sequence in the batch.
    """
    original = float(rope.get("original_max_position_embeddings") or lengths.stated)
    length = "long" if lengths.context > original else "short"
    factors = torch.tensor(rope[f"{length}_factor"], dtype=torch.float32)
    if factors.shape != (dim // 2,) and dim < _MAX_CHECKED:
        raise ValueError(f"{len(factors)} factors for {dim // 2} frequencies")
    magnitude = rope.get(f"{length}_mscale", rope.get("attention_factor"))  # Phi-3.5-MoE has one per set
    factor = float(rope.get("factor") or lengths.stated / original)
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    powers = base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    return 1.0 / (factors[: dim // 2] * powers), float(magnitude)


def _proportional(inv_freq: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Proportional RoPE: the frequencies of whole heads, of which only the first part is kept; the others are 0."""
    kept = int(rope.get("partial_rotary_factor", 1.0) * 2 * len(inv_freq) // 2)
    zeros = inv_freq.new_zeros(len(inv_freq) - kept)
    return torch.cat([inv_freq[:kept], zeros]) / float(rope.get("factor") or 1.0)


def _llama3(inv_freq: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Llama 3.1 scaling: long wavelengths are stretched by ``factor``, short ones kept, and those between blended."""
    factor, original = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    wavelength = 2 * math.pi / inv_freq
    blend = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * inv_freq / factor + blend * inv_freq


def _yarn(inv_freq: Tensor, rope: Mapping[str, Any], base: float, dim: int, max_position: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): interpolate low frequencies, keep high ones."""
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
    """Return the factor on cosines and sines; the two scales are DeepSeek's."""
    if mscale and mscale_all_dim:
        return yarn_magnitude(factor, float(mscale)) / yarn_magnitude(factor, float(mscale_all_dim))
    return yarn_magnitude(factor)


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """Return YaRN's factor on queries and keys for a context that is ``factor`` times longer."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
