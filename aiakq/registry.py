"""Registry: named implementations, built-in or from plugins (entry points), imported on first use.

A registry is declared once, next to the interface its entries satisfy:

    ARCHITECTURES = Registry("aiakq.architectures", {"LlamaForCausalLM": "aiakq.runtime.models.llama", ...})

and reads the entry points of that group, so that a package outside the tree adds to it. docs/adding.md lists groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiakq.kernels.registry as kernels
from aiakq.errors import error
from aiakq.kernels.registry import Entry

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class Registry(kernels.Registry[Entry]):
    """``aiakq.kernels.registry.Registry`` whose failures are the error ``plugin``."""

    def load(self, name: str) -> Entry:
        """Import and return what ``name`` stands for. Raises KeyError for an unknown name, and ``plugin``."""
        try:
            return super().load(name)
        except kernels.PluginError as failure:
            raise error("plugin", reason=str(failure)) from failure

    def _entry_points(self) -> dict[str, EntryPoint]:
        try:
            return super()._entry_points()
        except kernels.PluginError as failure:
            raise error("plugin", reason=str(failure)) from failure
