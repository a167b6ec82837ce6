"""``--tune``: lower divergence from the original for the same codes, the same bytes every time, never a worse one."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from aiakq.errors import AiakqError
from aiakq.evaluation.scoring import load_for_scoring
from aiakq.formats.checkpoint import Checkpoint
from aiakq.quantizers.tuning import stage, tune
from aiakq.quantizers.tuning.tune import Tuned

TUNED = {"samples": 24, "seqlen": 48, "bits": 2}
#: Leaves more to tune in random models.
OWN = {"targets": "own"}


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    """A file of ids on which a random model has something to predict."""
    rows = torch.randint(3, 250, (24, 48), generator=torch.Generator().manual_seed(0)).tolist()
    path = tmp_path / "ids.txt"
    path.write_text("\n".join(" ".join(map(str, row)) for row in rows))
    return path


def divergence(original: Path, other: Path, ids: Tensor) -> float:
    models = (load_for_scoring(path, "float32", "cpu") for path in (original, other))
    wanted, found = (model.logits(ids).log_softmax(-1) for model in models)
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


@pytest.mark.parametrize(
    ("architecture", "method", "options"),
    [
        ("LlamaForCausalLM", "gptq", {}),
        ("LlamaForCausalLM", "gptq", {"symmetric": False, "tp": 2}),
        ("LlamaForCausalLM", "gptq", {"layer": ("*.down_proj=bits:4",), "lm_head": 8, **OWN}),
        ("LlamaForCausalLM", "awq", {"bits": 4, "scale_search": "minmax", **OWN}),
        ("OPTForCausalLM", "gptq", {}),
        ("Qwen3MoeForCausalLM", "gptq", OWN),
        ("LlamaForCausalLM", "gptq", {"rotate": "hadamard", "importance": "gradient", "dtype": "bf16"}),
    ],
    ids=["llama", "zero points and tp", "overrides and head", "awq", "opt", "experts", "rotated in bf16"],
)
def test_tuning_lowers_the_divergence_for_the_same_codes(
    architecture: str,
    method: str,
    options: dict[str, Any],
    tiny_model: Callable[..., Path],
    quantize: Callable[..., Any],
    calibration: Path,
    tmp_path: Path,
) -> None:
    source = tiny_model(architecture)
    settings = {**TUNED, "token_ids": calibration, **options}
    quantize(source, tmp_path / "plain", method, **settings)
    report = quantize(source, tmp_path / "tuned", method, tune="24steps", **settings)
    assert report.tuned["steps"] == 24
    assert report.tuned["kl_after"] < report.tuned["kl_before"]
    assert report.recipe["tune"] == "24steps"
    assert any("--tune 24steps" in note for note in report.notes)
    plain, tuned = (Checkpoint.open(tmp_path / name) for name in ("plain", "tuned"))
    for name in plain.quantized_linears():
        before, after = plain.read_linear(name), tuned.read_linear(name)
        assert torch.equal(before.codes, after.codes)
        assert before.scales.dtype == after.scales.dtype
        assert (before.zeros is None) == (after.zeros is None)
    ids = torch.tensor([[int(word) for word in line.split()] for line in calibration.read_text().splitlines()])
    assert divergence(source, tmp_path / "tuned", ids) < 0.99 * divergence(source, tmp_path / "plain", ids)


def test_equal_steps_give_equal_bytes_however_they_were_chosen(
    tiny_model: Callable[..., Path],
    quantize: Callable[..., Any],
    calibration: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run with a time budget is repeated by its report, on any number of threads."""
    source = tiny_model("LlamaForCausalLM")
    settings = {**TUNED, "token_ids": calibration}
    clock = iter(range(1000))
    with monkeypatch.context() as patch:
        patch.setattr(tune.time, "monotonic", lambda: float(next(clock)))
        report = quantize(source, tmp_path / "timed", "gptq", tune=20, **settings)
    assert 1 < report.tuned["planned"] < 40
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        quantize(source, tmp_path / "again", "gptq", tune=report.recipe["tune"], **settings)
    finally:
        torch.set_num_threads(threads)
    one, other = (tmp_path / name / "model.safetensors" for name in ("timed", "again"))
    assert one.read_bytes() == other.read_bytes()


