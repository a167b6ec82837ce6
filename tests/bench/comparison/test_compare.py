"""``bench compare``: which metrics decide, what is refused, verdicts and exit codes."""

from __future__ import annotations

import json

import pytest

from aiakq.arguments.comparison import CompareArguments
from aiakq.bench.comparison.compare import CHANGED, change_text, compare, counter_rows, failure
from aiakq.bench.comparison.readers import Result
from aiakq.bench.comparison.statistics import Estimate, of_runs
from aiakq.cli import main
from aiakq.errors import CONFLICT, GATE, UNDECIDED, USAGE, AiakqError


def side(label: str = "a", machine: dict | None = None, **metrics) -> Result:
    named = {name.replace("__", "."): value for name, value in metrics.items()}
    return Result("aiakq", "serve", label, named, {}, machine or {"device_name": "X", "cpu_count": 2}, {"input_len": 8})


def exact(value: float) -> Estimate:
    return Estimate(value, 0.001, 50, 51, "runs")


def options(**settings) -> CompareArguments:
    return CompareArguments(base="a", new="b", **settings)


def rows_of(document: dict) -> dict[str, dict]:
    return {row["metric"]: row for row in document["metrics"]}


def test_slower_is_worse_and_fails():
    document = compare(side(tpot_ms__p50=exact(10)), side("b", tpot_ms__p50=exact(10.5)), options())
    (row,) = document["metrics"]
    assert row["ratio"] == pytest.approx(1.05) and row["verdict"] == "worse" == document["verdict"]
    problem = failure(document, allow_undecided=False)
    assert problem.exit_code == GATE and "tpot_ms.p50 +5.0 % (+4.7 to +5.3 %)" in str(problem)


def test_more_throughput_is_better():
    document = compare(side(output_throughput=exact(100)), side("b", output_throughput=exact(110)), options())
    assert document["verdict"] == "better" and failure(document, False) is None


def test_a_change_within_the_margin_is_no_failure():
    document = compare(side(tpot_ms__p50=exact(10)), side("b", tpot_ms__p50=exact(10.3)), options(margin=5.0))
    assert document["verdict"] == "equal" and failure(document, False) is None


def test_wide_intervals_are_undecided_with_a_code_of_their_own():
    wide = Estimate(10, 0.2, 50, 51, "runs")
    document = compare(side(tpot_ms__p50=wide), side("b", tpot_ms__p50=wide), options())
    assert failure(document, allow_undecided=False).exit_code == UNDECIDED
    assert failure(document, allow_undecided=True) is None


def test_the_mean_decides_where_the_median_has_no_interval():
    sides = [side(ttft_ms__p50=Estimate(9), ttft_ms__mean=exact(10), itl_ms__mean=exact(1)) for _ in "ab"]
    document = compare(*sides, options())
    assert [name for name, row in rows_of(document).items() if row["gated"]] == ["ttft_ms.mean"]


def test_chosen_metrics_decide():
    sides = [side(ttft_ms__p50=exact(9), output_throughput=exact(10)) for _ in "ab"]
    document = compare(*sides, options(metrics=("output_throughput",)))
    assert [name for name, row in rows_of(document).items() if row["gated"]] == ["output_throughput"]
    with pytest.raises(AiakqError, match="have the metric 'tpot_ms'"):
        compare(*sides, options(metrics=("tpot_ms",)))


def test_more_metrics_that_decide_widen_the_intervals():
    metrics = {"ttft_ms__p50": of_runs([9.0, 9.1, 9.2]), "output_throughput": of_runs([9.0, 9.1, 9.2])}
    one = compare(side(**metrics), side(**metrics), options(metrics=("ttft_ms.p50",)))
    both = compare(side(**metrics), side(**metrics), options())
    assert rows_of(both)["ttft_ms.p50"]["high"] > rows_of(one)["ttft_ms.p50"]["high"]


def test_noise_gives_single_runs_an_interval():
    base, new = side(output_throughput=Estimate(100)), side("b", output_throughput=Estimate(80))
    assert rows_of(compare(base, new, options()))["output_throughput"]["low"] is None
    assert compare(base, new, options(noise=2.0))["verdict"] == "worse"


