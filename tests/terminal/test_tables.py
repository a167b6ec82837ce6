"""Tables of results."""

from __future__ import annotations

import pytest

from aiakq.bench.serve import template
from aiakq.quantizers.report.records import LayerResult, QuantizeReport
from aiakq.terminal.compare_models_command import _show
from aiakq.terminal.tables import bench_result, quantize_report


@pytest.mark.parametrize(("duration", "shown"), [(0.3, False), (3.0, True)])
def test_a_run_shorter_than_a_second_has_no_peak_per_second(duration, shown, capsys):
    measured = {"duration": duration, "output_throughput": 4713.0, "max_output_tokens_per_s": 1536.0}
    config = {"model": "m", "workload": "random", "num_prompts": 1, "input_len": 1, "output_len": 1}
    config |= {"request_rate": "inf", "max_concurrency": None}
    bench_result(template() | measured | {"config": config})
    assert ("peak output tokens/s" in capsys.readouterr().err) == shown


def test_a_report_of_quantization_fits_into_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    bounds = {"kl_interval": {"low": 0.22, "high": 0.26}, "top1_agreement_interval": {"low": 0.65, "high": 0.68}}
    report = QuantizeReport("in", "out", "gptq", "w2a16 g128 sym", "gptq", 128, True, "bfloat16", 1, 2.23, 100, 50)
    report.layers = [LayerResult("model.layers.1.mlp.down_proj", 0.4)]
    report.kl, report.top1_agreement, report.perplexity_before, report.perplexity_after = 0.24, 0.6676, 54.4, 62.6
    report.evaluations = [{"name": "prose", **bounds, "perplexity_ratio_interval": {"low": 1.12, "high": 1.18}}]
    report.evaluation_text, report.notes = "the bundled held-out text", [" ".join(["note"] * 40)]
    quantize_report(report)
    out = capsys.readouterr().err
    assert max(map(len, out.splitlines())) <= 80
    assert "66.76 % (65.00 to 68.00 %)" in out and "+15.07 % (+12.00 to +18.00 %)" in out


@pytest.mark.parametrize("others", [["awq", "4.6 MB"], ["4.6 MB"]])
def test_compared_models_are_named_in_a_line_of_80_columns(others, capsys, monkeypatch):
    """By the last parts of their paths, and numbers are not folded where a column is left out."""
    monkeypatch.setenv("COLUMNS", "80")
    head = ["model", *(["quantization", "size"] if len(others) > 1 else ["size"]), "bits", "KL", "95 %", "perplexity"]
    numbers = ["4.25", "0.0136", "0.0130 to 0.0141", "62.59"]
    folder = "/home/somebody/models/of/this/year/and/the/last"
    _show({"remarks": []}, [head, *([f"{folder}/{name}", *others, *numbers] for name in ("first/awq", "second/awq"))])
    lines = capsys.readouterr().err.splitlines()
    [first] = [line for line in lines if "first/awq" in line]
    assert "4.6 MB" in first and "0.0130 to 0.0141" in first and "somebody" not in "".join(lines)
