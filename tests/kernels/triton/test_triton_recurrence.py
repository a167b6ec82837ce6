"""Convolutions, recurrences, selective scans and gated norms in Triton: values, states, the same bits however tokens
are cut."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from aiakq.kernels.ops import Ops, convolution, gated_norm, recurrence, selective_scan
from aiakq.kernels.recurrent_types import (
    ConvolutionSpec,
    GatedNormProblem,
    RecurrenceProblem,
    RecurrenceSpec,
    SelectiveScanProblem,
    SelectiveScanSpec,
    StateContext,
)
from aiakq.kernels.triton.recurrence import MAX_KEY_SIZE, columns
from aiakq.kernels.triton.states import chunk_tables, state_tables
from aiakq.kernels.types import AttentionContext

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: New tokens of three sequences, the rows of their states, and what is kept: the last token twice, as a page and as
#: the state of a running sequence.
LENGTHS, SOURCES = (1, 19, 6), [0, 6, 0]
SAVES = [[(0, 1)], [(4, 2), (15, 3), (18, 4), (18, 8)], [(5, 5)]]
CUTS = [(1,), (5, 16, 19), (6,)]
NAN = float("nan")


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def context(lengths, states, device):
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    starts_tensor, counts = (torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, lengths))
    slots = torch.zeros(starts[-1], dtype=torch.int64, device=device)
    table = torch.zeros(len(lengths), 1, dtype=torch.int32, device=device)
    return AttentionContext(starts_tensor, counts, slots, table, 0, starts, list(lengths), states=states)


def of_convolution(channels, taps, *, bias=True, silu=True, factors=True):
    spec = ConvolutionSpec(normal(channels, taps, seed=1), normal(channels, seed=2) if bias else None, silu)

    def made(name, dtype, device):
        layer = convolution.IMPLEMENTATIONS.load(name).prepare(
            ConvolutionSpec(spec.weight.to(device), None if spec.bias is None else spec.bias.to(device), silu),
            spec.problem(dtype, device.type),
        )

        def call(x, states, step):
            before, values, after = x.split(channels, dim=-1)
            return layer(values, states, step, before, after) if factors else layer(values, states, step)

        return call

    return made, spec.state_shape, 3 * channels


def of_recurrence(kind, *sizes, strength=1.0):
    heads = sizes[0]

    def spec_on(device):
        steps = heads * (sizes[2] if kind == "channel_delta_rule" else 1)
        a_log, step_bias, skip = (normal(n, seed=seed).to(device) for n, seed in ((heads, 3), (steps, 4), (heads, 5)))
        # Steps as small as those of models, and some that the limits cut.
        step_bias, skip = 3 * step_bias - 3, skip if kind == "state_space" else None
        return RecurrenceSpec(kind, *sizes, a_log - 2, step_bias, (0.001, 4.0), skip, strength)

    spec = spec_on(torch.device("cpu"))

    def made(name, dtype, device):
        module = recurrence.IMPLEMENTATIONS.load(name)
        layer = module.prepare(spec_on(device), spec.problem(dtype, device.type))
        return lambda x, states, step: layer(x[:, : spec.width], x[:, spec.width :], states, step)

    return made, spec.state_shape, spec.width + spec.gates_width


def of_selective_scan(channels, size):
    shapes = {3: (channels, size), 4: (channels,), 5: (channels,)}

    def spec_on(device):
        a_log, step_bias, skip = (normal(*shape, seed=n).to(device) for n, shape in shapes.items())
        return SelectiveScanSpec(a_log - 2, 3 * step_bias - 3, skip)

    widths, spec = (channels, channels, size, size, channels), spec_on(torch.device("cpu"))

    def made(name, dtype, device):
        module = selective_scan.IMPLEMENTATIONS.load(name)
        layer = module.prepare(spec_on(device), spec.problem(dtype, device.type))
        return lambda x, states, step: layer(*x.split(widths, dim=-1), states, step)

    return made, spec.state_shape, sum(widths)


LAYERS = {
    "convolution": of_convolution(150, 4),
    "plain convolution": of_convolution(20, 3, bias=False, silu=False, factors=False),
    "convolution of many taps": of_convolution(20, 12),
    "state_space": of_recurrence("state_space", 4, 2, 24, 40),
    "delta_rule": of_recurrence("delta_rule", 2, 1, 33, 40),
    "wide heads": of_recurrence("delta_rule", 1, 1, 200, 20),
    "channel_delta_rule": of_recurrence("channel_delta_rule", 2, 1, 33, 40),
    "negative eigenvalues": of_recurrence("delta_rule", 2, 1, 33, 40, strength=2.0),
    "selective_scan": of_selective_scan(150, 12),
    "wide states": of_selective_scan(10, 200),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_token_is_that_of_the_reference_and_the_same_in_every_step(kind, dtype, device, close):
    """Three sequences at once, in one piece; then one after the other, cut into chunks, from the states kept."""
    made, shape, width = LAYERS[kind]
    layer, total = made("triton", dtype, device), sum(LENGTHS)
    x = torch.full((total + 2, width + 7), NAN, dtype=dtype, device=device)[:, :width]
    x[:total] = normal(total, width).to(dtype)
    states = torch.full((10, *shape), NAN, device=device)
    states[0], states[6] = 0, normal(*shape, seed=8)
    before = states.clone()
    y = layer(x, states, context(LENGTHS, StateContext(SOURCES, SAVES), device))
    assert not y[total:].any(), "padding"
    kept = states.clone()
    assert torch.equal(kept[4], kept[8]) and kept[[7, 9]].isnan().all() and not kept[0].any()

    start = 0
    for source, length, ends in zip(SOURCES, LENGTHS, CUTS, strict=True):
        first = 0
        for end in ends:
            rows = slice(start + first, start + end)
            step = context([end - first], StateContext([source], [[(end - first - 1, 7)]]), device)
            assert torch.equal(layer(x[rows], states, step), y[rows])
            states[6], source, first = states[7], 6, end
        assert torch.equal(states[7], kept[{1: 1, 19: 4, 6: 5}[length]])
        start, states[6] = start + length, kept[6]

    cpu = torch.device("cpu")
    exact, wanted_states = made("torch", torch.float32, cpu), before.cpu()
    wanted = exact(x[:total].float().cpu(), wanted_states, context(LENGTHS, StateContext(SOURCES, SAVES), cpu))
    close(y[:total].cpu(), wanted)
    torch.testing.assert_close(kept[1:6].cpu(), wanted_states[1:6], rtol=1e-4, atol=1e-5)


#: Two long sequences with states saved within a chunk, before its end, at a multiple of its size, and twice at the end;
#: short ones between them.
LONG, LONG_SOURCES = (1, 70, 6, 98), [0, 12, 0, 13]
LONG_SAVES = [[(0, 1)], [(4, 2), (68, 3), (69, 4)], [(5, 5)], [(63, 6), (80, 7), (97, 8), (97, 9)]]


@pytest.mark.parametrize("dtype, sizes", [(torch.float16, (2, 1, 16, 20)), (torch.bfloat16, (1, 1, 33, 40))], ids=str)
@pytest.mark.parametrize(
    ("kind", "strength"),
    [("state_space", 1.0), ("delta_rule", 1.0), ("delta_rule", 2.0), ("channel_delta_rule", 1.0)],
)
def test_long_sequences_in_chunks_are_those_of_the_reference(kind, strength, dtype, sizes, device, close):
    """And keep every state that is asked for, beside short sequences, which are computed token by token."""
    made, shape, width = of_recurrence(kind, *sizes, strength=strength)
    total = sum(LONG)
    x = torch.full((total + 2, width + 7), NAN, dtype=dtype, device=device)[:, :width]
    x[:total] = normal(total, width).to(dtype)
    states = torch.full((14, *shape), NAN, device=device)
    states[0], states[12:] = 0, normal(2, *shape, seed=8)
    before = states.clone()
    y = made("triton", dtype, device)(x, states, context(LONG, StateContext(LONG_SOURCES, LONG_SAVES), device))
    assert not y[total:].any(), "padding"
    assert torch.equal(states[8], states[9]) and states[10:12].isnan().all() and not states[0].any()
    cpu = torch.device("cpu")
    wanted_states = before.cpu()
    step = context(LONG, StateContext(LONG_SOURCES, LONG_SAVES), cpu)
    wanted = made("torch", torch.float32, cpu)(x[:total].float().cpu(), wanted_states, step)
    close(y[:total].cpu(), wanted)
    # The interpreter cuts halves off, which a GPU rounds.
    close(states[1:10].cpu(), wanted_states[1:10], 2e-4)


def test_a_prompt_behind_a_saved_state_is_the_same_to_the_bit(device):
    """As it is after a cached prefix whose length is a multiple of a chunk's."""
    made, shape, width = of_recurrence("delta_rule", 2, 1, 16, 32)
    layer, x = made("triton", torch.bfloat16, device), normal(180, width).bfloat16().to(device)
    states = torch.zeros(4, *shape, device=device)
    y = layer(x, states, context([180], StateContext([0], [[(127, 1), (179, 2)]]), device))
    rest = layer(x[128:], states, context([52], StateContext([1], [[(51, 3)]]), device))
    assert torch.equal(rest, y[128:]) and torch.equal(states[2], states[3])


