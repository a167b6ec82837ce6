"""Native head norms, rotary positions and cache writes, on every instruction set, against the torch layers."""

from __future__ import annotations

import pytest
import torch

from aiakq.kernels.cpu.attention import NativeAttention, new_cache
from aiakq.kernels.ops.attention import TorchAttention
from aiakq.kernels.ops.rotary import apply_rotary, rotary_factors
from aiakq.kernels.types import AttentionContext, AttentionSpec
from aiakq.runtime.layers.rotary import rotary_tables

CPU = torch.device("cpu")

T, P, PAGES = 13, 7, 5
#: (H, Hkv, D, rotated part): whole heads, a part of them, halves that are no multiple of 16.
SHAPES = [(4, 2, 64, 1.0), (3, 3, 40, 0.5), (2, 1, 128, 0.25), (5, 1, 6, 1.0), (2, 2, 18, 1.0), (1, 1, 1000, 1.0)]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
NAN = float("nan")


def cache_of(spec, pages, dtype, page_size=P):
    return new_cache(spec.problem(torch.float32, dtype, "cpu"), pages, page_size, CPU)


class Case:
    """A fused projection of T tokens of one sequence, at shuffled slots, the last two of them padding."""

    def __init__(self, H, Hkv, D, part, dtype, cache, norms, rotated_norms=False):
        random = torch.Generator().manual_seed(D)
        self.shape = (H, Hkv, D)
        self.qkv = torch.randn(T, (H + 2 * Hkv) * D, generator=random).to(dtype)
        self.positions = torch.randint(0, 500, (T,), generator=random)
        slots = torch.randperm(P * (PAGES - 1), generator=random)[:T] + P
        slots[-2:] = 0
        self.context = AttentionContext(
            query_start=torch.tensor([0, T - 2], dtype=torch.int32),
            kv_len=torch.tensor([T - 2], dtype=torch.int32),
            slots=slots,
            page_table=torch.tensor([[1, 2]], dtype=torch.int32),
            num_decodes=0,
            query_start_list=[0, T - 2],
            kv_len_list=[T - 2],
        )
        rope = {"rope_type": "default", "partial_rotary_factor": part}
        self.rotary = rotary_tables(rope, D, 500, CPU)
        weights = [torch.rand(D, generator=random) + 0.5 for _ in range(2)]
        self.norms = weights if norms else None
        self.layer = NativeAttention(
            AttentionSpec(
                *(H, Hkv, D, 1.0, None, self.rotary),
                *(weights if norms else (None, None)),
                norm_eps=1e-6,
                rotated_norms=rotated_norms,
            )
        )
        self.cache = cache_of(self.layer.spec, PAGES, cache)

    def wanted(self):
        """q, k, v [T, heads, D] in float64, by the torch layers."""
        H, Hkv, D = self.shape
        parts = self.qkv.double().split((H * D, Hkv * D, Hkv * D), dim=1)
        q, k, v = (part.unflatten(1, (-1, D)) for part in parts)
        factors = rotary_factors(self.rotary, self.positions, torch.float64)
        if self.layer.spec.rotated_norms:
            return *self.normed(apply_rotary(q, factors), apply_rotary(k, factors)), v
        q, k = self.normed(q, k)
        return apply_rotary(q, factors), apply_rotary(k, factors), v

    def normed(self, *heads):
        return (
            [
                x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
                for x, weight in zip(heads, self.norms, strict=True)
            ]
            if self.norms
            else heads
        )

    def written(self, which):
        rows = self.cache[which].flatten(0, 1)[self.context.slots[:-2]].double()
        if len(self.cache) == 2:
            return rows
        return rows * self.cache[2 + which].flatten(0, 1)[self.context.slots[:-2]].double().unsqueeze(-1)


def far(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).nan_to_num(float("inf")).item()


@pytest.mark.parametrize(
    "norms", [(False, False), (True, False), (True, True)], ids=["", "norms", "norms after rotation"]
)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rotated_heads_and_cache_match_the_torch_layers(isa, dtype, norms):
    for shape in SHAPES:
        case = Case(*shape, dtype, dtype, *norms)
        q, k, v = case.wanted()
        values = v.to(dtype).double()
        out = case.layer(case.qkv, case.positions, case.cache, case.context)
        assert far(case.qkv[:, : q[0].numel()], q.flatten(1)) < TOLERANCE[dtype], shape
        assert far(case.written(0), k[:-2]) < TOLERANCE[dtype], shape
        assert torch.equal(case.written(1), values[:-2]), shape
        assert out.shape == (T, q[0].numel()) and out.isfinite().all()
        untouched = torch.ones(P * PAGES, dtype=torch.bool)
        untouched[case.context.slots[:-2]] = False
        for cache in case.cache:
            assert (cache.flatten(0, 1)[untouched] == 0).all(), "other slots or the scratch page were written"


