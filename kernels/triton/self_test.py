"""Self-test of a GPU: every family of kernels on a small problem, compared with torch on the same GPU.

Drivers, compilers and processors differ. A family that does not agree is not used there, and the start-up table and
``aiakq inspect`` show the reason.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Verdict:
    """What the self-test found about one family of kernels.

    failure  None, or one sentence.
    error    relative error, root mean square; NaN if the family raised.
    details  the traceback if it raised.
    """

    failure: str | None
    error: float
    details: str = ""


@lru_cache
def verdict(number: int, family: str) -> Verdict:
    """Whether the kernels of ``family``, a name in FAMILIES, agree with torch on GPU ``number``."""
    with torch.cuda.device(number):
        return examine(family, torch.device("cuda", number))


def examine(family: str, device: torch.device) -> Verdict:
    """``verdict`` on any device: the interpreter's is the CPU."""
    try:
        error = FAMILIES[family](device)
    except Exception as problem:  # whatever Triton, ptxas or the driver has to say
        first = (str(problem).splitlines() or [""])[0][:120]
        sentence = f"Triton's {family} kernels fail on this GPU: {type(problem).__name__}: {first}"
        return Verdict(sentence, float("nan"), traceback.format_exc())
    if error < MAX_ERROR:
        return Verdict(None, error)
    return Verdict(f"Triton's {family} kernels are off by {100 * error:.1f} % on this GPU", error)


def _error(found: Tensor, expected: Tensor) -> float:
    """Relative error, root mean square."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def _weight(scheme: str, bits: int, n: int, k: int, group: int, device: torch.device) -> QWeight:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(1, 2**bits, (n, k), generator=generator).to(torch.uint8)
    scales = torch.rand(n, k // group, generator=generator).half() / 64
    return QWeight(scheme, codes, scales if bits == 4 else scales.float(), group_size=group).to(device)


def _weight_only(device: torch.device) -> float:
    """Four-bit weights: one row, split inputs, many rows, and dequantized to memory."""
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
    """Eight-bit weights and activations."""
    linear_int8 = REGISTRIES["linear"].load("triton-w8a8")

    weight = _weight("w8a8", 8, 200, 1024, 1024, device)
    state = linear_int8.prepare(weight, weight.problem(torch.float16, device.type))
    whole = (weight.codes.float() - 128) * weight.scales
    rows = [torch.randn(m, 1024, device=device, dtype=torch.float16) for m in (1, 40, 300)]
    return max(_error(state(x), x.float() @ whole.T) for x in rows)


def _norm(device: torch.device) -> float:
    """RMS norms in every layout."""
    from aiakq.kernels.triton.layouts import PackedLayout, QuantizedLayout

    x, residual = (torch.randn(5, 300, device=device, dtype=torch.float16) for _ in range(2))
    weight = torch.rand(300, device=device, dtype=torch.float16)
    summed = x.float() + residual.float()
    expected = summed * torch.rsqrt(summed.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()
    problem = NormProblem("rms", 300, torch.float16, device.type)
    norm = REGISTRIES["norm"].load("triton").prepare(weight, None, 1e-5, problem)
    worst = _error(norm(x.clone(), residual), expected)
    quantized = norm(x.clone(), residual, QuantizedLayout(None))
    worst = max(worst, _error(quantized.codes * quantized.scales[:, None], expected))
    order = torch.randperm(300, device=device).to(torch.int32)
    packed = norm(x.clone(), residual, PackedLayout(order, 4, 32, 0, False))
    return max(worst, _error(packed.rows, expected[:, order]))


def _activation(device: torch.device) -> float:
    """A gated activation function."""
    gate, up = (torch.randn(5, 300, device=device, dtype=torch.float16) for _ in range(2))
    silu = REGISTRIES["activation"].load("triton").prepare(ActivationProblem("silu", torch.float16, device.type))
    return _error(silu.gated(torch.cat((gate, up), dim=1)), torch.nn.functional.silu(gate.float()) * up.float())


def _attention(device: torch.device) -> float:
    """Rotary positions, the writes into the cache, and attention over it: a prompt, then one more token."""
    heads, kv_heads, size, tokens = 4, 2, 64, 70
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size, device=device, dtype=torch.float16)
    freqs = torch.rand(tokens, size // 2, device=device)
    tables = RotaryTables(freqs.cos(), freqs.sin())
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


#: Family -> its check: the largest error on a device.
FAMILIES: dict[str, Callable[[torch.device], float]] = {
    "weight-only linear": _weight_only,
    "w8a8 linear": _w8a8,
    "norm": _norm,
    "activation": _activation,
    "attention": _attention,
}
