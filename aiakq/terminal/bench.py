"""``aiakq bench``: the command group, with its commands registered by importing their modules."""

from __future__ import annotations

from aiakq.terminal import compare_commands, load_commands
from aiakq.terminal.bench_commands import bench

__all__ = ["bench", "compare_commands", "load_commands"]