@pytest.mark.parametrize("cache", [torch.float16, torch.bfloat16, torch.int8], ids=str)
def test_caches_of_smaller_dtypes_hold_rounded_keys_and_values(isa, cache):
    for shape in SHAPES:
        case = Case(*shape, torch.float32, cache, True)
        _, k, v = case.wanted()
        case.layer(case.qkv, case.positions, case.cache, case.context)
        for which, wanted in ((0, k), (1, v)):
            if cache == torch.int8:
                steps = wanted[:-2].abs().amax(-1, keepdim=True) / 127
                assert ((case.written(which) - wanted[:-2]).abs() <= steps * 0.501).all(), shape
            else:
                assert far(case.written(which), wanted[:-2]) < TOLERANCE[cache], shape


def test_keys_and_values_of_any_stride_are_written_the_same(isa, threads):
    random = torch.Generator().manual_seed(3)
    k, v = (torch.randn(T, 2, 64, generator=random) for _ in range(2))
    slots = torch.randperm(P * (PAGES - 1), generator=random)[:T] + P
    wide = torch.full((T, 300), NAN)
    wide[:, 11:139] = v.flatten(1)
    layer = NativeAttention(AttentionSpec(4, 2, 64, 1.0))
    one, other = (cache_of(layer.spec, PAGES, torch.bfloat16) for _ in range(2))
    threads(1)
    layer.write(k, v, one, slots)
    threads(3)
    layer.write(k, wide[:, 11:139].unflatten(1, (2, 64)), other, slots)
    for expected, found in zip(one, other, strict=True):
        assert torch.equal(found, expected)


def test_a_token_does_not_depend_on_the_other_tokens(isa):
    """One token alone, and what is not finite in another one."""
    one, other = (Case(4, 2, 64, 1.0, torch.float32, torch.int8, True) for _ in range(2))
    other.qkv[3, 300] = NAN
    for case in (one, other):
        case.layer(case.qkv, case.positions, case.cache, case.context)
    rows = torch.arange(T) != 3
    assert torch.equal(one.qkv[rows, :256], other.qkv[rows, :256])
    kept = one.context.slots[:-2][rows[:-2]]
    for a, b in zip(one.cache, other.cache, strict=True):
        assert torch.equal(a.flatten(0, 1)[kept], b.flatten(0, 1)[kept])
    assert other.cache[2].flatten(0, 1)[one.context.slots[3], 0].isnan(), "its scale says so"


def test_int8_caches_hold_zeros_and_very_large_values(isa):
    k = torch.zeros(3, 2, 20)
    k[1], k[2, 1] = 3e38, torch.linspace(-1, 1, 20)
    layer = NativeAttention(AttentionSpec(2, 2, 20, 1.0))
    cache = cache_of(layer.spec, 2, torch.int8, page_size=4)
    for part in cache:
        part.fill_(55 if part.dtype == torch.int8 else NAN)
    layer.write(k, -k, cache, torch.tensor([5, 6, 7]))
    for sign, codes, scale in zip((1, -1), cache[:2], cache[2:], strict=True):
        read = codes[1, 1:].float() * scale[1, 1:].unsqueeze(-1)
        assert (read - sign * k).abs().max() <= 1.2e36 and (read[0] == 0).all()
        assert (read[2, 1] - sign * k[2, 1]).abs().max() <= 0.501 / 127


def test_cache_writes_match_the_torch_implementation(native):
    """The same function, the other implementation: floats exactly, 8 bits but for ties."""
    for cache, scaled in [(torch.bfloat16, False), (torch.int8, True)]:
        k, v = (torch.randn(6, 2, 24, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
        found = []
        spec = AttentionSpec(2, 2, 24, 1.0)
        for layer in (TorchAttention(spec, spec.problem(torch.float32, cache, "cpu")), NativeAttention(spec)):
            caches = cache_of(spec, 3, cache, page_size=4)
            layer.write(k, v, caches, torch.tensor([4, 11, 5, 6, 9, 8]))
            found.append(caches)
        for one, other in zip(*found, strict=True):
            if scaled:
                assert torch.allclose(one.float(), other.float(), atol=1 if one.dtype == torch.int8 else 1e-8)
            else:
                assert torch.equal(one, other)