@pytest.mark.parametrize("kind", ["state_space", "delta_rule"])
def test_states_that_vanish_within_a_chunk_leave_numbers(kind, device, close):
    """Decays of e^-4000 and less; and repeated keys, whose changes almost cancel each other."""
    spec = RecurrenceSpec(kind, 2, 1, 16, 16, torch.tensor([7.0, -9.0]).to(device), torch.zeros(2, device=device))
    module = recurrence.IMPLEMENTATIONS
    x = normal(100, spec.width).bfloat16()
    x[:, :48] = x[0, :48]
    gates = torch.full((100, 4 if kind == "delta_rule" else 2), 2.0).bfloat16()
    gates[::3] = 30
    found = []
    for name, dtype in (("triton", torch.bfloat16), ("torch", torch.float32)):
        states = torch.ones(3, *spec.state_shape, device=device)
        step = context([100], StateContext([0], [[(40, 1), (99, 2)]]), device)
        layer = module.load(name).prepare(spec, spec.problem(dtype, device.type))
        y = layer(x.to(device, dtype), gates.to(device, dtype), states, step)
        found.append((y.cpu(), states.cpu()))
    close(found[0][0], found[1][0])
    close(found[0][1], found[1][1], 1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("gate_first", "sigmoid"), [(False, False), (True, False), (False, True)])
