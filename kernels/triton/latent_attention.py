"""Launcher of latent_attention_kernel.py: attention over a paged cache of latents."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.kernels.triton.attention_blocks import MAX_SPLITS, decode_splits, num_splits, power_of_two, query_blocks
from aiakq.kernels.types import AttentionContext, AttentionProblem, AttentionSpec, LayerCache

#: Maximum latent size and rotary size whose tiles fit into GPU memory (DeepSeek's sizes).
MAX_LATENT, MAX_ROTATED = 512, 64
#: Decoding programs per multiprocessor among which sequences are split.
SHARE = 2
_LOG2E = 1.4426950408889634


def unsupported(problem: AttentionProblem) -> str | None:
    """Return why attention over latents does not support ``problem``, or None."""
    extras = {
        "windows": problem.sliding_window is not None,
        "chunks": problem.chunk_size is not None,
        "soft caps": problem.softcap > 0,
        "sinks": problem.sinks,
        "ALiBi": problem.alibi,
    }
    if given := [name for name, there in extras.items() if there]:
        return f"over latents it has no {', '.join(given)}"
    if problem.num_kv_heads != 1:
        return f"heads share one latent, not {problem.num_kv_heads}"
    if problem.value_dim > MAX_LATENT or problem.head_dim - problem.value_dim > MAX_ROTATED:
        return f"latents have at most {MAX_LATENT} elements and {MAX_ROTATED} rotated ones beside them"
    return None


@dataclass(frozen=True)
class LatentConfig:
    """The configuration of one launch: heads and tokens per program, both powers of two, and positions per tile."""

    heads: int
    tokens: int
    tile: int
    warps: int


def config_of(generation: int, num_heads: int, decoding: bool, bits: int) -> LatentConfig:
    """Return what fits into registers and shared memory: 64 rows for Hopper's matrix instructions, else 16 or 32."""
    max_rows = 64 if generation == 9 else 32
    if decoding:
        heads = min(max_rows, power_of_two(num_heads))
        if generation == 9 and bits == 16:
            return LatentConfig(heads, 1, 64, 8)
        return LatentConfig(heads, 1, 32, 4 if heads == 16 else 8)
    heads = min(max_rows, 1 << (num_heads - 1).bit_length())
    return LatentConfig(heads, max_rows // heads, 32, 8)


def _config(query: Tensor, cache: LayerCache, spec: AttentionSpec, decoding: bool) -> LatentConfig:
    from aiakq.kernels.triton import configs

    generation = configs.gpu(query.device).generation
    return config_of(generation, spec.uncut_heads[0], decoding, 8 if cache[0].itemsize == 1 else 16)


def constants(spec: AttentionSpec, cache: LayerCache, config: LatentConfig) -> dict[str, object]:
    """Return the compile-time constants of both kernels."""
    rotated = spec.head_dim - spec.value_dim
    return {
        "H": spec.num_heads,
        "HEADS": config.heads,
        "R": rotated,
        "WIDTH_R": power_of_two(max(1, rotated)),
        "L": spec.value_dim,
        "WIDTH_L": power_of_two(spec.value_dim),
        "PAGE": cache[0].shape[1],
        "TILE": config.tile,
        "SCALED": len(cache) > 1,
        # Page tables, tiles, products.
        "STAGES": 3,
        "num_warps": config.warps,
    }


def decode(
    query: Tensor,
    out: Tensor,
    cache: LayerCache,
    context: AttentionContext,
    spec: AttentionSpec,
    config: LatentConfig | None = None,
    target: int = 0,
) -> None:
    """Attention of the leading sequences with one token each: query [T, H, D] -> the same rows of ``out``
    [T, H, value_dim].

    target  number of splits of all sequences; 0: as many as the GPU needs.
    """
    from aiakq.kernels.triton.attention_kernel import combine_kernel
    from aiakq.kernels.triton.latent_attention_kernel import latent_decode_kernel

    S, H, L = context.num_decodes, spec.num_heads, spec.value_dim
    chosen = config or _config(query, cache, spec, decoding=True)
    blocks = -(-H // chosen.heads)
    target = target or num_splits(query.device, S, -(-spec.uncut_heads[0] // chosen.heads), SHARE)
    items, starts = decode_splits(context, query.device, chosen.tile, target)
    parts = torch.empty(len(items), H, L, dtype=torch.float32, device=query.device)
    peaks = torch.empty(len(items), H, 2, dtype=torch.float32, device=query.device)
    options = constants(spec, cache, chosen)
    latent_decode_kernel[(blocks, len(items))](
        query, cache[0], cache[0], cache[-1], context.page_table, context.kv_len, items, starts, S, parts, peaks,
        query.stride(0), context.page_table.stride(0), spec.scale * _LOG2E, **options,
    )  # fmt: skip
    combine_kernel[(S, H)](
        parts, peaks, starts, peaks, out, out.stride(0),
        H=H, D=L, WIDTH=options["WIDTH_L"], SPLITS=MAX_SPLITS, SINKS=False, SEVERAL=False, num_warps=4,
    )  # fmt: skip


def prefill(
    query: Tensor,
    out: Tensor,
    cache: LayerCache,
    context: AttentionContext,
    spec: AttentionSpec,
    config: LatentConfig | None = None,
) -> None:
    """Attention of the sequences with several tokens each: query [T, H, D] -> the same rows of ``out``
    [T, H, value_dim].
    """
    from aiakq.kernels.triton.latent_attention_kernel import latent_prefill_kernel

    chosen = config or _config(query, cache, spec, decoding=False)
    blocks = query_blocks(context, chosen.tokens, query.device)
    latent_prefill_kernel[(len(blocks), -(-spec.num_heads // chosen.heads))](
        query, cache[0], cache[0], cache[-1], context.page_table, context.kv_len, context.query_start, blocks, out,
        query.stride(0), out.stride(0), context.page_table.stride(0), spec.scale * _LOG2E,
        **constants(spec, cache, chosen), TOKENS=chosen.tokens,
    )  # fmt: skip
