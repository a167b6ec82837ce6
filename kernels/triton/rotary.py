"""Launcher of rotary_kernel.py: head norms, rotary embedding and KV cache writes."""

from __future__ import annotations

from torch import Tensor

from aiakq.kernels.triton.layouts import block_for
from aiakq.kernels.types import AttentionSpec, LayerCache


def rotate_and_write(
    spec: AttentionSpec, qkv: Tensor, positions: Tensor | None, cache: LayerCache, slots: Tensor
) -> Tensor:
    """Rotate queries in qkv [T, sum of spec.widths] in place and return them [T, H, D]; write keys and values to
    ``slots`` [T] unless the layer only reads.
    """
    query, key, value = qkv.split(spec.widths, dim=1)
    _launch(spec, spec.num_heads, query, key, value, positions, cache, slots)
    return query.unflatten(1, (spec.num_heads, spec.head_dim))


def write(spec: AttentionSpec, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
    """Only store key [T, Hkv, D] and value [T, Hkv, value_dim] at ``slots`` [T] of ``cache``; ``spec`` has no head
    norms.
    """
    key, value = key.flatten(1), value.flatten(1)
    _launch(spec, 0, key, key, value, None, cache, slots)


def _launch(
    spec: AttentionSpec,
    heads: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor | None,
    cache: LayerCache,
    slots: Tensor,
) -> None:
    from aiakq.kernels.triton.rotary_kernel import rotary_kernel

    if key.shape[0] == 0:
        return
    # The kernel accepts any tensor for arguments that it does not access, such as the values of latents.
    keys, values, *scales = (cache[0], cache[0], *cache[1:], *cache[1:]) if spec.latent else cache
    norms = (keys if norm is None else norm for norm in (spec.q_norm, spec.k_norm))
    rotated, factors, at = 0, (keys, keys), slots
    if spec.rotary is not None and positions is not None:
        rotated, factors, at = spec.rotary.rotated, (spec.rotary.cosines, spec.rotary.sines), positions
    # Only the elements of queries that change are read and written.
    changed = spec.head_dim if spec.q_norm is not None else rotated
    heads, kv_heads = heads if changed else 0, 0 if spec.reads_only else spec.num_kv_heads
    if heads + kv_heads == 0:
        return
    rotary_kernel[(key.shape[0], heads + kv_heads)](
        query, key, value, *norms, *factors, at, slots, keys, values, *(scales or (keys, keys)),
        query.stride(0), key.stride(0), value.stride(0), spec.norm_eps,
        H=heads, HKV=kv_heads, D=spec.head_dim, DV=0 if spec.latent else spec.value_dim,
        WIDTH=block_for(max(spec.head_dim, spec.value_dim)), WIDTH_Q=block_for(max(1, changed)), ROTATED=rotated,
        INTERLEAVED=spec.rotary is not None and spec.rotary.interleaved,
        NORM=0 if spec.q_norm is None else 1 + spec.rotated_norms, SCALED=bool(scales), num_warps=1,
    )  # fmt: skip
