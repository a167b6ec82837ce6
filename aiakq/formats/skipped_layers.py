"""Layers that are not quantized, for configs that list them apart from others, some as strings without patterns."""

from __future__ import annotations

from collections.abc import Collection

from aiakq.patterns import is_plain, matches
from aiakq.spec import QuantSpec


def skipped_patterns(spec: QuantSpec) -> list[str]:
    """Return the names and patterns of the layers that are not quantized."""
    return [*spec.ignore, *(pattern for pattern, layer in spec.layers if layer is None)]


def skipped_names(spec: QuantSpec) -> list[str]:
    """Return the strings in the names of these layers: ``up_proj`` of ``*up_proj*``. Regular expressions have none."""
    return [pattern.strip("*") for pattern in skipped_patterns(spec) if not pattern.startswith("re:")]


def hidden_layers(spec: QuantSpec) -> str | None:
    """Return why a list of layers that are not quantized hides others, because it counts first, or None."""
    for position, (pattern, layer) in enumerate(spec.layers):
        for name, other in spec.layers[:position] if layer is None else ():
            if other is not None and (matches(pattern, name) if is_plain(name) else not is_plain(pattern)):
                return f"such files cannot say that {name:.60} is quantized, and all else like {pattern:.60} is not"
    return None


def unnamed_layers(spec: QuantSpec, known: Collection[str] = ()) -> str | None:
    """Return why strings do not say which layers are not quantized, or None.

    known  regular expressions that mean the same as one of the strings.
    """
    for pattern in skipped_patterns(spec):
        if pattern not in known and not is_plain(pattern.strip("*")):
            return f"such files list parts of names that are not quantized, and no pattern like {pattern:.60}"
    return None
