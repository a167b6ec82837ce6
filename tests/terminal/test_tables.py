"""Tables of results."""

from __future__ import annotations

import pytest

from aiakq.bench.serve import template
from aiakq.terminal.tables import bench_result


@pytest.mark.parametrize(("duration", "shown"), [(0.3, False), (3.0, True)])
def test_a_run_shorter_than_a_second_has_no_peak_per_second(duration, shown, capsys):
    measured = {"duration": duration, "output_throughput": 4713.0, "max_output_tokens_per_s": 1536.0}
    config = {"model": "m", "workload": "random", "num_prompts": 1, "input_len": 1, "output_len": 1}
    config |= {"request_rate": "inf", "max_concurrency": None}
    bench_result(template() | measured | {"config": config})
    assert ("peak output tokens/s" in capsys.readouterr().err) == shown
