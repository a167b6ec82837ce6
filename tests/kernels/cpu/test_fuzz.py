"""Native linear layers of random shapes, against float64."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_examples import examples

from aiakq.kernels.cpu import linear
from aiakq.kernels.ops import Ops
from aiakq.kernels.ops import linear_reference as reference

CPU = torch.device("cpu")
FUZZ = settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))


@FUZZ
@given(
    m=st.integers(1, 30),
    n=st.integers(1, 140),
    k=st.integers(1, 300),
    group=st.one_of(st.sampled_from([8, 16, 24, 32, 48, 64, 96, 128]), st.integers(1, 300)),
    kind=st.sampled_from([2, 3, 4, 5, 6, 8, "e2m1", "nf4", "int8"]),
    zeros=st.sampled_from([None, "codes", "floats", "offsets"]),
    perm=st.booleans(),
    bias=st.booleans(),
)
def test_weight_only_products_of_random_shapes_match_float64(isa, make_weight, m, n, k, group, kind, zeros, perm, bias):
    bits, table = (kind, None) if isinstance(kind, int) else (4, kind)
    zeros = None if table and zeros != "offsets" else zeros
    weight = make_weight(n, k, bits, min(group, k), zeros, perm, bias, table=table)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m))
    natural = reference.dequantize(weight).double()
    wanted = x.double() @ natural.T + (weight.bias.double() if bias else 0)
    size = (x.double().abs() @ natural.abs().T).norm(dim=1) / k**0.5 + wanted.norm(dim=1)
    for exact, tolerance in ((True, 1e-5), (False, 0.05)):
        y = linear.prepare(weight, weight.problem(torch.float32, "cpu", exact=exact))(x)
        assert ((y.double() - wanted).norm(dim=1) <= tolerance * size).all()
        last = linear.prepare(weight, weight.problem(torch.float32, "cpu", exact=exact))(x[-1:].contiguous())
        assert torch.equal(last, y[-1:])


@FUZZ
@given(m=st.integers(1, 30), n=st.integers(1, 140), k=st.integers(1, 600), bias=st.booleans(), static=st.booleans())
def test_w8a8_products_of_random_shapes_are_exact(isa, make_weight, m, n, k, bias, static):
    weight = make_weight(n, k, 8, k, bias=bias, w8a8=True)
    weight.input_scale = torch.tensor(0.02) if static else None
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m))
    problem = weight.problem(torch.float32, "cpu")
    # Not the reference's own product: torch's of a single input is wrong.
    codes, scale = reference.quantize_activations(x, weight.input_scale)
    sums = codes.long() @ (weight.codes.long() - 128).T
    wanted = sums.to(torch.float32) * scale * weight.scales[:, 0]
    if bias:
        wanted += weight.bias
    assert torch.equal(linear.prepare(weight, problem)(x), wanted)


@FUZZ
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 140),
    k=st.integers(1, 300),
    stored=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_dense_products_of_random_shapes_match_float64(isa, m, n, k, stored):
    random = torch.Generator().manual_seed(n)
    weight, x = torch.randn(n, k, generator=random).to(stored), torch.randn(m, k, generator=random)
    wanted = x.double() @ weight.double().T
    size = (x.double().abs() @ weight.double().abs().T).norm(dim=1) / k**0.5 + wanted.norm(dim=1)
    found = Ops(torch.device("cpu"), torch.float32).dense(weight)(x)
    assert ((found.double() - wanted).norm(dim=1) <= 1e-5 * size).all()
