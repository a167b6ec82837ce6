"""The durable results of `make quality`: what is stored, what the page says of it, and rows of an earlier page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
HASH = "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def examples_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (EXAMPLES, EXAMPLES / "training", EXAMPLES / "peers"):
        monkeypatch.syspath_prepend(str(folder))


def slug_of(tool: str, name: str, bits: int = 4) -> str:
    from rows import ROWS, kind_of

    return next(row.slug for row in ROWS if (row.kind, row.tool, row.name) == (kind_of(bits, True), tool, name))


def result(tool: str, name: str, loss: float, kl: float, digest: str = HASH, **more: Any) -> dict[str, Any]:
    """A scored result as jobs.Job stores it, on 16 windows."""
    return {
        "model": "books",
        "sampling": "s0",
        "slug": slug_of(tool, name),
        "key": {"model": digest, "request": HASH, "calibration": HASH, "tool": HASH},
        "commit": "abc",
        "windows": HASH,
        "loss": [loss + 0.01 * window for window in range(16)],
        "loss_original": [4.0 + 0.01 * window for window in range(16)],
        "kl": [kl * (1 + 0.1 * window) for window in range(16)],
        "same": [0.91234567] * 16,
        "kl_p99": 1.23456789,
        "kl_p99_interval": [1.0, 2.0],
        "kl_max": 3.0,
        "texts": {"code": {"kl": [kl, 2 * kl]}},
        "bytes": 4_600_000,
        "seconds": 9.0,
        "processor_seconds": 30.0,
        "peak_memory": 1_000_000_000,
        "machine": "one",
        "versions": {"torch": "2"},
        **more,
    }


def page_of(kept: Any) -> str:
    import quality_page
    import store
    from rows import ROWS

    return quality_page.page(ROWS, kept.results(), kept.read(store.ELSEWHERE), kept.read(store.PUBLISHED))


def test_a_stored_row_says_the_same_as_the_whole_result(tmp_path: Path) -> None:
    import quality_page
    import store
    from rows import ROWS

    results = [result("aiakq", "gptq", 4.01, 0.0123456789), result("gptqmodel", "mse 2.4", 4.02, 0.0234567891)]
    kept = store.Store(tmp_path)
    for one in results:
        kept.keep(one)
    assert page_of(kept) == quality_page.page(ROWS, results, None)
    row = kept.row("books", "s0", results[0]["slug"])
    assert row["kl"][0] == 0.012346 and row["loss"][1] == 4.02 and row["key"]["model"] == HASH[:16]
    lines = (tmp_path / "books.json").read_text().splitlines()
    assert sum('"kl":' in line and "[" in line for line in lines) == 4, "lists and texts have a line each"


def test_rows_are_sorted_and_writing_them_again_changes_nothing(tmp_path: Path) -> None:
    import store

    kept = store.Store(tmp_path)
    one, other = result("aiakq", "gptq", 4.01, 0.01), result("aiakq", "RTN", 4.1, 0.1)
    texts = []
    for order in ((one, other), (other, one)):
        for each in order:
            kept.keep(each)
        texts.append((tmp_path / "books.json").read_text())
    assert texts[0] == texts[1]
    kept.keep({**one, "sampling": "s1", "kl": [0.02] * 16})
    assert kept.results()[0]["again"][0]["kl"] == [0.02] * 16
    assert "| 0.02000 |" in page_of(kept), "the other sampling has its column"


def test_the_loss_of_the_original_is_stored_once_for_each_training_of_the_model(tmp_path: Path) -> None:
    import store

    kept = store.Store(tmp_path)
    kept.keep(result("aiakq", "gptq", 4.01, 0.01))
    kept.keep(result("aiakq", "RTN", 4.1, 0.1))
    assert list(json.loads((tmp_path / "books.json").read_text())["originals"]) == [HASH[:16]]
    again = result("aiakq", "RTN", 4.1, 0.1, digest="f" * 64, loss_original=[3.0] * 16)
    kept.keep(again)
    assert sorted(json.loads((tmp_path / "books.json").read_text())["originals"]) == [HASH[:16], "f" * 16]
    kept.keep(result("aiakq", "RTN", 4.1, 0.1))
    assert list(json.loads((tmp_path / "books.json").read_text())["originals"]) == [HASH[:16]], "unused ones go"


def test_a_tool_that_is_not_installed_replaces_no_figures_and_one_that_fails_does(tmp_path: Path) -> None:
    import store

    kept = store.Store(tmp_path)
    measured = result("gptqmodel", "mse 2.4", 4.01, 0.01)
    names = {name: measured[name] for name in ("model", "sampling", "slug", "key")}
    kept.keep({**names, "failed": "not installed: no network"})
    assert kept.row("books", "s0", measured["slug"])["failed"] == "not installed: no network"
    kept.keep(measured)
    kept.keep({**names, "failed": "not installed: no network"})
    assert "kl" in kept.row("books", "s0", measured["slug"])
    kept.keep({**names, "failed": "failed: ValueError"})
    assert kept.row("books", "s0", measured["slug"])["failed"] == "failed: ValueError"


def test_a_stored_row_is_up_to_date_on_a_machine_without_checkpoints(tmp_path: Path) -> None:
    import quality
    import store
    from jobs import Job
    from rows import ROWS
    from subjects import Subject

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "ids.json").write_text("[[1, 2]]")
    subject = Subject("books", tmp_path, {"s0": tmp_path / "ids.json"}, torch.zeros(1, 2, dtype=torch.int64))
    row = next(row for row in ROWS if row.slug == slug_of("gptqmodel", "mse 2.4"))
    job, kept = Job(row, subject, "s0", tmp_path / "out"), store.Store(tmp_path / "results")
    assert quality.is_due(job, kept, retry=False)
    measured = result("gptqmodel", "mse 2.4", 4.01, 0.01, key=job.key, windows=quality.windows_hash(subject))
    kept.keep(measured)
    assert not quality.is_due(job, kept, retry=False)
    kept.keep({**measured, "windows": HASH})
    assert quality.state_of(job, quality.kept_row(job, kept)) == ("to be scored", "")
    kept.keep({**measured, "key": {**job.key, "tool": HASH}})
    assert quality.state_of(job, quality.kept_row(job, kept)) == ("stale", "tool")
    kept.keep({**measured, "failed": "failed: x"})
    assert not quality.is_due(job, kept, retry=False) and quality.is_due(job, kept, retry=True)


# --- rows of an earlier page --------------------------------------------------------------------------------------


def published(tmp_path: Path) -> tuple[Any, str]:
    """A store without values per window, of a page; and the page."""
    import store
    from published import read_into

    whole = store.Store(tmp_path / "whole")
    for one in (
        result("aiakq", "RTN", 4.1, 0.1),
        result("aiakq", "gptq", 4.01, 0.01),
        result("gptqmodel", "mse 2.4", 4.001, 0.02, machine="another"),
        result("autoround", "200 iterations (defaults)", 4.03, 0.0101),
    ):
        whole.keep(one)
    whole.keep({**result("aiakq", "gptq", 4.01, 0.015), "sampling": "s1"})
    failed = {"model": "books", "sampling": "s0", "slug": slug_of("llmcompressor", "GPTQ"), "failed": "failed: x"}
    whole.keep(failed)
    page = page_of(whole)
    kept = store.Store(tmp_path / "kept")
    read_into(kept, page, "1234")
    return kept, page


def test_rows_of_an_earlier_page_are_shown_as_they_were_with_a_mark(tmp_path: Path) -> None:
    kept, before = published(tmp_path)
    page = page_of(kept)
    unmarked = page.replace(" †", "").splitlines()
    missing = [line for line in before.splitlines() if line not in unmarked]
    assert len(missing) == 1 and missing[0].startswith("Rows of aiakq at commit abc")
    marked = [line for line in page.splitlines() if line.startswith("| aiakq") and "**gptq** †" in line]
    assert len(marked) == 2 and "| 0.01500 † |" not in marked[1]
    assert "published at commit 1234 (of aiakq at abc)" in " ".join(page.split())


def test_a_row_that_is_measured_again_replaces_the_published_one(tmp_path: Path) -> None:
    kept, _ = published(tmp_path)
    kept.keep(result("aiakq", "gptq", 4.01, 0.01))
    page = page_of(kept)
    assert "| aiakq | **gptq** | 4.6 |" in page and "mse 2.4 † |" in page
    short = next(line for line in page.splitlines() if line.startswith("| The example model | 4-bit"))
    assert "0.99 (0.99 to 0.99)" in short, "the comparison of the same figures is kept with its interval"
    kept.keep(result("aiakq", "gptq", 4.01, 0.008))
    short = next(line for line in page_of(kept).splitlines() if line.startswith("| The example model | 4-bit"))
    assert "| 0.79 |" in short, "of other figures there is no interval"
    kept.keep(result("aiakq", "gptq", 4.01, 0.008, digest="f" * 64, loss_original=[3.0] * 16))
    page = page_of(kept)
    assert "## In short" not in page, "another training of the model is not compared"
    assert "Rows of another training of the model, not compared with these: perplexity 58.850." in page


def test_reading_a_page_keeps_what_is_measured(tmp_path: Path) -> None:
    from published import read_into

    kept, page = published(tmp_path)
    kept.keep(result("aiakq", "gptq", 4.01, 0.008))
    read_into(kept, page, "1234")
    assert "kl" in kept.row("books", "s0", slug_of("aiakq", "gptq"))


def test_the_page_in_the_repository_is_that_of_its_results() -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; import quality_page, store; from rows import ROWS; k = store.Store();"
        "print(quality_page.page(ROWS, k.results(), k.read(store.ELSEWHERE), k.read(store.PUBLISHED)), end='')"
    )
    folders = [str(EXAMPLES), str(EXAMPLES / "training"), str(EXAMPLES / "peers")]
    found = subprocess.run([sys.executable, "-c", code, *folders], capture_output=True, text=True, check=True).stdout
    assert found == (ROOT / "docs" / "quality.md").read_text(encoding="utf-8")
