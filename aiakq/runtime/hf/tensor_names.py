"""Names of a checkpoint's tensors in a transformers model, by transformers' own renaming rules."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming, rename_source_key

from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.text_names import key_mapping


@dataclass(frozen=True)
class Joined:
    """A parameter of a transformers model that a checkpoint stores as several tensors, joined along ``dim``."""

    parts: tuple[str, ...]
    dim: int


class TensorNames:
    """Maps names in a checkpoint to names in a transformers model.

    transformers renames many tensors while it loads them, and merges some: experts into one tensor per projection.
    """

    def __init__(self, hf: Any, mapping: Mapping[str, str] | None = None) -> None:
        """mapping: patterns of names -> replacements that precede transformers' own rules."""
        rules = get_model_conversion_mapping(hf, dict(mapping) if mapping else None)
        self._state = hf.state_dict()
        self._base = hf.base_model_prefix
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]

    @staticmethod
    def of(hf: Any, checkpoint: Checkpoint) -> TensorNames:
        """Return the names of ``checkpoint``, which may contain more than the language model ``hf``."""
        return TensorNames(hf, text_mapping(checkpoint, hf.base_model_prefix))

    def own(self, stored: str) -> str | None:
        """Return the parameter or buffer that the tensor ``stored`` is loaded into unchanged; None if there is none."""
        for renamings, converters in ((self._renamings, self._converters), ([], [])):
            name, merged = rename_source_key(stored, renamings, converters, self._base, self._state)
            if name in self._state:
                return None if merged is not None else name
        return None

    def joined(self, stored: Collection[str]) -> dict[str, Joined]:
        """Return the parameters that are the tensors ``stored`` side by side, and nothing else, by name."""
        found: dict[str, dict[int, str]] = {}
        rules: dict[str, tuple[int, int]] = {}  # number of parts, and the dimension
        for rule in self._converters:
            join = rule.operations[0]
            if len(rule.operations) > 1 or not isinstance(join, Concatenate):
                continue
            for source in stored:
                name, pattern = rename_source_key(source, self._renamings, [rule], self._base, self._state)
                if pattern is not None and name in self._state:
                    found.setdefault(name, {})[rule.source_patterns.index(pattern)] = source
                    rules[name] = len(rule.source_patterns), join.dim
        return {
            name: Joined(tuple(parts[index] for index in sorted(parts)), rules[name][1])
            for name, parts in found.items()
            if len(parts) == rules[name][0]
        }

    def renamed(self, stored: str) -> str:
        """Return the name of the tensor ``stored`` by the rules that do not merge it with others."""
        return str(rename_source_key(stored, self._renamings, [], self._base, self._state)[0])


def text_mapping(checkpoint: Checkpoint, base: str) -> dict[str, str]:
    """Return the mapping of ``TensorNames`` for the language model in a multimodal checkpoint; empty for others.

    base  base_model_prefix of the class of the language model.
    """
    return key_mapping(checkpoint.inventory, base) if checkpoint.beside_text else {}
