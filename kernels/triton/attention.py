"""Attention over the paged KV cache on NVIDIA GPUs, through attention_kernel.py and rotary_kernel.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aiakq.kernels import triton
from aiakq.kernels.ops.attention import new_cache as new_cache
from aiakq.kernels.triton import rotary
from aiakq.kernels.types import AttentionContext, AttentionProblem, AttentionSpec, LayerCache

if TYPE_CHECKING:
    from aiakq.kernels.triton.configs import AttentionConfig


def supports(problem: AttentionProblem) -> str | None:
    """None, or why not."""
    return triton.unsupported(problem.device, problem.dtype)


def prepare(spec: AttentionSpec, problem: AttentionProblem) -> TritonAttention:
    """One layer's attention."""
    return TritonAttention(spec)


class TritonAttention:
    """The interface is PagedAttention in ops/attention.py."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def __call__(self, qkv: Tensor, positions: Tensor | None, cache: LayerCache, context: AttentionContext) -> Tensor:
        """See PagedAttention. Modifies the queries in qkv."""
        query = rotary.rotate_and_write(self.spec, qkv, positions, cache, context.slots)
        return self.attend(query, cache, context).flatten(1)

    def write(self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """Store key and value [T, Hkv, D] at ``slots`` [T]; see PagedAttention."""
        rotary.write(self.spec, key, value, cache, slots)

    def attend(self, query: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """Attention of query [T, H, D] -> [T, H, D]; see PagedAttention."""
        out = torch.zeros_like(query)
        scale, window = self.spec.scale, self.spec.sliding_window
        if context.num_decodes:
            decode(query, out, cache, context, scale, window)
        if context.num_decodes < len(context.kv_len_list):
            prefill(query, out, cache, context, scale, window)
        return out


def _shape(query: Tensor, cache: LayerCache) -> dict[str, int]:
    heads, size = query.shape[1:]
    keys = cache[0]
    return {
        "HKV": keys.shape[2],
        "GROUP": heads // keys.shape[2],
        "D": size,
        "WIDTH": max(16, 1 << (size - 1).bit_length()),
        "PAGE": keys.shape[1],
    }


def decode(
    query: Tensor,
    out: Tensor,
    cache: LayerCache,
    context: AttentionContext,
    scale: float,
    window: int | None,
    config: AttentionConfig | None = None,
    split: int = 0,
) -> None:
    """Attention of the sequences of one token each, which come first: query [T, H, D] -> the same rows of ``out``."""
    from aiakq.kernels.triton import configs
    from aiakq.kernels.triton.attention_kernel import combine_kernel, decode_kernel

    shape = _shape(query, cache)
    S, H, D = context.num_decodes, query.shape[1], query.shape[2]
    programs = S * shape["HKV"]
    chosen = config or configs.attention_config("decode", query.device, cache[0].itemsize, shape["WIDTH"], programs)
    split = split or splits(query.device, programs, chosen.share)
    parts = torch.empty(S, H, split, D, dtype=torch.float32, device=query.device)
    peaks = torch.empty(S, H, split, 2, dtype=torch.float32, device=query.device)
    scales = tuple(cache[2:]) or (peaks, peaks)
    decode_kernel[(S, shape["HKV"], split)](
        query, cache[0], cache[1], *scales, context.page_table, context.kv_len, parts, peaks,
        query.stride(0), context.page_table.stride(0), scale,
        **shape, ROWS=max(16, 1 << (shape["GROUP"] - 1).bit_length()), TILE=chosen.tile, SPLIT=split,
        WINDOW=window or 0, SCALED=len(cache) > 2, STAGES=chosen.stages, num_warps=chosen.warps,
    )  # fmt: skip
    combine_kernel[(S, H)](
        parts, peaks, out, out.stride(0),
        H=H, D=D, WIDTH=shape["WIDTH"], SPLIT=split, SPLITS=1 << (split - 1).bit_length(), num_warps=4,
    )  # fmt: skip


def splits(device: torch.device, programs: int, share: int) -> int:
    """Parts of a sequence, such that there are about ``share`` programs for each processor."""
    from aiakq.kernels.triton import configs

    if device.type != "cuda":
        return 2
    _, processors = configs.gpu(device)
    return max(1, min(64, -(-share * processors // programs)))


def prefill(
    query: Tensor,
    out: Tensor,
    cache: LayerCache,
    context: AttentionContext,
    scale: float,
    window: int | None,
    config: AttentionConfig | None = None,
) -> None:
    """Attention of the sequences of several tokens each: query [T, H, D] -> the same rows of ``out``."""
    from aiakq.kernels.triton import configs
    from aiakq.kernels.triton.attention_kernel import prefill_kernel

    shape = _shape(query, cache)
    chosen = config or configs.attention_config("prefill", query.device, cache[0].itemsize, shape["WIDTH"], len(query))
    tokens = max(1, chosen.share // shape["GROUP"])
    blocks = _blocks(context, tokens, query.device)
    scales = tuple(cache[2:]) or (out, out)
    warps = chosen.warps or prefill_warps(torch.cuda.get_device_capability(query.device)[0] if query.is_cuda else 9)
    prefill_kernel[(len(blocks), shape["HKV"])](
        query, cache[0], cache[1], *scales, context.page_table, context.kv_len, context.query_start, blocks, out,
        query.stride(0), out.stride(0), context.page_table.stride(0), scale,
        **shape, TOKENS=tokens, ROWS=max(16, 1 << (tokens * shape["GROUP"] - 1).bit_length()), TILE=chosen.tile,
        WINDOW=window or 0, SCALED=len(cache) > 2, STAGES=chosen.stages, num_warps=warps,
    )  # fmt: skip


def prefill_warps(generation: int) -> int:
    """Before Hopper, products are held in registers only, of which four warps have too few."""
    return 4 if generation >= 9 else 8


def _blocks(context: AttentionContext, tokens: int, device: torch.device) -> Tensor:
    """Which sequence and which of its tokens each program takes, [blocks, 2] int32; the same for all layers."""
    known = context.plans.get(("triton", tokens))
    if known is None:
        starts = context.query_start_list
        pairs = [
            (sequence, first)
            for sequence in range(context.num_decodes, len(starts) - 1)
            for first in range(0, starts[sequence + 1] - starts[sequence], tokens)
        ]
        known = context.plans["triton", tokens] = torch.tensor(pairs, dtype=torch.int32).to(device, non_blocking=True)
    return known
