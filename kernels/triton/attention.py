"""Launcher of attention_kernel.py: paged attention. Attention over latents uses latent_attention.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aiakq.kernels import triton
from aiakq.kernels.ops.attention import new_cache as new_cache
from aiakq.kernels.triton import latent_attention, rotary
from aiakq.kernels.triton.attention_blocks import MAX_SPLITS, decode_splits, num_splits, power_of_two, query_blocks
from aiakq.kernels.types import AttentionContext, AttentionProblem, AttentionSpec, LayerCache

if TYPE_CHECKING:
    from aiakq.kernels.triton.configs import AttentionConfig


def supports(problem: AttentionProblem) -> str | None:
    """Return None, or why not."""
    if not problem.latent:
        return triton.unsupported_dtype("attention", problem)
    return triton.unsupported_dtype("latent attention", problem) or latent_attention.unsupported(problem)


def prepare(spec: AttentionSpec, problem: AttentionProblem) -> TritonAttention:
    """Prepare the attention of one layer."""
    return TritonAttention(spec)


class TritonAttention:
    """Triton paged attention; the interface is PagedAttention in ops/attention.py."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def __call__(self, qkv: Tensor, positions: Tensor | None, cache: LayerCache, context: AttentionContext) -> Tensor:
        """See PagedAttention. Modifies the queries in qkv."""
        query = rotary.rotate_and_write(self.spec, qkv, positions, cache, context.slots)
        return self.attend(query, cache, context).flatten(1)

    def write(self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """Store key [T, Hkv, D] and value [T, Hkv, value_dim] at ``slots`` [T]; see PagedAttention."""
        rotary.write(self.spec, key, value, cache, slots)

    def attend(self, query: Tensor, cache: LayerCache, context: AttentionContext) -> Tensor:
        """Attention of query [T, H, D] -> [T, H, value_dim]; see PagedAttention."""
        out = query.new_empty(*query.shape[:2], self.spec.value_dim)
        out[context.query_start_list[-1] :] = 0
        latent = self.spec.latent
        if context.num_decodes:
            (latent_attention.decode if latent else decode)(query, out, cache, context, self.spec)
        if context.num_decodes < len(context.kv_len_list):
            (latent_attention.prefill if latent else prefill)(query, out, cache, context, self.spec)
        return out


def _constants(spec: AttentionSpec, cache: LayerCache) -> dict[str, int]:
    """Return the compile-time constants of the kernels."""
    return {
        "HKV": spec.num_kv_heads,
        "GROUP": spec.num_heads // spec.num_kv_heads,
        "D": spec.head_dim,
        "WIDTH": power_of_two(spec.head_dim),
        "DV": spec.value_dim,
        "WIDTH_V": power_of_two(spec.value_dim),
        "PAGE": cache[0].shape[1],
        "WINDOW": spec.sliding_window or 0,
        "CHUNK": spec.chunk_size or 0,
        "CAPPED": spec.softcap > 0,
        "ALIBI": spec.alibi is not None,
        "SCALED": len(cache) > 2,
    }


def _uncut_group(spec: AttentionSpec) -> int:
    """Return the query heads per key head of the whole layer: products with more rows may sum in another order."""
    return spec.uncut_heads[0] // spec.uncut_heads[1]


def _scale(spec: AttentionSpec) -> float:
    return spec.scale / spec.softcap if spec.softcap else spec.scale


def decode(
    query: Tensor,
    out: Tensor,
    cache: LayerCache,
    context: AttentionContext,
    spec: AttentionSpec,
    config: AttentionConfig | None = None,
    target: int = 0,
) -> None:
    """Attention of the leading sequences with one token each: query [T, H, D] -> the same rows of ``out``
    [T, H, value_dim].

    target  number of splits of all sequences; 0: as many as the GPU needs.
    """
    from aiakq.kernels.triton import configs
    from aiakq.kernels.triton.attention_kernel import combine_kernel, decode_kernel

    constants = _constants(spec, cache)
    S, H, DV, WIDTH_V = context.num_decodes, spec.num_heads, spec.value_dim, constants["WIDTH_V"]
    heads = spec.uncut_heads[1]
    width = max(constants["WIDTH"], WIDTH_V)
    chosen = config or configs.attention_config("decode", query.device, cache[0].itemsize, width, S * heads)
    target = target or num_splits(query.device, S, heads, chosen.share)
    items, starts = decode_splits(context, query.device, chosen.tile, target, constants["WINDOW"], constants["CHUNK"])
    parts = torch.empty(len(items), H, DV, dtype=torch.float32, device=query.device)
    peaks = torch.empty(len(items), H, 2, dtype=torch.float32, device=query.device)
    scales = tuple(cache[2:]) or (peaks, peaks)
    has_sinks, sinks = spec.sinks is not None, _given(spec.sinks, peaks)
    decode_kernel[(len(items), spec.num_kv_heads)](
        query, cache[0], cache[1], *scales, context.page_table, context.kv_len, items, starts, S, parts, peaks, out,
        _given(spec.alibi, peaks), sinks, query.stride(0), out.stride(0), context.page_table.stride(0), _scale(spec),
        spec.softcap, **constants, ROWS=power_of_two(_uncut_group(spec)), TILE=chosen.tile, SINKS=has_sinks,
        STAGES=chosen.stages, num_warps=chosen.warps,
    )  # fmt: skip
    combine_kernel[(S, H)](
        parts, peaks, starts, sinks, out, out.stride(0),
        H=H, D=DV, WIDTH=WIDTH_V, SPLITS=MAX_SPLITS, SINKS=has_sinks, SEVERAL=True, num_warps=4,
    )  # fmt: skip


def _given(of_heads: Tensor | None, other: Tensor) -> Tensor:
    """Return values [H] as float32, or any tensor if the kernel does not read them."""
    return other if of_heads is None else of_heads.float()


def prefill(
    query: Tensor,
    out: Tensor,
    cache: LayerCache,
    context: AttentionContext,
    spec: AttentionSpec,
    config: AttentionConfig | None = None,
) -> None:
    """Attention of the sequences with several tokens each: query [T, H, D] -> the same rows of ``out``
    [T, H, value_dim].
    """
    from aiakq.kernels.triton import configs
    from aiakq.kernels.triton.attention_kernel import prefill_kernel

    constants = _constants(spec, cache)
    width, group = max(constants["WIDTH"], constants["WIDTH_V"]), _uncut_group(spec)
    chosen = config or configs.attention_config("prefill", query.device, cache[0].itemsize, width, len(query))
    tokens = max(1, chosen.share // group)
    blocks = query_blocks(context, tokens, query.device)
    scales = tuple(cache[2:]) or (out, out)
    warps = chosen.warps or prefill_warps(configs.gpu(query.device).generation)
    prefill_kernel[(len(blocks), spec.num_kv_heads)](
        query, cache[0], cache[1], *scales, context.page_table, context.kv_len, context.query_start, blocks, out,
        _given(spec.alibi, out), _given(spec.sinks, out),
        query.stride(0), out.stride(0), context.page_table.stride(0), _scale(spec), spec.softcap,
        **constants, TOKENS=tokens, ROWS=power_of_two(tokens * group), TILE=chosen.tile,
        SINKS=spec.sinks is not None, STAGES=chosen.stages, num_warps=warps,
    )  # fmt: skip


def prefill_warps(generation: int) -> int:
    """Return the number of warps: with four, operands and sums of a product fit into registers only on Hopper and on
    Blackwell for data centers, which do not need registers for all of them.
    """
    return 4 if generation in (9, 10) else 8
