"""Block-bootstrap intervals: coverage, correlation, quantiles, edge cases."""

import math

import pytest
import torch

from aiakq.evaluation import intervals
from aiakq.evaluation.intervals import Interval, Resamples, quantile


def correlated(windows: int, length: int, seed: int, stretch: int = 32) -> torch.Tensor:
    """Values of which ``stretch`` neighbours are nearly equal."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randn(windows, length // stretch, generator=generator).exp()
    return levels.repeat_interleave(stretch, 1) + 0.01 * torch.randn(windows, length, generator=generator)


def test_equal_values_give_equal_intervals() -> None:
    values = correlated(8, 512, 0)
    assert Resamples(8, 512).mean(values) == Resamples(8, 512).mean(values.clone())


def test_blocks_cover_the_true_mean_of_correlated_values_where_single_tokens_do_not() -> None:
    resamples, independent = Resamples(8, 512), Resamples(8, 512, independent=True)
    wide = narrow = 0
    for seed in range(60):
        values = correlated(8, 512, seed)
        found, naive = resamples.mean(values), independent.mean(values)
        assert found is not None and naive is not None
        wide += not found.excludes(math.exp(0.5))
        narrow += not naive.excludes(math.exp(0.5))
    assert wide >= 50, "about 57 of 60 are expected"
    assert wide > narrow + 5


def test_blocks_stay_within_a_window_and_are_few() -> None:
    resamples = Resamples(16, 511)
    per_window = resamples.block_of.view(16, 511)
    assert (per_window[:, 0].diff() > 0).all() and set(per_window[0].tolist()) == {0, 1, 2, 3}
    assert resamples.blocks == 64 and resamples.block_length == 128
    assert Resamples(5000, 511).blocks <= 512
    assert Resamples(10_000, 1, independent=True).blocks <= 512


def test_quantiles_are_those_of_resampled_values() -> None:
    values = correlated(4, 256, 3)
    resamples = Resamples(4, 256)
    for fraction in (0.5, 0.9, 0.99):
        wanted = []
        for counts in resamples._counts[:200].long():
            drawn = values.flatten().repeat_interleave(counts[resamples.block_of])
            wanted.append(quantile(drawn, fraction))
        found = resamples.resampled_quantiles(values, fraction)[:200]
        assert found.tolist() == pytest.approx(wanted)


def test_a_quantile_is_not_exceeded_by_its_fraction() -> None:
    values = torch.arange(1.0, 1001.0)
    assert quantile(values, 0.99) == 990 and quantile(values, 0.5) == 500 and quantile(values, 0.999) == 999
    assert math.isnan(quantile(torch.tensor([1.0, math.nan]), 0.5))


def test_the_interval_of_the_maximum_ends_at_the_largest_value() -> None:
    values = correlated(8, 512, 4)
    found = Resamples(8, 512).maximum(values)
    assert found is not None and found.high == pytest.approx(float(values.max())) and found.low < found.high


def test_ratios_of_paired_values_are_narrower_than_those_of_each() -> None:
    ours = correlated(8, 512, 5)
    theirs = 1.1 * ours + 0.01
    resamples = Resamples(8, 512)
    paired, alone = resamples.ratio(ours, theirs), resamples.mean(ours)
    assert paired is not None and alone is not None
    assert paired.high < 1, "hidden in the variation of the text, but certain"
    assert paired.high - paired.low < 0.1 * (alone.high - alone.low)


def test_there_is_no_interval_where_nothing_is_known() -> None:
    assert Resamples(1, 100).mean(torch.ones(1, 100)) is None, "three blocks"
    values = torch.ones(8, 512)
    values[3, 4] = math.inf
    assert Resamples(8, 512).mean(values) is None
    values[3, 4] = math.nan
    assert Resamples(8, 512).mean(values) is None and Resamples(8, 512).quantile(values, 0.99) is None
    assert Resamples(8, 512).mean(torch.ones(8, 512)) == Interval(1.0, 1.0)


@pytest.mark.parametrize(("freedom", "value"), [(7, 2.36462), (15, 2.13145), (60, 2.00030), (500, 1.96472)])
def test_student_t(freedom: int, value: float) -> None:
    assert intervals._student_t(0.025, freedom) == pytest.approx(value, abs=2e-3)
