"""The parts of `make quality` without the other tools: the rows, the page, the model with outliers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from aiakq.evaluation.wording import DECIDES
from aiakq.quantizers.options import QuantizeOptions

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def examples_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (EXAMPLES, EXAMPLES / "training", EXAMPLES / "peers"):
        monkeypatch.syspath_prepend(str(folder))


def tiny_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def test_planted_outliers_keep_the_function_and_reach_every_linear() -> None:
    import outliers

    model = tiny_model()
    outliers.init_weights(model, torch.Generator().manual_seed(0))
    ids = torch.arange(40).view(2, 20)
    peaks: dict[str, float] = {}

    def watch(name: str) -> Any:
        def note(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            largest = args[0].float().abs().amax((0, 1))
            peaks[name] = float(largest.max() / largest.median())

        return note

    for name, module in model.model.layers.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(watch(name))
    with torch.inference_mode():
        before = model.float()(ids).logits
        outliers.add_outliers(model.to(torch.bfloat16), torch.Generator().manual_seed(1))
        after = model.float()(ids).logits
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    assert len(peaks) == 14
    assert all(peak > 8 for peak in peaks.values()), peaks


def test_text_is_the_same_for_the_same_seed() -> None:
    import outliers

    model = tiny_model().float()
    outliers.init_weights(model, torch.Generator().manual_seed(0))
    texts = [outliers.sample(model, 2, 12, torch.Generator().manual_seed(seed)) for seed in (2, 2, 3)]
    assert texts[0].shape == (2, 12)
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])


def test_rows_have_names_of_their_own_and_options_that_exist() -> None:
    from rows import ROWS

    assert len({row.slug for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert (EXAMPLES / "peers" / f"peer_{row.tool}.py").is_file()
        if row.tool == "aiakq":
            QuantizeOptions(input="in", output="out", **row.request["options"])


def test_other_models_have_the_best_of_each_tool_and_all_of_ours() -> None:
    from rows import ALL, FULL, REAL, ROWS, kind_of

    for bits in (4, 3, 2):
        for symmetric in (True, False):
            rows = [row for row in ROWS if row.kind == kind_of(bits, symmetric)]
            full = {row.tool for row in rows if FULL[1] in row.models}
            assert {"aiakq", "gptqmodel", "llmcompressor", "autoround"} <= full
            for model in (*ALL, REAL):
                names = {row.name for row in rows if model in row.models}
                assert {"gptq", "mse 2.4", "200 iterations (defaults)"} <= names


def job_of(folder: Path, calibration: str = "[[1, 2]]") -> Any:
    """A job on a folder with a config and no weights."""
    from jobs import Job
    from rows import ROWS
    from subjects import Subject

    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text("{}")
    (folder / "ids.json").write_text(calibration)
    subject = Subject("books", folder / "model", {"s0": folder / "ids.json"}, torch.zeros(1, 2, dtype=torch.int64))
    row = next(row for row in ROWS if row.tool == "autoround")
    return Job(row, subject, "s0", folder / "out")


def test_a_result_is_stale_when_something_that_it_depends_on_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import environments

    job = job_of(tmp_path)
    assert set(job.stale()) == {"model", "request", "calibration", "tool"}
    job.store({"key": job.key})
    assert job_of(tmp_path).stale() == []
    assert job_of(tmp_path, "[[1, 3]]").stale() == ["calibration"]
    monkeypatch.setitem(environments.ENVIRONMENTS, "autoround", environments.Environment(("auto-round==0",)))
    assert job_of(tmp_path).stale() == ["tool"]


def test_a_tool_that_fails_leaves_its_last_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    import environments

    monkeypatch.setattr(environments, "python_of", lambda name: Path(sys.executable))
    monkeypatch.setattr("jobs.PEERS", tmp_path)
    (tmp_path / "peer_autoround.py").write_text("raise ValueError('no such scheme')")
    job = job_of(tmp_path)
    assert job.quantize()["failed"] == "failed: ValueError: no such scheme"
    assert job_of(tmp_path).stored()["failed"] == "failed: ValueError: no such scheme"


def test_a_job_is_claimed_by_one_run_at_a_time(tmp_path: Path) -> None:
    with job_of(tmp_path).claimed() as first, job_of(tmp_path).claimed() as second:
        assert first and not second
    with job_of(tmp_path).claimed() as again:
        assert again


def test_page_names_the_best_and_the_failed_rows() -> None:
    import quality_page
    from rows import ROWS, W8A8

    def result(name: str, loss: float, kl: float) -> dict[str, Any]:
        row = next(row for row in ROWS if row.kind == W8A8 and row.name == name)
        measured = {"loss": [loss, loss + 0.01], "loss_original": [4.0, 4.01], "kl": [kl, kl], "same": [0.9, 0.9]}
        cost = {
            "bytes": 7_000_000,
            "seconds": 9.0,
            "processor_seconds": 3.0,
            "peak_memory": 5e8,
            "versions": {"torch": "2"},
        }
        return {"model": "books", "slug": row.slug, **measured, **cost}

    failed = {
        "model": "books",
        "slug": next(row.slug for row in ROWS if row.name == "INT8"),
        "failed": "not installed: x",
    }
    elsewhere = {"machine": "another", "seconds": 1.0, "processor_seconds": 1.0}
    results = [
        result("RTN", 4.2, 0.2),
        result("smooth_quant", 4.002, 0.001),
        result("rounding W8A8", 3.9, 0.3) | elsewhere,
        failed,
    ]
    page = quality_page.page(ROWS, results, None)
    assert "round-to-nearest (RTN) changes perplexity by +22.14 ± 0.00 %, `smooth_quant` by +0.20 ± 0.00 %" in page
    assert "| autoround | INT8 | | not installed: x |" in page
    assert "llmcompressor, rounding W8A8: perplexity -9.70 ± 0.00 %." in page
    assert "| aiakq | **smooth_quant** | 7.0 | 54." in page
    assert "| 90.0 % | 3 | 9 | 500 |" in page
    assert "| 90.0 % | 1* | 1* | 500 |" in page, "seconds of another processor are marked"
    assert DECIDES in page


def test_defaults_are_compared_with_the_best_of_other_tools() -> None:
    import quality_summary
    from rows import ROWS, kind_of

    def result(tool: str, name: str, loss: float, kl: float) -> tuple[str, dict[str, Any]]:
        row = next(row for row in ROWS if (row.kind, row.tool, row.name) == (kind_of(4, True), tool, name))
        means = {"loss": [loss + 0.1 * window for window in range(8)], "kl": [kl * (1 + window) for window in range(8)]}
        return row.slug, {**means, "loss_original": [4.0] * 8, "processor_seconds": 3.0}

    found = dict(
        [
            result("aiakq", "RTN", 4.3, 0.010),
            result("aiakq", "gptq", 4.2, 0.002),
            result("aiakq", "gptq, learned rotation", 4.2, 0.001),
            result("gptqmodel", "mse 2.4", 4.1, 0.008),
            result("autoround", "200 iterations (defaults)", 4.2, 0.004),
        ]
    )
    lines = quality_summary.compared(ROWS, {"books": found}, {"books": "Books"}, {})
    row = next(line for line in lines if line.startswith("| Books"))
    assert "| gptq | 0.00900 | autoround, 200 iterations (defaults) | 0.01800 | 0.50 (0.50 to 0.50) |" in row
    assert "| +10.52 ± 0.00 % |" in row, "perplexity is compared with the tool that has the lowest"
    assert lines[-1].startswith("Our default has the lower divergence in 1 of 1 rows, in 1 of them")
    settings = quality_summary.settings(ROWS, {"books": found}, {"books": "Books"})
    assert settings[2:6:3] == ["| settings | Books, 4 bits |", "| **gptq** | 0.00900 |"]
    assert not any("own targets" in line for line in settings[2:]), "what was not measured is left out"


def test_fidelity_is_compared_window_by_window_and_text_by_text() -> None:
    import fidelity_table
    from rows import ROWS, kind_of

    rows = [row for row in ROWS if row.kind == kind_of(4, True)][:3]
    hard = [0.5 + 0.1 * (window % 5) for window in range(16)]

    def result(factor: float, other: float) -> dict[str, Any]:
        means = {"kl": [factor * value for value in hard], "same": [0.9] * 16}
        text = {"kl": [other * value for value in hard]}
        return {**means, "kl_p99": 2.0, "kl_p99_interval": [1.5, 2.5], "kl_max": 3.0, "texts": {"code": text}}

    found = {rows[0].slug: result(1.1, 0.9), rows[1].slug: result(1.0, 1.0), rows[2].slug: {"failed": "not installed"}}
    lines = fidelity_table.table(rows, found, rows[1])
    assert lines[0] == "| tool | settings | KL | against ours | 99 % | max | top-1 | code |"
    assert len(lines) == 4, "failed rows are left out"
    assert "| +10.0 % (+10.0 to +10.0), worse | 2 (1.5 to 2.5) | 3 | 90.0 (90.0 to 90.0) % |" in lines[2]
    assert lines[2].endswith("-10.0 % (-10.0 to -10.0), better |"), "another text is another verdict"
    assert f"**{rows[1].name}**" in lines[3] and "worse" not in lines[3]


def test_scores_keep_a_mean_for_every_window() -> None:
    import fidelity

    class Bigram:
        def __init__(self, noise: float) -> None:
            table = torch.randn(20, 20, generator=torch.Generator().manual_seed(0))
            self.table = table + noise * torch.randn(20, 20, generator=torch.Generator().manual_seed(1))

        def logits(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table[ids]

    windows = torch.randint(0, 20, (12, 65), generator=torch.Generator().manual_seed(2))
    found = fidelity.scores(Bigram(0.2), Bigram(0.0), windows)
    assert len(found["kl"]) == len(found["loss"]) == len(found["same"]) == 12
    assert max(found["kl"]) < found["kl_p99"] <= found["kl_max"]
    assert found["kl_p99_interval"][0] <= found["kl_p99"] <= found["kl_p99_interval"][1]


def test_other_texts_are_divided_into_blocks_whose_mean_is_that_of_their_tokens(byte_tokenizer: Any) -> None:
    import fidelity

    from aiakq.evaluation.metrics import compare
    from aiakq.evaluation.text import load_texts

    class Bigram:
        def __init__(self, noise: float) -> None:
            table = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
            self.table = table + noise * torch.randn(300, 300, generator=torch.Generator().manual_seed(1))

        def logits(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table[ids]

    found = fidelity.other_texts(Bigram(0.2), Bigram(0.0), byte_tokenizer, 300, 300)
    assert list(found) == ["dialogue", "code"]
    (text,) = load_texts(["code"], byte_tokenizer, 300, 300)
    assert len(found["code"]["kl"]) == 3 * len(text.windows)
    whole = compare(Bigram(0.2), Bigram(0.0), text.windows)
    assert sum(found["code"]["kl"]) / len(found["code"]["kl"]) == pytest.approx(whole.kl, rel=1e-6)
