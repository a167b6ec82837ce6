"""Smoothing: planted outliers cost little, the searched strength is the best of those tried, stored scales fit."""

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
from aiakq.quantizers.transforms import smooth_quant
from aiakq.rounding.integers import round_activations


class Block(nn.Module):
    """Attention without heads and a gated MLP; two channels of each norm are a hundred times louder than the rest."""

    def __init__(self, loud: float = 100.0) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(0)
        self.norm, self.norm2 = nn.LayerNorm(64), nn.LayerNorm(64)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate", "up", "down"):
            linear = nn.Linear(64, 64, bias=False)
            linear.weight.data.copy_(torch.randn(64, 64, generator=make) / 8)
            self.add_module(name, linear)
        for norm, readers in ((self.norm, "qkv"), (self.norm2, ("gate", "up"))):
            norm.weight.data[5::32] = loud
            for reader in readers:
                linear = self.get_submodule(reader if len(reader) > 1 else f"{reader}_proj")
                linear.weight.data[:, 5::32] /= loud  # type: ignore[operator, union-attr]

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        scores = torch.softmax(self.q_proj(h) @ self.k_proj(h).transpose(1, 2) / 8, dim=-1)
        x = x + self.o_proj(scores @ self.v_proj(h))
        h = self.norm2(x)
        return x + self.down(torch.sigmoid(self.gate(h)) * self.up(h))


