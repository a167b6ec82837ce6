"""A tokenizer beside the server: counts tokens where the server does not, and writes prompts of a length as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aiakq.errors import error


class LocalTokenizer:
    """The tokenizer.json of a model folder."""

    def __init__(self, folder: Path) -> None:
        """Raises ``model_malformed``."""
        from tokenizers import Tokenizer

        file = folder / "tokenizer.json" if folder.is_dir() else folder
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(file))
        except Exception as problem:  # the library raises Exception itself
            raise error("model_malformed", file=file, reason=problem) from None

    def count(self, text: str) -> int:
        """Tokens of generated text, which begins with none of its own accord."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text_of(self, ids: list[int]) -> str:
        """Text of about as many tokens as ``ids``: what they decode to, cut to their number if it has more."""
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        again = self._tokenizer.encode(text, add_special_tokens=False).ids
        return text if len(again) <= len(ids) else self._tokenizer.decode(again[: len(ids)], skip_special_tokens=True)


def open_tokenizer(given: str | None, root: str | None) -> LocalTokenizer | None:
    """The tokenizer in the folder ``given``, or the one of a server on this machine; None if there is neither.

    Raises ``model_malformed`` if the one that was given cannot be read.
    """
    if given is not None:
        return LocalTokenizer(Path(given))
    if root is None or not (Path(root) / "tokenizer.json").is_file():
        return None
    return LocalTokenizer(Path(root))
