"""Registry: built-in entries and entry points of installed packages as one lazy mapping."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from other_programs import printed_by

from aiakq.kernels.registry import PluginError, Registry

GROUP = "aiakq.test_parts"
BUILTIN = {"json": "json", "dumps": "json:dumps"}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """``install(package, entries, **modules)`` puts an installed package with entry points of GROUP on the path."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(package: str, entries: dict[str, str], **modules: str) -> None:
        info = tmp_path / f"{package}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        lines = [f"[{GROUP}]", *(f"{name} = {value}" for name, value in entries.items())]
        (info / "entry_points.txt").write_text("\n".join(lines))
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)

    return install


def test_builtin_entries_are_a_mapping_and_load_modules_and_attributes():
    import json

    registry = Registry(GROUP, BUILTIN)
    assert dict(registry) == BUILTIN and len(registry) == 2 and "xml" not in registry
    assert registry.load("json") is json
    assert registry.load("dumps") is json.dumps
    assert registry.package("json") is None
    for unknown in (registry.load, registry.package, registry.__getitem__):
        with pytest.raises(KeyError):
            unknown("xml")


def test_entry_points_are_listed_after_builtin_names_and_load(install):
    install("zoo", {"zebra": "zoo_parts", "ape": "zoo_parts:ape.name"}, zoo_parts="class ape:\n    name = 'Koko'\n")
    registry = Registry(GROUP, BUILTIN)
    assert list(registry) == ["json", "dumps", "ape", "zebra"]
    assert registry["zebra"] == "zoo_parts"
    assert "zoo_parts" not in sys.modules, "listing names imports nothing"
    assert registry.load("ape") == "Koko"
    assert registry.load("zebra").ape.name == "Koko"
    assert registry.package("ape") == "zoo 1.2"


def test_plugins_can_come_before_builtin_names(install):
    install("zoo", {"zebra": "zoo_parts", "ape": "zoo_parts"})
    assert list(Registry(GROUP, BUILTIN, plugins_first=True)) == ["ape", "zebra", "json", "dumps"]


def test_a_plugin_may_not_replace_a_builtin_entry(install):
    install("zoo", {"json": "zoo_parts"})
    for use in (list, len, lambda registry: registry.load("dumps")):
        with pytest.raises(PluginError, match=r"^the package zoo 1\.2 adds 'json' to aiakq\.test_parts, which .*$"):
            use(Registry(GROUP, BUILTIN))


def test_two_plugins_may_not_add_the_same_name(install):
    install("zoo", {"ape": "zoo_parts"})
    install("farm", {"ape": "farm_parts"})
    with pytest.raises(PluginError, match=r"the packages (zoo|farm) 1\.2 and (zoo|farm) 1\.2 both add 'ape'"):
        list(Registry(GROUP, BUILTIN))


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("zoo_missing", "ModuleNotFoundError: No module named 'zoo_missing'"),
        ("zoo_broken", "ZeroDivisionError: division by zero"),
        ("zoo_empty:part", "AttributeError: module 'zoo_empty' has no attribute 'part'"),
    ],
)
def test_a_plugin_that_cannot_be_imported_fails_only_when_used(install, target, cause):
    install("zoo", {"ape": target}, zoo_broken="1 / 0", zoo_empty="")
    registry = Registry(GROUP, BUILTIN)
    assert "ape" in registry and registry.load("dumps")
    with pytest.raises(PluginError) as caught:
        registry.load("ape")
    assert str(caught.value) == (
        f"'ape' (aiakq.test_parts) of the package zoo 1.2 cannot be imported from {target!r}: {cause}"
    )


def test_a_builtin_entry_that_cannot_be_imported_raises_what_it_raises():
    with pytest.raises(ModuleNotFoundError):
        Registry(GROUP, {"gone": "aiakq_module_that_is_not_there"}).load("gone")


def test_the_module_needs_the_standard_library_only():
    source = Path(sys.modules[Registry.__module__].__file__ or "")
    code = f"import sys, runpy; runpy.run_path({str(source)!r}); print('torch' in sys.modules, 'aiakq' in sys.modules)"
    assert printed_by(code) == "False False"
