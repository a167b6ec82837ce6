"""aiakq.registry: failures of plugins are the error ``plugin``, one line that names the package."""

from __future__ import annotations

import pytest

from aiakq.errors import AiakqError
from aiakq.registry import Registry

GROUP = "aiakq.test_parts"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """``install(entries)`` puts an installed package "zoo" with these entry points of GROUP on the path."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(*entries: str) -> None:
        info = tmp_path / "zoo-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zoo\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text("\n".join((f"[{GROUP}]", *entries)))

    return install


def test_a_plugin_that_cannot_be_imported_is_an_error_of_the_registry(install):
    install("ape = zoo_missing")
    registry = Registry(GROUP, {"json": "json"})
    assert list(registry) == ["json", "ape"]
    with pytest.raises(AiakqError, match="package zoo 1.2 cannot be imported from 'zoo_missing'") as caught:
        registry.load("ape")
    assert caught.value.id == "plugin" and "\n" not in str(caught.value)


def test_a_plugin_that_replaces_a_builtin_entry_is_an_error_of_the_registry(install):
    install("json = zoo_parts")
    with pytest.raises(AiakqError, match="package zoo 1.2 adds 'json'") as caught:
        Registry(GROUP, {"json": "json"}).load("json")
    assert caught.value.id == "plugin"


def test_a_kernel_plugin_that_cannot_be_used_is_one_line_of_the_command_line(aiakq, example_model, monkeypatch):
    from aiakq.kernels.registry import PluginError
    from aiakq.terminal import tables

    def fail(*_: object) -> None:
        raise PluginError("the package zoo 1.2 adds 'cpu' to aiakq.implementations, which aiakq has already")

    monkeypatch.setattr(tables, "inspection", fail)
    ended = aiakq("inspect", str(example_model))
    assert ended.code == 7 and ended.last.startswith("aiakq: error[plugin]: A plugin cannot be used: the package zoo")
