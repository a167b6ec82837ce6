"""Registry: named implementations, built-in or from plugins (entry points), imported on first use.

Standard library only. ``aiakq.registry.Registry`` is the same class with aiakq's errors; kernels use this one.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


#: What the names of a registry stand for.
Entry = TypeVar("Entry")


class PluginError(Exception):
    """Raised when a plugin package cannot be used. The text is one sentence that names the package and the cause."""


class Registry(Mapping[str, str], Generic[Entry]):
    """A read-only mapping of names to ``"module"`` or ``"module:attribute"``.

    ``builtin`` holds the built-in entries. Installed packages add theirs as entry points of ``group``:

        [project.entry-points."aiakq.architectures"]
        MyModelForCausalLM = "my_package.my_model"

    Entry points are read once, on first access; nothing is imported before ``load``. Built-in names come first, in
    their order, then those of plugins, sorted. ``plugins_first`` is for registries whose order is a preference: it puts
    the names of plugins first.

    Every access raises PluginError if a plugin adds a name that is built in or that another package adds.
    """

    def __init__(self, group: str, builtin: Mapping[str, str], plugins_first: bool = False) -> None:
        self.group = group
        self._builtin = dict(builtin)
        self._plugins_first = plugins_first
        self._plugins: dict[str, EntryPoint] | None = None

    def __getitem__(self, name: str) -> str:
        plugins = self._entry_points()
        return plugins[name].value if name in plugins else self._builtin[name]

    def __iter__(self) -> Iterator[str]:
        plugins = self._entry_points()
        return iter((*plugins, *self._builtin) if self._plugins_first else (*self._builtin, *plugins))

    def __len__(self) -> int:
        return len(self._builtin) + len(self._entry_points())

    def __repr__(self) -> str:
        return f"Registry({self.group!r}, {dict(self)!r})"

    def package(self, name: str) -> str | None:
        """Return the package that adds ``name`` as ``"package 1.0"``; None if built in. Raises KeyError if unknown."""
        if name in self._builtin:
            return None
        return _package(self._entry_points()[name])

    def load(self, name: str) -> Entry:
        """Import and return the module, or the attribute of a module, that ``name`` refers to.

        Raises KeyError for an unknown name, and PluginError if a plugin's entry cannot be imported.
        """
        target = self[name]
        plugin = self._entry_points().get(name)
        if plugin is None:
            return _import(target)
        try:
            return _import(target)
        except Exception as cause:
            raise PluginError(
                f"{name!r} ({self.group}) of the package {_package(plugin)} cannot be imported from {target!r}: "
                f"{type(cause).__name__}: {cause}"
            ) from cause

    def _entry_points(self) -> dict[str, EntryPoint]:
        if self._plugins is None:
            self._plugins = self._merge(_installed(tuple(sys.path))(group=self.group))
        return self._plugins

    def _merge(self, plugins: Iterable[EntryPoint]) -> dict[str, EntryPoint]:
        merged: dict[str, EntryPoint] = {}
        for plugin in sorted(plugins, key=lambda plugin: plugin.name):
            other = merged.get(plugin.name)
            if plugin.name in self._builtin:
                raise PluginError(
                    f"the package {_package(plugin)} adds {plugin.name!r} to {self.group}, which aiakq has already"
                )
            if other is not None and (other.value, _package(other)) != (plugin.value, _package(plugin)):
                raise PluginError(
                    f"the packages {_package(other)} and {_package(plugin)} both add {plugin.name!r} to {self.group}"
                )
            merged[plugin.name] = plugin
        return merged


@lru_cache(maxsize=1)
def _installed(folders: tuple[str, ...]) -> Callable[..., Iterable[EntryPoint]]:
    """Return what selects from the entry points of the packages in ``folders``, which are ``sys.path``.

    They are read once for all registries: finding them takes 50 ms.
    """
    from importlib.metadata import entry_points  # slower to import than the rest of this module

    return entry_points().select


def _import(target: str) -> Any:
    module, _, attributes = target.partition(":")
    attribute_value: object = importlib.import_module(module)
    for attribute in filter(None, attributes.split(".")):
        attribute_value = getattr(attribute_value, attribute)
    return attribute_value


def _package(plugin: EntryPoint) -> str:
    return f"{plugin.dist.name} {plugin.dist.version}" if plugin.dist else "(unknown)"
