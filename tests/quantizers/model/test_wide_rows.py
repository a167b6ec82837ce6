"""Blocks of Gemma 3n, called with all hidden states of a token in one row, and by their model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from aiakq.formats.checkpoint import Checkpoint
from aiakq.quantizers.model.groups import block_linears, gates
from aiakq.quantizers.model.outer_layers import capture, finish, load_outside
from aiakq.quantizers.model.source import SourceModel
from aiakq.quantizers.model.wide_rows import apart, side_by_side, states_of


def source_of(folder: Path) -> SourceModel:
    return SourceModel(Checkpoint.open(folder), None, torch.device("cpu"), False)


def test_blocks_one_by_one_compute_what_the_model_does(tiny_model: Callable[..., Path]) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_model("Gemma3nForCausalLM")
    model = source_of(folder)
    assert model.hidden_width == 3 * 128 and {states_of(block) for block in model.blocks} == {3}
    ids = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(0))
    inputs = capture(model, [ids], lambda _: None)
    assert inputs.hidden.shapes == [(2, 40, 3 * 128)]
    for index, block in enumerate(model.blocks):
        model.load(block, model.block_prefix(index))
        inputs.advance(block, index)
    load_outside(model)
    found = finish(model, ids, inputs.hidden[0], inputs.outputs)
    with torch.inference_mode():
        whole = model.model(input_ids=ids, use_cache=False).logits  # the model calls its blocks itself
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(input_ids=ids).logits
    assert float((found - expected).abs().max()) < 1e-4 and float((whole - expected).abs().max()) < 1e-4


def test_hidden_states_lie_side_by_side(tiny_model: Callable[..., Path]) -> None:
    block = source_of(tiny_model("Gemma3nForCausalLM")).blocks[0]
    states = torch.arange(3 * 2 * 4 * 128.0).view(3, 2, 4, 128)
    wide = side_by_side(states, block)
    assert torch.equal(wide[1, 2, 128:256], states[1, 1, 2]) and torch.equal(apart(wide, block), states)
    other = source_of(tiny_model("LlamaForCausalLM")).blocks[0]
    assert side_by_side(wide, other) is wide and apart(wide, other) is wide


def test_coefficients_of_hidden_states_stay_unquantized(tiny_model: Callable[..., Path]) -> None:
    block = source_of(tiny_model("Gemma3nForCausalLM")).blocks[0]
    assert gates(block) == [f"altup.{name}" for name in ("correction_coefs", "modality_router", "prediction_coefs")]
    assert "laurel.linear_left" in block_linears(block) and "per_layer_projection" in block_linears(block)
