"""Compare benchmark results: statistics, readers of result files, interleaved A/B measurement, reports."""
