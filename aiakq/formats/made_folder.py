"""Model folders in the cache that are made from models in other forms: a GGUF file, a folder in Mistral's format.

Everything that loads a model expects a folder with config.json. One that is made holds the config and the tokenizer of
the model in the words of Hugging Face, a few MiB, and a mark, which names where the tensors are. It is made once for
each version of the source: its name is a hash of paths, sizes and times. Nothing else writes there, so a folder
elsewhere cannot name files. Without torch: names are resolved before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from aiakq.errors import error
from aiakq.formats.model_folder import read_json
from aiakq.system.files import cache_folder

#: The kinds of sources: each has a folder in the cache, and a file that marks what was made from it.
GGUF, MISTRAL = "gguf", "mistral"
_KINDS = (GGUF, MISTRAL)


def mark_of(kind: str) -> str:
    """Return the name of the file that names the source in a folder made from it."""
    return f"{kind}.json"


def root_of(kind: str) -> Path:
    """Return the folder of the cache with what was made from sources of this kind."""
    return cache_folder() / kind


def source_of(folder: Path, kind: str) -> Path | None:
    """Return what ``folder`` was made from; None for a folder that was not made from such a source.

    Raises ``model_malformed`` for a mark without a name.
    """
    mark = mark_of(kind)
    if not (folder / mark).is_file() or folder.resolve().parent != root_of(kind).resolve():
        return None
    path = read_json(folder / mark, mark).get("file")
    if not isinstance(path, str):
        raise error("model_malformed", file=mark, reason="it names no file")
    return Path(path)


def model_path(folder: Path) -> Path:
    """Return what the user calls the model in ``folder``: what it was made from, else the folder itself."""
    return next((path for kind in _KINDS if (path := source_of(folder, kind)) is not None), folder)


def made_path(kind: str, stem: str, parts: Iterable[Path], layout: int) -> Path:
    """Return the path of the folder that is made from the files ``parts``.

    stem    start of its name.
    layout  a number that changes whenever the files of a folder would be others.
    """
    stats = [(str(part), part.stat().st_size, part.stat().st_mtime_ns) for part in parts]
    digest = hashlib.sha256(json.dumps([layout, version("aiakq"), stats]).encode()).hexdigest()
    return root_of(kind) / f"{re.sub(r'[^A-Za-z0-9._-]', '_', stem)[:80]}-{digest[:16]}"


def write_made(folder: Path, kind: str, files: Mapping[str, Any]) -> None:
    """Write the files of a folder, which appears with all of them at once.

    files  name -> bytes, or a value to write as JSON.

    Raises ``cache_unwritable``.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
        try:
            for name, content in files.items():
                if isinstance(content, bytes):
                    (partial / name).write_bytes(content)
                    continue
                text = json.dumps(content, ensure_ascii=False, indent=1 if name != "tokenizer.json" else None)
                (partial / name).write_text(text, encoding="utf-8", errors="surrogatepass")
            os.replace(partial, folder)
        except OSError:
            if not (folder / mark_of(kind)).is_file():  # another process was faster
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as problem:
        raise error("cache_unwritable", path=str(folder.parent), reason=problem.strerror or str(problem)) from None
