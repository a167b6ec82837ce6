"""Shapes of a model's linears."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearShape:
    """One linear that will be quantized: its name, outputs N, inputs K, and whether tensor parallelism cuts its K."""

    name: str
    n: int
    k: int
    row_parallel: bool
