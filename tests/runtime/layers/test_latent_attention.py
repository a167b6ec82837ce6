"""Latent attention against its definition with expanded keys and values in float64, in steps of any size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aiakq.kernels.ops import Ops
from aiakq.kernels.types import AttentionContext, AttentionSpec, RotaryTables
from aiakq.runtime.layers.attention import Attention
from aiakq.runtime.layers.latent_attention import LatentOutput, LatentProjection, LatentSizes, LowRankQueries
from aiakq.runtime.layers.rotary import rotary_tables

CPU = torch.device("cpu")
SIZES = LatentSizes(heads=3, latent=24, rotated=8, plain=20, value=12)
HIDDEN, RANK, TOKENS, PAGE_SIZE = 37, 18, 21, 4
SCALE = 0.3


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


WEIGHTS = {
    "first": random(RANK + SIZES.cached, HIDDEN, seed=1),
    "second": random(SIZES.heads * SIZES.query, RANK, seed=2),
    "expand": random(SIZES.heads, SIZES.expanded, SIZES.latent, seed=3),
    "output": random(HIDDEN, SIZES.heads * SIZES.value, seed=4),
    "latent_norm": random(SIZES.latent, seed=5) + 1,
    "query_norm": random(RANK, seed=6) + 1,
}
X = random(TOKENS, HIDDEN, seed=7) * 6


def tables() -> RotaryTables:
    made = rotary_tables({}, SIZES.rotated, 64, CPU)
    return RotaryTables(made.cosines, made.sines, interleaved=True)


def expected() -> Tensor:
    """[TOKENS, HIDDEN] float64."""
    weights = {name: weight.double() for name, weight in WEIGHTS.items()}

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    def rotated(x: Tensor) -> Tensor:
        made = tables()
        cosines, sines = (part[:TOKENS].double().unsqueeze(1) for part in (made.cosines, made.sines))
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cosines - b * sines, b * cosines + a * sines], -1).flatten(-2)

    first = X.double() @ weights["first"].T
    queries, latent, shared = first.split([RANK, SIZES.latent, SIZES.rotated], 1)
    queries = (norm(queries, weights["query_norm"]) @ weights["second"].T).unflatten(1, (SIZES.heads, -1))
    plain, turned = queries.split([SIZES.plain, SIZES.rotated], 2)
    both = torch.einsum("tl,hnl->thn", norm(latent, weights["latent_norm"]), weights["expand"])
    keys, values = both.split([SIZES.plain, SIZES.value], 2)
    queries = torch.cat([plain, rotated(turned)], 2)
    keys = torch.cat([keys, rotated(shared.unsqueeze(1)).expand(-1, SIZES.heads, -1)], 2)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * SCALE
    hidden = torch.ones(TOKENS, TOKENS).triu(1).bool()
    shares = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", shares, values).flatten(1) @ weights["output"].T


def layer() -> Attention:
    ops = Ops(CPU, torch.float32)
    keys, values = WEIGHTS["expand"].split([SIZES.plain, SIZES.value], 1)
    projection = LatentProjection(
        first=ops.dense(WEIGHTS["first"]),
        norm=ops.rms_norm(WEIGHTS["latent_norm"], 1e-6),
        absorbed=ops.batched(keys.transpose(1, 2)),
        sizes=SIZES,
        queries=LowRankQueries(ops.rms_norm(WEIGHTS["query_norm"], 1e-6), ops.dense(WEIGHTS["second"])),
    )
    output = LatentOutput(ops.batched(values), ops.dense(WEIGHTS["output"]), SIZES.heads)
    spec = AttentionSpec(SIZES.heads, 1, SIZES.cached, SCALE, rotary=tables(), value_dim=SIZES.latent, latent=True)
    return Attention(projection, output, spec, ops)


@pytest.mark.parametrize("kernels", ["", "reference"], ids=["selected", "torch"])
@pytest.mark.parametrize("steps", [[TOKENS], [5, 1, 1, 9, 5], [1] * TOKENS], ids=["whole", "chunks", "decoded"])
def test_latents_give_what_expanded_keys_and_values_give(steps, kernels, monkeypatch):
    if kernels:
        monkeypatch.setenv("AIAKQ_KERNELS", kernels)
    attention, numbers = layer(), torch.arange(TOKENS)
    cache = attention.new_cache(8, PAGE_SIZE, 0)
    assert sum(part[0, 0].numel() for part in cache) == SIZES.cached, "elements of a token in the cache"
    found, start = [], 0
    for count in steps:
        end = start + count
        context = AttentionContext(
            query_start=torch.tensor([0, count], dtype=torch.int32),
            kv_len=torch.tensor([end], dtype=torch.int32),
            slots=numbers[start:end] + PAGE_SIZE,
            page_table=torch.arange(1, 7, dtype=torch.int32).unsqueeze(0),
            num_decodes=int(count == 1),
            query_start_list=[0, count],
            kv_len_list=[end],
        )
        found.append(attention(X[start:end], numbers[start:end], cache, context))
        start = end
    assert (torch.cat(found) - expected()).norm() < 1e-5 * expected().norm()
