"""Limits of containers and services, read from trees of files as the kernel shows them, and from real groups."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aiakq.system import cgroups, memory, threads

V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    "32 31 0:29 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "33 31 0:30 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
)


@pytest.fixture
def tree(tmp_path) -> Callable[..., Path]:
    """``tree(cgroup, mounts, {path: text})`` -> a root folder with these files."""

    def make(cgroup: str, mounts: str, files: dict[str, str]) -> Path:
        for path, text in {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mounts, **files}.items():
            target = tmp_path / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text + "\n")
        return tmp_path

    return make


def test_the_limits_of_a_service_are_those_of_its_own_group_and_of_all_around_it(tree):
    unit = "sys/fs/cgroup/system.slice/aiakq.service"
    root = tree(
        "0::/system.slice/aiakq.service",
        V2_MOUNT.format(root="/"),
        {
            f"{unit}/memory.max": "1000000",
            f"{unit}/memory.high": "max",
            f"{unit}/memory.current": "700000",
            f"{unit}/memory.stat": "anon 100000\ninactive_file 500000\nactive_file 7",
            f"{unit}/cpu.max": "250000 100000",
            "sys/fs/cgroup/system.slice/cpu.max": "150000 100000",
            "sys/fs/cgroup/system.slice/memory.max": "max",
            "sys/fs/cgroup/system.slice/memory.current": "5",
        },
    )
    assert cgroups.available_memory(root) == 800_000, "a model file that was read is not memory in use"
    assert cgroups.processor_limit(root) == 1.5


def test_the_lower_of_two_limits_counts(tree):
    root = tree(
        "0::/a/b",
        V2_MOUNT.format(root="/"),
        {
            "sys/fs/cgroup/a/b/memory.max": "900",
            "sys/fs/cgroup/a/b/memory.high": "500",
            "sys/fs/cgroup/a/b/memory.current": "100",
            "sys/fs/cgroup/a/memory.max": "1000",
            "sys/fs/cgroup/a/memory.current": "990",
        },
    )
    assert cgroups.available_memory(root) == 10
    assert cgroups.processor_limit(root) is None


@pytest.mark.parametrize("path", ["/", "/docker/abc", "/../elsewhere"])
def test_a_container_sees_its_own_group_at_the_mount(tree, path):
    """Its path may be that on the host, with or without a namespace of cgroups."""
    files = {"sys/fs/cgroup/memory.max": "2000", "sys/fs/cgroup/memory.current": "500"}
    root = tree(f"0::{path}", V2_MOUNT.format(root="/docker/abc" if path == "/docker/abc" else "/"), files)
    assert cgroups.available_memory(root) == 1500


def test_limits_of_cgroup_version_1_are_read(tree):
    memory_folder, cpu_folder = "sys/fs/cgroup/memory", "sys/fs/cgroup/cpu,cpuacct"
    root = tree(
        "9:name=systemd:/\n5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/",
        V1_MOUNTS.format(root="/docker"),
        {
            f"{memory_folder}/memory.limit_in_bytes": "9223372036854771712",
            f"{memory_folder}/memory.usage_in_bytes": "123",
            f"{memory_folder}/abc/memory.limit_in_bytes": "10000",
            f"{memory_folder}/abc/memory.usage_in_bytes": "6000",
            f"{memory_folder}/abc/memory.stat": "inactive_file 1\ntotal_inactive_file 1000",
            f"{cpu_folder}/cpu.cfs_quota_us": "-1",
            f"{cpu_folder}/cpu.cfs_period_us": "100000",
            f"{cpu_folder}/abc/cpu.cfs_quota_us": "50000",
            f"{cpu_folder}/abc/cpu.cfs_period_us": "100000",
        },
    )
    assert cgroups.available_memory(root) == 5000
    assert cgroups.processor_limit(root) == 0.5


@pytest.mark.parametrize("broken", ["", "nothing\n", "0::/a:b:c\n", "::::\n"])
def test_a_machine_without_cgroups_has_no_limits(tree, broken, tmp_path):
    assert cgroups.available_memory(tmp_path) is None and cgroups.processor_limit(tmp_path) is None
    root = tree(
        broken, "12 - \n" + V2_MOUNT.format(root="/"), {"sys/fs/cgroup/memory.max": "x", "sys/fs/cgroup/cpu.max": ""}
    )
    assert cgroups.available_memory(root) is None and cgroups.processor_limit(root) is None


@pytest.mark.parametrize(("limit", "expected"), [(None, None), (0.5, 1), (1.0, 1), (2.9, 2)])
def test_threads_stay_within_the_limit(monkeypatch, limit, expected):
    monkeypatch.setattr(threads, "processor_limit", lambda: limit)
    monkeypatch.setattr(threads, "_processors", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads.threads_in_limit() == expected
    assert threads.available_threads() == (expected or 8)
    environment: dict[str, str] = {}
    threads.limit_threads(environment)
    assert environment == ({} if expected is None else {"OMP_NUM_THREADS": str(expected)})
    given = {"OMP_NUM_THREADS": "5"}
    threads.limit_threads(given)
    assert given == {"OMP_NUM_THREADS": "5"}, "the user knows better"


def test_a_limit_above_the_processors_changes_nothing(monkeypatch):
    monkeypatch.setattr(threads, "processor_limit", lambda: 64.0)
    monkeypatch.setattr(threads, "_processors", lambda: 8)
    environment: dict[str, str] = {}
    threads.limit_threads(environment)
    assert environment == {}


@pytest.fixture
def real_groups() -> Iterator[list[Path]]:
    """A group of version 1 with 600 MB, and one with half a processor, made for the test."""
    name, made = f"aiakq-test-{uuid.uuid4().hex[:8]}", []
    limits = [("memory", "memory.limit_in_bytes", str(600 << 20)), ("cpu", "cpu.cfs_quota_us", "50000")]
    try:
        for controller, file, value in limits:
            folder = Path("/sys/fs/cgroup", controller, name)
            folder.mkdir()
            made.append(folder)
            (folder / file).write_text(value)
    except OSError:
        for folder in made:
            folder.rmdir()
        pytest.skip("groups of version 1 cannot be made here")
    yield made
    for folder in made:
        folder.rmdir()


def test_a_process_in_real_groups_sees_their_limits(real_groups):
    code = (
        "import os, sys; [open(f'{folder}/cgroup.procs', 'w').write(str(os.getpid())) for folder in sys.argv[1:]];"
        "from aiakq.system.memory import free_host_memory; import torch;"
        "from aiakq.runtime.distributed.starting import limit_torch_threads; limit_torch_threads();"
        "from aiakq.system.threads import available_threads;"
        "print(free_host_memory(), available_threads(), torch.get_num_threads())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    words = [sys.executable, "-c", code, *map(str, real_groups)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    free, count, torch_threads = map(int, done.stdout.split())
    assert 100 << 20 < free < 600 << 20 and count == torch_threads == 1
    assert memory.free_host_memory() > 600 << 20
