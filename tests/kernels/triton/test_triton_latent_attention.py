"""Attention over latents in Triton: decoding in parts, prompts, chunks, caches of 8 bits, and the writes before it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aiakq.kernels.ops.attention import TorchAttention, as_bytes
from aiakq.kernels.triton import attention as paged
from aiakq.kernels.triton import latent_attention
from aiakq.kernels.triton.latent_attention import LatentConfig, config_of
from aiakq.kernels.types import LARGEST, AttentionContext, AttentionSpec, RotaryTables

LENGTHS = {
    "decode": [(0, 1), (14, 1), (15, 1), (70, 1)],
    "prefill": [(0, 2), (0, 17), (0, 70)],
    "mixed": [(40, 1), (7, 1), (0, 33), (50, 6)],
}
#: Heads, rotated elements, latent, page.
SHAPES = [(5, 16, 32, 16), (3, 8, 40, 5), (20, 0, 64, 32), (1, 20, 24, 1)]
#: What a result may differ by, relative, by the type that latents are stored in.
TOLERANCE = {None: None, torch.int8: 0.02, torch.float8_e4m3fn: 0.06, torch.float8_e5m2: 0.12}


def made(lengths, spec, page, dtype, stored=None):
    """Queries, keys, cache and context of sequences of (cached, new) tokens on shuffled pages; all else is no number.

    Keys of tokens before the step are in the cache, as the reference wrote them.
    """
    draw = torch.Generator().manual_seed(7)
    lengths = sorted(lengths, key=lambda pair: pair[1] > 1)
    counts = [-(-(old + new) // page) for old, new in lengths]
    free = (torch.randperm(sum(counts) + 2, generator=draw) + 1).split([*counts, 2])
    shape = (sum(counts) + 3, page, 1)
    cache = [torch.full((*shape, spec.head_dim), float("nan")).to(stored or dtype)]
    cache += [torch.full(shape, float("nan"))] if stored else []
    slots = [pages[torch.arange(old + new) // page] * page + torch.arange(old + new) % page
             for pages, (old, new) in zip(free, lengths, strict=False)]  # fmt: skip
    problem = spec.problem(dtype, stored or dtype, "cpu")
    keys = [torch.randn(len(each), 1, spec.head_dim, generator=draw).to(dtype) for each in slots]
    reference = TorchAttention(replace(spec, rotary=None), problem)
    for key, each, (old, _) in zip(keys, slots, lengths, strict=True):
        reference.write(key[:old], key[:old], cache, each[:old])
    starts = [0, *torch.tensor([new for _, new in lengths]).cumsum(0).tolist()]
    kv_len = [old + new for old, new in lengths]
    table = torch.nn.utils.rnn.pad_sequence(list(free[: len(lengths)]), batch_first=True)
    context = AttentionContext(
        query_start=torch.tensor(starts, dtype=torch.int32),
        kv_len=torch.tensor(kv_len, dtype=torch.int32),
        slots=torch.cat([each[old:] for each, (old, _) in zip(slots, lengths, strict=True)]),
        page_table=table.to(torch.int32),
        num_decodes=sum(new == 1 for _, new in lengths),
        query_start_list=starts,
        kv_len_list=kv_len,
    )
    query = torch.randn(starts[-1], spec.num_heads, spec.head_dim, generator=draw).to(dtype)
    new = torch.cat([key[old:] for key, (old, _) in zip(keys, lengths, strict=True)])
    return query, new, cache, context


def on(device, cache, context):
    """Copies on ``device``."""
    names = ("query_start", "kv_len", "slots", "page_table")
    moved = replace(context, plans={}, **{name: getattr(context, name).to(device) for name in names})
    return [tensor.clone().to(device) for tensor in cache], moved


def check(lengths, shape, dtype, device, close, stored=None, launch=None):
    """A whole layer, rotary positions and writes before attention, against the reference."""
    heads, rotated, latent, page = shape
    angles = torch.rand(80, rotated // 2, generator=torch.Generator().manual_seed(1))
    rotary = RotaryTables(angles.cos(), angles.sin(), interleaved=True) if rotated else None
    spec = AttentionSpec(heads, 1, rotated + latent, 0.3, value_dim=latent, latent=True, rotary=rotary)
    query, key, cache, context = made(lengths, spec, page, dtype, stored)
    qkv = torch.cat((query.flatten(1), key.flatten(1)), dim=1)
    positions = torch.cat([torch.arange(n - new, n) for n, new in zip(
        context.kv_len_list, torch.tensor(context.query_start_list).diff().tolist(), strict=True)])  # fmt: skip
    exact = [cache[0].double(), *cache[1:]] if stored is None else [each.clone() for each in cache]
    wanted = TorchAttention(spec, spec.problem(torch.float64, exact[0].dtype, "cpu"))(
        qkv.double(), positions, exact, context
    )
    tables = None if rotary is None else RotaryTables(rotary.cosines.to(device), rotary.sines.to(device), True)
    layer = paged.prepare(replace(spec, rotary=tables), spec.problem(dtype, stored or dtype, device.type))
    cache, context = on(device, cache, context)
    before = as_bytes(cache[0]).clone()
    # Two rows of padding, which go nowhere.
    context.slots = torch.cat((context.slots, context.slots.new_zeros(2)))
    padded, places = (torch.cat((x, x[:2])).to(device) for x in (qkv, positions))
    found = layer(padded, places, cache, context)
    assert not found[len(qkv) :].any()
    found = found[: len(qkv)]
    tolerance = TOLERANCE[stored] or (2e-3 if dtype == torch.float16 else None)
    close(found.cpu(), wanted.double(), tolerance)
    untouched = torch.ones(before.shape[:2], dtype=torch.bool).flatten()
    untouched[context.slots.cpu()] = False
    same = as_bytes(cache[0]).view(torch.uint8) == before.view(torch.uint8)
    assert same.cpu().flatten(0, 1)[untouched].all(), "nothing else is written"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_layers_match_the_reference(lengths, dtype, device, close):
    check(LENGTHS[lengths], SHAPES[0], dtype, device, close)


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_shapes(shape, device, close):
    check(LENGTHS["mixed"], shape, torch.float16, device, close)


@pytest.mark.parametrize("stored", LARGEST, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_eight_bit_caches_match_the_reference(dtype, stored, device, close):
    check(LENGTHS["mixed"], SHAPES[0], dtype, device, close, stored)


CONFIGS = {LatentConfig(16, 1, 32, 4), LatentConfig(32, 1, 32, 8), LatentConfig(64, 1, 64, 8)}


@pytest.mark.parametrize("target", [1, 6, 30])
@pytest.mark.parametrize("config", sorted(CONFIGS, key=lambda config: config.heads), ids=str)
def test_any_number_of_splits_and_blocks_of_heads(config, target, device, close):
    spec = AttentionSpec(40, 1, 48, 0.3, value_dim=32, latent=True)
    query, key, cache, context = made(LENGTHS["decode"], spec, 16, torch.float16)
    reference = TorchAttention(spec, spec.problem(torch.float16, torch.float16, "cpu"))
    reference.write(key, key, cache, context.slots)
    wanted = reference.attend(query, cache, context)
    cache, context = on(device, cache, context)
    out = torch.full((len(query), 40, 32), float("nan"), dtype=torch.float16, device=device)
    latent_attention.decode(query.to(device), out, cache, context, spec, config, target)
    close(out.cpu(), wanted, 2e-3)


@pytest.mark.parametrize("config", [LatentConfig(64, 1, 32, 8), LatentConfig(16, 4, 32, 8), LatentConfig(4, 8, 32, 8)])
def test_prompts_in_blocks_of_tokens_and_heads(config, device, close):
    spec = AttentionSpec(20, 1, 48, 0.3, value_dim=32, latent=True)
    query, key, cache, context = made([(0, 19), (40, 5)], spec, 16, torch.float16)
    reference = TorchAttention(spec, spec.problem(torch.float16, torch.float16, "cpu"))
    reference.write(key, key, cache, context.slots)
    wanted = reference.attend(query, cache, context)
    cache, context = on(device, cache, context)
    out = torch.full((len(query), 20, 32), float("nan"), dtype=torch.float16, device=device)
    latent_attention.prefill(query.to(device), out, cache, context, spec, config)
    close(out.cpu(), wanted, 2e-3)


def test_what_fits_into_a_gpu():
    """Heads, tokens, positions and warps of DeepSeek V3 (128 heads), of its Lite model (16) and of a tiny one."""
    assert config_of(9, 128, True, 16) == LatentConfig(64, 1, 64, 8)
    assert config_of(9, 128, True, 8) == LatentConfig(64, 1, 32, 8)
    assert config_of(8, 128, True, 16) == LatentConfig(32, 1, 32, 8)
    assert config_of(9, 16, True, 16) == LatentConfig(16, 1, 64, 8)
    assert config_of(8, 16, True, 16) == LatentConfig(16, 1, 32, 4)
    assert config_of(9, 16, False, 16) == LatentConfig(16, 4, 32, 8)
    assert config_of(8, 3, False, 8) == LatentConfig(4, 8, 32, 8)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sliding_window": 7}, "over latents it has no windows"),
        ({"softcap": 5.0, "chunk_size": 4}, "over latents it has no chunks, soft caps"),
        ({"sinks": torch.zeros(4), "alibi": torch.zeros(4)}, "over latents it has no sinks, ALiBi"),
        ({"num_kv_heads": 2}, "heads share one latent, not 2"),
        ({"head_dim": 640}, "latents have at most 512 elements and 64 rotated ones beside them"),
        ({}, None),
    ],
)
def test_what_it_does_not_compute_is_refused_by_name(change, reason):
    spec = replace(AttentionSpec(4, 1, 576, 0.3, value_dim=512, latent=True), **change)
    assert paged.supports(spec.problem(torch.float16, torch.float16, "cuda")) == reason
