"""The self-test of a GPU: every kernel once on a small problem, compared with torch on the same GPU.

Drivers, compilers and processors differ. If a kernel does not agree, none of them is used there, and the start-up table
and ``aiakq inspect`` show the reason.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from aiakq.kernels.ops import REGISTRIES
from aiakq.kernels.types import (
    ActivationProblem,
    AttentionContext,
    AttentionSpec,
    NormProblem,
    QWeight,
    RotaryTables,
)

#: Relative error, root mean square, from which on a kernel is wrong and not merely rounded.
MAX_ERROR = 0.02


@lru_cache
def failure(number: int) -> str | None:
    """None if all kernels agree with torch on GPU ``number``, or one sentence about the first that does not."""
    device = torch.device("cuda", number)
    try:
        with torch.cuda.device(device):
            for name, check in (("w4a16", _w4a16), ("w8a8", _w8a8), ("norm", _rows), ("attention", _attention)):
                error = check(device)
                if not error < MAX_ERROR:
                    return f"Triton's {name} kernel is off by {100 * error:.1f} % on this GPU"
    except Exception as problem:  # whatever Triton, ptxas or the driver has to say
        return f"Triton fails on this GPU: {type(problem).__name__}: {str(problem).splitlines()[0][:120]}"
    return None


def _error(found: Tensor, expected: Tensor) -> float:
    """Relative error, root mean square."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def _weight(scheme: str, bits: int, n: int, k: int, group: int, device: torch.device) -> QWeight:
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(1, 2**bits, (n, k), generator=draw).to(torch.uint8)
    scales = torch.rand(n, k // group, generator=draw).half() / 64
    return QWeight(scheme, codes, scales if bits == 4 else scales.float(), group_size=group).to(device)


def _w4a16(device: torch.device) -> float:
    from aiakq.kernels.triton.configs import Config

    linear = REGISTRIES["linear"].load("triton")

    weight = _weight("w4a16", 4, 192, 1024, 128, device)
    whole = (weight.codes.float() - 8) * weight.scales.float().repeat_interleave(128, dim=1)
    worst = 0.0
    for dtype in (torch.float16, torch.bfloat16):
        state = linear.prepare(weight, weight.problem(dtype, device.type))
        for m, config in ((3, None), (16, Config(64, 16, 2, 3, 4)), (40, None), (200, None), (1000, None)):
            x = torch.randn(m, 1024, device=device, dtype=dtype)
            worst = max(worst, _error(linear.run(x, state, config), x.float() @ whole.T))
    return worst


def _w8a8(device: torch.device) -> float:
    linear_int8 = REGISTRIES["linear"].load("triton-w8a8")

    weight = _weight("w8a8", 8, 200, 1024, 1024, device)
    state = linear_int8.prepare(weight, weight.problem(torch.float16, device.type))
    whole = (weight.codes.float() - 128) * weight.scales
    rows = [torch.randn(m, 1024, device=device, dtype=torch.float16) for m in (1, 40, 300)]
    return max(_error(state(x), x.float() @ whole.T) for x in rows)


def _rows(device: torch.device) -> float:
    """Norms in every layout, and a gated activation function."""
    from aiakq.kernels.triton.layouts import PackedLayout, QuantizedLayout

    x, residual = (torch.randn(5, 300, device=device, dtype=torch.float16) for _ in range(2))
    weight = torch.rand(300, device=device, dtype=torch.float16)
    summed = x.float() + residual.float()
    expected = summed * torch.rsqrt(summed.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()
    problem = NormProblem("rms", 300, torch.float16, device.type)
    norm = REGISTRIES["norm"].load("triton").prepare(weight, None, 1e-5, problem)
    plain = norm(x.clone(), residual)
    worst = _error(plain, expected)
    quantized = norm(x.clone(), residual, QuantizedLayout(None))
    worst = max(worst, _error(quantized.codes * quantized.scales[:, None], expected))
    order = torch.randperm(300, device=device).to(torch.int32)
    packed = norm(x.clone(), residual, PackedLayout(order, 4, 32, 0, False))
    worst = max(worst, _error(packed.rows, expected[:, order]))
    silu = REGISTRIES["activation"].load("triton").prepare(ActivationProblem("silu", torch.float16, device.type))
    gated = silu.gated(torch.cat((x, residual), dim=1))
    return max(worst, _error(gated, torch.nn.functional.silu(x.float()) * residual.float()))


def _attention(device: torch.device) -> float:
    """Rotary positions, the writes into the cache, and attention over it: a prompt, then one more token."""
    heads, kv_heads, size, tokens = 4, 2, 64, 70
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size, device=device, dtype=torch.float16)
    angles = torch.rand(tokens, size // 2, device=device)
    tables = RotaryTables(angles.cos(), angles.sin())
    pages = torch.tensor([3, 1, 5, 2, 4], dtype=torch.int32, device=device)
    position = torch.arange(tokens, device=device)
    slots = pages.long()[position // 16] * 16 + position % 16
    cache = [torch.zeros(6, 16, kv_heads, size, device=device, dtype=torch.float16) for _ in range(2)]
    spec = AttentionSpec(heads, kv_heads, size, size**-0.5, rotary=tables)
    layer = (
        REGISTRIES["attention"].load("triton").prepare(spec, spec.problem(torch.float16, torch.float16, device.type))
    )
    expected = _expected_attention(qkv, tables, heads, kv_heads, size)
    worst = 0.0
    for begin, end in ((0, tokens - 1), (tokens - 1, tokens)):
        starts, lengths = [0, end - begin], [end]
        context = AttentionContext(
            query_start=torch.tensor(starts, dtype=torch.int32, device=device),
            kv_len=torch.tensor(lengths, dtype=torch.int32, device=device),
            slots=slots[begin:end],
            page_table=pages[None],
            num_decodes=int(end - begin == 1),
            query_start_list=starts,
            kv_len_list=lengths,
        )
        found = layer(qkv[begin:end], position[begin:end], cache, context)
        worst = max(worst, _error(found, expected[begin:end]))
    return worst


def _expected_attention(qkv: Tensor, tables: RotaryTables, heads: int, kv_heads: int, size: int) -> Tensor:
    """qkv [T, (H + 2 Hkv) D] -> [T, H D] float32, by torch."""
    q, k, v = (part.unflatten(1, (-1, size)).float() for part in qkv.split([heads * size] + [kv_heads * size] * 2, 1))
    rotated = []
    for x in (q, k):
        first, second = x.chunk(2, -1)
        c, s = tables.cosines[:, None], tables.sines[:, None]
        rotated.append(torch.cat((first * c - second * s, second * c + first * s), -1).transpose(0, 1))
    keys, values = (x.repeat_interleave(heads // kv_heads, 0) for x in (rotated[1], v.transpose(0, 1)))
    out = torch.nn.functional.scaled_dot_product_attention(rotated[0], keys, values, is_causal=True)
    return out.transpose(0, 1).flatten(1)