def test_intervals_over_requests_come_with_a_warning():
    requests = Estimate(10, 0.01, 99, 100, "requests")
    document = compare(side(ttft_ms__mean=requests), side(ttft_ms__mean=requests), options())
    assert any("variation between runs" in text for text in document["warnings"])


def test_other_machines_are_refused_by_default():
    base, new = side(ttft_ms__mean=exact(1)), side("b", {"device_name": "Y", "cpu_count": 2}, ttft_ms__mean=exact(1))
    with pytest.raises(AiakqError) as caught:
        compare(base, new, options())
    assert caught.value.exit_code == CONFLICT and "device_name 'X' and 'Y'" in str(caught.value)
    document = compare(base, new, options(across_machines=True))
    assert "different machines" in document["warnings"][0]


def test_unknown_machines_and_other_loads_are_marked():
    base, new = (
        side(ttft_ms__mean=exact(1)),
        Result("vllm", "serve", "b", {"ttft_ms.mean": exact(1)}, {}, {}, {"input_len": 9}),
    )
    texts = " ".join(compare(base, new, options())["warnings"])
    assert "b does not name the machine" in texts and "input_len 8 and 9" in texts


def test_nothing_in_common_is_an_error():
    with pytest.raises(AiakqError) as caught:
        compare(side(ttft_ms__mean=exact(1)), side(tpot_ms__mean=exact(1)), options())
    assert caught.value.id == "nothing_to_compare"


def test_counters_have_to_be_equal():
    rows = {
        row["counter"]: row["verdict"] for row in counter_rows({"a": 1, "b": 2, "old": 3}, {"a": 1, "b": 1, "new": 4})
    }
    assert rows == {"a": "equal", "b": CHANGED, "old": "equal", "new": "equal"}


def test_a_changed_counter_fails():
    base = Result("aiakq", "counters", "a", {}, {"steps": 10, "pages": 3})
    new = Result("aiakq", "counters", "b", {}, {"steps": 9, "pages": 3})
    problem = failure(compare(base, new, options()), allow_undecided=False)
    assert problem.exit_code == GATE and "steps 10 -> 9" in str(problem) and "pages" not in str(problem)


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path):
    """Folders ``base``, ``same`` and ``slow`` of three runs each, as vLLM writes them."""
    for name, scale in {"base": 1.0, "same": 1.0, "slow": 1.1}.items():
        (tmp_path / name).mkdir()
        for number, value in enumerate((10.0, 10.01, 10.02)):
            document = {"completed": 5, "mean_ttft_ms": value * scale, "median_ttft_ms": value * scale}
            (tmp_path / name / f"{number}.json").write_text(json.dumps(document))
    return tmp_path


def test_the_command_prints_one_document_and_a_table(runs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["bench", "compare", str(runs / "base"), str(runs / "same")]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["verdict"] == "equal"
    assert "ttft_ms.p50" in err and max(map(len, err.splitlines())) <= 80 + len(str(runs))


def test_the_exit_code_tells_worse(runs, capsys):
    assert main(["bench", "compare", str(runs / "base"), str(runs / "slow")]) == GATE
    assert "error[got_worse]: Worse by more than 2 %: ttft_ms.p50 +10.0 %" in capsys.readouterr().err


def test_every_report_is_written(runs, capsys):
    words = ["bench", "compare", str(runs / "base"), str(runs / "slow")]
    files = {name: runs / f"report.{name}" for name in ("output", "markdown", "junit", "github", "bencher")}
    for name, path in files.items():
        words += [f"--{name}", str(path)]
    assert main(words) == GATE
    assert json.loads(files["output"].read_text()) == json.loads(capsys.readouterr().out)
    assert all(path.stat().st_size > 50 for path in files.values())


def test_a_report_in_no_folder_is_refused_first(runs, capsys):
    words = ["bench", "compare", "missing", "missing", "--junit", str(runs / "none" / "a.xml")]
    assert main(words) != 0
    assert "error[output_failed]" in capsys.readouterr().err


def test_a_missing_side_is_a_usage_error(capsys):
    assert main(["bench", "compare", "one.json"]) == USAGE


def test_an_interval_without_a_sensible_end_is_not_spelt_out():
    row = {"ratio": 0.9, "low": 0.001, "high": 1.7e17}
    assert change_text(row) == "-10.0 % (-99.9 to >+900 %)"
