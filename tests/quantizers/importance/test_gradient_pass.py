"""Weights of tokens by the gradients of the original model, against autograd through the whole model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.quantizers.importance.gradient_pass import GradientPass
from aiakq.quantizers.importance.row_factors import RowFactors
from aiakq.quantizers.importance.token_weights import MAX_WEIGHT, RoutedTokens, TokenWeights
from aiakq.quantizers.model.activations import batched
from aiakq.quantizers.model.source import SourceModel
from aiakq.quantizers.workers.worker_group import FirstWorker

SAMPLES = list(torch.randint(3, 250, (20, 24), generator=torch.Generator().manual_seed(0)))
BATCHES = batched(SAMPLES, 2)


def weights_of(source: Path, scratch: Path, budget: float = 1e9, seed: int = 0) -> list[TokenWeights]:
    model = SourceModel(Checkpoint.open(source), torch.float32, torch.device("cpu"))
    return GradientPass(model, BATCHES, FirstWorker(), budget, scratch, seed, lambda done, total: None).run()


def is_linear(name: str, module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear)


def whole_model_gradients(
    source: Path, chosen: Callable[[str, torch.nn.Module], bool] = is_linear
) -> dict[str, list[Tensor]]:
    """The gradients at the outputs of the ``chosen`` modules, [T, N] for each call in order."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).requires_grad_(False)
    found: dict[str, list[Tensor]] = {}

    def hook(name: str) -> Callable[..., None]:
        def watch(module: Any, args: Any, output: Tensor) -> None:
            output.register_hook(lambda gradient: found.setdefault(name, []).append(gradient.flatten(0, -2)))

        return watch

    for name, module in model.named_modules():
        if chosen(name, module):
            module.register_forward_hook(hook(name))
    for batch, ids in enumerate(BATCHES):
        generator = torch.Generator().manual_seed(batch)
        for row in ids:
            embedded = model.get_input_embeddings()(row[None]).requires_grad_(True)
            logits = model(inputs_embeds=embedded, use_cache=False).logits[0]
            labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator).squeeze(-1)
            torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    return found


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "OPTForCausalLM", "Gemma2ForCausalLM"])
def test_squares_are_those_of_the_whole_model(
    architecture: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = tiny_model(architecture)
    wanted = whole_model_gradients(source)
    model = SourceModel(Checkpoint.open(source), torch.float32, torch.device("cpu"))
    for index, weights in enumerate(weights_of(source, tmp_path)):
        assert weights.squares
        for name, squares in weights.squares.items():
            expected = torch.cat(wanted[f"{model.block_prefix(index)}.{name}"]).square().sum(-1)
            found = torch.cat([squares[batch] for batch in range(len(BATCHES))])
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5 * float(expected.max()))
            assert weights.means[name] == pytest.approx(float(expected.mean()), rel=1e-4)


def test_another_seed_samples_other_tokens(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model("LlamaForCausalLM")
    one, other = (weights_of(source, tmp_path, seed=seed)[0].means for seed in (0, 1))
    assert one.keys() == other.keys()
    assert one != other


def test_hidden_states_on_disk_give_the_same_bits(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model("LlamaForCausalLM")
    assert_same(weights_of(source, tmp_path, budget=0), weights_of(source, tmp_path))
    assert not list(tmp_path.iterdir())


def test_bits_do_not_depend_on_the_number_of_threads(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model("LlamaForCausalLM")
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(weights_of(source, tmp_path))
    finally:
        torch.set_num_threads(before)
    assert_same(*found)


def test_outputs_of_experts_have_the_gradient_of_the_mixture(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """The output of an expert is multiplied by its share, so is its gradient: what is stored is the same for all."""
    source = tiny_model("Qwen3MoeForCausalLM")
    wanted = whole_model_gradients(source, lambda name, module: name.endswith(".mlp"))
    for index, weights in enumerate(weights_of(source, tmp_path)):
        expected = torch.cat(wanted[f"model.layers.{index}.mlp"]).square().sum(-1)
        squares = weights.squares["mlp.experts.*.down_proj"]
        found = torch.cat([squares[batch] for batch in range(len(BATCHES))])
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5 * float(expected.max()))


def test_an_expert_weighs_its_tokens_by_their_own_gradients(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """A token's entry is shared by the experts; the weight of its output tells how much of it an expert has."""
    source = tiny_model("MixtralForCausalLM")
    for weights in weights_of(source, tmp_path):
        down = next(name for name in weights.squares if name.endswith(("w2", "down_proj")))
        (expert,) = [name for name in weights.means if name == down.replace("*", "0")]
        squares = weights.squares[down][0]
        routing = RoutedTokens(torch.tensor([3, 7]), torch.tensor([0.25, 0.5]))
        found = weights.of((expert,), 0, routing)
        assert found is not None
        wanted = squares[[3, 7]] * torch.tensor([0.0625, 0.25]) / weights.means[expert]
        torch.testing.assert_close(found, wanted.clamp(max=MAX_WEIGHT))
        everywhere = weights.of((expert,), 0)
        assert everywhere is not None and len(everywhere) == BATCHES[0].numel()


def assert_same(one: list[TokenWeights], other: list[TokenWeights]) -> None:
    """The weights are equal, bit for bit."""
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        assert mine.means == theirs.means
        assert mine.squares.keys() == theirs.squares.keys()
        for name, squares in mine.squares.items():
            assert squares.keys() == theirs.squares[name].keys()
            assert all(torch.equal(square, theirs.squares[name][batch]) for batch, square in squares.items())


def factors_of(source: Path, scratch: Path, budget: float = 1e9) -> list[RowFactors | None]:
    model = SourceModel(Checkpoint.open(source), torch.float32, torch.device("cpu"))
    found = GradientPass(model, BATCHES, FirstWorker(), budget, scratch, 0, lambda done, total: None, rows=True).run()
    return [weights.rows for weights in found]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_factors_are_second_moments_of_gradients(
    architecture: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = tiny_model(architecture)
    wanted = whole_model_gradients(source)
    compared = 0
    for index, rows in enumerate(factors_of(source, tmp_path)):
        assert rows is not None
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
            if f"model.layers.{index}.{name}" not in wanted:
                continue
            gradients = torch.cat(wanted[f"model.layers.{index}.{name}"])
            expected, found = gradients.T @ gradients, rows.of(name)
            assert found is not None
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
            compared += 1
        if architecture.startswith("Qwen3Moe"):
            assert rows.of("mlp.experts.0.down_proj") is not None
    assert compared >= 4


def test_factors_on_disk_have_the_same_bits(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model("LlamaForCausalLM")
    in_memory, on_disk = factors_of(source, tmp_path), factors_of(source, tmp_path, budget=0)
    for one, other in zip(in_memory, on_disk, strict=True):
        assert one is not None and other is not None
        assert one.bytes_in_memory > 0 and not other.bytes_in_memory
        first, second = one.of("mlp.up_proj"), other.of("mlp.up_proj")
        assert first is not None and second is not None and torch.equal(first, second)
    del on_disk, other
    assert not list(tmp_path.iterdir())


def test_keys_that_later_blocks_read_have_no_gradients(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(AiakqError, match="--importance with Gemma4ForCausalLM, whose blocks read keys"):
        weights_of(tiny_model("Gemma4ForCausalLM"), tmp_path)
    assert len(weights_of(tiny_model("Gemma4ForCausalLM", num_kv_shared_layers=0), tmp_path)) == 6
