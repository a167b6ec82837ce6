"""The texts that models are evaluated on: bundled ones by name, or files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aiakq.data.files import COMPRESSED, TABLES
from aiakq.errors import error

#: Bundled texts by their names -> name of the file in aiakq/data, and their title.
BUNDLED = {
    "prose": ("heldout", "the bundled held-out text"),
    "dialogue": ("dialogue", "the bundled dialogue"),
    "code": ("code", "the bundled code"),
}
#: Bytes at the start of a file that show whether it is one of text.
_LOOKED_AT = 1 << 16


def text_names(sources: Sequence[str]) -> list[str]:
    """Return a unique name for each source: that of a bundled text, or the name of a file, with its folder if two have
    the same.
    """
    names = [source if is_bundled(source) else Path(source).name for source in sources]
    return [source if names.count(name) > 1 else name for name, source in zip(names, sources, strict=True)]


def is_bundled(source: str) -> bool:
    """Whether ``source`` is the name of a bundled text, not a file."""
    return source in BUNDLED and not Path(source).exists()


def check_sources(sources: Sequence[str]) -> None:
    """Raise ``evaluation_text`` for an unknown source, ``option_conflict`` for one that is given twice."""
    for index, source in enumerate(sources):
        if not is_bundled(source) and not Path(source).is_file():
            known = ", ".join(BUNDLED)
            raise error("evaluation_text", reason=f"{source} is neither a file nor one of the bundled texts ({known})")
        if not is_bundled(source) and _is_binary(Path(source)):
            raise error("evaluation_text", reason=f"{source} is not a file of text: it holds zero bytes")
        if source in sources[:index]:
            reason = "a text is measured once"
            raise error("option_conflict", option=source, other=source, reason=reason, hint="Name it once.")


def _is_binary(path: Path) -> bool:
    """Whether a file that is neither a table nor compressed has zero bytes at its start; text has none."""
    if path.suffix.lower() in (*TABLES, *COMPRESSED):
        return False
    try:
        with open(path, "rb") as stream:
            return b"\0" in stream.read(_LOOKED_AT)
    except OSError:  # reading the text says why
        return False
