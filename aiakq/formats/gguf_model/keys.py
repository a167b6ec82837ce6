"""Metadata: the keys of a GGUF file, read with their types; one that nothing read may change results, and is refused.

A GGUF file stores its model's settings as typed keys, those of the model under the name of its architecture, like
``llama.attention.head_count``. Floats are stored in float32: they are returned as the shortest decimal number with the
same float32, which is what the config.json that they come from says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy

from aiakq.errors import AiakqError, error

#: Metadata outside the namespaces of the model and its tokenizer: a description of the file, and how it was made.
_HARMLESS = re.compile(
    r"general\.(architecture|type|name|author|version|organization|finetune|basename|description|quantized_by|size_label"
    r"|license(\..+)?|url|doi|uuid|repo_url|source\..+|base_model\..+|dataset\..+|tags|languages|datasets|file_type"
    r"|quantization_version|alignment|sampling\..+)"
    r"|split\.(no|count|tensors\.count)|quantize\.imatrix\..+|GGUF\..+|[a-z_]*imatrix[a-z_.]*|mradermacher\..+"
)


def unsupported(reason: str) -> AiakqError:
    """Return a ``gguf_unsupported`` error."""
    return error("gguf_unsupported", reason=reason)


_MISSING = object()
#: Longest name that is shown.
_SHOWN = 80


class Metadata:
    """The metadata of one GGUF file.

    values        key -> bool, int, float, str, or a list of them.
    file          name of the file in messages.
    architecture  ``general.architecture``, the namespace of the model's keys.
    """

    def __init__(self, values: Mapping[str, object], file: str) -> None:
        self.values = values
        self.file = file
        self._read: set[str] = set()
        architecture = values.get("general.architecture")
        if not isinstance(architecture, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", architecture):
            raise self.malformed("general.architecture", architecture, "the name of an architecture")
        self.architecture = architecture

    def malformed(self, key: str, value: object, expected: str) -> AiakqError:
        """Return ``model_malformed`` for a key, which is not as ``expected``."""
        found = "missing" if value is None else f"{value!r:.64}"
        return error("model_malformed", file=self.file, reason=f"{key[:_SHOWN]} is {found}, not {expected}")

    # --- any key --------------------------------------------------------------------------------------------------

    def get(self, key: str) -> object:
        """Return the value of ``key``, or None."""
        self._read.add(key)
        return self.values.get(key)

    def text(self, key: str, default: str | None = None) -> str | None:
        """Return a string. Raises ``model_malformed`` for another type."""
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.malformed(key, value, "a string")
        return default if value is None else value

    def array(self, key: str, kind: type, what: str, length: int | None = None) -> list[Any] | None:
        """Return a list whose entries are of ``kind``; None if it is missing. Raises ``model_malformed``."""
        value = self.get(key)
        if value is None:
            return None
        entries = list(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else None
        if entries is None or any(type(each) is not kind for each in entries):
            raise self.malformed(key, value, f"a list of {what}")
        if length is not None and len(entries) != length:
            raise error(
                "model_malformed",
                file=self.file,
                reason=f"{key} has {len(entries)} entries, not {length} as the others",
            )
        return entries

    # --- keys of the model ----------------------------------------------------------------------------------------

    def full(self, name: str) -> str:
        """Return the full name of a key of the model."""
        return f"{self.architecture}.{name}"

    def has(self, name: str) -> bool:
        """Whether the model has the key ``name``."""
        return self.full(name) in self.values

    def integer(self, name: str, default: Any = _MISSING, low: int = 1) -> Any:
        """Return an integer of at least ``low``; a list with the same entry for each layer counts as its entry."""
        return self._scalar(name, default, lambda value: type(value) is int and low <= value < 2**31, "a count")

    def number(self, name: str, default: Any = _MISSING) -> Any:
        """Return a finite number, as a float."""
        value = self._scalar(name, default, _is_number, "a number")
        return shortest(float(value)) if _is_number(value) else value

    def flag(self, name: str, default: Any = _MISSING) -> Any:
        """Return a boolean."""
        return self._scalar(name, default, lambda value: isinstance(value, bool), "true or false")

    def word(self, name: str, default: Any = _MISSING) -> Any:
        """Return a string."""
        return self._scalar(name, default, lambda value: isinstance(value, str), "a string")

    def _scalar(self, name: str, default: Any, accepts: Any, expected: str) -> Any:
        key = self.full(name)
        value = self.get(key)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if isinstance(value, list) and all(accepts(each) for each in value):
            raise unsupported(f"{key} differs from layer to layer ({value!r:.60})")
        if value is None and default is not _MISSING:
            return default
        if value is None or not accepts(value):
            raise self.malformed(key, value, expected)
        return value

    def each_layer(self, name: str, layers: int) -> list[Any] | None:
        """Return a list with one entry of true or false, or a number, for each layer; None without the key."""
        key = self.full(name)
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < layers or any(type(each) not in (bool, int) for each in value):
            raise self.malformed(key, value, f"a list of {layers} values, one for each layer")
        return value[:layers]

    def fixed(self, name: str, *allowed: object) -> None:
        """Raise ``gguf_unsupported`` unless the key is missing or has one of the values ``allowed``."""
        value = self.get(self.full(name))
        if value is not None and not any(value == each for each in allowed):
            raise unsupported(f"{self.full(name)} is {value!r:.60}, which aiakq does not compute")

    def ignore(self, *names: str) -> None:
        """Count keys of the model as read that do not change results."""
        self._read.update(map(self.full, names))

    # --- keys that nothing read -----------------------------------------------------------------------------------

    def unread(self, harmless: Collection[str] = ()) -> Iterator[str]:
        """Yield the keys that were not read and are not known to be harmless, except those of the tokenizer."""
        for key in self.values:
            known = key in self._read or key in harmless or key.startswith(("tokenizer.", "general.sampling."))
            if not known and not _HARMLESS.fullmatch(key):
                yield key

    def unread_tokenizer(self) -> Iterator[str]:
        """Yield the keys of the tokenizer that were not read."""
        return (key for key in self.values if key.startswith("tokenizer.") and key not in self._read)

    def check_all_read(self) -> None:
        """Raise ``gguf_unsupported`` for a key that was not read, by name."""
        for key in self.unread():
            value = self.values[key]
            reason = f"{self.file} has the key {key[:_SHOWN]!r} ({value!r:.60}), which may change the results"
            raise unsupported(reason)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def shortest(value: float) -> float:
    """Return the shortest decimal number with the float32 of ``value``: 1e-05 for 9.999999747378752e-06."""
    with numpy.errstate(over="ignore"):
        rounded = numpy.float32(value)
    return float(str(rounded)) if numpy.isfinite(rounded) and float(rounded) == value else value