MAPPINGS = (
    SmoothMapping("norm", ("q_proj", "k_proj", "v_proj"), ""),
    SmoothMapping("v_proj", ("o_proj",), "o_proj"),
    SmoothMapping("norm2", ("gate", "up"), ""),
    SmoothMapping("up", ("down",), "down"),
)
GROUPS = [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate", "up"), ("down",)]


def inputs() -> Tensor:
    return torch.randn(2, 48, 64, generator=torch.Generator().manual_seed(1))


def quantize(mappings: tuple[SmoothMapping, ...] = MAPPINGS, **fields: Any) -> DecoderBlock:
    hidden = Activations([inputs()], {(2, 48): [Call((), {})]}, torch.device("cpu"))
    options = QuantizeOptions("a", "b", "smooth_quant", **fields)
    plan = BlockPlan(options.spec("1"), torch.float32, torch.float32, Heads(1, 1))
    block = Block()
    for parameter in block.parameters():
        parameter.requires_grad_(False)
    found = DecoderBlock(block, 0, "block", plan, list(GROUPS), hidden, mappings=mappings)
    with torch.no_grad():
        quantize_block(options.resolved_recipe.for_model("llama"), found)
    return found


def error(block: DecoderBlock) -> float:
    """Of the block's output, relative; the inputs of its linears are rounded by what ``finish`` put there."""
    with torch.no_grad():
        wanted = Block()(inputs())
        return float((block.module(inputs()) - wanted).norm() / (wanted - inputs()).norm())


def test_planted_outliers_cost_little() -> None:
    plain = error(quantize(mappings=()))
    assert plain > 0.05
    assert error(quantize()) < 0.2 * plain
    assert error(quantize(smooth_alpha="auto")) < 0.2 * plain


def test_the_searched_strength_is_the_best_of_those_tried() -> None:
    """One mapping alone: the error of the block is what the search minimizes, up to the other linears' rounding."""
    block = quantize(smooth_alpha="auto")
    chosen = {
        name: block.result.remarks[name]["alpha"] for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate", "up")
    }
    assert chosen["q_proj"] == chosen["k_proj"] == chosen["v_proj"] != "none"
    errors: dict[Any, float] = {}
    usual = smooth_quant._w8a8_error

    def note(block: DecoderBlock, mapping: SmoothMapping, *rest: Any) -> float:
        value = usual(block, mapping, *rest)
        errors[mapping.smooth_layer, len([key for key in errors if key[0] == mapping.smooth_layer])] = value
        return value

    try:
        smooth_quant._w8a8_error = note
        block = quantize(smooth_alpha="auto")
    finally:
        smooth_quant._w8a8_error = usual
    for mapping in MAPPINGS:
        tried = [errors[mapping.smooth_layer, at] for at in range(len(smooth_quant.ALPHAS))]
        best = smooth_quant.ALPHAS[tried.index(min(tried))]
        assert block.result.remarks[mapping.balance_layers[0]]["alpha"] == ("none" if best is None else best)


def test_stored_activation_scales_are_shared_and_cover_the_largest_input() -> None:
    block = quantize(activation_scales="tensor", scale_search="minmax")
    stored = {name: float(weight.input_scale or 0) for name, weight in block.result.finished.items()}
    assert stored["q_proj"] == stored["k_proj"] == stored["v_proj"]
    assert stored["gate"] == stored["up"]
    with torch.no_grad():
        largest = float(block.module.norm(inputs()).abs().max())  # type: ignore[operator]
    assert stored["q_proj"] == pytest.approx(largest / 127, rel=1e-5)
    assert error(block) < 0.1


def test_a_searched_stored_scale_is_no_worse_and_clips_a_rare_outlier() -> None:
    whole = quantize(activation_scales="tensor", scale_search="minmax")
    searched = quantize(activation_scales="tensor")
    for name, weight in searched.result.finished.items():
        assert float(weight.input_scale or 0) <= float(whole.result.finished[name].input_scale or 0)
    assert error(searched) < 1.1 * error(whole)
    assert any(float(remark["clip"]) < 1 for remark in searched.result.remarks.values())


def test_gptq_after_smoothing_lowers_the_error_of_the_weights() -> None:
    """GPTQ lowers the part of an output's error that comes from the weights."""

    def weight_error(block: DecoderBlock) -> float:
        seen: list[Tensor] = []
        handle = block.module.norm2.register_forward_hook(lambda module, args, out: seen.append(out))
        with torch.no_grad():
            block.module(inputs())
        handle.remove()
        x = seen[0].reshape(-1, 64)
        return sum(
            float((x @ (block.weight(name) - block.result.originals[name]).T).square().sum()) for name in ("gate", "up")
        )

    rounded, compensated = quantize(), quantize(gptq=True)
    assert weight_error(compensated) < 0.8 * weight_error(rounded)
    assert set(compensated.result.finished) == set(rounded.result.finished)


def test_search_of_weight_ranges_lowers_the_error_of_the_weights() -> None:
    plain, searched = quantize(), quantize(scale_search="mse")
    for name, weight in plain.result.finished.items():
        assert bool((searched.result.finished[name].scales <= weight.scales).all())


@pytest.mark.parametrize("gptq", [False, True])
def test_stored_scales_are_published_and_served(gptq: bool, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    from aiakq.evaluation.scoring import load_for_scoring
    from aiakq.formats.checkpoint import Checkpoint
    from aiakq.quantizers.pipeline import quantize_checkpoint

    source = tiny_model("LlamaForCausalLM")
    options = QuantizeOptions(
        str(source), str(tmp_path / "out"), "smooth_quant", samples=16, seqlen=64, evaluate=False,
        activation_scales="tensor", gptq=gptq, smooth_alpha="auto",
    )  # fmt: skip
    quantize_checkpoint(options)
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert checkpoint.spec is not None and checkpoint.spec.static_input
    scales = {name: checkpoint.read_linear(name).input_scale for name in checkpoint.quantized_linears()}
    assert len({float(scales[f"model.layers.0.self_attn.{part}_proj"]) for part in "qkv"}) == 1  # type: ignore[arg-type]
    ids = torch.randint(3, 250, (1, 40), generator=torch.Generator().manual_seed(0))
    wanted = load_for_scoring(source, "float32", "cpu").logits(ids)
    got = load_for_scoring(tmp_path / "out", "float32", "cpu").logits(ids)
    assert float((got - wanted).norm() / wanted.norm()) < 0.6  # random weights amplify errors


def test_rounded_activations_in_place_are_what_they_were() -> None:
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    kept = x.clone()
    scale = x.abs().amax(-1, keepdim=True) / 127
    assert torch.equal(round_activations(x), torch.round(x / scale).clamp(-128, 127) * scale)
    assert torch.equal(x, kept)
