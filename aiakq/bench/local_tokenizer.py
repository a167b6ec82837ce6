"""Client-side tokenizer: counts tokens if the server sends no usage, and generates text prompts of a given length."""

from __future__ import annotations

from pathlib import Path

from aiakq.errors import error


class LocalTokenizer:
    """Tokenizer of a ``tokenizer.json``."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is a model folder or the file itself. Raises ``model_malformed``."""
        from tokenizers import Tokenizer

        file = folder / "tokenizer.json" if folder.is_dir() else folder
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as problem:  # the library raises Exception itself
            raise error("model_malformed", file=file, reason=problem) from None

    def count(self, text: str) -> int:
        """Return the number of tokens of generated text, without special tokens."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text_of(self, ids: list[int]) -> str:
        """Decode ``ids`` to text of at most about ``len(ids)`` tokens; truncated if it re-encodes to more."""
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        reencoded = self._tokenizer.encode(text, add_special_tokens=False).ids
        return (
            text
            if len(reencoded) <= len(ids)
            else self._tokenizer.decode(reencoded[: len(ids)], skip_special_tokens=True)
        )


def open_tokenizer(given: str | None, root: str | None) -> LocalTokenizer | None:
    """Open the tokenizer in the folder ``given``, else that of the server's model folder ``root`` if it is local.

    Returns None if there is neither. Raises ``model_malformed`` if the tokenizer cannot be read.
    """
    if given is not None:
        return LocalTokenizer(Path(given))
    if root is None or not (Path(root) / "tokenizer.json").is_file():
        return None
    return LocalTokenizer(Path(root))
