"""Little memory: hidden states on disk, and models that are scored block by block."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from aiakq.evaluation.scoring import load_for_scoring
from aiakq.evaluation.streamed import StreamedScorer
from aiakq.quantizers.model.activations import HiddenStates
from aiakq.quantizers.model.blockwise import BlockwiseCheckpoint
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint


def test_hidden_states_beyond_the_budget_are_files(tmp_path: Path) -> None:
    tensors = [torch.randn(2, 3, 4) for _ in range(5)]
    states = HiddenStates(tensors, budget=2 * 96, folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    assert all(torch.equal(states[i], tensors[i]) for i in range(5))
    assert states.shapes == [torch.Size((2, 3, 4))] * 5
    other = states.copy()
    new = torch.randn(2, 3, 4)
    for i in range(5):
        states[i] = new
    assert all(torch.equal(other[i], tensors[i]) for i in range(5)), "a copy goes its own way"
    assert len(list(tmp_path.iterdir())) == 6
    del other
    assert len(list(tmp_path.iterdir())) == 3
    del states
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "OPTForCausalLM"])
def test_block_by_block_gives_the_runtimes_logits(
    architecture: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """For the source and for every method's output; tied and untied heads."""
    source = tiny_model(architecture)
    folders = [source]
    for method in ("weight_only_int8", "smooth_quant", "gptq"):
        size = 32 if method == "gptq" else None
        options = QuantizeOptions(
            str(source), str(tmp_path / method), method, group_size=size, samples=4, seqlen=32, evaluate=False,
            device="cpu",
        )  # fmt: skip
        quantize_checkpoint(options)
        folders.append(tmp_path / method)
    windows = torch.randint(3, 250, (9, 40), generator=torch.Generator().manual_seed(0))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for folder in folders:
        states = HiddenStates((), 10_000, scratch)
        scorer = StreamedScorer(BlockwiseCheckpoint(folder, torch.device("cpu"), False, states))
        scorer.prepare(windows, lambda done, total: None)
        found = torch.cat([scorer.logits(part) for part in windows.split([1, 4, 4])])
        wanted = load_for_scoring(folder, device="cpu").logits(windows)
        limit = 2e-2 if folder.name == "smooth_quant" else 1e-5  # rounding of activations may fall the other way
        assert float((found - wanted).norm() / wanted.norm()) < limit, folder.name


def test_little_memory_gives_the_same_bytes(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No hidden state in memory, models scored block by block: the same output and the same figures."""
    from aiakq.evaluation import quality_check

    text = tmp_path / "text.txt"
    text.write_text("A short text to evaluate on. " * 40)
    reports = []
    for name, memory in (("much", None), ("little", 0.0)):
        if name == "little":
            monkeypatch.setattr(quality_check, "free_memory", lambda device: 0)
        options = QuantizeOptions(
            str(tiny_model("LlamaForCausalLM")), str(tmp_path / name), "gptq", group_size=32, samples=8, seqlen=64,
            eval_text=text, activation_memory=memory, device="cpu",
        )  # fmt: skip
        reports.append(quantize_checkpoint(options))
    assert reports[0].kl == pytest.approx(reports[1].kl, rel=1e-3)
    assert reports[0].perplexity_before == pytest.approx(reports[1].perplexity_before, rel=1e-5)
    files = sorted(path.name for path in (tmp_path / "much").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "little").iterdir())
    much, little = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("much", "little"))
    assert much == little
