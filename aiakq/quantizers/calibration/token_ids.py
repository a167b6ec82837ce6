"""Calibration samples from files of token ids: lines of numbers, JSON, JSON lines, or tables.

Padding is left out, because it would spoil the statistics: positions with a 0 in ``attention_mask`` and, without a
mask, runs of the tokenizer's padding id at either end of a line. Other columns that tokenizers and trainers write
(``labels``, ``position_ids``, ``token_type_ids``, ...) are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiakq.data.files import TABLES, bad, decoded_json, file_kind, read_text
from aiakq.data.tables import read_rows
from aiakq.quantizers.paths import TOKENS_HINT

_SPLIT = re.compile(r"[,\s]+")
#: Names of the column with token ids, and of that with masks.
_IDS = ("input_ids", "token_ids", "prompt_token_ids")
_MASK = "attention_mask"


@dataclass(frozen=True)
class PaddingIds:
    """What a tokenizer pads with.

    pad   the id; None if unknown.
    kept  whether one of a run is kept, because the id is also that of the end or the beginning of a text.
    """

    pad: int | None = None
    kept: bool = False

    @staticmethod
    def of(tokenizer: Any, pad_token_id: int | None = None) -> PaddingIds:
        """Return those of a transformers tokenizer or, without one, of ``pad_token_id`` in the model's config."""
        pad = getattr(tokenizer, "pad_token_id", None)
        pad = pad_token_id if pad is None else pad
        ends = (getattr(tokenizer, "eos_token_id", None), getattr(tokenizer, "bos_token_id", None))
        return PaddingIds(pad if isinstance(pad, int) else None, tokenizer is None or pad in ends)


@dataclass
class TokenFile:
    """The samples of a file, and sentences about what was left out."""

    samples: list[list[int]] = field(default_factory=list)
    num_masked: int = 0
    num_padding: int = 0
    num_suspicious: int = 0

    def warnings(self, name: str, padding: PaddingIds) -> list[str]:
        """Return sentences for the report."""
        lines = []
        if self.num_masked:
            lines.append(f"{self.num_masked} positions of {name} were left out: their attention_mask is 0.")
        if self.num_padding:
            lines.append(f"{self.num_padding} tokens of {name} were left out as padding: runs of the id {padding.pad}.")
        if self.num_suspicious:
            lines.append(
                f"{self.num_suspicious} lines of {name} begin or end with a run of one id. If that is padding, write "
                "it with an attention_mask."
            )
        return lines


def read_token_ids(path: Path, vocab_size: int) -> list[list[int]]:
    """Return the samples of a file of token ids without masked positions. Raises ``calibration``."""
    return read_token_file(path, vocab_size, PaddingIds()).samples


def read_token_file(path: Path, vocab_size: int, padding: PaddingIds) -> TokenFile:
    """Read a file of token ids, detecting its format.

    Lines of integers separated by commas or white space, each optionally in brackets, ``#`` starting a comment; a JSON
    list of lists or of objects; an object of columns; JSON lines; or a table. Objects have ``input_ids`` and may have
    an ``attention_mask``, for one sample or for a batch. Raises ``calibration``.
    """
    found = TokenFile()
    for where, ids, mask in _records(path):
        for sample, sample_mask, place in _unbatched(ids, mask, where, path):
            checked = _ids(sample, place, path, vocab_size)
            if sample_mask is None:
                found.samples.append(_without_padding(checked, padding, found))
            else:
                found.samples += _unmasked(checked, sample_mask, place, path, found)
    found.samples = [sample for sample in found.samples if sample]
    if not found.samples:
        raise bad(path.name, "it holds no sample", TOKENS_HINT)
    return found


# --- reading ----------------------------------------------------------------------------------------------------------


def _records(path: Path) -> Iterator[tuple[str, Any, Any]]:
    """Yield a place in the file, the ids there, and their mask or None."""
    if file_kind(path) in TABLES:
        for number, row in enumerate(read_rows(path, TOKENS_HINT), 1):
            yield _columns(row, f"row {number}", path)
        return
    text = read_text(path, TOKENS_HINT)
    whole = decoded_json(text) if text.lstrip()[:1] in ("[", "{") else None
    if isinstance(whole, Mapping):
        yield _columns(whole, "line 1" if "\n" not in text.strip() else "it", path)
    elif isinstance(whole, list) and any(isinstance(item, (list, Mapping)) for item in whole):
        for number, item in enumerate(whole, 1):
            yield _record(item, f"sample {number}", path)
    else:
        for number, line in enumerate(text.splitlines(), 1):
            content = line.strip()
            if not content.startswith("{"):
                content = content.partition("#")[0].strip()
            if content:
                yield _record(_line(content, number, path), f"line {number}", path)


