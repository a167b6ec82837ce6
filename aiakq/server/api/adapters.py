"""LoRA adapters that requests may name as their model: --lora-modules, and those loaded through routes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aiakq.arguments.lora import parse_module
from aiakq.arguments.server import ServerArguments
from aiakq.errors import AiakqError, error
from aiakq.runtime.protocol.adapters import AdapterRef
from aiakq.system.user_path import user_path

#: Validates an adapter, given its name, its path, and the folder that must contain it, or None.
Check = Callable[[str, str, str | None], Awaitable[AdapterRef]]

#: Has an adapter read before any request names it.
Prefetch = Callable[[AdapterRef], Awaitable[None]]


@dataclass
class AdapterRegistry:
    """The adapters that requests may name.

    root  folder from which routes may load adapters, or None if they may not.
    """

    root: str | None = None
    _adapters: dict[str, AdapterRef] = field(default_factory=dict)
    _bases: dict[str, str] = field(default_factory=dict)
    _loading: Counter[str] = field(default_factory=Counter)

    @property
    def names(self) -> list[str]:
        """Names by which requests may select adapters."""
        return list(self._adapters)

    def get(self, name: str | None) -> AdapterRef | None:
        """Return the adapter with this name, or None."""
        return None if name is None else self._adapters.get(name)

    def may_change(self) -> bool:
        """Whether adapters may be replaced while the server runs."""
        return self.root is not None

    def is_loading(self, name: str) -> bool:
        """Whether an adapter with this name is being loaded by a route."""
        return self._loading[name] > 0

    def base(self, name: str) -> str:
        """Return the served name of the adapter's base model."""
        return self._bases[name]

    async def start(self, args: ServerArguments, names: Sequence[str], check: Check) -> None:
        """Set the root and load the adapters of --lora-modules. ``names`` are the served names of the model.

        The arguments have passed ``check_named_files``. Raises the errors of the check.
        """
        self.root = args.lora_root
        for module in map(parse_module, args.lora_modules or ()):
            path = str(user_path(module.path))
            self._add(await check(module.name, path, None), module.base or names[0])

    async def load(
        self, name: str, path: str, names: Sequence[str], check: Check, prefetch: Prefetch, replace: bool
    ) -> AdapterRef | None:
        """Load an adapter from the root folder. Returns the one that it replaces, if no other name refers to that.

        Raises ``lora_root_missing``, ``adapter_exists`` if the name is that of the model or, without ``replace``, of an
        adapter, and the errors of ``check`` and ``prefetch``.
        """
        if self.root is None:
            raise error("lora_root_missing")
        if name in names or (name in self._adapters and not replace):
            raise error("adapter_exists", param="lora_name", name=name[:64])
        self._loading[name] += 1
        try:
            adapter = await self._read(name, str(Path(self.root, path)), check, prefetch)
        finally:
            self._loading[name] -= 1
            self._loading += Counter()  # without names whose count is 0
        before = self._adapters.get(name)
        if before is not None and not replace:  # loaded meanwhile
            raise error("adapter_exists", param="lora_name", name=name[:64])
        self._add(adapter, names[0])
        return None if before is None or self._is_named(before) else before

    async def _read(self, name: str, path: str, check: Check, prefetch: Prefetch) -> AdapterRef:
        """Check an adapter and have it read. Raises the errors of ``check`` and ``prefetch``."""
        adapter = await check(name, path, self.root)
        try:
            await prefetch(adapter)
        except AiakqError as failure:
            # An adapter with a new name is read again when it is needed.
            if failure.id != "adapters_in_use" or name in self._adapters:
                raise
        return adapter

    def remove(self, name: str) -> AdapterRef | None:
        """Remove a name. Returns the adapter if no other name refers to it. Raises ``unknown_adapter``."""
        adapter = self._adapters.pop(name, None)
        if adapter is None:
            known = ", ".join(self._adapters) or "none"
            raise error("unknown_adapter", param="lora_name", name=name[:64], known=known)
        del self._bases[name]
        return None if self._is_named(adapter) else adapter

    def _is_named(self, adapter: AdapterRef) -> bool:
        return any(other.key == adapter.key for other in self._adapters.values())

    def _add(self, adapter: AdapterRef, base: str) -> None:
        self._adapters[adapter.name] = adapter
        self._bases[adapter.name] = base
