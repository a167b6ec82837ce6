"""aiakq compare: figures are those of eval and of the files, and every form of the table has them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aiakq.arguments.checkpoint import EvalArguments
from aiakq.arguments.model_comparison import ModelComparisonArguments
from aiakq.bench import models
from aiakq.errors import AiakqError
from aiakq.evaluation import evaluate
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint


@pytest.fixture(scope="module")
def folders(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A model, and the reports of two quantizations of it by folder."""
    source, root = tiny_model("LlamaForCausalLM"), tmp_path_factory.mktemp("compared")
    return source, {
        str(root / method): quantize_checkpoint(
            QuantizeOptions(str(source), str(root / method), method, samples=2, seqlen=32, evaluate=False, device="cpu")
        )
        for method in ("weight_only_int8", "nvfp4")
    }


def arguments(*names: str, **fields: Any) -> ModelComparisonArguments:
    usual = {"limit": 256, "device": "cpu", "rounds": 2, "input_len": 8, "output_len": 4}
    return ModelComparisonArguments(models=names, **{**usual, **fields})


def test_the_table_has_the_figures_of_the_report_and_of_eval(
    folders: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    source, reports = folders
    seen: list[str] = []
    files = tuple(str(tmp_path / f"table{suffix}") for suffix in (".md", ".html", ".json"))
    asked = arguments(*reports, original=str(source), output=files)
    document = models.run(asked, lambda stage, done, total, detail: seen.append(f"{stage} {detail}")).document()
    for row, (folder, report) in zip(document["models"], reports.items(), strict=True):
        assert (row["model"], row["bytes"]) == (folder, report.bytes_after)
        assert row["bits_per_weight"] == pytest.approx(report.bits_per_weight, abs=1e-3)
        assert row["tokens_per_s"] > 0 and len(row["tokens_per_s_rounds"]) == 2
    first, second = reports
    wanted = evaluate.run(
        EvalArguments(model=first, versus=(second,), original=str(source), text=("prose",), limit=256, device="cpu"),
        lambda *_: None,
    ).document()
    assert document["models"][0]["kl"] == wanted["kl"]
    assert document["models"][1]["kl_interval"] == wanted["versus"][0]["kl_interval"]
    # In turns: a model is not measured again before all others were.
    assert [line.partition(" ")[2] for line in seen if line.startswith("speed")] == [first, second] * 2
    models.write(document, asked.paths)
    head, *rows = models.cells(document)
    markdown, page = (Path(name).read_text() for name in files[:2])
    assert f"| {' | '.join(head)} |" in markdown and f"| {' | '.join(rows[1])} |" in markdown
    assert all(f">{cell}<" in page for cell in rows[0])
    assert json.loads(Path(files[2]).read_text()) == document


def test_what_is_not_measured_has_no_column(folders: tuple[Path, dict[str, Any]]) -> None:
    source, reports = folders
    document = models.run(arguments(str(source), *reports, speed=False), lambda *_: None).document()
    assert models.cells(document)[0] == ["model", "quantization", "size", "bits", "perplexity"]
    assert document["models"][0]["bits_per_weight"] == 32 and document["models"][0]["quantization"] == "none"


def test_models_without_a_name_and_files_that_are_folders_are_refused_first(tmp_path: Path) -> None:
    (tmp_path / "a.md").mkdir()
    for options, id in (
        (arguments(""), "bad_option"),
        (arguments("a", output=(str(tmp_path / "a.md"),)), "output_failed"),
    ):
        with pytest.raises(AiakqError) as problem:
            models.check(options)
        assert problem.value.id == id


def test_perplexities_of_different_tokens_are_not_compared(folders, monkeypatch) -> None:
    source, _ = folders
    texts = [{"quantization": "none", "tokens": tokens, "perplexity": 9.0} for tokens in (100, 90)]
    monkeypatch.setattr(models, "_quality", lambda options, progress: (texts, {}))
    document = models.run(arguments(str(source), str(source), speed=False), lambda *_: None).document()
    assert document["remarks"] == [models.OTHER_TOKENS]


@pytest.mark.parametrize(
    ("file", "id"),
    [("table.txt", "bad_option"), ("missing/table.md", "output_failed"), ("/proc/table.md", "output_failed")],
)
def test_a_file_that_cannot_be_written_is_refused_first(file: str, id: str, tmp_path: Path) -> None:
    with pytest.raises(AiakqError) as problem:
        models.check(arguments("a", "b", original="c", output=(str(tmp_path / file),)))
    assert problem.value.id == id


def test_prompts_longer_than_the_context_are_refused_before_anything_is_measured(folders, monkeypatch) -> None:
    source, _ = folders
    monkeypatch.setattr(models, "_quality", lambda options, progress: pytest.fail("it was measured"))
    with pytest.raises(AiakqError, match="--input-len") as problem:
        models.run(arguments(str(source), input_len=10**6), lambda *_: None)
    assert problem.value.id == "bad_option"


def test_binary_files_are_no_texts(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"words" * 100 + bytes(8))
    with pytest.raises(AiakqError, match="zero bytes") as problem:
        models.check(arguments("a", text=(str(tmp_path / "text"),)))
    assert problem.value.id == "evaluation_text"