def _record(value: Any, where: str, path: Path) -> tuple[str, Any, Any]:
    return _columns(value, where, path) if isinstance(value, Mapping) else (where, value, None)


def _columns(value: Mapping[str, Any], where: str, path: Path) -> tuple[str, Any, Any]:
    name = next((name for name in _IDS if isinstance(value.get(name), (list, str))), None)
    if name is None:
        has = ", ".join(map(str, list(value)[:6])) or "nothing"
        raise bad(path.name, f"{where} has no list 'input_ids' (it has {has})", TOKENS_HINT)
    cells = [value[name], value.get(_MASK)]
    for at, cell in enumerate(cells):
        if isinstance(cell, str):  # those of CSV files are text
            cells[at] = decoded_json(cell)
            if cells[at] is None:
                raise bad(path.name, f"{where} holds {cell[:40]!r}, which is no list of integers", TOKENS_HINT)
    return where, cells[0], cells[1]


def _line(content: str, number: int, path: Path) -> Any:
    if content.startswith("{"):
        value = decoded_json(content)
        if not isinstance(value, dict):
            raise bad(path.name, f"line {number} is no JSON object with a list 'input_ids'", TOKENS_HINT)
        return value
    if content.startswith("["):
        nested = decoded_json(content.rstrip(", "))
        if isinstance(nested, list) and any(isinstance(item, list) for item in nested):
            return nested
        content = content[1:].rstrip(", ").removesuffix("]")
    words = [word for word in _SPLIT.split(content) if word]
    for word in words:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", word):
            raise bad(path.name, f"line {number} holds {word[:40]!r}, which is no integer", TOKENS_HINT)
    return [int(word) for word in words]


def _unbatched(ids: Any, mask: Any, where: str, path: Path) -> Iterator[tuple[Any, Any, str]]:
    """Yield the samples of a record, which may be a batch, with their masks."""
    if not (isinstance(ids, list) and ids and all(isinstance(row, list) for row in ids)):
        yield ids, mask, where
        return
    if mask is not None and (not isinstance(mask, list) or len(mask) != len(ids)):
        raise bad(
            path.name, f"{where} has {len(ids)} lists of ids, and an attention_mask of another shape", TOKENS_HINT
        )
    for number, row in enumerate(ids):
        yield row, None if mask is None else mask[number], f"{where}, sample {number + 1}"


def _ids(value: Any, where: str, path: Path, vocab_size: int) -> list[int]:
    if not isinstance(value, list):
        raise bad(path.name, f"{where} is no list of ids", TOKENS_HINT)
    for item in value:
        if type(item) is not int:
            raise bad(path.name, f"{where} holds {str(item)[:40]!r}, which is no integer", TOKENS_HINT)
        if not 0 <= item < vocab_size:
            raise bad(
                path.name,
                f"{where} holds the id {item}, outside 0..{vocab_size - 1}",
                "Make the ids with this model's own tokenizer.",
            )
    return value


# --- padding ----------------------------------------------------------------------------------------------------------


def _unmasked(ids: list[int], mask: Any, where: str, path: Path, found: TokenFile) -> list[list[int]]:
    """Return the runs of tokens whose mask is 1; a gap ends a sample, since its neighbours do not follow each other."""
    if not isinstance(mask, list) or len(mask) != len(ids):
        length = len(mask) if isinstance(mask, list) else "no"
        raise bad(path.name, f"{where} has {len(ids)} ids and an attention_mask of {length} values", TOKENS_HINT)
    runs: list[list[int]] = [[]]
    for token, visible in zip(ids, mask, strict=True):
        if visible not in (0, 1):
            raise bad(path.name, f"{where} has {str(visible)[:40]} in its attention_mask, not 0 or 1", TOKENS_HINT)
        if visible:
            runs[-1].append(token)
        else:
            found.num_masked += 1
            if runs[-1]:
                runs.append([])
    return [run for run in runs if run]


def _without_padding(ids: list[int], padding: PaddingIds, found: TokenFile) -> list[int]:
    """Return ``ids`` without runs of the padding id at either end."""
    start, end = 0, len(ids)
    while end > start and ids[end - 1] == padding.pad:
        end -= 1
    while start < end and ids[start] == padding.pad:
        start += 1
    if padding.kept:  # a single one is the end or the beginning of a text
        start, end = max(0, start - 1), min(len(ids), end + 1)
    found.num_padding += len(ids) - (end - start)
    kept = ids[start:end]
    found.num_suspicious += padding.pad is None and len(kept) > 8 and (_is_run(kept[-4:]) or _is_run(kept[:4]))
    return kept


def _is_run(ids: list[int]) -> bool:
    return len(set(ids)) == 1
