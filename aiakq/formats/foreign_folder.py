"""The tensors of folders that were made from models in other forms (made_folder.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aiakq.formats.foreign_tensors import ForeignTensors
from aiakq.formats.gguf_model.folder import tensors_of
from aiakq.formats.made_folder import MISTRAL, source_of
from aiakq.formats.mistral.tensors import MistralTensors, StoredTensors

__all__ = ["MISTRAL", "ForeignTensors", "foreign_tensors"]


def foreign_tensors(
    folder: Path, config: Mapping[str, Any], consolidated: Callable[[Path], StoredTensors]
) -> ForeignTensors | None:
    """Return the tensors of what ``folder`` was made from; None for a folder with its own.

    consolidated  opens the files of a folder in Mistral's format.

    Raises what opening the files raises, ``model_malformed``, and what the kinds of sources refuse.
    """
    if (source := source_of(folder, MISTRAL)) is not None:
        return MistralTensors.of(consolidated(source), config)
    return tensors_of(folder, config)