def test_nothing_worse_than_before_is_published(
    tiny_model: Callable[..., Path],
    quantize: Callable[..., Any],
    calibration: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = tiny_model("LlamaForCausalLM")
    settings = {**TUNED, "token_ids": calibration}
    quantize(source, tmp_path / "plain", "gptq", **settings)
    monkeypatch.setattr(tune, "RATE", 5.0)
    seen: list[Tensor] = []
    run = tune.Tuning.run

    def record(self: tune.Tuning, *args: Any) -> tune.Tuned:
        seen.append(torch.stack([self.teacher.samples[number] for number in self.held_out]))
        return run(self, *args)

    monkeypatch.setattr(tune.Tuning, "run", record)
    report = quantize(source, tmp_path / "tuned", "gptq", tune="8steps", **settings)
    assert report.tuned["best_step"] == 0
    assert report.tuned["kl_after"] == report.tuned["kl_before"]
    assert any("nothing was changed" in note for note in report.notes)
    (held_out,) = seen
    measured = divergence(source, tmp_path / "plain", held_out)
    assert report.tuned["kl_before"] == pytest.approx(measured, rel=1e-3)
    one, other = (tmp_path / name / "model.safetensors" for name in ("plain", "tuned"))
    assert one.read_bytes() == other.read_bytes()


def test_an_interrupted_run_does_not_tune_again(
    tiny_model: Callable[..., Path],
    quantize: Callable[..., Any],
    calibration: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = tiny_model("LlamaForCausalLM")
    settings = {**TUNED, "token_ids": calibration, "tune": "8steps"}
    quantize(source, tmp_path / "whole", "gptq", **settings)
    from aiakq.quantizers import pipeline

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "copy_files", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            quantize(source, tmp_path / "resumed", "gptq", resume=True, **settings)
    monkeypatch.setattr(stage, "Teacher", None)
    report = quantize(source, tmp_path / "resumed", "gptq", resume=True, **settings)
    assert report.tuned["steps"] == 8
    one, other = (tmp_path / name / "model.safetensors" for name in ("whole", "resumed"))
    assert one.read_bytes() == other.read_bytes()
    saved = json.loads((tmp_path / "resumed" / "aiakq_report.json").read_text())
    assert saved["tuned"]["steps"] == 8


@pytest.mark.parametrize("case", ["memory", "samples"])
def test_what_cannot_be_tuned_is_refused_before_the_work(
    case: str,
    tiny_model: Callable[..., Path],
    quantize: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = 8
    if case == "memory":
        monkeypatch.setattr(stage, "free_memory", lambda device: 1000)
    else:
        samples = 1
    with pytest.raises(AiakqError) as caught:
        quantize(tiny_model("LlamaForCausalLM"), tmp_path / "out", "gptq", tune="8steps", samples=samples)
    assert caught.value.id == "tuning"
    assert ("0.0 GB are free on cpu" if case == "memory" else "there is 1 calibration sample,") in caught.value.message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Tuned(1, 1, 0, 0.5, 0.5, 1, 0.1), "Tuning for 1 step did not lower the KL divergence on 1 held-out "
         "calibration sample; nothing was changed. --tune 1steps repeats it."),
        (Tuned(8, 24, 8, 0.5, 0.25, 2, 0.1), "Scales and norms were tuned end to end for 8 steps; the KL divergence on "
         "2 held-out calibration samples fell from 0.5 to 0.25 nats per token. --tune 24steps repeats it."),
    ],
)  # fmt: skip
def test_the_report_says_what_tuning_did(found: Tuned, words: str) -> None:
    report: Any = SimpleNamespace(recipe={}, notes=[])
    stage.report_tuning(report, found)
    assert report.notes == [words]


def test_rounding_makes_no_divergence_negative() -> None:
    tuning: Any = tune.Tuning.__new__(tune.Tuning)
    tuning.student = SimpleNamespace(rounded=lambda *dtypes: nullcontext())
    tuning._dtypes, tuning._lengths, tuning._vocabulary, tuning.held_out = (), [2], 8, [0]
    tuning._divergence = lambda call: torch.tensor([[-1e-9, 0.0]])
    assert tuning._held_out_divergence() == 0.0
    tuning._divergence = lambda call: torch.tensor([[torch.nan, 0.0]])
    assert tuning._held_out_divergence() != tuning._held_out_divergence(), "NaN"
