"""Comparison of benchmark results: statistics, readers of records, two sides measured in alternation, reports."""
