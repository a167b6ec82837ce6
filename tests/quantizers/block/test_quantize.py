"""A recipe applied to a block: transforms in order, then the rounder, and undone if a transform made it worse."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aiakq.quantizers.block.decoder_block import BlockPart, BlockPlan, DecoderBlock
from aiakq.quantizers.block.quantize import quantize_block
from aiakq.quantizers.model.activations import Activations, Call
from aiakq.quantizers.model.groups import Heads, SmoothMapping
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.recipe import Recipe, Rounder, Transform
from aiakq.quantizers.rounders.rtn import Rtn

MAPPING = SmoothMapping("norm", ("up",), "up")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(0)
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        for linear in (self.up, self.down):
            linear.weight.data.copy_(torch.randn(64, 64, generator=make) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def decoder_block() -> DecoderBlock:
    hidden = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(1))
    inputs = Activations([hidden], {(2, 32): [Call((), {})]}, torch.device("cpu"))
    spec = QuantizeOptions("in", "out", "awq", group_size=32).spec("1")
    plan = BlockPlan(spec, torch.float32, torch.float16, Heads(1, 1))
    module = Mlp().requires_grad_(False)
    return DecoderBlock(module, 0, "block", plan, [("up",), ("down",)], inputs, mappings=(MAPPING,))


@dataclass(frozen=True)
class Doubling(Transform):
    """Folds a scale of 2, and may ask for the block to be restored."""

    worse: bool = False

    name = "doubling"
    folds = True

    def apply(self, block: DecoderBlock, part: BlockPart) -> None:
        for mapping in part.mappings:
            block.fold(mapping, torch.full((64,), 2.0))

    def guard(self, block: DecoderBlock) -> Callable[[], str | None]:
        return lambda: "doubling gave nothing" if self.worse else None


@dataclass(frozen=True)
class Once(Rounder):
    """Rounds to nearest, but cannot start over."""

    name = "once"

    def round(self, block: DecoderBlock, part: BlockPart) -> None:
        Rtn().round(block, part)


def codes(block: DecoderBlock) -> dict[str, Any]:
    return {name: weight.codes for name, weight in block.result.finished.items()}


def test_transforms_run_before_the_rounder() -> None:
    block = decoder_block()
    weight = block.weight("up").clone()
    quantize_block(Recipe((Doubling(),), Rtn()), block)
    assert torch.equal(block.result.originals["up"], 2 * weight)
    assert torch.equal(block.folder.columns["up"], torch.full((64,), 2.0))
    assert torch.equal(block.folder.changed["norm.weight"], torch.full((64,), 0.5))
    assert block.result.remarks["up"] == {"scaled": "by 2 to 2"}


def test_factors_of_two_folds_are_multiplied() -> None:
    block = decoder_block()
    for _ in range(2):
        block.fold(MAPPING, torch.full((64,), 2.0))
    assert torch.equal(block.folder.columns["up"], torch.full((64,), 4.0))
    assert not block.folder.rows, "norms have no adapters"


def test_a_block_that_a_transform_made_worse_is_restored_and_rounded_again() -> None:
    block, plain = decoder_block(), decoder_block()
    quantize_block(Recipe((), Rtn()), plain)
    quantize_block(Recipe((Doubling(worse=True),), Rtn()), block)
    assert not block.folder.changed and not block.folder.columns
    assert all(torch.equal(found, codes(plain)[name]) for name, found in codes(block).items())
    assert block.result.warnings == ["block was quantized without doubling: doubling gave nothing on a sample."]
    assert block.result.remarks["up"] == {"doubling": "not applied"}


def test_a_rounder_that_cannot_be_repeated_keeps_the_folded_scales() -> None:
    block = decoder_block()
    quantize_block(Recipe((Doubling(worse=True),), Once()), block)
    assert block.folder.changed and not block.result.warnings
