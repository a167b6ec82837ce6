"""Kernels of other packages for the same problems, where they are installed, for comparison in `make gpu`.

Each function returns a call, or raises an exception of its package; the report then has a line with the reason.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Call = Callable[[Tensor], object]


def torch_bf16(n: int, k: int) -> Call:
    weight = torch.randn(n, k, dtype=torch.bfloat16, device="cuda")
    return lambda x: torch.nn.functional.linear(x, weight)


def torch_int_mm(n: int, k: int) -> Call:
    """int8 by int8 without scales; activations are rounded beforehand, which is not timed."""
    weight = torch.randint(-127, 127, (n, k), dtype=torch.int8, device="cuda").t()
    rounded: dict[int, Tensor] = {}

    def call(x: Tensor) -> Tensor:
        codes = rounded.setdefault(len(x), x.mul(20).clamp(-127, 127).to(torch.int8))
        return torch._int_mm(codes, weight)

    return call


def torch_fp8(n: int, k: int) -> Call:
    """e4m3 by e4m3 with scales per output and row; activations are rounded beforehand, which is not timed."""
    weight = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn).t()
    scales = torch.rand(1, n, device="cuda") / 64
    rounded: dict[int, tuple[Tensor, Tensor]] = {}

    def call(x: Tensor) -> Tensor:
        if len(x) not in rounded:
            rounded[len(x)] = x.to(torch.float8_e4m3fn), torch.ones(len(x), 1, device="cuda")
        codes, own = rounded[len(x)]
        return torch._scaled_mm(codes, weight, own, scales, out_dtype=x.dtype)

    return call


def torch_int4(n: int, k: int) -> Call:
    """Groups of 128, asymmetric, activations in bfloat16."""
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    packed = torch._convert_weight_to_int4pack(codes, 8)
    grid = torch.rand(k // 128, n, 2, dtype=torch.bfloat16, device="cuda") / 64
    return lambda x: torch._weight_int4pack_mm(x, packed, 128, grid)


def gemlite(n: int, k: int) -> Call:
    from gemlite import DType, GemLiteLinear

    layer = GemLiteLinear(4, 128, in_features=k, out_features=n, input_dtype=DType.BF16, output_dtype=DType.BF16)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
    scales, zeros = torch.rand(2, n, k // 128, dtype=torch.bfloat16, device="cuda") / 64
    layer.pack(codes, scales, zeros + 8, None)
    return layer


#: Name -> bytes per weight, and what makes one.
PRODUCTS: dict[str, tuple[float, Callable[[int, int], Call]]] = {
    "torch bf16": (2, torch_bf16),
    "torch int_mm": (1, torch_int_mm),
    "torch fp8": (1, torch_fp8),
    "torch int4": (0.5, torch_int4),
    "gemlite w4a16": (0.5, gemlite),
}


def flashinfer_decode(query: Tensor, cache: list[Tensor], table: Tensor, lengths: Tensor) -> Callable[[], object]:
    """Over the same pages [pages, P, Hkv, D]; planned beforehand, as an engine does it once per step."""
    import flashinfer

    page, kv_heads, size = cache[0].shape[1:]
    counts = (lengths + page - 1) // page
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(2**27, dtype=torch.uint8, device="cuda"), "NHD", use_tensor_cores=True
    )
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    pages = torch.cat([row[:count] for row, count in zip(table, counts.tolist(), strict=True)])
    last = ((lengths - 1) % page + 1).to(torch.int32)
    dtypes = {"q_data_type": query.dtype, "kv_data_type": cache[0].dtype}
    wrapper.plan(starts, pages, last, query.shape[1], kv_heads, size, page, **dtypes)
    return lambda: wrapper.run(query, (cache[0], cache[1]))


def sdpa_prefill(backend: str, query: Tensor, keys: Tensor, values: Tensor) -> Callable[[], object]:
    """Causal attention of one dense sequence, query [T, H, D], keys and values [T, Hkv, D]."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, keys, values))

    def call() -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return call
