"""Which GGUF file a name means, and which one a folder was made from (gguf_model/folder.py).

Without torch: names are resolved before anything is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from aiakq.errors import AiakqError, error
from aiakq.formats.made_folder import GGUF, mark_of, source_of
from aiakq.formats.model_folder import read_json

#: Names the GGUF file, in a folder that was made for it.
MARK = mark_of(GGUF)
_PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})")
#: Files beside models: projectors of images, and statistics of calibration.
_NO_MODEL = re.compile(r"(mmproj|mtp)[-_].*|.*[-_.](imatrix|mmproj)([-_.].*)?", re.IGNORECASE)
#: Most entries that a message lists.
_SHOWN = 12


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def quantization_label(name: str) -> str:
    """Return the end of a file's name that says how it is quantized, like Q4_K_M; else the whole name."""
    stem = re.sub(r"\.gguf$", "", name.rpartition("/")[2], flags=re.IGNORECASE)
    match = _PART.fullmatch(stem)
    stem = match["stem"] if match else stem
    found = re.search(
        r"(?:^|[-_.])((?:UD-)?(?:I?Q[1-9](?:_[A-Z0-9]+)*|TQ[1-9]_[0-9]|MXFP4(?:_MOE)?|BF16|F16|F32))$",
        stem,
        re.IGNORECASE,
    )
    return found[1] if found else stem


def choose_file(names: Sequence[str], wanted: str, source: str) -> list[str]:
    """Return the GGUF file among ``names`` whose quantization is ``wanted``, or the only one if that is empty, with all
    of its parts. Raises ``gguf_choice``.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        stem = re.sub(r"\.gguf$", "", name)
        match = _PART.fullmatch(stem)
        if name.endswith(".gguf") and not _NO_MODEL.fullmatch(stem.rpartition("/")[2]):
            models.setdefault(match["stem"] if match else stem, []).append(name)
    labels = {stem: quantization_label(stem + ".gguf") for stem in models}
    found = [
        stem
        for stem in models
        if not wanted or labels[stem].lower() == wanted.lower() or stem.lower().endswith(f"-{wanted.lower()}")
    ]
    if len(found) == 1:
        return models[found[0]]
    listed = sorted(labels[stem] for stem in (found or models))
    shown = ", ".join(listed[:_SHOWN]) + (", ..." if len(listed) > _SHOWN else "") or "none"
    asked = f" that is {wanted}" if wanted else ""
    problem = f"has no GGUF file{asked}" if not found else f"has {len(found)} GGUF files{asked}"
    raise error(
        "gguf_choice",
        path=source,
        problem=problem,
        found=shown,
        example=f"{source}:{listed[0] if listed else 'Q4_K_M'}",
    )


def local_file(folder: Path, wanted: str) -> Path:
    """Return the GGUF file of a folder whose quantization is ``wanted``; see ``choose_file``."""
    names = [path.name for path in folder.glob("*.gguf")]
    return folder / choose_file(names, wanted, str(folder))[0]


def gguf_of(folder: Path) -> Path | None:
    """Return the GGUF file of a folder that was made from one; None for others. Raises ``model_malformed``."""
    return source_of(folder, GGUF)


def missing_tokenizer(folder: Path) -> AiakqError | None:
    """Return why a folder of a GGUF file has no tokenizer; None if it has one, and for other folders."""
    if gguf_of(folder) is None:
        return None
    reason = read_json(folder / MARK, MARK).get("no_tokenizer")
    return error("gguf_unsupported", reason=reason) if isinstance(reason, str) else None
