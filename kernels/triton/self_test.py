"""Before a GPU is trusted: every kernel once on small problems against torch, on that GPU.

Drivers, compilers and processors differ. What does not agree is not used, and the reason is shown where the choice is.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from aiakq.kernels.types import Arranging, QWeight, Rounding

#: Relative error, root mean square, beyond which a kernel is wrong and not merely rounded.
WRONG = 0.02


@lru_cache
def failure(number: int) -> str | None:
    """None if all kernels agree with torch on GPU ``number``, or one sentence about the first that does not."""
    device = torch.device("cuda", number)
    try:
        with torch.cuda.device(device):
            for name, check in (("w4a16", _grouped), ("w8a8", _integers), ("rows", _rows), ("attention", _attention)):
                error = check(device)
                if not error < WRONG:
                    return f"Triton's {name} kernel is off by {100 * error:.1f} % on this GPU"
    except Exception as problem:  # whatever Triton, ptxas or the driver has to say
        return f"Triton fails on this GPU: {type(problem).__name__}: {str(problem).splitlines()[0][:120]}"
    return None


def _off(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def _weight(scheme: str, bits: int, n: int, k: int, group: int, device: torch.device) -> QWeight:
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(1, 2**bits, (n, k), generator=draw).to(torch.uint8)
    scales = torch.rand(n, k // group, generator=draw).half() / 64
    return QWeight(scheme, codes, scales if bits == 4 else scales.float(), group_size=group).to(device)


def _grouped(device: torch.device) -> float:
    from aiakq.kernels.triton import linear
    from aiakq.kernels.triton.configs import Config

    weight = _weight("w4a16", 4, 192, 1024, 128, device)
    whole = (weight.codes.float() - 8) * weight.scales.float().repeat_interleave(128, dim=1)
    worst = 0.0
    for dtype in (torch.float16, torch.bfloat16):
        state = linear.prepare(weight, weight.problem(dtype, device))
        for m, config in ((3, None), (16, Config(64, 16, 2, 3, 4)), (40, None), (200, None), (1000, None)):
            x = torch.randn(m, 1024, device=device, dtype=dtype)
            worst = max(worst, _off(linear.run(x, state, config), x.float() @ whole.T))
    return worst


def _integers(device: torch.device) -> float:
    from aiakq.kernels.triton import linear_int8 as w8a8

    weight = _weight("w8a8", 8, 200, 1024, 1024, device)
    state = w8a8.prepare(weight, weight.problem(torch.float16, device))
    whole = (weight.codes.float() - 128) * weight.scales
    rows = [torch.randn(m, 1024, device=device, dtype=torch.float16) for m in (1, 40, 300)]
    return max(_off(w8a8.run(x, state), x.float() @ whole.T) for x in rows)


def _rows(device: torch.device) -> float:
    from aiakq.kernels.triton import rows as layers

    x, residual = (torch.randn(5, 300, device=device, dtype=torch.float16) for _ in range(2))
    weight = torch.rand(300, device=device, dtype=torch.float16)
    summed = x.float() + residual.float()
    wanted = summed * torch.rsqrt(summed.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()
    worst = _off(layers.norm(x.clone(), weight, None, 1e-5, residual), wanted)
    rounded = layers.norm(x.clone(), weight, None, 1e-5, residual, wish=Rounding(None))
    worst = max(worst, _off(rounded.codes * rounded.scales[:, None], wanted))
    order = torch.randperm(300, device=device).to(torch.int32)
    arranged = layers.norm(x.clone(), weight, None, 1e-5, residual, wish=Arranging(order, 4, 32, 0, False))
    worst = max(worst, _off(arranged.rows, wanted[:, order]))
    wanted = torch.nn.functional.silu(x.float()) * residual.float()
    return max(worst, _off(layers.gate("silu", x, residual), wanted))


def _attention(device: torch.device) -> float:
    """Rotary positions, the cache's writes, and attention over it: a prompt, then one more token."""
    from aiakq.kernels.triton import attention as paged
    from aiakq.kernels.triton import rows as layers
    from aiakq.kernels.types import AttentionContext

    heads, kv_heads, size, tokens = 4, 2, 64, 70
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size, device=device, dtype=torch.float16)
    angles = torch.rand(tokens, size // 2, device=device)
    cosines, sines = angles.cos(), angles.sin()
    pages = torch.tensor([3, 1, 5, 2, 4], dtype=torch.int32, device=device)
    position = torch.arange(tokens, device=device)
    slots = pages.long()[position // 16] * 16 + position % 16
    cache = [torch.zeros(6, 16, kv_heads, size, device=device, dtype=torch.float16) for _ in range(2)]
    layer = layers.Heads(heads, kv_heads, size, cosines, sines)

    q, k, v = (part.unflatten(1, (-1, size)).float() for part in qkv.split([heads * size] + [kv_heads * size] * 2, 1))
    turned = []
    for x in (q, k):
        first, second = x.chunk(2, -1)
        c, s = cosines[:, None], sines[:, None]
        turned.append(torch.cat((first * c - second * s, second * c + first * s), -1).transpose(0, 1))
    keys, values = (x.repeat_interleave(heads // kv_heads, 0) for x in (turned[1], v.transpose(0, 1)))
    wanted = torch.nn.functional.scaled_dot_product_attention(turned[0], keys, values, is_causal=True).transpose(0, 1)

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
        query = layer(qkv[begin:end], position[begin:end], cache, context.slots)
        worst = max(worst, _off(paged.attend(query, cache, context, size**-0.5), wanted[begin:end]))
    return worst
