"""Names of a checkpoint's tensors in a transformers model, by transformers' own renaming rules."""

from __future__ import annotations

from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming, rename_source_key


class TensorNames:
    """Maps names in a checkpoint to names in a transformers model.

    transformers renames many tensors while it loads them, and merges some: experts into one tensor per projection.
    """

    def __init__(self, hf: Any) -> None:
        rules = get_model_conversion_mapping(hf)
        self._state = hf.state_dict()
        self._base = hf.base_model_prefix
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]

    def own(self, stored: str) -> str | None:
        """Return the parameter or buffer that the tensor ``stored`` is loaded into unchanged; None if there is none."""
        for renamings, converters in ((self._renamings, self._converters), ([], [])):
            name, merged = rename_source_key(stored, renamings, converters, self._base, self._state)
            if name in self._state:
                return None if merged is not None else name
        return None

    def concatenated(self, stored: str) -> tuple[str, int] | None:
        """Return the parameter whose rows are those of the tensor ``stored`` and of others, and the place of ``stored``
        among them; None if there is none.
        """
        name, pattern = rename_source_key(stored, self._renamings, self._converters, self._base, self._state)
        if pattern is None or name not in self._state:
            return None
        rule = next(rule for rule in self._converters if pattern in rule.source_patterns)
        operation = rule.operations[0]
        rows = len(rule.operations) == 1 and isinstance(operation, Concatenate) and operation.dim == 0
        return (name, rule.source_patterns.index(pattern)) if rows else None

    def renamed(self, stored: str) -> str:
        """Return the name of the tensor ``stored`` by the rules that do not merge it with others."""
        return str(rename_source_key(stored, self._renamings, [], self._base, self._state)[0])
