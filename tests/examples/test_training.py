"""The script that trains the models of `make quality`: resuming, dialogues, and planted massive activations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def examples_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (EXAMPLES, EXAMPLES / "training"):
        monkeypatch.syspath_prepend(str(folder))


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def test_an_interrupted_training_ends_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import training_loop
    from training_loop import Schedule, train

    ids = torch.randint(0, 64, (500,), generator=torch.Generator().manual_seed(1))
    schedule = Schedule(steps=6, rate=1e-2, muon=1e-2, distillation=0.5, batch=2, length=16)
    whole = tiny_model()
    train(whole, tiny_model(), ids, schedule, tmp_path / "whole")

    monkeypatch.setattr(training_loop, "CHECKPOINTS", 2)
    real, calls = training_loop._windows, []

    def interrupted(*args: Any) -> torch.Tensor:
        calls.append(args[1])
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(training_loop, "_windows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_model(), tiny_model(), ids, schedule, tmp_path / "parts")
    continued = tiny_model()
    train(continued, tiny_model(), ids, schedule, tmp_path / "parts")
    assert calls == [0, 1, 2, 3, 4, 3, 4, 5]
    for one, other in zip(whole.parameters(), continued.parameters(), strict=True):
        assert torch.equal(one, other)
    other_seed = tiny_model()
    train(other_seed, tiny_model(), ids, replace(schedule, seed=1), tmp_path / "seed")
    assert not torch.equal(other_seed.lm_head.weight, whole.lm_head.weight)


def test_speeches_of_both_kinds_of_quotation_marks_become_turns() -> None:
    from dialogues import dialogues

    speeches = [f"this is the speech number {number}" for number in range(13)]
    marks = (("`` ", " ''"), ("\u201c", "\u201d"))
    parts = [start + speech + end for speech, (start, end) in zip(speeches, 7 * marks, strict=False)]
    found = dialogues("he said " + " , and she said ".join([*parts, "`` no ! ''"]))
    assert [turn["content"] for turns in found for turn in turns] == speeches[:12]
    assert [turn["role"] for turn in found[0]] == ["user", "assistant"] * 3


def test_massive_activations_are_in_few_channels_of_few_tokens(example_model: Path, heldout_text: str) -> None:
    import model_shapes
    import train_models

    tokenizer = train_models.AutoTokenizer.from_pretrained(example_model)
    ids = torch.tensor(tokenizer(heldout_text[:40000])["input_ids"])
    model = model_shapes.with_outliers(train_models.example_model(), ids, torch.Generator().manual_seed(0))
    with torch.inference_mode():
        states = model(ids[-256:].unsqueeze(0), output_hidden_states=True).hidden_states
    stream = states[model_shapes.MASSIVE_BLOCK + 1][0].abs()
    massive = stream > 50 * stream.median()
    assert int(massive.any(0).sum()) == model_shapes.MASSIVE_CHANNELS
    assert 0 < int(massive.any(1).sum()) < len(stream) // 4
    assert float(states[model_shapes.MASSIVE_BLOCK].abs().max()) < 50 * float(stream.median())


@pytest.mark.parametrize("name", ["qwen2", "moe"])
def test_other_architectures_compute_before_they_are_trained(name: str, heldout_text: str) -> None:
    import train_models
    from model_shapes import RECIPES

    tokenizer = train_models.AutoTokenizer.from_pretrained(train_models.EXAMPLE)
    ids = torch.tensor(tokenizer(heldout_text[:12000])["input_ids"])
    model = RECIPES[name].make(train_models.example_model(), ids, torch.Generator().manual_seed(0)).float()
    windows = ids[-128:].view(1, -1)
    assert train_models.perplexity(model, windows) < 20000
    shares = train_models.expert_shares(model, windows)
    assert (shares is None) == (name == "qwen2")


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_muon_takes_the_steps_of_torch(shape: tuple[int, int]) -> None:
    from muon import Muon

    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    optimizers = [
        Muon([ours], lr=0.1, weight_decay=0.05),
        torch.optim.Muon([theirs], lr=0.1, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
    ]
    for _ in range(3):
        ours.grad = torch.randn(shape, generator=generator)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.02 * moved  # torch computes its products in bfloat16
