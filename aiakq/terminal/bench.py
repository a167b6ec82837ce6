"""``aiakq bench``: the group with all of its commands, which the modules imported here add to it."""

from __future__ import annotations

from aiakq.terminal import compare_commands, load_commands
from aiakq.terminal.bench_commands import bench

__all__ = ["bench", "compare_commands", "load_commands"]
