"""Blocks that read of tokens more than hidden states: Gemma 4's inputs of layers, and keys of earlier blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from aiakq.errors import AiakqError
from aiakq.quantizers.model.activations import Activations, Call, HiddenStates
from aiakq.quantizers.model.blockwise import BlockwiseCheckpoint
from aiakq.quantizers.model.outer_layers import capture
from aiakq.quantizers.model.source import SourceModel
from aiakq.quantizers.model.token_arguments import differing

CPU = torch.device("cpu")
NAME = "Gemma4ForCausalLM"


@pytest.fixture
def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 250, shape, generator=generator) for shape in ((2, 40), (2, 40), (1, 9))]


@pytest.mark.parametrize("budget", [float("inf"), 0.0], ids=["in memory", "on disk"])
def test_block_by_block_gives_what_the_whole_model_gives(
    budget: float, batches: list[Tensor], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_model(NAME)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = BlockwiseCheckpoint(folder, CPU, False, HiddenStates((), budget, tmp_path))
    hidden = model.run_blocks(batches, lambda *_: None)
    for number, ids in enumerate(batches):
        with torch.inference_mode():
            wanted = whole(ids).logits
        assert torch.allclose(model.head(ids, hidden[number]), wanted, atol=2e-5)


def test_a_sequence_alone_and_its_first_tokens_read_what_belongs_to_them(
    batches: list[Tensor], tiny_model: Callable[..., Path]
) -> None:
    model = BlockwiseCheckpoint(tiny_model(NAME), CPU, False, HiddenStates()).model
    inputs = capture(model, batches, lambda _: None)
    for index, block in enumerate(model.blocks):
        model.load(block, model.block_prefix(index))
        with torch.inference_mode():
            whole = inputs.run(block, index, 1)
            for row in range(2):
                assert torch.allclose(inputs.run_one(block, index, 1, row), whole[row : row + 1], atol=1e-5)
            assert torch.allclose(inputs.run_one(block, index, 1, 1, 17), whole[1:, :17], atol=1e-5)
        inputs.advance(block, index)


def test_copies_leave_their_own_keys(batches: list[Tensor], tiny_model: Callable[..., Path]) -> None:
    model: SourceModel = BlockwiseCheckpoint(tiny_model(NAME), CPU, False, HiddenStates()).model
    inputs = capture(model, batches[:1], lambda _: None)
    for index, block in enumerate(model.blocks[:4]):
        model.load(block, model.block_prefix(index))
        if index == 3:  # reads the keys of block 1
            break
        other = inputs.copy()
        with torch.no_grad():
            for parameter in block.self_attn.parameters():
                parameter.mul_(2)
        other.advance(block, index)
        with torch.no_grad():
            for parameter in block.self_attn.parameters():
                parameter.div_(2)
        inputs.advance(block, index)
    other.hidden[0] = inputs.hidden[0]
    whole = AutoModelForCausalLM.from_pretrained(tiny_model(NAME), dtype=torch.float32).eval()
    with torch.inference_mode():
        states = whole(batches[0], output_hidden_states=True).hidden_states
        assert torch.allclose(inputs.run(block, 3, 0), states[4], atol=1e-4)


def test_what_a_block_left_before_a_hook_ended_its_run_is_kept() -> None:
    class Ended(Exception):
        pass

    class Block(nn.Module):
        def forward(self, hidden: Tensor, left: dict[str, Any]) -> Tensor:
            left["keys"] = (hidden * 2, hidden * 3)
            raise Ended

    class Reader(nn.Module):
        def forward(self, hidden: Tensor, left: dict[str, Any]) -> Tensor:
            return hidden + left["keys"][1]

    inputs = Activations([torch.ones(1, 2, 4)], {(1, 2): [Call((), {"left": {}})] * 2}, CPU)
    with pytest.raises(Ended):
        inputs.run(Block(), 0, 0)
    assert torch.equal(inputs.run(Reader(), 1, 0), torch.full((1, 2, 4), 4.0))


def test_what_is_left_has_to_be_tensors() -> None:
    class Block(nn.Module):
        def forward(self, hidden: Tensor, left: dict[str, Any]) -> Tensor:
            left["count"] = 1
            return hidden

    inputs = Activations([torch.ones(1, 2, 4)], {(1, 2): [Call((), {"left": {}})]}, CPU)
    with pytest.raises(AiakqError, match="read what earlier ones left"):
        inputs.run(Block(), 0, 0)


def test_arguments_that_depend_on_tokens_are_found_by_their_place() -> None:
    same, one, other = torch.zeros(2), torch.zeros(1, 3), torch.ones(1, 3)
    first = Call((same, one), {"mask": same, "tables": (same, one), "more": None})
    assert differing(first, Call((same, other), {"mask": same, "tables": (same, one), "more": None})) == [1]
    assert differing(first, Call((same, one), {"mask": other, "tables": (same, other), "more": 1})) == [
        "mask",
        "tables",
    ]
