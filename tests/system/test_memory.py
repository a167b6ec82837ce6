"""Memory of the machine and of a container."""

from __future__ import annotations

import gc

import pytest

from aiakq.system import memory


@pytest.fixture
def files(monkeypatch):
    """``files[path] = lines``: what the system's files hold; others are not there."""
    found: dict[str, list[str]] = {}
    monkeypatch.setattr(memory, "_lines", lambda path: found.get(path, []))
    return found


def test_free_memory_is_what_the_kernel_can_make_available(files):
    files["/proc/meminfo"] = ["MemTotal:  2000 kB", "MemFree:  10 kB", "MemAvailable:  500 kB"]
    assert memory.free_host_memory() == 500 * 1024


def test_a_container_has_no_more_than_its_limit(files, monkeypatch):
    files["/proc/meminfo"] = ["MemAvailable:  500 kB"]
    for limit, available in ((None, 500 * 1024), (50_000, 50_000), (0, 0), (2**40, 500 * 1024)):
        monkeypatch.setattr(memory.cgroups, "available_memory", lambda limit=limit: limit)
        assert memory.free_host_memory() == available


def test_without_the_files_the_pages_of_the_system_count(files):
    assert memory.free_host_memory() > 0


def test_objects_are_collected_again_after_freezing(monkeypatch):
    monkeypatch.setattr(memory, "_are_frozen", False)
    with memory.gc_frozen():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_what_the_process_froze_stays_frozen():
    memory.freeze_objects()
    count = gc.get_freeze_count()
    with memory.gc_frozen():
        assert gc.get_freeze_count() > count / 2  # some of them may have ended
    assert gc.get_freeze_count() > count / 2 > 0


def test_everything_is_collected_only_now_and_then(monkeypatch):
    """A full collection takes a tenth of a second and more, and a step without memory is seldom the only one."""
    collected = []
    monkeypatch.setattr(memory.gc, "collect", lambda generation=2: collected.append(generation))
    monkeypatch.setattr(memory, "_last_collection", float("-inf"))
    for _ in range(3):
        memory.release_host_memory()
    monkeypatch.setattr(memory, "_COLLECTION_SECONDS", 0.0)
    memory.release_host_memory()
    assert collected == [2, 1, 1, 2]


def test_rare_collections_end_with_the_work():
    before = gc.get_threshold()
    with pytest.raises(KeyError), memory.rare_collections():
        assert gc.get_threshold() == (100 * before[0], *before[1:])
        raise KeyError
    assert gc.get_threshold() == before


def test_engines_in_threads_raise_the_threshold_once():
    """Entered and left in any order, as engines in threads do."""
    before = gc.get_threshold()
    first, second = memory.rare_collections(), memory.rare_collections()
    for entered in (first, second):
        entered.__enter__()
        assert gc.get_threshold() == (100 * before[0], *before[1:])
    first.__exit__(None, None, None)
    assert gc.get_threshold()[0] == 100 * before[0], "the second one still works"
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before
