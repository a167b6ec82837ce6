"""AWQ: both searches include the identity and find planted scales, and no block is worse than with plain rounding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiakq.quantizers.block.decoder_block import BlockPlan, DecoderBlock
from aiakq.quantizers.block.quantize import quantize_block
from aiakq.quantizers.model.activations import Activations, Call
from aiakq.quantizers.model.groups import Heads, SmoothMapping
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.transforms import awq
from aiakq.rounding.integers import grouped, round_weight, rounded_weight


def test_the_grid_is_the_published_one_with_both_ends_and_begins_with_doing_nothing() -> None:
    make = torch.Generator().manual_seed(0)
    activations, weights = torch.rand(64, generator=make), torch.rand(64, generator=make)
    coarse = list(awq.coarse_grid())
    assert torch.equal(coarse[0].scales(activations, weights), torch.ones(64))
    assert {(c.step, c.weights) for c in coarse} == {(r, True) for r in range(0, 21, 2)} | {
        (r, False) for r in range(0, 21, 2)
    }
    assert {c.step for c in awq.finer(awq.Candidate(20, True))} == {19}
    assert {c.step for c in awq.finer(awq.Candidate(4, False))} == {3, 5}
    for candidate in coarse:
        scales = candidate.scales(activations, weights)
        ratio = candidate.step / 20
        wanted = activations**ratio / (weights ** (1 - ratio) + 1e-4 if candidate.weights else 1)
        wanted = wanted.clamp(min=1e-4)
        assert torch.allclose(scales, wanted / (wanted.max() * wanted.min()).sqrt(), rtol=1e-5)


def test_the_grid_is_finite_for_dead_channels() -> None:
    for activations in (torch.zeros(8), torch.tensor([0.0, 1, 0, 1, 0, 1, 1e-30, 1e30])):
        for candidate in awq.coarse_grid():
            scales = candidate.scales(activations, torch.zeros(8))
            assert bool((scales > 0).all()) and bool(torch.isfinite(scales).all())


def test_the_scale_search_refines_the_coarse_grid() -> None:
    """A loss with its lowest point at r = 0.35, which only the finer points reach; NaN never wins."""
    activations, weights = torch.linspace(0.1, 2, 16), torch.linspace(1, 0.5, 16) ** 3
    goal = awq.Candidate(7, False).scales(activations, weights)

    def loss(scales: Tensor) -> float:
        return float((scales - goal).square().sum())

    best, scales, lowest, identity = awq.best_scales(activations, weights, loss)
    assert best == awq.Candidate(7, False)
    assert lowest == 0.0 < identity
    assert torch.equal(scales, goal)
    best, scales, _, _ = awq.best_scales(activations, weights, lambda scales: float("nan"))
    assert best == awq.IDENTITY
    assert torch.equal(scales, torch.ones(16))


class Block(nn.Module):
    """A norm and what reads it, all at once, as in blocks with parallel attention; ``loud`` inputs stand out."""

    def __init__(self, loud: float = 30.0) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(0)
        self.norm = nn.LayerNorm(64)
        self.q_proj, self.gate, self.up = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.down = nn.Linear(64, 64, bias=False)
        with torch.no_grad():
            for linear in (self.q_proj, self.gate, self.up, self.down):
                linear.weight.copy_(torch.randn(64, 64, generator=make) * 0.1)
            self.norm.weight[5] = loud

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.q_proj(h) + self.down(torch.tanh(self.gate(h)) * self.up(h))


MAPPINGS = (SmoothMapping("norm", ("q_proj", "gate", "up"), ""), SmoothMapping("up", ("down",), "down"))


def options(**fields: Any) -> QuantizeOptions:
    return QuantizeOptions("a", "b", "awq", group_size=32, **fields)


def decoder_block(block: nn.Module, mappings: tuple[SmoothMapping, ...] = MAPPINGS, **fields: Any) -> DecoderBlock:
    make = torch.Generator().manual_seed(1)
    inputs = Activations([torch.randn(2, 64, 64, generator=make)], {(2, 64): [Call((), {})]}, torch.device("cpu"))
    plan = BlockPlan(options(**fields).spec("1"), torch.float32, torch.float16, Heads(1, 1))
    groups = [("q_proj", "gate", "up"), ("down",)]
    for parameter in block.parameters():
        parameter.requires_grad_(False)
    return DecoderBlock(block, 0, "block", plan, groups, inputs, mappings=mappings)


def quantized(**fields: Any) -> DecoderBlock:
    found = decoder_block(Block(), **fields)
    quantize_block(options(**fields).resolved_recipe, found)
    return found


def rounded_to_nearest(**fields: Any) -> DecoderBlock:
    found = decoder_block(Block(), **fields)
    for name in found.linears:
        found.finish(name, found.rtn(name))
    return found


def block_error(block: nn.Module) -> float:
    x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return float((block(x) - Block()(x)).square().sum())


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_rescue_a_channel_that_matters_in_a_block_with_parallel_attention(bits: int) -> None:
    """One input channel is thirty times louder, and the parent of what reads it is the block itself."""
    found = quantized(bits=bits)
    assert found.plan.spec.symmetric == (bits == 8)
    plain = rounded_to_nearest(bits=bits)
    assert block_error(found.module) < 0.5 * block_error(plain.module)
    assert not found.result.warnings
    assert float(found.result.remarks["gate"]["gain"]) > 0.3
    assert set(found.folder.changed) == {"norm.weight", "norm.bias"}


def test_a_block_that_awq_makes_worse_is_quantized_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awq.Candidate, "scales", lambda self, x, w: torch.linspace(1e-3, 1e3, len(x)))
    found, plain = quantized(targets="own"), rounded_to_nearest()
    assert "was quantized without awq" in found.result.warnings[0]
    assert not found.folder.changed
    for name, weight in plain.result.finished.items():
        assert torch.equal(weight.codes, found.result.finished[name].codes)
        assert torch.equal(weight.scales, found.result.finished[name].scales)
        assert found.result.remarks[name] == {"awq": "not applied"}
    state = plain.module.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in found.module.state_dict().items())


def test_minmax_uses_full_ranges() -> None:
    found = quantized(scale_search="minmax")
    for name, weight in found.result.finished.items():
        reference = found.result.originals[name]
        assert torch.equal(weight.scales, round_weight(reference, 4, 32, False, torch.float16)[1])


def test_awq_without_clip_only_folds_scales() -> None:
    folded = decoder_block(Block())
    awq.Awq(clip=False).apply(folded, folded.whole)
    columns = folded.folder.columns
    assert not folded.clip
    assert set(columns) == {"q_proj", "gate", "up", "down"}
    assert not folded.result.finished
    assert float(columns["gate"][5]) > 2
    assert block_error(folded.module) < 1e-6


def test_rounded_weight_equals_quantize_and_dequantize() -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    columns = torch.rand(64, generator=torch.Generator().manual_seed(1)) + 0.5
    codes, scales, zeros = round_weight(weight * columns, 4, 32, False, torch.float16)
    wanted = ((grouped(codes.float(), 32) - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)).flatten(1) / columns
    assert torch.equal(rounded_weight(weight, 4, 32, False, torch.float16, columns), wanted)


def test_a_sample_is_truncated_only_if_module_outputs_stay_the_same() -> None:
    from aiakq.quantizers.model import module_calls

    class Mixing(Block):
        """Sequences of a batch see each other: a cut call would answer otherwise."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + x.mean(0, keepdim=True))

    kept = module_calls.SAMPLE_TOKENS
    try:
        module_calls.SAMPLE_TOKENS = 64
        cut = decoder_block(Block()).inputs.record_calls(["", "down"])
        whole = decoder_block(Mixing()).inputs.record_calls([""])
    finally:
        module_calls.SAMPLE_TOKENS = kept
    assert cut[""][0].output.shape == (1, 64, 64)
    assert cut["down"][0].args[0].shape == (1, 64, 64)
    assert whole[""][0].output.shape == (2, 64, 64)


@pytest.mark.parametrize("bits", [4, 8])
def test_both_bit_widths_are_published(bits: int, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    from aiakq.formats.checkpoint import Checkpoint
    from aiakq.quantizers.pipeline import quantize_checkpoint

    options = QuantizeOptions(
        str(tiny_model("LlamaForCausalLM")), str(tmp_path / "out"), "awq", bits=bits, group_size=32, samples=4,
        seqlen=32, evaluate=False,
    )  # fmt: skip
    report = quantize_checkpoint(options)
    spec = Checkpoint.open(tmp_path / "out").spec
    assert spec is not None
    assert (spec.bits, spec.format) == (bits, "awq" if bits == 4 else "compressed-tensors")
    assert report.mean_error is not None and report.mean_error < (0.2 if bits == 4 else 0.01)
