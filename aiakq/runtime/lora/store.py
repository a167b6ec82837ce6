"""AdapterStore: the adapters in the memory of one rank, in the slots that the scheduler assigns. LoRA's part of an
executor.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch

from aiakq.errors import AiakqError, error, first_line, one_line
from aiakq.runtime.lora.adapter_folder import LoraWeights, open_adapter
from aiakq.runtime.lora.layers import AdaptableLayers, PreparedAdapter
from aiakq.runtime.lora.staging import AdapterStaging
from aiakq.runtime.protocol.adapters import AdapterRef
from aiakq.runtime.protocol.command import DropAdapter, FreeAdapter, LoadAdapter, PrepareAdapter
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.step import ADAPTER_FAILED


class AdaptableModel(Protocol):
    """What of a model is needed here: its layers that support adapters; None if LoRA is disabled."""

    adapters: AdaptableLayers | None


class RunningSequence(Protocol):
    """What of a sequence of the executor is needed here.

    failure  why nothing it computes counts; None: it does.
    """

    spec: RequestSpec
    failure: str | None


class AdapterStore:
    """Adapters by slot. It is a ``RowPart`` of an executor.

    staging  adapters that are read before a batch loads them.
    nbytes   slot -> bytes of its adapter in memory.
    """

    def __init__(self, layers: AdaptableLayers) -> None:
        self._layers = layers
        self._slots: dict[str, int] = {}
        self._failures: dict[str, str] = {}
        self.nbytes: dict[int, int] = {}
        self.staging = AdapterStaging(self._prepare)

    def handlers(self) -> Mapping[type, Callable[[Any], object]]:
        """See ``ExecutorPart``."""
        return {
            FreeAdapter: lambda command: self._drop(command.slot),
            LoadAdapter: self.load,
            DropAdapter: lambda command: self.staging.drop(command.adapter.key),
            PrepareAdapter: lambda preparation: self.staging.add(preparation.adapter),
        }

    def start(self, sequence: RunningSequence) -> None:
        """See ``ExecutorPart``: a sequence fails if its adapter could not be loaded."""
        adapter = sequence.spec.options.adapter
        if adapter is not None and adapter.key in self._failures:
            sequence.failure = f"{ADAPTER_FAILED}: {self._failures[adapter.key]}"

    def assign(self, sequences: Sequence[RunningSequence], starts: list[int], logit_rows: list[range]) -> None:
        """See ``RowPart``: sets the rows of the next step's tokens and logits that have an adapter."""
        tokens: dict[int, list[int]] = {}
        logits: dict[int, list[int]] = {}
        for index, sequence in enumerate(sequences):
            adapter = sequence.spec.options.adapter
            slot = None if adapter is None else self._slots.get(adapter.key)
            if slot is not None:
                tokens.setdefault(slot, []).extend(range(starts[index], starts[index + 1]))
                if own := logit_rows[index]:
                    logits.setdefault(slot, []).extend(own)
        self._layers.tokens.assign(list(tokens.items()))
        self._layers.logit_rows.assign(list(logits.items()))

    def load(self, new: LoadAdapter) -> LoadAdapter:
        """Load an adapter that was staged; return the command, with an error where loading failed."""
        self._drop(new.slot)
        self._slots[new.adapter.key] = new.slot
        reason = new.error
        if reason is not None:
            self.staging.drop(new.adapter.key)
        else:
            try:
                prepared = self.staging.take(new.adapter.key)
                self.nbytes[new.slot] = self._layers.load(new.slot, prepared)
            except (AiakqError, MemoryError) as failure:
                reason = first_line(failure, "there is no memory for it")
        if reason is not None:
            self._layers.unload(new.slot)
            self._failures[new.adapter.key] = reason
        return msgspec.structs.replace(new, error=reason)

    @torch.inference_mode()
    def _prepare(self, adapter: AdapterRef) -> PreparedAdapter:
        """Read and pack an adapter, in the thread of ``staging``."""
        try:
            return self._layers.prepare(read(adapter))
        except (AiakqError, MemoryError):
            raise
        except Exception as failure:
            # Whatever is wrong with the files or the disk: only requests with this adapter fail.
            if not isinstance(failure, OSError):
                traceback.print_exc()
            raise error("adapter_malformed", adapter=adapter.name, reason=one_line(failure).rstrip(".")) from failure

    def _drop(self, slot: int) -> None:
        self._layers.unload(slot)
        self.nbytes.pop(slot, None)
        for key in [key for key, own in self._slots.items() if own == slot]:
            del self._slots[key]
            self._failures.pop(key, None)


def read(adapter: AdapterRef) -> dict[str, LoraWeights]:
    """Read the weights of an adapter by module.

    Raises what ``open_adapter`` raises, and ``adapter_changed`` if its files are not those that were checked, or if a
    folder of its path has been replaced by a link.
    """
    if os.path.realpath(adapter.path) != adapter.path:
        raise error("adapter_changed", adapter=adapter.name)
    digest, weights = open_adapter(adapter.path).read()
    if digest != adapter.key:
        raise error("adapter_changed", adapter=adapter.name)
    return weights