def test_gated_norms(gate_first, sigmoid, dtype, device, close):
    problem = GatedNormProblem(90, 30, gate_first, dtype, device.type, sigmoid)
    weight = normal(90)
    layer = gated_norm.IMPLEMENTATIONS.load("triton").prepare(weight.to(device), 1e-3, problem)
    x = normal(5, 200, seed=6).to(dtype).to(device)
    values, gate = x[:, :90], x[:, 100:190]
    function = torch.sigmoid if sigmoid else F.silu
    wide, factor = values.double().cpu(), function(gate.double().cpu())
    groups = (wide * factor if gate_first else wide).unflatten(1, (3, 30))
    normed = (groups / (groups.square().mean(-1, keepdim=True) + 1e-3).sqrt()).flatten(1) * weight
    close(layer(values, gate).cpu(), normed if gate_first else normed * factor)
    assert layer(values[:0], gate[:0]).shape == (0, 90)


def test_small_steps_keep_their_digits(device):
    """softplus of -12 is 6e-6, of which 1 + e^-12 has lost half the digits."""
    zero = torch.zeros(1, device=device)
    spec = RecurrenceSpec("state_space", 1, 1, 1, 1, zero, zero)
    layer = recurrence.IMPLEMENTATIONS.load("triton").prepare(spec, spec.problem(torch.float32, device.type))
    gates = torch.tensor([-40.0, -12, -5, 0, 5, 25], device=device)[:, None]
    x, states = torch.ones(6, 3, device=device), torch.zeros(2, 1, 1, 1, device=device)
    sources = StateContext([0] * 6, [[]] * 6)
    y = layer(x, gates, states, context([1] * 6, sources, device))
    torch.testing.assert_close(y.double().cpu(), F.softplus(gates.double()).cpu(), rtol=1e-6, atol=0)


