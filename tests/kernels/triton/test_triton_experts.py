"""Mixtures of experts, whose pairs are sorted and multiplied without the host, against the torch reference."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from aiakq.kernels.ops.activation import FUNCTIONS, TorchActivation
from aiakq.kernels.ops.dense import TorchDense
from aiakq.kernels.ops.experts import ExpertLayers, PairExperts, Routed, TorchExperts
from aiakq.kernels.ops.linear import LinearLayer, RotatedLinear, RoundedInputs
from aiakq.kernels.ops.linear_reference import dequantize
from aiakq.kernels.ops.routing import SigmoidRouting, SoftmaxRouting, SparseMixerRouting, TopSigmoidRouting
from aiakq.kernels.ops.row_parallel import SummedExperts
from aiakq.kernels.ops.sharded import ShardedExperts, shares
from aiakq.kernels.tables import TABLES
from aiakq.kernels.triton import experts, experts_kernel, linear, linear_floats, linear_fp8, linear_int8
from aiakq.kernels.triton.activation import TritonActivation
from aiakq.kernels.triton.language import INTERPRETED
from aiakq.kernels.types import ExpertsProblem, QWeight
from aiakq.runtime.layers.experts import SparseMLP

HIDDEN, WIDTH = 128, 64
DTYPES = [torch.float16, torch.bfloat16]
#: Scheme -> stored bits and group, or None for floats.
SCHEMES = {
    "floats": None,
    "fp8a16": 64,
    "fp8a8": 64,
    "fp8a8 rows": 64,
    "mxfp4": 32,
    "w4a16": 64,
    "w2a16": 64,
    "w3a16": 32,
    "w8a16": 128,
    "w8a8": 64,
}


def make_layer(scheme: str, n: int, k: int, dtype, device, seed: int, bias: bool, **changes) -> tuple[Any, LinearLayer]:
    """A layer of Triton's kernels, and the same in float32."""
    draw = torch.Generator().manual_seed(seed)
    offset = torch.randn(n, generator=draw).to(dtype) / 4 if bias else None
    if scheme == "floats":
        values = (torch.randn(n, k, generator=draw) / k**0.5).to(dtype)
        exact = TorchDense(values.float(), None if offset is None else offset.float())
        return TorchDense(values.to(device), None if offset is None else offset.to(device)), exact
    if scheme.startswith("fp8"):
        values = torch.randn(n, k, generator=draw).to(torch.float8_e4m3fn)
        name, _, rows = scheme.partition(" ")
        group = k if rows else 64
        weight = QWeight(
            name, values.view(torch.uint8), (torch.rand(n, k // group, generator=draw) + 0.5) / 16, bias=offset,
            group_size=group, code_type=torch.float8_e4m3fn, **changes,
        )  # fmt: skip
        exact = TorchDense(dequantize(weight), None if offset is None else offset.float())
        module = linear_fp8 if rows else linear_floats
        prepared = module.prepare(weight.to(device), weight.problem(dtype, device.type))
        return prepared, RoundedInputs(exact, None, weight.rounding) if name == "fp8a8" else exact
    if scheme == "mxfp4":
        codes = torch.randint(0, 16, (n, k), generator=draw).to(torch.uint8)
        scales = torch.exp2(torch.randint(-7, -4, (n, k // 32), generator=draw).float())
        table = torch.tensor(TABLES["e2m1"])
        weight = QWeight("lut4a16", codes, scales, bias=offset, group_size=32, table=table)
        exact = TorchDense(dequantize(weight), None if offset is None else offset.float())
        return linear_floats.prepare(weight.to(device), weight.problem(dtype, device.type)), exact
    bits, group = int(scheme[1]), k if scheme == "w8a8" else min(SCHEMES[scheme], k)
    signs = torch.randn(n, k // group, generator=draw).sign()
    weight = QWeight(
        scheme,
        torch.randint(0, 2**bits, (n, k), generator=draw).to(torch.uint8),
        ((torch.rand(n, k // group, generator=draw) + 0.5) * signs / 2**bits / 4).half(),
        bias=offset,
        group_size=group,
        **changes,
    )
    module = linear_int8 if scheme == "w8a8" else linear
    prepared = module.prepare(weight.to(device), weight.problem(dtype, device.type))
    return prepared, TorchDense(dequantize(weight), None if offset is None else offset.float())


def make_experts(
    scheme: str, count: int, dtype, device, *, act="silu", bias=False, kinds=None, gated=True, **changes
) -> tuple[ExpertLayers, TorchExperts]:
    # A step of 2-bit weights takes 128 inputs.
    kinds = kinds or (scheme, "w4a16" if scheme == "w2a16" else scheme)
    outputs = 2 * WIDTH if gated else WIDTH
    first = [make_layer(kinds[0], outputs, HIDDEN, dtype, device, 2 * e, bias, **changes) for e in range(count)]
    second = [make_layer(kinds[1], HIDDEN, WIDTH, dtype, device, 2 * e + 1, bias) for e in range(count)]
    gate = TritonActivation(act) if act == "silu" else TorchActivation(FUNCTIONS[act])
    layers = ExpertLayers([own for own, _ in first], [own for own, _ in second], gate, 1, gated=gated)
    plain = TorchActivation(FUNCTIONS[act])
    exact = [[own for _, own in group] for group in (first, second)]
    return layers, TorchExperts(ExpertLayers(exact[0], exact[1], plain, 1, gated=gated))


def routed(tokens: int, count: int, top_k: int, *, skewed=False, seed=0, weigh_inputs=False) -> Routed:
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(tokens, count, generator=draw)
    if skewed:
        scores[:, :top_k] += 100
    weights, selected = scores.softmax(-1).topk(top_k, dim=-1)
    return Routed(selected, torch.rand(weights.shape, generator=draw) + 0.1, count, weigh_inputs)


def on(device: torch.device, routing: Routed) -> Routed:
    return replace(routing, selected=routing.selected.to(device), weights=routing.weights.to(device))


def rows_of(tokens: int, dtype, seed=1) -> Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tolerance(scheme: str, dtype) -> float:
    """Outputs of the first layer, of the activation function and of the second are rounded, in the interpreter down."""
    return (
        0.05
        if scheme.startswith("fp8a8") and dtype == torch.bfloat16
        else 0.035
        if dtype == torch.bfloat16
        else 0.02
        if scheme.startswith("fp8a8") or scheme == "w8a8"
        else 2e-3
    )


def check(scheme, count, top_k, tokens, dtype, device, close, *, skewed=False, weigh_inputs=False, **changes) -> None:
    layers, reference = make_experts(scheme, count, dtype, device, **changes)
    found = experts.prepare(layers, ExpertsProblem(dtype, device.type))
    assert isinstance(found, experts.TritonExperts) and isinstance(found, PairExperts) and found.host_reason is None
    x, routing = rows_of(tokens, dtype), routed(tokens, count, top_k, skewed=skewed, weigh_inputs=weigh_inputs)
    sums = found.mixture(x.to(device), on(device, routing))
    assert sums.dtype == torch.float32
    close(sums.cpu(), reference.mixture(x.float(), routing), tolerance(scheme, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_matches_the_reference(scheme, dtype, device, close):
    check(scheme, 4, 2, 5, dtype, device, close, bias=dtype == torch.float16)


@pytest.mark.parametrize(
    ("count", "top_k", "tokens", "skewed"),
    [(1, 1, 1, False), (1, 1, 65, False), (8, 2, 65, False), (8, 1, 65, True), (8, 8, 1, False), (60, 4, 7, True)]
    + [(128, 8, 1, False), (128, 2, 7, False)],
)
@pytest.mark.parametrize("scheme", ["floats", "w4a16", "w8a8"])
def test_any_number_of_experts_and_tokens(scheme, count, top_k, tokens, skewed, device, close):
    if scheme != "floats" and (count, tokens) == (8, 65) and not skewed:
        pytest.skip("half a minute in the interpreter")
    check(scheme, count, top_k, tokens, torch.float16, device, close, skewed=skewed)


@pytest.mark.parametrize("kinds", [("w4a16", "w8a16"), ("w8a8", "floats")])
def test_both_products_may_have_weights_of_different_kinds(kinds, device, close):
    check("w8a8", 4, 2, 7, torch.float16, device, close, kinds=kinds)


def test_inputs_may_be_weighted_instead_of_outputs(device, close):
    check("w4a16", 4, 2, 5, torch.float16, device, close, weigh_inputs=True)


def test_a_gate_that_torch_computes_and_biases(device, close):
    check("w4a16", 4, 2, 3, torch.float16, device, close, act="clamped_swiglu", bias=True)
    check("floats", 4, 2, 3, torch.float16, device, close, act="clamped_swiglu", bias=True)


@pytest.mark.parametrize(("bits", "mean"), [(4, 20), (4, 65), (8, 130)])
def test_blocks_of_many_rows(bits, mean, device, close, monkeypatch):
    """The launches of each bucket, with a few rows."""
    monkeypatch.setattr(experts, "mean_rows", lambda routed: mean)
    check(f"w{bits}a16", 3, 2, 5, torch.bfloat16, device, close)


@pytest.mark.parametrize("mean", [20, 100, 300])
def test_blocks_of_many_rows_of_integers_and_floats(mean, device, close, monkeypatch):
    monkeypatch.setattr(experts, "mean_rows", lambda routed: mean)
    for scheme in ("w8a8", "floats", "mxfp4"):
        check(scheme, 3, 2, 5, torch.float16, device, close)


def test_experts_without_gates(device, close):
    for scheme in ("floats", "w4a16", "w8a8"):
        check(scheme, 4, 2, 7, torch.float16, device, close, act="relu2", gated=False)


def test_no_token_gives_no_row(device):
    layers, _ = make_experts("w4a16", 4, torch.float16, device)
    found = experts.prepare(layers, ExpertsProblem(torch.float16, device.type))
    routing = on(device, routed(0, 4, 2))
    assert found.mixture(rows_of(0, torch.float16).to(device), routing).shape == (0, HIDDEN)


@pytest.mark.parametrize(("start", "count"), [(0, 60), (20, 20), (59, 1)])
@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize(("tokens", "skewed"), [(1, False), (65, False), (65, True)])
def test_pairs_are_sorted_into_blocks_of_one_expert(tokens, skewed, rows, start, count, device):
    selected = routed(tokens, 60, 4, skewed=skewed).selected
    blocks = experts.sort_pairs(selected.to(device), start, count, rows)
    assert blocks.pairs.shape == (experts.most_blocks(4 * tokens, count, rows), rows)
    flat, places, numbers = selected.flatten(), blocks.pairs.cpu(), blocks.experts.cpu().tolist()
    for expert in range(count):
        wanted = (flat == start + expert).nonzero().flatten().int()
        own = [places[number] for number, each in enumerate(numbers) if each == expert]
        assert len(own) == -(-len(wanted) // rows)
        found = torch.cat([torch.empty(0, dtype=torch.int32), *own])
        assert torch.equal(found[: len(wanted)], wanted), "ascending"
        assert (found[len(wanted) :] == len(flat)).all()
    used = sum(number >= 0 for number in numbers)
    assert numbers == sorted(numbers[:used]) + [-1] * (len(numbers) - used)


@pytest.mark.parametrize("rows", [8, 16, 128])
def test_as_many_blocks_as_the_worst_routing_needs(rows):
    for pairs, count in ((1, 1), (7, 60), (60, 7), (520, 128), (1000, 3)):
        alive = min(pairs, count)
        # All experts but one have a single pair, or a single pair more than some full blocks.
        full = (pairs - alive) // rows
        assert experts.most_blocks(pairs, count, rows) >= alive + full
        assert experts.most_blocks(pairs, count, rows) <= alive + full + 1


@pytest.mark.parametrize("scheme", ["floats", "w4a16", "w8a8"])
def test_a_token_does_not_depend_on_the_others(scheme, device):
    """On a GPU, and in the emulator, all bits are the same; in the interpreter numpy multiplies, where the place of a
    row in a tile matters."""
    tolerated = {"rtol": 2e-3, "atol": 2e-4} if INTERPRETED.value else {"rtol": 0, "atol": 0}
    layers, _ = make_experts(scheme, 4, torch.float16, device)
    found = experts.prepare(layers, ExpertsProblem(torch.float16, device.type))
    x, routing = rows_of(4, torch.float16).to(device), on(device, routed(4, 4, 2))
    together = found.mixture(x, routing)
    for token in (0, 3):
        one = replace(routing, selected=routing.selected[token : token + 1], weights=routing.weights[token : token + 1])
        alone = found.mixture(x[token : token + 1], one)
        assert torch.allclose(alone, together[token : token + 1], **tolerated)
    assert torch.equal(found.mixture(x, routing), together)


class Ranks:
    """All ranks in one process: the sum of what each hands in, which is known after the first of two turns."""

    def __init__(self, size: int, rank: int, handed: list[list[Tensor]], turn: int) -> None:
        self.size, self.rank, self._handed, self._turn, self._calls = size, rank, handed, turn, 0

    def sum(self, x: Tensor) -> Tensor:
        if self._turn == 0:
            self._handed.append(x.clone())
            return x
        return sum(self._handed[1:], self._handed[0])


@pytest.mark.parametrize(("count", "size"), [(8, 2), (5, 4), (2, 3)])
@pytest.mark.parametrize("kind", [ShardedExperts, SummedExperts])
@pytest.mark.parametrize("looped", [False, True], ids=["together", "one by one"])
def test_experts_of_ranks(kind, count, size, looped, device, close):
    """Also ranks without experts; with gathered rows every rank has the bits of a single process."""
    layers, _ = make_experts("floats", count, torch.float16, device)
    problem = ExpertsProblem(torch.float16, device.type)
    x, routing = rows_of(3, torch.float16).to(device), on(device, routed(3, count, 2))
    wanted = experts.prepare(layers, problem).mixture(x, routing)
    bounds, handed = shares(count, size), []
    for turn in range(2):
        for rank in range(size):
            first, end = bounds[rank : rank + 2]
            own = ExpertLayers(layers.first[first:end], layers.second[first:end], layers.act, 1, first)
            mine = experts.LoopedExperts(own, "asked") if looped else experts.prepare(own, problem)
            assert isinstance(mine, PairExperts) and (looped or end == first or mine.host_reason is None)
            found = kind(mine, bounds, Ranks(size, rank, handed, turn), HIDDEN).mixture(x, routing)
        if turn == 1:
            assert len(handed) == size
            close(found, wanted, 1e-3)
            if kind is ShardedExperts and not looped:
                assert torch.equal(found, wanted)


#: Everything that selects experts, with the number of them and how many groups they are in.
ROUTINGS = {
    "softmax": SoftmaxRouting(4, normalize=True),
    "softmax in groups": SoftmaxRouting(4, normalize=False, scale=2.0, groups=(4, 2)),
    "sigmoid": SigmoidRouting(4, True, 2.5, TorchActivation(torch.sigmoid), torch.zeros(16), (4, 2)),
    "top sigmoid": TopSigmoidRouting(1, TorchActivation(torch.sigmoid)),
    "sparse mixer": SparseMixerRouting(0.01),
}


@pytest.fixture
def launches(monkeypatch) -> list[str]:
    """The names of kernels that are launched from now on, which do not run."""
    names: list[str] = []

    def launch(function, grid):
        assert all(isinstance(size, int) and size > 0 for size in grid)
        return lambda *arguments, **options: names.append(function.fn.__name__)

    monkeypatch.setattr(type(experts_kernel.experts_count_kernel), "__getitem__", launch)
    return names


def without_values(mixture: ExpertLayers, **changes) -> SparseMLP:
    """A layer whose tensors have shapes and no values: whatever reads one of them raises."""

    def moved(layer):
        made = copy.copy(layer)
        for name, value in vars(layer).items():
            if isinstance(value, Tensor):
                setattr(made, name, value.to("meta"))
        return made

    own = replace(
        mixture, first=[moved(each) for each in mixture.first], second=[moved(each) for each in mixture.second]
    )
    found = experts.prepare(own, ExpertsProblem(torch.float16, "cuda"))
    router = TorchDense(torch.empty(16, HIDDEN, dtype=torch.float16, device="meta"))
    return SparseMLP(router, found, 16, SoftmaxRouting(2, True), **changes)


def rows_without_values(tokens: int) -> Tensor:
    return torch.empty(tokens, HIDDEN, dtype=torch.float16, device="meta")


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("scheme", ["floats", "w4a16", "w8a8"])
def test_the_host_reads_nothing_in_a_layer(scheme, routing, launches):
    layers, _ = make_experts(scheme, 16, torch.float16, torch.device("cpu"))
    shared = TorchDense(rows_without_values(HIDDEN))
    mixture = without_values(layers, shared=shared, shared_gate=TorchDense(rows_without_values(1)))
    mixture.weigh_inputs = routing == "top sigmoid"
    mixture.routing = ROUTINGS[routing]
    if routing == "sigmoid":
        mixture.routing = replace(ROUTINGS[routing], correction=torch.zeros(16, device="meta"))
    for tokens in (1, 33):
        launches.clear()
        assert mixture(rows_without_values(tokens)).shape == (tokens, HIDDEN)
        # Sort, two products, the activation function, the sum, and what prepares inputs: not one launch per expert.
        assert {"experts_count_kernel", "experts_place_kernel", "experts_sum_kernel"} <= set(launches)
        assert 6 <= len(launches) <= 7


@pytest.mark.parametrize("kind", [ShardedExperts, SummedExperts])
def test_the_host_reads_nothing_on_a_rank(kind, launches):
    layers, _ = make_experts("w4a16", 16, torch.float16, torch.device("cpu"))
    mixture = without_values(replace(layers, first=layers.first[4:8], second=layers.second[4:8], start=4))
    mixture.experts = kind(mixture.experts, [0, 4, 8, 12, 16], Ranks(4, 1, [], 0), HIDDEN)
    assert mixture.experts.host_reason is None
    assert mixture(rows_without_values(5)).shape == (5, HIDDEN)
    assert len(launches) == 7


def test_a_loop_over_experts_reads_what_has_no_value(launches):
    layers, _ = make_experts("floats", 16, torch.float16, torch.device("cpu"))
    mixture = without_values(layers)
    mixture.experts = experts.LoopedExperts(layers, "asked")
    with pytest.raises((NotImplementedError, RuntimeError), match="[Mm]eta"):
        mixture(rows_without_values(5))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("order", "their inputs are stored in an order of their own (act-order)"),
        ("groups", "their weights are not alike"),
        ("static", "their activations have stored scales"),
        ("rotated", "no kernel computes their layers (RotatedLinear) together"),
        ("narrow", "72 inputs are no multiple of 16"),
    ],
)
def test_other_experts_say_why_the_host_counts(change, reason, device, close):
    scheme = {"static": "w8a8", "narrow": "floats"}.get(change, "w4a16")
    layers, reference = make_experts(scheme, 4, torch.float16, device)
    first = list(layers.first)
    if change == "order":
        first[0] = replace(first[0], perm=torch.arange(HIDDEN, dtype=torch.int32, device=device))
    elif change == "groups":
        first[1] = make_layer("w8a16", 2 * WIDTH, HIDDEN, torch.float16, device, 2, False)[0]
    elif change == "static":
        first[0] = replace(first[0], input_scale=torch.ones(1, device=device))
    elif change == "rotated":
        first[0] = RotatedLinear(first[0])
    else:
        first = [TorchDense(torch.zeros(8, 72, device=device)) for _ in first]
    found = experts.prepare(replace(layers, first=first), ExpertsProblem(torch.float16, device.type))
    assert found.host_reason == f"experts run one after the other, because {reason}"
    if change == "order":
        routing = routed(3, 4, 2, skewed=True)
        sums = found.mixture(rows_of(3, torch.float16).to(device), on(device, routing)).cpu()
        close(sums, reference.mixture(rows_of(3, torch.float16).float(), routing), 2e-3)


def test_layers_share_memory_with_the_product(device):
    layers, _ = make_experts("w4a16", 4, torch.float16, device)
    before = layers.first[2].words.clone()
    experts.prepare(layers, ExpertsProblem(torch.float16, device.type))
    storages = {layer.words.untyped_storage().data_ptr() for layer in layers.first}
    assert len(storages) == 1 and torch.equal(layers.first[2].words, before)
