"""Tasks of lm-eval (``aiakq eval --tasks``), run by the runtime, and compared item by item with the original."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiakq.arguments.checkpoint import EvalArguments
from aiakq.errors import AiakqError, error, one_line
from aiakq.evaluation.wording import BETTER, SAME, WORSE

if TYPE_CHECKING:
    from aiakq.evaluation.intervals import Interval

#: A verdict from discordant items needs a smaller probability than this.
_ALPHA = 0.05


@dataclass(frozen=True)
class TaskScores:
    """What a model scored: ``overall`` by task and metric, and ``items`` by task, metric and number of the item.

    A metric is named as lm-eval does, with its filter: ``acc,none``.
    """

    overall: Mapping[tuple[str, str], float]
    items: Mapping[tuple[str, str], Mapping[int, float]]
    higher_is_better: Mapping[tuple[str, str], bool]


def check_installed(options: EvalArguments) -> None:
    """Raise ``no_lm_eval`` if ``--tasks`` is given without lm-eval, ``option_conflict`` for options without it."""
    if options.tasks and importlib.util.find_spec("lm_eval") is None:
        raise error("no_lm_eval")
    given = {"--include-path": options.include_path, "--num-fewshot": options.num_fewshot}
    given["--task-limit"] = options.task_limit
    for flag, value in given.items():
        if value is not None and not options.tasks:
            reason = "it says how tasks are run"
            raise error("option_conflict", option=flag, other="no --tasks", reason=reason, hint="Give --tasks.")
    if options.include_path is not None and not options.include_path.is_dir():
        expected = "a folder with task definitions"
        raise error("bad_option", option="--include-path", value=options.include_path, expected=expected, hint="")


def run_tasks(model: str, options: EvalArguments) -> TaskScores:
    """Run the tasks of ``options`` with a model. Raises ``tasks``, and the errors of loading a model."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    from aiakq.evaluation.lm_eval_model import load_lm_eval_model

    adapter = load_lm_eval_model(model, options)
    folder = None if options.include_path is None else str(options.include_path)
    # lm-eval's own progress bars would destroy ours, and what a task prints our document.
    nowhere = io.StringIO()
    try:
        with contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
            results = lm_eval.simple_evaluate(
                model=adapter,
                tasks=list(options.tasks),
                num_fewshot=options.num_fewshot,
                limit=options.task_limit,
                task_manager=TaskManager(include_path=folder),
                bootstrap_iters=0,
                log_samples=True,
            )
    except AiakqError:
        raise
    except Exception as problem:
        # Whatever a task raises: an unknown name, a data set that cannot be loaded, code of its own.
        hint = "Task names are those of lm_eval ls tasks; data sets are downloaded from the hub unless they are local."
        raise error("tasks", tasks=", ".join(options.tasks), reason=one_line(problem), hint=hint) from problem
    return scores_of(results)


def scores_of(results: Mapping[str, Any]) -> TaskScores:
    """Return the scores in the result of ``lm_eval.simple_evaluate``."""
    overall = {}
    for task, values in results["results"].items():
        for metric, value in values.items():
            if isinstance(value, (int, float)) and "," in metric and not metric.partition(",")[0].endswith("_stderr"):
                overall[task, metric] = float(value)
    items: dict[tuple[str, str], dict[int, float]] = {}
    for task, samples in results.get("samples", {}).items():
        for sample in samples:
            for metric in sample.get("metrics", ()):
                value = sample.get(metric)
                if isinstance(value, (bool, int, float)):
                    key = task, f"{metric},{sample.get('filter', 'none')}"
                    items.setdefault(key, {})[sample["doc_id"]] = float(value)
    higher = results.get("higher_is_better", {})
    better = {key: bool(higher.get(key[0], {}).get(key[1].partition(",")[0], True)) for key in overall}
    return TaskScores(overall, items, better)


def task_rows(model: TaskScores, original: TaskScores | None) -> list[dict[str, Any]]:
    """Return a row for every task and metric as JSON values, with the original's score and the paired difference."""
    rows = []
    for key, value in model.overall.items():
        task, _, (metric, _, filter_name) = key[0], ",", key[1].partition(",")
        items = model.items.get(key, {})
        row: dict[str, Any] = {"task": task, "metric": metric, "filter": filter_name, "score": value}
        row |= {"items": len(items) or None, "higher_is_better": model.higher_is_better[key]}
        if original is not None:
            row["score_original"] = original.overall.get(key)
            row |= paired(items, original.items.get(key, {}), model.higher_is_better[key])
        rows.append(row)
    return rows


def paired(ours: Mapping[int, float], theirs: Mapping[int, float], higher_is_better: bool = True) -> dict[str, Any]:
    """Compare two models item by item: mean difference with its interval, discordant items, and the verdict.

    Of items that are right or wrong, the exact McNemar test decides; of others, whether the interval excludes 0.
    """
    import torch

    from aiakq.evaluation.intervals import Resamples

    common = sorted(ours.keys() & theirs.keys())
    row: dict[str, Any] = dict.fromkeys(
        ("difference", "difference_interval", "only_model_right", "only_original_right", "p_value")
    )
    if not common:
        return {**row, "verdict": None}
    pairs = [(ours[item], theirs[item]) for item in common]
    differences = [a - b for a, b in pairs]
    mean = math.fsum(differences) / len(differences)
    found: Interval | None = None
    values = torch.tensor(differences, dtype=torch.float64).unsqueeze(1)
    found = Resamples(len(common), 1, independent=True).mean(values)
    row |= {"difference": mean, "difference_interval": None if found is None else vars(found)}
    different = found is not None and found.excludes(0.0)
    if all(value in (0.0, 1.0) for pair in pairs for value in pair):
        only_ours, only_theirs = pairs.count((1.0, 0.0)), pairs.count((0.0, 1.0))
        p = mcnemar(only_ours, only_theirs)
        row |= {"only_model_right": only_ours, "only_original_right": only_theirs, "p_value": p}
        different = p < _ALPHA
    better = BETTER if (mean > 0) == higher_is_better else WORSE
    return {**row, "verdict": better if different and mean else SAME}


def mcnemar(one: int, other: int) -> float:
    """Return the exact two-sided p-value of McNemar's test for the numbers of discordant items."""
    total = one + other
    tail = sum(math.comb(total, count) for count in range(min(one, other) + 1))
    return float(min(1.0, 2 * tail / 2**total))