def test_tables_of_states_are_made_once_a_step(device):
    """And begin where Triton expects most pointers to, so that it compiles one kernel."""
    step = context(LENGTHS, StateContext(SOURCES, SAVES), device)
    tables = state_tables(step, device)
    assert state_tables(step, device) is tables
    assert tables.sources.tolist() == SOURCES and tables.firsts.tolist() == [0, 1, 5, 6]
    assert tables.saves.tolist() == [[s, *save] for s, saves in enumerate(SAVES) for save in saves]
    assert tables.blocks.tolist() == [[0, 0], [1, 0], [1, 8], [1, 16], [2, 0]]
    parts = (tables.sources, tables.firsts, tables.saves, tables.blocks)
    assert all(part.data_ptr() % 16 == 0 for part in parts)


def test_chunks_end_where_states_are_saved(device):
    step = context(LONG, StateContext(LONG_SOURCES, LONG_SAVES), device)
    tables = chunk_tables(step, device, 64)
    assert chunk_tables(step, device, 64) is tables
    assert tables.sequences.tolist() == [[1, 0, 3], [3, 3, 7]]
    first, second = [[1, 5, 2], [6, 64, 3], [70, 1, 4]], [[77, 64, 6], [141, 17, 7], [158, 17, 8], [175, 0, 9]]
    assert tables.chunks.tolist() == first + second
    shorter = chunk_tables(context([70], StateContext([0], [[]]), device), device, 32)
    assert shorter.chunks.tolist() == [[0, 32, -1], [32, 32, -1], [64, 6, -1]]


def test_columns_of_a_program_fit_into_its_registers():
    def of(key_dim, value_dim):
        empty = torch.empty(0)
        return columns(RecurrenceSpec("delta_rule", 4, 2, key_dim, value_dim, empty, empty))

    assert [of(128, 128), of(128, 64), of(24, 40), of(MAX_KEY_SIZE, 128)] == [16, 16, 64, 2]


def test_what_it_does_not_compute_is_refused_by_name():
    module = recurrence.IMPLEMENTATIONS.load("triton")
    wide = RecurrenceProblem("delta_rule", 4, 2, MAX_KEY_SIZE + 1, 64, torch.float16, "cuda")
    assert module.supports(wide) == "keys have at most 1024 elements"
    single = RecurrenceProblem("delta_rule", 4, 2, 64, 64, torch.float32, "cuda")
    assert module.supports(single) == "activations are float16 or bfloat16, not torch.float32"
    module = selective_scan.IMPLEMENTATIONS.load("triton")
    wide = SelectiveScanProblem(64, 257, torch.float16, "cuda")
    assert module.supports(wide) == "states have at most 256 elements"


def test_a_gpu_takes_them_for_activations_of_16_bits():
    specs = {
        "convolution": ConvolutionSpec(torch.empty(64, 4)),
        "recurrence": RecurrenceSpec("delta_rule", 4, 2, 64, 64, torch.empty(4), torch.empty(4)),
        "selective_scan": SelectiveScanSpec(torch.empty(64, 16), torch.empty(64), torch.empty(64)),
    }
    for dtype, name in ((torch.bfloat16, "triton"), (torch.float32, "torch")):
        ops = Ops(torch.device("cuda"), dtype)
        problems = {operation: spec.problem(dtype, "cuda") for operation, spec in specs.items()}
        problems["gated_norm"] = GatedNormProblem(64, 64, False, dtype, "cuda")
        assert {ops.select(operation, problem)[0].name for operation, problem in problems.items()} == {name}
