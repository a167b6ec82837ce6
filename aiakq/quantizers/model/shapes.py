"""Shapes of a model's linears."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearShape:
    """A linear to quantize: its name, outputs N, inputs K, and whether tensor parallelism splits its inputs."""

    name: str
    n: int
    k: int
    row_parallel: bool
