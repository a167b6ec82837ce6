"""Targets of the original model: their moments against the definition, and what they do to the output of a block."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiakq import formats
from aiakq.errors import AiakqError
from aiakq.quantizers.block.decoder_block import BlockPlan, DecoderBlock
from aiakq.quantizers.block.original import OriginalBlock, OriginalModel, batch_step
from aiakq.quantizers.block.quantize import quantize_block
from aiakq.quantizers.model.activations import Activations, Call
from aiakq.quantizers.model.experts import Experts
from aiakq.quantizers.model.groups import Heads
from aiakq.quantizers.model.residuals import Residual, find_residuals
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.recipe import Component, Recipe, load_rounder
from aiakq.quantizers.rounders.targets import OriginalTargets
from aiakq.quantizers.workers.worker_group import FirstWorker


class Block(nn.Module):
    """A norm, a linear and another one, whose output is added to the input."""

    def __init__(self, multiplier: float = 1.0, width: int = 64) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(0)
        self.multiplier = multiplier
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, width, bias=False), nn.Linear(width, 64)
        for linear in (self.up, self.down):
            linear.weight.data.copy_(torch.randn(linear.weight.shape, generator=make) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.multiplier * self.down(torch.tanh(self.up(self.norm(x))))


def decoder_block(options: QuantizeOptions, index: int = 1, width: int = 64, multiplier: float = 1.0) -> DecoderBlock:
    make = torch.Generator().manual_seed(1)
    hidden = [torch.randn(2, 64, 64, generator=make) for _ in range(4)]
    calls = {(2, 64): [Call((), {})] * (index + 1)}
    device = torch.device("cpu")
    other = Activations([x + 0.2 * torch.roll(x, 1, dims=-1) for x in hidden], calls, device)
    plan = BlockPlan(options.spec("1"), torch.float32, torch.float16, Heads(1, 1))
    inputs = Activations(hidden, calls, device)
    blocks = [Block(multiplier, width), Block(multiplier, width)]
    for block in blocks:
        block.requires_grad_(False)
    found = find_residuals(blocks[1], lambda: blocks[1](hidden[0]))
    assert found == {"down": Residual("", multiplier, 1.0)}
    groups = [("up",), ("down",)]
    return DecoderBlock(blocks[0], index, "block", plan, groups, inputs, OriginalBlock(blocks[1], other, found))


def options(**fields: Any) -> QuantizeOptions:
    return QuantizeOptions("a", "b", "gptq", group_size=32, **{"bits": 3, **fields})


def states(block: DecoderBlock) -> tuple[list[Tensor], list[Tensor]]:
    assert block.original is not None
    return list(map(block.inputs.activations.hidden.__getitem__, range(4))), [
        block.original.inputs.hidden[batch] for batch in range(4)
    ]


@pytest.mark.parametrize("width", [64, 160])
@pytest.mark.parametrize("multiplier", [1.0, 0.25])
@torch.no_grad()
def test_shift_and_drift_match_their_definitions(multiplier: float, width: int) -> None:
    found = decoder_block(options(), width=width, multiplier=multiplier)
    assert found.original is not None
    module: Any = found.module
    before, expected = states(found)
    columns = torch.linspace(0.5, 2, width)
    found.folder.columns["down"] = columns
    module.up.weight.mul_(0.9)  # as if rounded
    targets = OriginalTargets(found, 0.4, 0.7)
    up, down = targets.moments(("up",)), targets.moments(("down",))

    def inputs(block: Any, hidden: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        stream = torch.cat(hidden).flatten(0, 1)
        normed = block.norm(stream)
        return stream, normed, torch.tanh(block.up(normed))

    r, x, y = inputs(module, before)
    r2, x2, y2 = inputs(found.original.module, expected)
    assert torch.allclose(up.hessian, x.T @ x / len(x), atol=1e-5)
    assert torch.allclose(down.hessian, y.T @ y / len(y), atol=1e-5)
    moved = (y2 / columns - y) @ module.down.weight.T
    wanted = (0.4 * moved + 0.7 / multiplier * (r2 - r)).T @ y / len(y)
    assert down.shift is not None and down.drift is None
    assert torch.allclose(down.shift, wanted, atol=1e-5)
    drift = 0.4 * (x2 - x).T @ x / len(x)
    assert up.shift is None and up.drift is not None
    assert torch.allclose(up.drift, drift, atol=1e-5)


@torch.no_grad()
def test_the_pass_of_the_last_group_leaves_the_outputs_of_the_original_block() -> None:
    found = decoder_block(options())
    assert found.original is not None
    wanted = [found.original.module(hidden) for hidden in states(found)[1]]
    recipe = options().resolved_recipe
    quantize_block(recipe, found)
    assert found.original.advanced == {0, 1, 2, 3}
    found.original.advance(1)
    assert all(map(torch.equal, states(found)[1], wanted))


@torch.no_grad()
def test_equal_inputs_of_the_first_block_are_not_compared() -> None:
    found = decoder_block(options(), index=0)
    assert found.original is not None
    found.original.inputs.hidden = found.inputs.activations.hidden.copy()
    targets = OriginalTargets(found, 0.5, 0.5)
    up = targets.moments(("up",))
    assert up.drift is None and up.shift is None and not targets.replay._cached_inputs
    found.linears["up"].weight.mul_(0.9)
    assert targets.moments(("down",)).shift is not None


@pytest.mark.parametrize("fields", [{}, {"gptaq": True}, {"targets": "original"}, {"symmetric": False}])
def test_the_block_output_comes_closer_to_the_unquantized_model(fields: dict[str, Any]) -> None:
    def gap(**fields: Any) -> float:
        given = options(**fields)
        found = decoder_block(given)
        before, expected = states(found)
        assert found.original is not None
        with torch.no_grad():
            wanted = [found.original.module(hidden) for hidden in expected]
            quantize_block(given.resolved_recipe, found)
            got = [found.module(hidden) for hidden in before]
        return sum(float((a - b).square().sum()) for a, b in zip(got, wanted, strict=True))

    assert gap(**fields) < 0.8 * gap(**{**fields, "gptaq": False, "targets": "own"})


def test_tokens_that_are_missing_in_the_original_model_are_reported() -> None:
    found = decoder_block(options())
    assert found.original is not None
    found.original.inputs.hidden = type(found.original.inputs.hidden)(
        [torch.full((2, 64, 64), float("nan")) for _ in range(4)]
    )
    with torch.no_grad():
        quantize_block(options().resolved_recipe, found)
    assert [warning.partition(" was")[0] for warning in found.result.warnings] == ["block.up", "block.down"]


class Mixture(nn.Module):
    """Three experts, to which the sign of two channels routes the tokens; one of two experts per token."""

    def __init__(self) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(0)

        def expert() -> nn.Module:
            linear = nn.Linear(32, 32, bias=False)
            linear.weight.data.copy_(torch.randn(32, 32, generator=make) / 6)
            return nn.Sequential(linear)

        self.experts = Experts(expert() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 32)
        chosen = torch.stack([(rows[:, 0] > 0).long(), torch.full((len(rows),), 2)], dim=1)
        return x + self.experts(rows, chosen, torch.full(chosen.shape, 0.5)).view(x.shape)


@torch.no_grad()
def test_experts_compare_only_tokens_that_reach_them_in_both_models() -> None:
    make = torch.Generator().manual_seed(1)
    hidden = [torch.randn(4, 64, 32, generator=make) for _ in range(2)]
    changed = [x + 0.5 * torch.roll(x, 1, dims=-1) for x in hidden]
    calls = {(4, 64): [Call((), {})] * 2}
    modules = [Mixture().requires_grad_(False), Mixture().requires_grad_(False)]
    given = options()
    plan = BlockPlan(given.spec("1"), torch.float32, torch.float16, Heads(1, 1))
    device = torch.device("cpu")
    groups = [(f"experts.{number}.0",) for number in range(3)]
    original = OriginalBlock(modules[1], Activations(changed, calls, device))
    block = DecoderBlock(modules[0], 1, "block", plan, groups, Activations(hidden, calls, device), original)
    targets = OriginalTargets(block, 1.0, 1.0)
    x, y = (torch.cat(tensors).reshape(-1, 32) for tensors in (hidden, changed))
    for number in range(3):
        here, there = ((rows[:, 0] > 0) == number if number < 2 else rows[:, 0] < 99 for rows in (x, y))
        found = targets.moments((f"experts.{number}.0",))
        both = here & there
        assert 50 < int(both.sum()) and (number == 2 or int(both.sum()) < int(here.sum()))
        assert found.drift is not None
        assert torch.allclose(found.hessian, x[here].T @ x[here] / here.sum(), atol=1e-5)
        assert torch.allclose(found.drift, (y - x)[both].T @ x[both] / here.sum(), atol=1e-5)
    assert not block.result.warnings


def test_tokens_of_the_original_model_are_limited_by_the_widest_input() -> None:
    blocks = [Block(width=160)]
    assert batch_step(blocks, 160 * 16 * 3 + 5, 16) == 3
    assert batch_step(blocks, 160 * 16 * 3 + 5, 8) == 6
    assert batch_step(blocks, 100, 16) == 1
    assert batch_step(blocks, 10**9, 0) == 1
    assert batch_step([Mixture()], 10**9, 16) == 1


@pytest.mark.parametrize(("tokens", "batches"), [(0, [0, 1, 2, 3]), (2, [0]), (4, [0, 2]), (16, [0, 1, 2, 3])])
def test_a_recipe_says_on_how_many_tokens_the_original_model_runs(tokens: int, batches: list[int]) -> None:
    hidden = [torch.randn(2, 64, 64) for _ in range(4)]
    inputs = Activations(hidden, {(2, 64): [Call((), {})]}, torch.device("cpu"))
    rounder = load_rounder(Component("gptq", {"original_tokens": tokens}))
    assert OriginalModel([Block()], inputs, FirstWorker(), Recipe((), rounder)).inputs.here == batches


def test_2_bits_make_up_for_more_of_the_errors_given_enough_tokens() -> None:
    """The default at 2 bits, and at others with these parameters; fewer tokens have the codes of other widths."""

    def parameters(**fields: Any) -> tuple[Any, ...]:
        rounder = vars(options(**fields).resolved_recipe.rounder)
        return tuple(rounder[name] for name in ("alpha", "beta", "original_tokens", "enough_tokens"))

    assert parameters(bits=2) == (0.75, 0.75, 48, 32)
    assert parameters(bits=4) == parameters(bits=3) == (0.5, 0.5, 16, 0)

    def codes(tokens: float, **given: float) -> Tensor:
        found = decoder_block(options(bits=2))
        assert found.original is not None
        found.original.tokens_per_input = tokens
        rounder = load_rounder(Component("gptq", given))
        with torch.no_grad():
            quantize_block(Recipe((), rounder), found)
        return found.result.finished["down"].codes

    more = {"alpha": 0.75, "beta": 0.75, "enough_tokens": 32}
    assert torch.equal(codes(32, **more), codes(0, alpha=0.75, beta=0.75))
    assert torch.equal(codes(31.9, **more), codes(0))
    assert not torch.equal(codes(32, **more), codes(31.9, **more))


def test_the_original_model_says_how_many_tokens_an_input_has() -> None:
    inputs = Activations([torch.randn(2, 64, 64) for _ in range(4)], {(2, 64): [Call((), {})]}, torch.device("cpu"))
    for tokens, every in ((0, 1), (4, 2)):
        rounder = load_rounder(Component("gptq", {"original_tokens": tokens}))
        model = OriginalModel([Block()], inputs.copy(), FirstWorker(), Recipe((), rounder))
        found = model.block(Block(), 0, inputs)
        assert found.tokens_per_input == 512 / every / 64


def test_gptaq_is_another_name_of_the_targets_of_the_original_model() -> None:
    named = load_rounder(Component("gptaq", {"damp": 0.02}))
    assert named.document() == load_rounder(Component("gptq", {"damp": 0.02, "targets": "original"})).document()
    assert options(gptaq=True).resolved_recipe == options(targets="original").resolved_recipe
    for refused in (
        lambda: options(gptaq=True, targets="own"),
        lambda: load_rounder(Component("gptaq", {"targets": "own"})),
    ):
        with pytest.raises(AiakqError):
            refused()


def test_own_targets_need_no_original_model() -> None:
    assert options().resolved_recipe.needs_original
    assert not options(targets="own").resolved_recipe.needs_original


@pytest.mark.parametrize(("signed", "remark"), [(True, None), (False, "positive, as readers of gptq need them")])
def test_scales_are_positive_where_readers_need_them(
    signed: bool, remark: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats.load("gptq"), "SIGNED_SCALES", signed, raising=False)
    for given in (options(), options(targets="own")):
        found = decoder_block(given)
        with torch.no_grad():
            quantize_block(given.resolved_recipe, found)
        own = given.targets == "own"
        for name in ("up", "down"):
            negative = found.result.finished[name].scales < 0
            assert bool(negative.any()) == (signed and not own)
            assert found.result.remarks[name].get("scales") == (None if own else remark)


def test_rounding_to_nearest_with_a_search_uses_both_signs() -> None:
    found = decoder_block(options())
    codes, scales, _ = found.rtn_searched("up", near=False, signed=True)
    assert 0 < int((scales < 0).sum()) < scales.numel()
    for positive in ({"near": True, "signed": True}, {"near": False}):
        assert bool((found.rtn_searched("up", **positive)[1] > 0).all())


def test_8_bits_have_their_own_outputs_as_targets_unless_asked() -> None:
    def targets(method: str = "gptq", **fields: Any) -> Any:
        return vars(QuantizeOptions("a", "b", method, **fields).resolved_recipe.rounder)["targets"]

    assert (
        targets() == targets(bits=3) == targets(bits=8, gptaq=True) == targets(bits=8, targets="original") == "original"
    )
    assert targets(bits=8) == targets("smooth_quant", gptq=True) == "own"
    assert targets("smooth_quant", gptq=True, targets="original") == "original"
