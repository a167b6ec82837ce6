"""Weights of 2, 3, 4 and 8 bits with 16-bit activations, against float64."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import replace

import pytest
import torch

from aiakq.kernels.triton import configs, language, linear
from aiakq.kernels.triton.activation import TritonActivation
from aiakq.kernels.triton.configs import Config
from aiakq.kernels.triton.norm import TritonNorm
from aiakq.kernels.types import LinearProblem, PackedActivation, QWeight

DTYPES = [torch.float16, torch.bfloat16]
#: A tile of each path: few activations, parts of the inputs shared out, weights made first, and made in memory.
PATHS = {
    "one_row": (1, Config(64, 16, 2, 3, 1)),
    "shared": (5, Config(64, 16, 2, 3, 3)),
    "wide": (17, Config(128, 16, 4, 3, 1)),
    "weights_first": (18, Config(64, 16, 4, 3, 2, scale_first=True)),
    "joined": (18, Config(64, 16, 4, 3, 2, scale_first=True, joined=True)),
    "joined_codes": (17, Config(64, 32, 4, 3, 1, joined=True)),
    "dense": (19, Config(64, 16, 4, 3, 1, dense=True)),
}


def weight(bits, n, k, group, zeros=None, perm=False, bias=False) -> QWeight:
    draw = torch.Generator().manual_seed(bits * 1000 + n + group)
    groups = k // group
    zero = torch.randint(0, 2**bits, (n, groups), generator=draw)
    return QWeight(
        scheme=f"w{bits}a16",
        codes=torch.randint(0, 2**bits, (n, k), generator=draw).to(torch.uint8),
        scales=((torch.rand(n, groups, generator=draw) + 0.5) * torch.randn(n, groups, generator=draw).sign()).half(),
        zeros={None: None, "codes": zero.to(torch.uint8), "floats": zero + 0.375}[zeros],
        perm=torch.randperm(k, generator=draw) if perm else None,
        bias=torch.randn(n, generator=draw) if bias else None,
        group_size=group,
    )


def exact(w: QWeight, x: torch.Tensor) -> torch.Tensor:
    """x W^T in float64."""
    zeros = torch.full(w.scales.shape, 2.0 ** (w.bits - 1)) if w.zeros is None else w.zeros
    scales, zeros = (t.double().repeat_interleave(w.group_size, dim=1) for t in (w.scales, zeros))
    x = x.double() if w.perm is None else x.double()[:, w.perm]
    y = x @ ((w.codes.double() - zeros) * scales).T
    return y if w.bias is None else y + w.bias.double()


def check(w, dtype, m, config, device, close):
    state = linear.prepare(w.to(device), w.problem(dtype, device.type))
    x = torch.randn(m, w.k, generator=torch.Generator().manual_seed(m)).to(dtype)
    close(linear.run(x.to(device), state, config).cpu(), exact(w, x))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_width_on_every_path(bits, dtype, path, device, close):
    m, config = PATHS[path]
    check(weight(bits, 100, 512, 128, zeros="codes", bias=True), dtype, m, config, device, close)


@pytest.mark.parametrize("scale_first", [False, True])
@pytest.mark.parametrize(
    ("bits", "group"), [(4, 16), (4, 32), (4, 64), (4, 256), (4, 512), (2, 32), (2, 512), (8, 16), (8, 32), (8, 512)]
)
def test_every_group_size_matches_the_reference(bits, group, scale_first, device, close):
    config = Config(64, 16, 2, 3, 2, scale_first=scale_first)
    for zeros, dtype in itertools.product((None, "codes"), DTYPES):
        check(weight(bits, 70, 512, group, zeros=zeros), dtype, 3, config, device, close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_permuted_inputs_and_fractional_zero_points(path, dtype, device, close):
    m, config = PATHS[path]
    check(weight(4, 64, 256, 64, zeros="floats", perm=True), dtype, m, config, device, close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [2, 4])
def test_weights_are_rounded_once(bits, dtype, device):
    """Zero points that are no whole numbers lose nothing beside the offset of the codes, 1024 in float16."""
    w = weight(bits, 64, 128, 64, zeros="floats")
    state = linear.prepare(w.to(device), w.problem(dtype, device.type))
    found = torch.empty(64, 128, dtype=dtype, device=device)
    linear.dequantize(state, found)
    exact_weights = (w.codes.double() - w.zeros.repeat_interleave(64, 1)) * w.scales.double().repeat_interleave(64, 1)
    # In units of the step between two codes.
    error = (found.cpu().double() - exact_weights).abs() / w.scales.double().abs().repeat_interleave(64, 1)
    assert error.max() < (0.02 if dtype == torch.float16 else 0.2)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [1e-7, 3e5])
def test_scales_beyond_the_range_of_float16(size, path, device, close):
    m, config = PATHS[path]
    w = weight(4, 64, 256, 64, zeros="codes")
    w = replace(w, scales=w.scales.float() * size)
    check(w, torch.bfloat16, m, config, device, close)


def test_memory_that_captured_graphs_point_to_is_never_freed(device, monkeypatch):
    monkeypatch.setattr(configs, "_counters", {})
    first = configs.counters(device, 10)
    alive = weakref.ref(first)
    del first
    assert configs.counters(device, 100_000).numel() >= 100_000
    assert alive() is not None


@pytest.mark.parametrize("n", [24, 63, 64, 65, 130])
def test_any_number_of_outputs_and_nothing_beyond_them(n, device, close):
    w = weight(4, n, 128, 128)
    for config in (Config(64, 16, 2, 3, 1), Config(128, 32, 4, 3, 1, scale_first=True)):
        for m in (1, 16, 17):
            check(w, torch.float16, m, config, device, close)


def test_rows_of_a_wider_tensor(device, close):
    w = weight(4, 64, 128, 128)
    state = linear.prepare(w.to(device), w.problem(torch.float16, device.type))
    wide = torch.randn(4, 300).half()
    close(linear.run(wide.to(device)[:, 100:228], state).cpu(), exact(w, wide[:, 100:228]))
    assert linear.run(wide.to(device)[:0, :128], state).shape == (0, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group"), [(4, 128), (4, 64), (2, 128), (8, 384)])
def test_norms_and_activations_compute_the_sums_for_the_next_layer(bits, group, dtype, device, monkeypatch):
    """With 384 inputs a block of columns has room that is no input."""
    w = weight(bits, 64, 384, group, zeros="codes")
    state = linear.prepare(w.to(device), w.problem(dtype, device.type))
    config = Config(64, 16, 2, 3, 1)
    monkeypatch.setattr(linear, "choose", lambda state, m: config)
    x, residual, scale = (torch.randn(rows, 384, device=device).to(dtype) for rows in (3, 3, 1))
    norm, both = TritonNorm(scale[0], None, 1e-5, False), torch.cat((x, residual), dim=1)
    for make in (
        lambda layout: norm(x.clone(), residual, layout),
        lambda layout: TritonActivation("silu").gated(both, layout),
    ):
        given = make(state.input_layout(3))
        assert isinstance(given, PackedActivation)
        given.sums[:, 3:] = float("nan")  # of no row
        plain = make(None)
        assert torch.equal(given.rows, plain)
        found, wanted = linear.run(given, state), linear.run(plain, state)
        assert torch.allclose(found.float(), wanted.float(), rtol=1e-2, atol=wanted.abs().max() / 500)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_first", [False, True])
@pytest.mark.parametrize("centered", [False, True])
def test_norms_permute_their_rows_for_the_next_layer(centered, scale_first, dtype, device, monkeypatch):
    w = weight(4, 64, 384, 64, zeros="codes", perm=True)
    state = linear.prepare(w.to(device), w.problem(dtype, device.type))
    config = Config(64, 16, 2, 3, 1, scale_first=scale_first)
    monkeypatch.setattr(linear, "choose", lambda state, m: config)
    x, residual, scale, bias = (torch.randn(rows, 384, device=device).to(dtype) for rows in (3, 3, 1, 1))
    norms = []
    norm = TritonNorm(scale[0], bias[0] if centered else None, 1e-5, centered)
    for layout in (state.input_layout(3), None):
        summed = x.clone()
        norms.append(norm(summed, residual, layout))
        assert torch.allclose(summed.float(), (x.float() + residual.float()), rtol=1e-2), "the sum stays in its order"
    given, plain = norms
    assert isinstance(given, PackedActivation) and (given.sums is None) == scale_first
    assert torch.equal(given.rows, plain[:, w.perm.to(device)])
    wanted = linear.run(plain, state)
    monkeypatch.setattr(linear, "pack_activation", None)  # there is nothing left to do
    assert torch.allclose(linear.run(given, state).float(), wanted.float(), rtol=1e-2, atol=wanted.abs().max() / 500)
    # A program of an activation function computes a part of a row: it leaves the order to the layer.
    assert isinstance(TritonActivation("silu")(x, state.input_layout(3)), torch.Tensor)


def test_parts_are_added_in_their_order_and_counters_are_left_at_zero(device):
    w = weight(4, 64, 1024, 128)
    state = linear.prepare(w.to(device), w.problem(torch.float16, device.type))
    x = torch.randn(3, 1024).half().to(device)
    results = [linear.run(x, state, Config(64, 16, 2, 3, 4)) for _ in range(3)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert not configs.counters(device, 1).any()


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_assembly_is_a_mask_and_an_exponent_for_each_plane(bits, bf16):
    """What the PTX says, carried out here for every word there is: the code, and the offset its plane has."""
    text = {
        (2, False): language._ASM_2_FP16,
        (2, True): language._ASM_2_BF16,
        (4, False): language._ASM_4_FP16,
        (4, True): language._ASM_4_BF16,
        (8, False): language._ASM_8_FP16,
        (8, True): language._ASM_8_BF16,
    }[bits, bf16].value
    words = torch.arange(2**16)
    # Two words in a register: the upper one must not reach into the lower one's results.
    register = words | (words.flip(0) << 16)
    planes = run_ptx(text, register, 16 // bits, bf16)
    for plane, found in enumerate(planes):
        offset = (0 if bits == 8 else 128) if bf16 else 2.0 ** (10 - plane * bits % 8)
        for half, whole in ((found[0], words), (found[1], words.flip(0))):
            assert torch.equal(half, ((whole >> (plane * bits)) & (2**bits - 1)) + offset)


def run_ptx(text: str, register: torch.Tensor, outputs: int, bf16: bool) -> list[list[torch.Tensor]]:
    """The few instructions of language.py on 32-bit registers; lower and upper halves of every output as floats."""
    values: dict[str, torch.Tensor] = {f"${outputs}": register}

    def floats(bits: torch.Tensor) -> list[torch.Tensor]:
        halves = [(bits >> shift & 0xFFFF).to(torch.uint16) for shift in (0, 16)]
        return [half.view(torch.bfloat16 if bf16 else torch.float16).double() for half in halves]

    def value(word: str) -> torch.Tensor:
        return torch.tensor(int(word, 16)) if word.startswith("0x") else values[word]

    for line in text.strip("{} ").split(";"):
        name, *words = line.replace(",", " ").split() or [""]
        if name in ("", ".reg"):
            continue
        if name == "mov.b32":
            values[words[0]] = value(words[1])
        elif name == "shr.u32":
            values[words[0]] = values[words[1]] >> int(words[2])
        elif name == "mul.lo.u32":
            values[words[0]] = values[words[1]] * value(words[2]) & 0xFFFFFFFF
        elif name == "lop3.b32":
            a, b, c = (value(word) for word in words[1:4])
            values[words[0]] = {"0xea": (a & b) | c, "0x6a": (a & b) ^ c}[words[4]]
        elif name == "fma.rn.bf16x2":
            a, b, c = (floats(value(word).expand(2**16)) for word in words[1:4])
            low, high = (
                (x * y + z).to(torch.bfloat16).view(torch.uint16).long() for x, y, z in zip(a, b, c, strict=True)
            )
            values[words[0]] = low | high << 16
        else:
            raise AssertionError(line)
    return [floats(values[f"${number}"]) for number in range(outputs)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "float16 or bfloat16"),
        ({"k": 100, "group_size": 100}, "do not fit"),
        ({"group_size": 8}, "do not fit"),
        ({"scheme": "w8a8"}, "w8a8"),
    ],
)
def test_unsupported_features_are_refused_by_name(changes, reason):
    asked = {"scheme": "w4a16", "n": 64, "k": 256, "group_size": 128, "has_zeros": False, "has_perm": False} | {
        "has_bias": False, "static_input": False, "dtype": torch.float16, "device": "cuda"
    }  # fmt: skip
    assert linear.supports(LinearProblem(**asked)) is None
    assert reason in linear.supports(LinearProblem(**(asked | changes)))
