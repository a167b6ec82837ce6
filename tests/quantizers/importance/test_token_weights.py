"""Weights of tokens in the statistics of a block: aligned with the rows that are kept, and by group."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiakq.formats.checkpoint import Checkpoint
from aiakq.quantizers.block.inputs import BlockInputs
from aiakq.quantizers.block.result import BlockResult
from aiakq.quantizers.importance.token_weights import MAX_WEIGHT, TokenWeights
from aiakq.quantizers.model.activations import Activations, Call, HiddenStates


class Pair(nn.Module):
    """A block of two linears with the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 6)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + 0 * (self.a(hidden).sum() + self.b(hidden).sum())


@pytest.fixture
def inputs() -> BlockInputs:
    """Inputs of a block on two batches of 2 x 5 tokens, one of which is not finite."""
    make = torch.Generator().manual_seed(0)
    hidden = [torch.randn(2, 5, 8, generator=make) for _ in range(2)]
    hidden[1][0, 3, 2] = float("nan")
    block = Pair().requires_grad_(False)
    activations = Activations(HiddenStates(hidden), {(2, 5): [Call((), {})]}, torch.device("cpu"))
    return BlockInputs(block, 0, "block", activations, [("a", "b")], [], BlockResult({}, {}))


def test_the_hessian_weights_the_rows_that_are_kept(inputs: BlockInputs) -> None:
    weights = [torch.rand(10, generator=torch.Generator().manual_seed(batch)) for batch in range(2)]
    squares = {name: {0: weights[0] * size, 1: weights[1] * size} for name, size in (("a", 3.0), ("b", 0.01))}
    inputs.weights = TokenWeights(squares, {"a": 3.0, "b": 0.01})
    found = inputs.hessians(["a"])["a"]
    rows = torch.cat([inputs.activations.hidden[batch].reshape(-1, 8) for batch in range(2)])
    kept = torch.isfinite(rows).all(-1)
    rows, chosen = rows[kept], torch.cat(weights)[kept]
    torch.testing.assert_close(found, (rows * chosen[:, None]).T @ rows / len(rows))
    assert len(rows) == 19


def test_linears_with_the_same_input_have_the_mean_of_their_weights() -> None:
    weights = TokenWeights(
        {"a": {0: torch.tensor([1.0, 3.0])}, "b": {0: torch.tensor([0.3, 0.1])}}, {"a": 2.0, "b": 0.2}
    )
    found = weights.of(("a", "b"), 0)
    assert found is not None
    torch.testing.assert_close(found, torch.tensor([1.0, 1.0]))


def test_no_token_weighs_more_than_the_limit() -> None:
    weights = TokenWeights({"a": {0: torch.tensor([0.0, 150.0])}}, {"a": 1.0})
    found = weights.of(("a",), 0)
    assert found is not None
    assert found.tolist() == [0.0, MAX_WEIGHT]


def test_tokens_count_equally_where_gradients_are_not_known(inputs: BlockInputs) -> None:
    plain = inputs.hessians(["a"])["a"]
    inputs.weights = TokenWeights({"a": {0: torch.ones(10), 1: torch.ones(10)}}, {"a": 1.0})
    assert torch.equal(inputs.hessians(["a"])["a"], plain)
    (warning,) = inputs._result.warnings
    assert "have no weights" in warning


def test_options_and_recipe_select_them(
    tiny_model: Callable[..., Path], quantize: Callable[..., Any], tmp_path: Path
) -> None:
    source = tiny_model("LlamaForCausalLM")
    quantize(source, tmp_path / "equal", "gptq")
    quantize(source, tmp_path / "weighted", "gptq", importance="gradient")
    report = tmp_path / "weighted" / "aiakq_report.json"
    quantize(source, tmp_path / "again", "gptq", recipe=report)
    codes = {}
    for name in ("equal", "weighted", "again"):
        checkpoint = Checkpoint.open(tmp_path / name)
        codes[name] = checkpoint.read_linear(sorted(checkpoint.quantized_linears())[0]).codes
    assert not torch.equal(codes["equal"], codes["weighted"])
    assert torch.equal(codes["again"], codes["weighted"])
