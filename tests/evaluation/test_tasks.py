"""Tasks of lm-eval: reading its results, pairing items, and a run where it is installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from aiakq.arguments.checkpoint import EvalArguments
from aiakq.errors import AiakqError
from aiakq.evaluation import tasks
from aiakq.evaluation.wording import BETTER, SAME, WORSE

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "lm_eval"


def results(right: list[float]) -> dict[str, Any]:
    """What ``simple_evaluate`` returns, for a task with the given items."""
    samples = [{"doc_id": item, "filter": "none", "metrics": ["acc"], "acc": value} for item, value in enumerate(right)]
    values = {"alias": "quiz", "acc,none": sum(right) / len(right), "acc_stderr,none": 0.1}
    return {"results": {"quiz": values}, "samples": {"quiz": samples}, "higher_is_better": {"quiz": {"acc": True}}}


def rows(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    (row,) = tasks.task_rows(tasks.scores_of(results(ours)), tasks.scores_of(results(theirs)))
    return row


def test_items_are_paired() -> None:
    ours, theirs = [1.0] * 40 + [0.0] * 60, [1.0] * 55 + [0.0] * 45
    row = rows(ours, theirs)
    assert (row["task"], row["metric"], row["filter"], row["items"]) == ("quiz", "acc", "none", 100)
    assert (row["score"], row["score_original"]) == (0.4, 0.55)
    assert row["difference"] == pytest.approx(-0.15)
    assert row["difference_interval"]["low"] < -0.15 < row["difference_interval"]["high"] < 0
    assert (row["only_model_right"], row["only_original_right"]) == (0, 15)
    assert row["p_value"] == pytest.approx(2 * 0.5**15) and row["verdict"] == WORSE
    assert rows(theirs, ours)["verdict"] == BETTER


def test_a_few_discordant_items_are_not_a_difference() -> None:
    row = rows([1.0, 1.0, 1.0] + [0.0] * 47, [0.0, 0.0, 0.0] + [0.0] * 47)
    assert row["verdict"] == SAME and row["p_value"] == pytest.approx(0.25)


def test_scores_that_are_not_right_or_wrong_use_the_interval() -> None:
    row = rows([0.5 + 0.01 * (item % 7) for item in range(50)], [0.6 + 0.01 * (item % 5) for item in range(50)])
    assert row["p_value"] is None and row["verdict"] == WORSE


def test_mcnemar() -> None:
    assert tasks.mcnemar(0, 0) == 1.0
    assert tasks.mcnemar(5, 5) == 1.0
    assert tasks.mcnemar(1, 9) == pytest.approx(22 / 1024)


def test_options_that_cannot_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AiakqError, match="lm-eval.*is not installed") as caught:
        tasks.check_installed(EvalArguments(model="m", tasks=("hellaswag",)))
    assert caught.value.id == "no_lm_eval" and "pip install 'aiakq[eval]'" in caught.value.remedy
    with pytest.raises(AiakqError, match="--task-limit cannot be combined with no --tasks"):
        tasks.check_installed(EvalArguments(model="m", task_limit=3))


def test_local_tasks_run_on_the_engine(example_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'aiakq[eval]'")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.chdir(EXAMPLES.parents[1])
    options = EvalArguments(
        model=str(example_model), tasks=("tinybooks_continuation",), include_path=EXAMPLES, task_limit=10
    )
    scores = tasks.run_tasks(str(example_model), options)
    assert len(scores.items["tinybooks_continuation", "acc,none"]) == 10
    assert len((EXAMPLES / "continuation.jsonl").read_text().splitlines()) > 10
    with pytest.raises(AiakqError) as caught:
        tasks.run_tasks(str(example_model), EvalArguments(model=str(example_model), tasks=("no_such_task",)))
    assert caught.value.id == "tasks" and json.dumps(caught.value.message)
