"""Processor topology: the NUMA nodes of this machine."""

from __future__ import annotations

import os
from pathlib import Path

_NODES = Path("/sys/devices/system/node")


def cpu_nodes(root: Path = _NODES) -> list[list[int]]:
    """Return the usable processors of every NUMA node that has any; one node if the system reports none."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    nodes = []
    for folder in sorted(root.glob("node[0-9]*"), key=lambda folder: int(folder.name.removeprefix("node"))):
        try:
            cpus = _numbers((folder / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        nodes.append([cpu for cpu in cpus if cpu in allowed])
    return [node for node in nodes if node] or [sorted(allowed)]


def cpu_shares(size: int, root: Path = _NODES) -> list[list[int]]:
    """Return the processors to bind each of ``size`` ranks to, so that its memory is local to its NUMA node.

    Ranks are bound to one node each if nodes can be divided evenly. On a machine with one node, the lists are empty,
    and ranks are not bound.
    """
    nodes = cpu_nodes(root)
    if len(nodes) < 2 or size % len(nodes):
        return [[] for _ in range(size)]
    per_node = size // len(nodes)
    shares = []
    for node in nodes:
        if len(node) < per_node:
            return [[] for _ in range(size)]
        step, more = divmod(len(node), per_node)
        start = 0
        for rank in range(per_node):
            end = start + step + (rank < more)
            shares.append(node[start:end])
            start = end
    return shares


def _numbers(text: str) -> list[int]:
    """Parse a list of numbers like 0-3,8,10-11."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers += range(int(first), int(last or first) + 1)
    return numbers
