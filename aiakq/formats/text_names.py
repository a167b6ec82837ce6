"""Names of a language model's tensors in files: inside a multimodal model, and without the outermost module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

#: Prefixes of the language model in multimodal checkpoints.
TEXT_PREFIXES = ("model.language_model.", "language_model.", "model.text_model.")
#: Prefix of the vision tower beside a language model without such a prefix (Qwen2-VL).
_TOWER = "visual."
#: model_type -> prefix of the encoder beside the decoder of a model with cross-attention.
_ENCODERS = {"whisper": "model.encoder."}
#: Names of the module around all of a model but its head, which files written without the head leave out.
_BASES = ("model.", "transformer.", "backbone.")


def spellings(name: str) -> tuple[str, ...]:
    """Return the names that files may have for what a language model calls ``name``."""
    base = next((base for base in _BASES if name.startswith(base)), "model.")
    inner = name.removeprefix(base)
    inside = (f"model.language_model.{inner}", f"language_model.{name}", f"model.text_model.{inner}")
    return name, inner, base + name, *inside


def beside_text(names: Iterable[str], config: Mapping[str, object]) -> frozenset[str]:
    """Return those of ``names`` that are not part of the language model of a multimodal checkpoint with this
    config.json, or of the decoder beside an encoder; none for other checkpoints."""
    every = list(names)
    encoder = _ENCODERS.get(str(config.get("model_type")))
    if encoder is not None:
        return frozenset(name for name in every if name.startswith(encoder))
    text = tuple(prefix for prefix in TEXT_PREFIXES if any(name.startswith(prefix) for name in every))
    if text:
        return frozenset(name for name in every if not name.startswith((*text, "lm_head.")))
    return frozenset(name for name in every if name.startswith(_TOWER) and "vision_config" in config)


def key_mapping(names: Iterable[str], base: str) -> dict[str, str]:
    """Return patterns for the names of a language model inside a multimodal checkpoint with these ``names`` -> what
    transformers' class of the language model alone, whose base model is called ``base``, has in their place.
    """
    every = list(names)
    own = dict(zip(TEXT_PREFIXES, (f"{base}.", "", f"{base}."), strict=True))
    return {f"^{re.escape(stored)}": own[stored] for stored in own if any(name.startswith(stored) for name in every)}


def other_names(name: str) -> tuple[str, ...]:
    """Return what config.json may call the module ``name`` of a multimodal file, whose names transformers 5 changes."""
    inner = name
    for prefix in ("language_model.model.", "language_model.", "model.language_model.", "model.text_model.", "model."):
        if name.startswith(prefix):
            inner = name.removeprefix(prefix)
            break
    inside = (f"model.language_model.{inner}", f"language_model.model.{inner}", f"model.text_model.{inner}")
    return tuple(each for each in (*inside, f"language_model.{inner}", f"model.{inner}", inner) if each != name)


@dataclass(frozen=True)
class Renaming:
    """A prefix of names in a model of transformers, and what files have in its place."""

    own: str = ""
    stored: str = ""

    def to_file(self, name: str) -> str:
        """Return what files call the tensor or module ``name`` of the model."""
        return self.stored + name.removeprefix(self.own) if self.own and name.startswith(self.own) else name

    def to_model(self, name: str) -> str:
        """Return what the model calls the tensor or module ``name`` of a file."""
        return self.own + name.removeprefix(self.stored) if self.own and name.startswith(self.stored) else name


def renaming(own: str, names: Mapping[str, str]) -> Renaming:
    """Return how files spell the prefix ``own``, judging by names of a model -> those of a file.

    It is the identity unless all names that begin with ``own`` agree.
    """
    pairs = [(name.removeprefix(own), stored) for name, stored in names.items() if name.startswith(own)]
    found = {stored.removesuffix(inner) if stored.endswith(inner) else None for inner, stored in pairs}
    prefix = found.pop() if len(found) == 1 else None
    return Renaming(own, prefix) if prefix is not None and prefix != own else Renaming()
