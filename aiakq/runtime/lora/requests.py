"""LoRARequest: how a caller names an adapter; and the check of its folder against the loaded model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from aiakq.errors import error
from aiakq.formats.model_folder import file_identity
from aiakq.runtime.engine.adapters import AdapterLimits
from aiakq.runtime.engine.adapters import AdapterRef as AdapterRef
from aiakq.runtime.lora.adapter_folder import CONFIG, WEIGHTS, open_adapter
from aiakq.runtime.lora.layers import check_fits


@dataclass(frozen=True)
class LoRARequest:
    """An adapter of ``LLM.generate``, with vLLM's fields.

    lora_int_id  is not used: an adapter is known by the contents of its files.
    lora_path    folder that PEFT saved it to.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
    base_model_name: str | None = field(default=None, compare=False)


def check_adapter(
    name: str, path: str | Path, limits: AdapterLimits | None, root: str | Path | None = None
) -> AdapterRef:
    """The adapter in the folder ``path``, checked against what was loaded, from its headers, and hashed.

    root  the folder has to be inside it.
    Raises ``lora_disabled``, ``adapter_size``, and what ``open_adapter`` and ``check_fits`` raise.
    """
    if limits is None:
        raise error("lora_disabled")
    adapter = open_adapter(path, root, limits.max_rank)
    check_fits(adapter, limits.modules, limits.model_type, limits.widths)
    if limits.max_bytes is not None and adapter.nbytes > limits.max_bytes:
        raise error("adapter_size", adapter=name, size=adapter.nbytes, limit=limits.max_bytes)
    return AdapterRef(adapter.digest(), name, str(adapter.path), adapter.nbytes)


class CheckedAdapters:
    """Adapters that were checked, until their files change."""

    def __init__(self, limits: AdapterLimits | None) -> None:
        self._limits = limits
        self._checked: dict[tuple[str, str], tuple[object, AdapterRef]] = {}

    def of(self, request: LoRARequest) -> AdapterRef:
        """The adapter of ``request``. Raises what ``check_adapter`` raises."""
        key, folder = (request.lora_name, request.lora_path), Path(request.lora_path)
        identity = [file_identity(folder / name) for name in (CONFIG, WEIGHTS)]
        known = self._checked.get(key)
        if known is None or known[0] != identity:
            known = self._checked[key] = identity, check_adapter(*key, self._limits)
        return known[1]
