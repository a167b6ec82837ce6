"""Every vector instruction set gives the same bits, so that answers do not depend on the machine.

Two are left out, as kernels/cpu/library.py says: portable, which has no fused multiply-add, and products of bfloat16
with bfloat16 on vnni_bf16, which are added up in pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from aiakq.kernels.cpu import (
    activation,
    attention,
    batched,
    dense,
    gated_norm,
    library,
    linear,
    norm,
    recurrence,
    scaling,
    selective_scan,
)
from aiakq.kernels.recurrent_types import GatedNormProblem, RecurrenceSpec, SelectiveScanSpec, StateContext
from aiakq.kernels.types import (
    ActivationProblem,
    AttentionContext,
    AttentionSpec,
    BatchedProblem,
    DenseProblem,
    InputRounding,
    NormProblem,
    RotaryTables,
    ScalingProblem,
)

CPU = torch.device("cpu")


def on_every_isa(native: library.NativeLibrary, compute: Callable[[], Tensor]) -> dict[str, Tensor]:
    """The result of ``compute`` on each vector instruction set of this machine."""
    before, found = native.isa, {}
    try:
        for name in ("avx2", "avx512", "vnni", "vnni_bf16"):
            try:
                native.use_isa(name)
            except OSError:
                continue
            found[name] = compute()
    finally:
        native.use_isa(before)
    return found


def check(native: library.NativeLibrary, compute: Callable[[], Tensor]) -> None:
    found = on_every_isa(native, compute)
    if len(found) < 2:
        pytest.skip("this machine has one vector instruction set at most")
    first = next(iter(found.values()))
    for name, result in found.items():
        assert torch.equal(result, first), (name, next(iter(found)))


def rows(m: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m * k)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "blocks"])
@pytest.mark.parametrize(
    "kind", ["2", "3", "4", "5", "6", "8", "2 offsets", "5 offsets", "8 offsets", "e2m1", "nf4", "int8"]
)
def test_weight_only_products(native, make_weight, kind, exact, dtype):
    first, _, offsets = kind.partition(" ")
    bits, table = (int(first), None) if first.isdecimal() else (4, first)
    for n, k, group in ((64, 256, 128), (33, 96, 32), (48, 80, 16), (40, 300, 300)):
        weight = make_weight(n, k, bits, group, None if table else offsets or "codes", False, True, table=table)
        layer = linear.prepare(weight, weight.problem(dtype, "cpu", exact=exact))
        for m in (1, 5, 13):
            check(native, partial(layer, rows(m, k, dtype)))


def test_products_of_8_bit_activations(native, make_weight):
    weight = make_weight(96, 320, 8, 320, w8a8=True, bias=True)
    layer = linear.prepare(weight, weight.problem(torch.float32, "cpu", exact=True))
    check(native, lambda: layer(rows(7, 320, torch.float32)))


@pytest.mark.parametrize("code_type", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_products_of_8_bit_floats(native, make_weight, code_type):
    weight = make_weight(96, 320, 8, 64, bias=True)
    weight = replace(weight, scheme="fp8a8", codes=weight.codes & 0xBB, code_type=code_type, rounding=InputRounding(64))
    layer = linear.prepare(weight, weight.problem(torch.float32, "cpu"))
    for m in (1, 5, 13):
        check(native, partial(layer, rows(m, 320, torch.float32)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dense_products_are_equal_on_every_instruction_set(native, weight_dtype, dtype):
    weight = rows(70, 130, weight_dtype)
    layer = dense.prepare(weight, None, DenseProblem(70, 130, weight_dtype, dtype, "cpu"))
    for m in (1, 5, 13):
        check(native, partial(layer, rows(m, 130, dtype)))
    weights = rows(210, 130, weight_dtype).unflatten(0, (3, 70))
    many = batched.prepare(weights, BatchedProblem(3, 70, 130, weight_dtype, dtype, "cpu"))
    check(native, partial(many, rows(5, 390, dtype).unflatten(1, (3, 130))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_norms_and_activations(native, dtype):
    x, weight = rows(5, 330, dtype), rows(1, 330, dtype)[0]
    for kind in ("rms", "layer"):
        layer = norm.prepare(weight, weight, 1e-5, NormProblem(kind, 330, dtype, "cpu"))
        check(native, partial(layer, x))
    for function in activation.FUNCTIONS:
        act = activation.prepare(ActivationProblem(function, dtype, "cpu"))
        check(native, partial(act.gated, x))
    check(native, partial(scaling.prepare(0.7, 30.0, None, ScalingProblem(dtype, "cpu")), x))


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_attention(native, cache_dtype):
    heads, kv_heads, head_dim, page_size, length = 6, 2, 24, 8, 45
    angles = torch.outer(torch.arange(64.0), 10000 ** (-torch.arange(0, head_dim, 2) / head_dim))
    spec = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, rotary=RotaryTables(angles.cos(), angles.sin()))
    problem = spec.problem(torch.float32, cache_dtype, "cpu")
    layer = attention.prepare(spec, problem)
    qkv = rows(length, (heads + 2 * kv_heads) * head_dim, torch.float32)
    numbers = torch.arange(length)

    def compute() -> Tensor:
        cache = attention.new_cache(problem, 8, page_size, CPU)
        context = AttentionContext(
            query_start=torch.tensor([0, length], dtype=torch.int32),
            kv_len=torch.tensor([length], dtype=torch.int32),
            slots=numbers + page_size,
            page_table=torch.arange(1, 7, dtype=torch.int32).unsqueeze(0),
            num_decodes=0,
            query_start_list=[0, length],
            kv_len_list=[length],
        )
        return layer(qkv.clone(), numbers, cache, context)

    check(native, compute)


@pytest.mark.parametrize("kind", ["state_space", "delta_rule", "channel_delta_rule"])
def test_recurrences_and_their_norms(native, kind):
    biases = torch.ones(160 if kind == "channel_delta_rule" else 4)
    spec = RecurrenceSpec(kind, 4, 2, 40, 72, a_log=torch.zeros(4), step_bias=biases)
    layer = recurrence.prepare(spec, spec.problem(torch.float32, "cpu"))
    x, gates = rows(7, spec.width, torch.float32), rows(7, spec.gates_width, torch.float32)
    starts, lengths = torch.tensor([0, 7], dtype=torch.int32), torch.tensor([7], dtype=torch.int32)
    step = AttentionContext(starts, lengths, torch.zeros(7, dtype=torch.int64), lengths[None], 0, [0, 7], [7])
    step.states = StateContext([0], [[(6, 1)]])
    sigmoid = kind == "channel_delta_rule"
    problem = GatedNormProblem(288, 72, not sigmoid, torch.float32, "cpu", sigmoid)
    norm_layer = gated_norm.prepare(torch.ones(288), 1e-5, problem)
    check(native, lambda: norm_layer(layer(x, gates, torch.zeros(2, *spec.state_shape), step), rows(7, 288, x.dtype)))


def test_selective_scans(native):
    spec = SelectiveScanSpec(rows(40, 9, torch.float32), rows(1, 40, torch.float32)[0], torch.ones(40))
    layer = selective_scan.prepare(spec, spec.problem(torch.float32, "cpu"))
    values, steps, gate = rows(7, 120, torch.float32).chunk(3, dim=-1)
    keys, queries = rows(7, 18, torch.float32).chunk(2, dim=-1)
    starts, lengths = torch.tensor([0, 7], dtype=torch.int32), torch.tensor([7], dtype=torch.int32)
    step = AttentionContext(starts, lengths, torch.zeros(7, dtype=torch.int64), lengths[None], 0, [0, 7], [7])
    step.states = StateContext([0], [[(6, 1)]])
    states = torch.zeros(2, *spec.state_shape)
    check(native, lambda: layer(values, steps, keys, queries, gate, states.zero_(), step))
