"""Native head norms, rotary positions and cache writes, on every instruction set, against the torch layers."""

from __future__ import annotations

import pytest
import torch

from aiakq.kernels.cpu.attention import PagedAttention, Turning, new_cache
from aiakq.kernels.ops import attention
from aiakq.kernels.types import AttentionContext
from aiakq.runtime.layers.norm import RMSNorm
from aiakq.runtime.layers.rotary import Rotary

T, P, PAGES = 13, 7, 5
#: (H, Hkv, D, rotated part): whole heads, a part of them, halves that are no multiple of 16.
SHAPES = [(4, 2, 64, 1.0), (3, 3, 40, 0.5), (2, 1, 128, 0.25), (5, 1, 6, 1.0), (2, 2, 18, 1.0), (1, 1, 1000, 1.0)]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
NAN = float("nan")


class Case:
    """A fused projection of T tokens of one sequence, at shuffled slots, the last two of them padding."""

    def __init__(self, H, Hkv, D, part, dtype, cache, norms):
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
        self.cache = new_cache(PAGES, P, Hkv, D, cache, cache == torch.int8)
        rope = {"rope_type": "default", "partial_rotary_factor": part}
        self.rotary = Rotary(rope, D, 500, torch.float64, torch.device("cpu"))
        weights = [torch.rand(D, generator=random) + 0.5 for _ in range(2)]
        self.norms = [RMSNorm(weight.double(), 1e-6) for weight in weights] if norms else None
        turning = Turning(self.rotary.cosines, self.rotary.sines)
        self.layer = PagedAttention(H, Hkv, D, 1.0, None, turning, *(weights if norms else (None, None)), 1e-6)

    def wanted(self):
        """q, k, v [T, heads, D] in float64, by the torch layers."""
        H, Hkv, D = self.shape
        parts = self.qkv.double().split((H * D, Hkv * D, Hkv * D), dim=1)
        q, k, v = (part.unflatten(1, (-1, D)) for part in parts)
        if self.norms:
            q, k = (
                x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight
                for x, norm in zip((q, k), self.norms, strict=True)
            )
        angles = self.rotary.at(self.positions)
        return self.rotary(q, angles), self.rotary(k, angles), v

    def written(self, which):
        rows = self.cache[which].flatten(0, 1)[self.context.slots[:-2]].double()
        if len(self.cache) == 2:
            return rows
        return rows * self.cache[2 + which].flatten(0, 1)[self.context.slots[:-2]].double().unsqueeze(-1)


def far(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).nan_to_num(float("inf")).item()


@pytest.mark.parametrize("norms", [False, True], ids=["", "norms"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rotated_heads_and_cache_match_the_torch_layers(isa, dtype, norms):
    for shape in SHAPES:
        case = Case(*shape, dtype, dtype, norms)
        q, k, v = case.wanted()
        values = v.to(dtype).double()
        out = case.layer.fused(case.qkv, case.positions, case.cache, case.context)
        assert far(case.qkv[:, : q[0].numel()], q.flatten(1)) < TOLERANCE[dtype], shape
        assert far(case.written(0), k[:-2]) < TOLERANCE[dtype], shape
        assert torch.equal(case.written(1), values[:-2]), shape
        assert out.shape == (T, q[0].numel()) and out.isfinite().all()
        untouched = torch.ones(P * PAGES, dtype=torch.bool)
        untouched[case.context.slots[:-2]] = False
        for cache in case.cache:
            assert (cache.flatten(0, 1)[untouched] == 0).all(), "nobody else's slots, nor the scratch page"


@pytest.mark.parametrize("cache", [torch.float16, torch.bfloat16, torch.int8], ids=str)
def test_caches_of_smaller_dtypes_hold_rounded_keys_and_values(isa, cache):
    for shape in SHAPES:
        case = Case(*shape, torch.float32, cache, True)
        _, k, v = case.wanted()
        case.layer.fused(case.qkv, case.positions, case.cache, case.context)
        for which, wanted in ((0, k), (1, v)):
            if cache == torch.int8:
                steps = wanted[:-2].abs().amax(-1, keepdim=True) / 127
                assert ((case.written(which) - wanted[:-2]).abs() <= steps * 0.501).all(), shape
            else:
                assert far(case.written(which), wanted[:-2]) < TOLERANCE[cache], shape


def test_separate_projections_of_any_stride_give_the_same_bits(isa, threads):
    whole, apart = (Case(4, 2, 64, 1.0, torch.float32, torch.bfloat16, True) for _ in range(2))
    threads(1)
    expected = whole.layer.fused(whole.qkv, whole.positions, whole.cache, whole.context)
    q, k, v = apart.qkv.split((256, 128, 128), dim=1)
    k, wide = k.contiguous(), torch.full((T, 300), NAN)
    wide[:, 11:139] = v
    threads(3)
    found = apart.layer(q, k, wide[:, 11:139], apart.positions, apart.cache, apart.context)
    assert torch.equal(found, expected)
    assert torch.equal(whole.qkv[:, :256], apart.qkv[:, :256]) and torch.equal(k, whole.qkv[:, 256:384])
    for one, other in zip(whole.cache, apart.cache, strict=True):
        assert torch.equal(one, other)


def test_a_token_does_not_depend_on_the_other_tokens(isa):
    """One token alone, and what is not finite in another one."""
    one, other = (Case(4, 2, 64, 1.0, torch.float32, torch.int8, True) for _ in range(2))
    other.qkv[3, 300] = NAN
    for case in (one, other):
        case.layer.fused(case.qkv, case.positions, case.cache, case.context)
    rows = torch.arange(T) != 3
    assert torch.equal(one.qkv[rows, :256], other.qkv[rows, :256])
    kept = one.context.slots[:-2][rows[:-2]]
    for a, b in zip(one.cache, other.cache, strict=True):
        assert torch.equal(a.flatten(0, 1)[kept], b.flatten(0, 1)[kept])
    assert other.cache[2].flatten(0, 1)[one.context.slots[3], 0].isnan(), "its scale says so"


def test_int8_caches_hold_zeros_and_very_large_values(isa):
    k = torch.zeros(3, 2, 20)
    k[1], k[2, 1] = 3e38, torch.linspace(-1, 1, 20)
    cache = new_cache(2, 4, 2, 20, torch.int8, True)
    for part in cache:
        part.fill_(55 if part.dtype == torch.int8 else NAN)
    attention.write_kv(k, -k, cache, torch.tensor([5, 6, 7]))
    for sign, codes, scale in zip((1, -1), cache[:2], cache[2:], strict=True):
        read = codes[1, 1:].float() * scale[1, 1:].unsqueeze(-1)
        assert (read - sign * k).abs().max() <= 1.2e36 and (read[0] == 0).all()
        assert (read[2, 1] - sign * k[2, 1]).abs().max() <= 0.501 / 127


def test_cache_writes_match_the_torch_implementation(native):
    """The same function, the other implementation: floats exactly, 8 bits but for ties."""
    for cache, scaled in [(torch.bfloat16, False), (torch.int8, True)]:
        k, v = (torch.randn(6, 2, 24, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
        found = []
        for implementation in ("torch", "native"):
            caches = new_cache(3, 4, 2, 24, cache, scaled)
            try:
                attention.use(implementation)
                attention.write_kv(k, v, caches, torch.tensor([4, 11, 5, 6, 9, 8]))
            finally:
                attention.use(None)
            found.append(caches)
        for one, other in zip(*found, strict=True):
            if scaled:
                assert torch.allclose(one.float(), other.float(), atol=1 if one.dtype == torch.int8 else 1e-8)
            else:
                assert torch.equal(one, other)
