"""Weights that are floats of 8 or 4 bits, with 16-bit activations, against float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from aiakq.kernels.ops import linear_reference as reference
from aiakq.kernels.tables import TABLES
from aiakq.kernels.triton import float_codes, linear_floats
from aiakq.kernels.triton.configs import Config
from aiakq.kernels.triton.float_scales import E4M3, E8M0, FLOAT32
from aiakq.kernels.types import InputRounding, LinearProblem, QWeight

DTYPES = [torch.float16, torch.bfloat16]
#: By names without "float8": GPUs before sm_89 have no such type, but these kernels.
TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
#: 4-bit floats -> how their scales are stored, and the inputs that share one.
FLOATS4 = {"mxfp4": (E8M0, 32), "nvfp4": (E4M3, 16), "any scales": (FLOAT32, 32)}
#: A tile of each path: few activations, inputs shared out, wide, planes joined, without assembly, decoded to memory.
PATHS = {
    "one_row": (1, Config(64, 16, 2, 3, 1)),
    "shared": (5, Config(64, 16, 2, 3, 3)),
    "wide": (17, Config(128, 16, 4, 3, 1)),
    "joined": (18, Config(64, 32, 4, 3, 2, joined=True)),
    "plain": (18, Config(64, 16, 4, 3, 1, plain=True)),
    "dense": (19, Config(64, 16, 4, 3, 1, dense=True)),
}
#: The same of scales that are applied first.
SCALED_PATHS = {
    "first": (17, Config(128, 32, 4, 3, 2, scale_first=True)),
    "first_joined": (33, Config(128, 32, 4, 3, 1, scale_first=True, joined=True)),
}


def weight(kind: str, n: int, k: int, group: int, bias: bool = False, scheme: str = "fp8a16") -> QWeight:
    draw = torch.Generator().manual_seed(n + group)
    codes = torch.randn(n, k, generator=draw).to(TYPES[kind]).view(torch.uint8)
    signs = torch.randn(n, -(-k // group), generator=draw).sign()
    return QWeight(
        scheme,
        codes,
        (torch.rand(n, -(-k // group), generator=draw) + 0.5) * signs,
        bias=torch.randn(n, generator=draw) if bias else None,
        group_size=group,
        code_type=TYPES[kind],
    )


def weight4(kind: str, n: int, k: int, group: int = 0, bias: bool = False) -> QWeight:
    """4-bit floats, the scales of each output around another number."""
    draw = torch.Generator().manual_seed(n + k)
    stored, group = FLOATS4[kind][0], group or FLOATS4[kind][1]
    exponents = torch.randint(-9, -2, (n, -(-k // group)), generator=draw)
    scales = torch.exp2(exponents.float())
    if stored == E4M3:
        numbers = torch.randint(0, 0x7F, exponents.shape, generator=draw).to(torch.uint8).view(torch.float8_e4m3fn)
        scales = numbers.float() / (3000 * torch.rand(n, 1, generator=draw) + 1000)
    elif stored == FLOAT32:
        scales = (torch.rand(exponents.shape, generator=draw) + 0.5) / 16
    codes = torch.randint(0, 16, (n, k), generator=draw).to(torch.uint8)
    offset = torch.randn(n, generator=draw) if bias else None
    return QWeight("lut4a16", codes, scales, bias=offset, group_size=group, table=torch.tensor(TABLES["e2m1"]))


def exact(w: QWeight, x: torch.Tensor) -> torch.Tensor:
    """x W^T in float64."""
    scales = w.scales.double().repeat_interleave(w.group_size, dim=1)[:, : w.k]
    values = w.codes.view(w.code_type).double() if w.table is None else w.table.double()[w.codes.long()]
    y = x.double() @ (values * scales).T
    return y if w.bias is None else y + w.bias.double()


def check(w, dtype, m, config, device, close):
    state = linear_floats.pack(w.to(device), w.problem(dtype, device.type))
    x = torch.randn(m, w.k, generator=torch.Generator().manual_seed(m)).to(dtype)
    close(linear_floats.run(x.to(device), state, config).cpu(), exact(w, x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", TYPES)
def test_every_code_is_decoded_exactly(kind, dtype, device):
    """With assembly and without; codes that are no finite numbers do not occur."""
    codes = torch.arange(256).to(torch.uint8)
    codes = torch.where(codes.view(TYPES[kind]).float().isfinite(), codes, 0).repeat(64, 1)
    w = QWeight("fp8a16", codes, torch.full((64, 1), 0.5), code_type=TYPES[kind]).to(device)
    state = linear_floats.pack(w, w.problem(dtype, device.type))
    found = torch.empty(64, 256, dtype=dtype, device=device)
    for plain in (False, True):
        linear_floats.decode(state, found, plain)
        assert torch.equal(found.cpu().float(), codes.view(TYPES[kind]).float() / 2)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", TYPES)
def test_every_type_on_every_path(kind, dtype, path, device, close):
    m, config = PATHS[path]
    for group in (384, 128):
        check(weight(kind, 70, 384, group, bias=True), dtype, m, config, device, close)


@pytest.mark.parametrize("path", PATHS | SCALED_PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FLOATS4)
def test_every_kind_of_4_bits_on_every_path(kind, dtype, path, device, close):
    """Steps of 64 and of 128 inputs; with the former, two steps of mxfp4 have their scales in a word."""
    m, config = (PATHS | SCALED_PATHS)[path]
    for k in (192, 256):
        w = weight4(kind, 70, k, bias=True)
        assert linear_floats.pack(w, w.problem(dtype, "cpu")).stored == FLOATS4[kind][0]
        check(w, dtype, m, config, device, close)


@pytest.mark.parametrize(("k", "group"), [(256, 128), (192, 128), (192, 192)])
@pytest.mark.parametrize("scale_first", [False, True])
def test_other_groups_of_4_bits(k, group, scale_first, device, close):
    for kind, joined in itertools.product(("mxfp4", "nvfp4"), (False, True)):
        config = Config(64, 16, 4, 3, 2, joined=joined, scale_first=scale_first)
        check(weight4(kind, 70, k, group), torch.float16, 3, config, device, close)


@pytest.mark.parametrize("kind", FLOATS4)
def test_4_bits_are_decoded_as_the_reference_does(kind, device):
    """Products that are not exact may round the other way."""
    w = weight4(kind, 70, 192)
    wanted = reference.dequantize(w)
    for dtype, plain in itertools.product(DTYPES, (False, True)):
        found = torch.empty(70, 192, dtype=dtype, device=device)
        linear_floats.decode(linear_floats.pack(w.to(device), w.problem(dtype, device.type)), found, plain)
        if kind == "mxfp4":
            assert torch.equal(found.cpu(), wanted.to(dtype))
        else:
            assert torch.allclose(found.cpu().float(), wanted, rtol=torch.finfo(dtype).eps, atol=2**-24)


@pytest.mark.parametrize(("k", "group"), [(512, 32), (512, 64), (512, 256), (192, 128), (320, 128), (96, 96)])
def test_every_group_size_and_a_last_one_with_fewer_inputs(k, group, device, close):
    for dtype, joined in itertools.product(DTYPES, (False, True)):
        check(weight("e4m3", 70, k, group), dtype, 3, Config(64, 16, 4, 3, 2, joined=joined), device, close)


@pytest.mark.parametrize("m", [1, 2, 9, 40, 65, 300])
def test_the_shipped_configuration_of_any_number_of_rows(m, device, close):
    check(weight("e4m3", 130, 256, 128, bias=True), torch.bfloat16, m, None, device, close)
    check(weight4("mxfp4", 130, 256, bias=True), torch.bfloat16, m, None, device, close)


def test_the_largest_and_smallest_codes_and_scales_are_exact(device):
    """One activation of each row is not 0, so that nothing is rounded."""
    codes = torch.tensor([0x7E, 0xFE, 0x01, 0x81, 0x08, 0x38, 0, 0x77]).repeat(64, 16).to(torch.uint8)
    x = torch.zeros(8, 128)
    x[range(8), range(8, 16)] = torch.tensor([1.0, -3, 2, 4, 0.5, -1, 3, -2])
    for dtype, scale in itertools.product(DTYPES, (2.0**-10, 1.0)):
        w = QWeight("fp8a16", codes, torch.full((64, 1), scale), code_type=torch.float8_e4m3fn)
        state = linear_floats.pack(w.to(device), w.problem(dtype, device.type))
        found = linear_floats.run(x.to(dtype).to(device), state, Config(64, 16, 2, 3, 1)).cpu()
        assert torch.equal(found, exact(w, x).to(dtype))


def test_parts_are_added_in_their_order_and_rows_of_a_wider_tensor(device, close):
    w = weight("e4m3", 64, 1024, 128)
    state = linear_floats.pack(w.to(device), w.problem(torch.float16, device.type))
    wide = torch.randn(4, 1100).half()
    found = [linear_floats.run(wide.to(device)[:, 50:1074], state, Config(64, 16, 2, 3, 4)).cpu() for _ in range(2)]
    close(found[0], exact(w, wide[:, 50:1074]))
    assert torch.equal(*found)
    assert linear_floats.run(wide.to(device)[:0, :1024], state).shape == (0, 64)


@pytest.mark.parametrize("rounding", [InputRounding(), InputRounding(128), InputRounding(128, True)], ids=str)
@pytest.mark.parametrize("static", [False, True])
def test_rounded_activations_are_those_of_the_reference(rounding, static, device, close):
    w = weight("e4m3", 64, 256, 128, scheme="fp8a8")
    w.rounding, w.input_scale = rounding, torch.tensor(0.02) if static else None
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    wanted = reference.prepare(w, w.problem(torch.float32, "cpu"))(x.half().float())
    layer = linear_floats.prepare(w.to(device), w.problem(torch.float16, device.type))
    close(layer(x.half().to(device)).cpu(), wanted, 1e-3)


@pytest.mark.parametrize("bits_and_mantissa", [(8, 3), (8, 2), (4, 1)])
@pytest.mark.parametrize("bf16", [False, True])
def test_moved_codes_times_their_factor_are_the_codes(bits_and_mantissa, bf16):
    """By the definition of the formats alone: sign, exponent, mantissa."""
    bits, mantissa = bits_and_mantissa
    width, bias = (7, 127) if bf16 else (10, 15)
    own = 2 ** (bits - mantissa - 2) - 1
    for code in range(0x7C if (bits, mantissa) == (8, 2) else 1 << (bits - 1)):
        exponent, fraction = code >> mantissa, code & ((1 << mantissa) - 1)
        wanted = (fraction + (1 << mantissa) * (exponent > 0)) * 2.0 ** (max(exponent, 1) - own - mantissa)
        moved = code << (width - mantissa)
        found = torch.tensor([moved], dtype=torch.int16).view(torch.bfloat16 if bf16 else torch.float16).double()
        assert found * 2.0 ** float_codes.shift_of(bits, mantissa, bf16) == wanted
    assert bias - own == float_codes.shift_of(bits, mantissa, bf16)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "float16 or bfloat16"),
        ({"k": 100, "group_size": 100}, "do not fit"),
        ({"group_size": 8}, "do not fit"),
        ({"has_zeros": True}, "no zero points"),
        ({"scheme": "w4a16"}, "w4a16"),
        ({"scheme": "lut4a16", "table": "nf4"}, "not of another table"),
        ({"scheme": "lut4a16", "table": "e2m1", "k": 96, "group_size": 32}, "do not fit"),
    ],
)
def test_unsupported_features_are_refused_by_name(changes, reason):
    asked = {"scheme": "fp8a16", "n": 64, "k": 256, "group_size": 128, "has_zeros": False, "has_perm": False} | {
        "has_bias": False, "static_input": False, "dtype": torch.float16, "device": "cuda"
    }  # fmt: skip
    assert linear_floats.supports(LinearProblem(**asked)) is None
    assert reason in linear_floats.supports(LinearProblem(**(asked | changes)))
