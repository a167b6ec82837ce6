"""Processors by NUMA node, from a made-up description of a machine."""

import os
from pathlib import Path

import pytest

from aiakq.system.topology import cpu_nodes, cpu_shares


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """``machine(lists, allowed)`` describes nodes by their lists of processors; returns the folder."""

    def make(lists: list[str], allowed: set[int]) -> Path:
        for number, text in enumerate(lists):
            (tmp_path / f"node{number}").mkdir()
            (tmp_path / f"node{number}" / "cpulist").write_text(text + "\n")
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed, raising=False)
        return tmp_path

    return make


def test_nodes_are_read_in_order_and_only_with_processors_that_may_be_used(machine):
    root = machine(["0-3,8", "4-7", ""], {0, 1, 2, 5, 8})
    assert cpu_nodes(root) == [[0, 1, 2, 8], [5]]


def test_ranks_share_out_nodes_evenly(machine):
    root = machine(["0-3", "4-7"], set(range(8)))
    assert cpu_shares(2, root) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cpu_shares(4, root) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_nothing_is_bound_where_nodes_cannot_be_shared_out(machine):
    root = machine(["0-3", "4-7"], set(range(8)))
    assert cpu_shares(3, root) == [[], [], []]
    assert cpu_shares(16, root) == [[]] * 16


def test_a_machine_with_one_node_binds_nothing(machine, tmp_path):
    assert cpu_shares(2, machine(["0-7"], set(range(8)))) == [[], []]
    assert cpu_nodes(tmp_path / "nowhere") == [list(range(8))]
