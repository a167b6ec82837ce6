"""Measurements of `make gpu`: products, attention and whole steps in Llama 3 8B's shape, with their rooflines."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gpu_peers
import torch

from aiakq.bench.timing import copies, microseconds
from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.attention import PagedAttention, as_bytes
from aiakq.kernels.tables import TABLES
from aiakq.kernels.triton import linear, linear_floats, linear_fp8, linear_int8
from aiakq.kernels.types import AttentionContext, AttentionSpec, InputRounding, QWeight
from aiakq.spec import QuantSpec

#: config.json of Llama 3 8B, as far as shapes go.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
#: A small shape for a rehearsal without a GPU.
SMALL = LLAMA | {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
#: Outputs and inputs of its products: q, k and v; attention's output; gate and up; down; the head.
SHAPES = {
    "qkv": (6144, 4096),
    "output": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
ROWS = (1, 16, 64, 256, 1024, 4096)
#: Bytes of a weight with its scales.
FORMATS = {
    "w4a16": 0.5 + 4 / 128,
    "w8a16": 1.0,
    "w8a8": 1.0,
    "fp8": 1.0,
    "fp8 blocks": 1 + 4 / 128,
    "fp8a16": 1.0,
    "mxfp4": 0.5 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
}
#: Of these, and of other packages' formats, those whose products are of 8 bits.
OF_8_BITS = ("w8a8", "torch int_mm", "fp8", "fp8 blocks", "torch fp8")
#: Ours -> theirs.
PEERS = {
    "w4a16": ("torch int4", "gemlite w4a16"),
    "w8a16": (),
    "w8a8": ("torch int_mm",),
    "fp8": ("torch fp8",),
    "fp8 blocks": ("torch fp8",),
    "fp8a16": (),
    "mxfp4": (),
    "nvfp4": (),
}
Left = Callable[[], float]
#: Stores an incomplete result.
Save = Callable[[dict[str, Any]], None]


def forget(found: dict[str, Any]) -> None:
    """Store nothing."""


def weight(kind: str, n: int, k: int, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """A layer of ours in one of FORMATS."""
    if kind.startswith("fp8") and kind != "fp8a16":
        return _fp8(n, k, 128 if kind == "fp8 blocks" else k, device)
    if kind in ("fp8a16", "mxfp4", "nvfp4"):
        return _float_weight(kind, n, k, device)
    codes = torch.randint(0, 16 if kind == "w4a16" else 256, (n, k), dtype=torch.uint8, device=device)
    group = 128 if kind == "w4a16" else k
    made = QWeight(kind, codes, torch.rand(n, k // group, device=device).half() / 64, group_size=group)
    module = linear_int8 if kind == "w8a8" else linear
    return module.prepare(made, made.problem(torch.bfloat16, device.type))


def _float_weight(kind: str, n: int, k: int, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """A layer of codes that are floats: 8 bits in blocks of 128, or 4 bits in groups of 32 or 16."""
    group = {"fp8a16": 128, "mxfp4": 32, "nvfp4": 16}[kind]
    if kind == "fp8a16":
        scales = torch.rand(n // 128, k // 128, device=device).repeat_interleave(128, 0) / 64
        codes = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
        made = QWeight(kind, codes.view(torch.uint8), scales, group_size=group, code_type=torch.float8_e4m3fn)
    else:
        scales = torch.randint(-9, -4, (n, k // group), device=device).float().exp2()
        if kind == "nvfp4":
            scales = torch.rand(n, k // group, device=device).to(torch.float8_e4m3fn).float()
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
        made = QWeight("lut4a16", codes, scales, group_size=group, table=torch.tensor(TABLES["e2m1"], device=device))
    return linear_floats.prepare(made, made.problem(torch.bfloat16, device.type))


def _fp8(n: int, k: int, group: int, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """A layer with scales per output and token, or in blocks of 128 x 128 and per token and 128 inputs; activations are
    rounded in the call.
    """
    codes = torch.randn(n, k, device=device).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(n, k // group, device=device)[torch.arange(n, device=device) // 128 * 128] / 64
    rounding = InputRounding(128 if group < k else 0)
    made = QWeight("fp8a8", codes, scales, group_size=group, code_type=torch.float8_e4m3fn, rounding=rounding)
    return linear_fp8.prepare(made, made.problem(torch.bfloat16, device.type))


def roofline_us(n: int, k: int, m: int, kind: str, ceilings: dict[str, float]) -> float:
    """Return the minimum microseconds by the measured speeds of memory and of arithmetic, those of integers also for
    8-bit floats, which tensor cores multiply as fast.
    """
    per_weight = FORMATS[kind] if kind in FORMATS else gpu_peers.PRODUCTS[kind][0]
    moved = per_weight * n * k + 2 * m * (n + k)
    most = ceilings["int8_tops" if kind in OF_8_BITS else "float_tflops"]
    return max(moved / ceilings["gbps"] / 1e3, 2 * m * n * k / most / 1e6)


def _rows_of(kind: str, rows: tuple[int, ...]) -> tuple[int, ...]:
    """Return the rows to measure: torch needs more than 16 of 8 bits, and kernels for decoding are slow with many."""
    if kind in ("torch int_mm", "torch fp8"):
        return tuple(m for m in rows if m > 16)
    return tuple(m for m in rows if m <= 256) if kind in ("torch int4", "gemlite w4a16") else rows


def products(
    ceilings: dict[str, float],
    left: Left,
    shapes: dict[str, tuple[int, int]] = SHAPES,
    rows: tuple[int, ...] = ROWS,
    save: Save = forget,
) -> dict[str, Any]:
    """Measure the microseconds of one product of ours and of other packages, with weights that are in no cache."""
    device = torch.device("cuda")
    table: list[dict[str, Any]] = []
    notes: dict[str, str] = {}
    for name, (n, k) in shapes.items():
        makers: dict[str, tuple[float, Callable[[], Callable]]] = {
            kind: (size, partial(weight, kind, n, k, device)) for kind, size in FORMATS.items()
        }
        makers |= {title: (size, partial(make, n, k)) for title, (size, make) in gpu_peers.PRODUCTS.items()}
        for title, (per_weight, make) in makers.items():
            if title in notes:
                continue
            if left() < 10:
                notes["not measured"] = f"from {title} of {name} on: no time left"
                break
            try:
                layers = [make() for _ in range(copies(device, per_weight * n * k))]
                for m in _rows_of(title, rows):
                    x = torch.randn(m, k, dtype=torch.bfloat16, device=device)
                    us = microseconds([partial(layer, x) for layer in layers], device)
                    least = roofline_us(n, k, m, title, ceilings)
                    row = {"layer": name, "format": title, "rows": m, "us": us, "roofline_us": least}
                    table.append(row | {"reached": least / us})
            except Exception as problem:
                if title in FORMATS:
                    raise
                notes[title] = f"{type(problem).__name__}: {str(problem).splitlines()[0][:160]}"
            layers = []
            torch.cuda.empty_cache()
            save({"rows": table, "times": ratios(table), "notes": notes})
    return {"rows": table, "times": ratios(table), "notes": notes}


def ratios(table: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """How many times as fast as torch in bf16, and as each peer, ours are: the geometric mean over the shapes."""
    us = {(row["format"], row["rows"], row["layer"]): row["us"] for row in table}
    found: dict[str, dict[str, float]] = {}
    for kind, peers in PEERS.items():
        for peer in ("torch bf16", *peers):
            for m in sorted({row["rows"] for row in table}):
                both = [
                    us[peer, m, layer] / us[kind, m, layer]
                    for layer in SHAPES
                    if (peer, m, layer) in us and (kind, m, layer) in us
                ]
                if both:
                    mean = math.exp(sum(map(math.log, both)) / len(both))
                    found.setdefault(f"{kind} / {peer}", {})[str(m)] = mean
    return found


def sequences(lengths: list[int], new: int, device: torch.device, dtype: torch.dtype, stored: torch.dtype) -> tuple:
    """Return query, cache and context of sequences of ``lengths`` whose last ``new`` tokens are computed."""
    page, heads, kv_heads, size = 16, LLAMA["num_attention_heads"], LLAMA["num_key_value_heads"], 128
    counts = [-(-length // page) for length in lengths]
    spec = AttentionSpec(heads, kv_heads, size, 0.088)
    cache = Ops(device, dtype, stored).new_cache(spec, sum(counts) + 1, page)
    for tensor in cache[:2]:
        if stored == dtype:
            tensor.normal_()
        else:
            as_bytes(tensor).random_(-100, 100)
    for tensor in cache[2:]:
        tensor.fill_(1 / 64)
    order = (torch.randperm(sum(counts), device=device) + 1).to(torch.int32).split(counts)
    table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)
    starts = [new * number for number in range(len(lengths) + 1)]
    context = AttentionContext(
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        kv_len=torch.tensor(lengths, dtype=torch.int32, device=device),
        slots=torch.empty(0, dtype=torch.int64, device=device),
        page_table=table,
        num_decodes=len(lengths) if new == 1 else 0,
        query_start_list=starts,
        kv_len_list=lengths,
    )
    return torch.randn(starts[-1], heads, size, dtype=dtype, device=device), cache, context


def ours(query: torch.Tensor, cache: Sequence[torch.Tensor]) -> PagedAttention:
    """Our attention for such queries [T, H, D] and caches."""
    spec = AttentionSpec(query.shape[1], cache[0].shape[2], query.shape[2], 0.088)
    return Ops(query.device, query.dtype, cache[0].dtype).attention(spec)


def attention_speed(
    ceilings: dict[str, float],
    left: Left,
    decoding: tuple = ((1, 1024), (16, 1024), (64, 1024), (256, 1024), (1, 8192), (16, 8192)),
    prompts: tuple[int, ...] = (2048, 8192),
    device: torch.device | None = None,
    dtype: torch.dtype = torch.bfloat16,
    save: Save = forget,
) -> dict[str, Any]:
    """Decoding over pages in three types of cache, and prompts, ours and others'."""
    device = device or torch.device("cuda")
    table: list[dict[str, Any]] = []
    notes: dict[str, str] = {}

    def add(case: str, title: str, call: Callable[[], object], least: float) -> None:
        us = microseconds([call], device)
        table.append({"case": case, "format": title, "us": us, "roofline_us": least, "reached": least / us})

    def add_peer(case: str, title: str, make: Callable[[], Callable[[], object]], least: float) -> None:
        if title in notes:
            return
        try:
            add(case, title, make(), least)
        except Exception as problem:
            notes[title] = f"{type(problem).__name__}: {str(problem).splitlines()[0][:160]}"

    for batch, length in decoding:
        for stored in (dtype, torch.int8, torch.float8_e4m3fn):
            if left() < 10:
                notes["not measured"] = "some of decoding: no time left"
                break
            query, cache, context = sequences([length] * batch, 1, device, dtype, stored)
            case = f"decode {batch} x {length}"
            moved = sum(t.numel() * t.element_size() for t in cache) + 2 * query.numel() * query.element_size()
            least = moved / ceilings["gbps"] / 1e3
            call = partial(ours(query, cache).attend, query, cache, context)
            add(case, f"ours, {str(stored).removeprefix('torch.')}", call, least)
            if stored == dtype and device.type == "cuda":
                make = partial(gpu_peers.flashinfer_decode, query, cache, context.page_table, context.kv_len)
                add_peer(case, "flashinfer", make, least)
            del query, cache, context
            save({"rows": table, "notes": notes})
    for length in prompts:
        query, cache, context = sequences([length], length, device, dtype, dtype)
        heads, size = query.shape[1:]
        least = 2 * length * length * heads * size / ceilings["float_tflops"] / 1e6
        case = f"prompt {length}"
        add(case, "ours", partial(ours(query, cache).attend, query, cache, context), least)
        if device.type == "cuda":
            keys, values = (torch.randn(length, cache[0].shape[2], size, dtype=dtype, device=device) for _ in range(2))
            for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
                make = partial(gpu_peers.sdpa_prefill, backend, query, keys, values)
                add_peer(case, f"SDPA {backend.lower()}", make, least)
    return {"rows": table, "notes": notes}


def tune(folder: Path) -> dict[str, Any]:
    """The fastest launch configurations for LLAMA's products and attention, written into ``folder``."""
    from aiakq.bench.problem import Problem, Product
    from aiakq.bench.tuning import tune as tune_kernels
    from aiakq.runtime.config.engine import EngineConfig

    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(LLAMA))
        config = EngineConfig.from_args({"model": model, "device": "cuda", "load_format": "dummy"})
    # The products of a layer, but not the head, which is not quantized.
    specs = QuantSpec("gptq", "gptq", 4, 128), QuantSpec("smooth_quant", "compressed-tensors", 8, activation_bits=8)
    products = [Product(name, *shape, spec) for spec in specs for name, shape in list(SHAPES.items())[:4]]
    problem = Problem(torch.device("cuda"), torch.bfloat16, products, config)
    return {"file": str(tune_kernels(problem, 1024, folder, lambda *progress: None))}
