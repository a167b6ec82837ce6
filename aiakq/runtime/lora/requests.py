"""LoRARequest: how a caller names an adapter; and checks of its folder against the loaded model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from aiakq.errors import error
from aiakq.formats.model_folder import file_identity
from aiakq.patterns import time_limit
from aiakq.runtime.lora.adapter_folder import CONFIG, WEIGHTS, open_adapter
from aiakq.runtime.lora.layers import check_fits
from aiakq.runtime.protocol.adapters import AdapterRef as AdapterRef
from aiakq.runtime.protocol.limits import AdapterLimits

#: Processor time for all patterns of an adapter's config, and time to read its file: other adapters wait meanwhile.
_PATTERN_SECONDS, _READ_SECONDS = 1.0, 120.0


@dataclass(frozen=True)
class LoRARequest:
    """An adapter of ``LLM.generate``, with vLLM's fields.

    lora_int_id      not used: an adapter is identified by the contents of its files.
    lora_path        folder that PEFT saved it to.
    base_model_name  not used.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
    base_model_name: str | None = field(default=None, compare=False)


def check_adapter(
    name: str, path: str | Path, limits: AdapterLimits | None, root: str | Path | None = None
) -> AdapterRef:
    """Check the adapter in the folder ``path`` against the loaded model, by its headers, and hash it.

    root  folder that ``path`` must be inside.
    Raises ``lora_disabled``, ``adapter_size``, and what ``open_adapter`` and ``check_fits`` raise.
    """
    if limits is None:
        raise error("lora_disabled")
    with time_limit(_PATTERN_SECONDS):
        adapter = open_adapter(path, root, limits.max_rank)
        check_fits(adapter, limits.modules, limits.model_type, limits.widths)
    if limits.max_bytes is not None and adapter.nbytes > limits.max_bytes:
        raise error("adapter_size", adapter=name, size=adapter.nbytes, limit=limits.max_bytes)
    return AdapterRef(adapter.digest(_READ_SECONDS), name, str(adapter.path), adapter.nbytes)


class CheckedAdapters:
    """Cache of checked adapters; one whose files have changed is checked again."""

    def __init__(self, limits: AdapterLimits | None) -> None:
        self._limits = limits
        self._checked: dict[tuple[str, str], tuple[object, AdapterRef]] = {}

    def of(self, request: LoRARequest) -> AdapterRef:
        """Return the adapter of ``request``. Raises what ``check_adapter`` raises."""
        key, folder = (request.lora_name, request.lora_path), Path(request.lora_path)
        identity = [file_identity(folder / name) for name in (CONFIG, WEIGHTS)]
        known = self._checked.get(key)
        if known is None or known[0] != identity:
            known = self._checked[key] = identity, check_adapter(*key, self._limits)
        return known[1]
