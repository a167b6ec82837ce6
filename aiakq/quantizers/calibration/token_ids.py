"""Calibration samples from files of token ids: lines of numbers, JSON, JSON lines, or tables.

Padding is left out, because it would spoil the statistics (see padding.py). Text that a loss ignores, such as prompts
with labels of -100, is calibrated: the model reads it, too. Masks of a file that are ones throughout say nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiakq.data.files import TABLES, bad, decoded_json, decoded_literal, file_kind, read_text
from aiakq.data.json_rows import rows_of
from aiakq.data.messages import is_missing
from aiakq.data.rows import has_known_columns, plain_name
from aiakq.data.tables import read_rows
from aiakq.quantizers.calibration import padding as paddings
from aiakq.quantizers.calibration.padding import LABELS, LENGTHS, LOSS_MASKS, PaddingIds
from aiakq.quantizers.paths import TOKENS_HINT

__all__ = ["PaddingIds", "TokenFile", "check_tokenized", "read_token_file", "read_token_ids"]

_SPLIT = re.compile(r"[,;\s]+")
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}(\.[0-9]{0,18})?([eE][+-]?[0-9]{1,2})?")
#: How tensors and arrays are printed.
_PRINTED = re.compile(r"(?:(?:torch\.)?tensor|(?:np\.|numpy\.)?array)\((.*?)(?:,\s*dtype=[\w.]+)?\)", re.DOTALL)
#: Names of the column with token ids, of ids that follow a prompt, and of masks whose ones are text.
_IDS = ("input_ids", "prompt_token_ids", "prompt_input_ids", "prompt_ids", "token_ids", "tokens", "ids")
_ANSWERS = tuple(
    "token_ids output_token_ids completion_token_ids response_token_ids completion_ids response_ids output_ids "
    "completion_input_ids chosen_input_ids".split()
)
_MASKS = ("attention_mask", "input_mask", "attention_masks", "attn_mask", "attn_masks")
#: Masks whose ones are padding in some programs and text in others.
_AMBIGUOUS = ("padding_mask", "key_padding_mask", "encoder_padding_mask", "pad_mask")
#: Columns that say nothing about the text, or what padding.py reads.
_USED = frozenset({*_MASKS, *LOSS_MASKS, *LENGTHS, *LABELS, "position_ids", "special_tokens_mask", "token_type_ids"})
_OTHERS = frozenset("offset_mapping overflow_to_sample_mapping cu_seqlens cu_seq_lens_q sequence_ids word_ids".split())
KNOWN = frozenset(_IDS)


@dataclass
class TokenFile:
    """The samples of a file, and sentences about what was left out."""

    samples: list[list[int]] = field(default_factory=list)
    num_masked: int = 0
    num_padding: int = 0
    num_suspicious: int = 0
    num_empty: int = 0
    padding_ids: set[int] = field(default_factory=set)
    unread: dict[str, None] = field(default_factory=dict)

    def warnings(self, name: str, padding: PaddingIds) -> list[str]:
        """Return sentences for the report."""
        lines = []
        if self.num_empty:
            lines.append(f"{self.num_empty} rows of {name} were left out: they have no token ids.")
        if self.num_masked:
            lines.append(f"{self.num_masked} positions of {name} were left out: their attention_mask is 0.")
        if self.num_padding:
            ids = ", ".join(map(str, sorted(self.padding_ids or {padding.pad or 0})[:6]))
            lines.append(f"{self.num_padding} tokens of {name} were left out as padding: runs of the id {ids}.")
        if self.num_suspicious:
            lines.append(
                f"{self.num_suspicious} lines of {name} begin or end with a run of one id. If that is padding, mark it "
                "with 0 in an attention_mask."
            )
        if self.unread:
            names = ", ".join(f"{column[:40]!r}" for column in list(self.unread)[:6])
            lines.append(f"Columns of {name} with other token ids that were not read: {names}.")
        return lines


@dataclass(frozen=True)
class _Record:
    """The ids at a place in a file, their mask or None, and other columns, for one sample or for a batch."""

    where: str
    ids: Any
    mask: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)


def read_token_ids(path: Path, vocab_size: int) -> list[list[int]]:
    """Return the samples of a file of token ids without masked positions. Raises ``calibration``."""
    return read_token_file(path, vocab_size, PaddingIds()).samples


def read_token_file(path: Path, vocab_size: int, padding: PaddingIds) -> TokenFile:
    """Read a file of token ids, detecting its format.

    Lines of integers separated by commas or white space, each optionally in brackets, ``#`` starting a comment; a JSON
    list of lists or of objects; an object of columns or one that wraps rows; JSON lines; or a table. Objects have
    ``input_ids`` and may have an ``attention_mask``, for one sample or for a batch. Raises ``calibration``.
    """
    found, unmasked, masked = TokenFile(), [], []
    for record in _records(path, found):
        for sample in _unbatched(record, path):
            if is_missing(sample.ids):
                found.num_empty += 1
                continue
            ids = _ids(sample.ids, sample.where, path, vocab_size)
            _note_labels(ids, sample.columns, found)
            if sample.mask is None:
                unmasked.append((ids, sample.columns))
            else:
                runs = _visible(ids, sample, path, found)
                masked.append(([ids] if set(sample.mask) == {1} else runs, sample.columns))
    for runs, columns in masked:
        _add_masked(runs, columns, padding, found)
    filler = None
    if padding.pad is None or not any(padding.pad in ids[:1] + ids[-1:] for ids, _ in unmasked):
        filler = paddings.common_padding([ids for ids, _ in unmasked])
    for ids, columns in unmasked:
        found.samples += _without_padding(ids, columns, padding if filler is None else PaddingIds(filler, True), found)
    found.samples = [sample for sample in found.samples if sample]
    if not found.samples:
        rows = f" (rows without token ids: {found.num_empty})" if found.num_empty else ""
        raise bad(path.name, f"it holds no sample{rows}", TOKENS_HINT)
    return found


# --- reading ----------------------------------------------------------------------------------------------------------


def _records(path: Path, found: TokenFile) -> Iterator[_Record]:
    """Yield what is in each line, item or row."""
    kind = file_kind(path)
    is_text = kind in (".csv", ".tsv")
    text = read_text(path, TOKENS_HINT) if is_text or kind not in TABLES else ""
    if kind in TABLES and not (is_text and re.match(r"[\s\d,;+-]+$", text.partition("\n")[0])):
        for number, row in enumerate(read_rows(path, TOKENS_HINT, KNOWN), 1):
            yield from _record(row, f"row {number}", path, found)
        return
    whole = decoded_json(text) if text.lstrip()[:1] in ("[", "{") else None
    if isinstance(whole, Mapping) and not _has_column(whole):
        whole = rows_of(whole, path.name, KNOWN)
    if isinstance(whole, Mapping):
        yield from _record(whole, "line 1" if "\n" not in text.strip() else "it", path, found)
    elif isinstance(whole, list) and any(isinstance(item, list | Mapping | str) for item in whole):
        for number, item in enumerate(whole, 1):
            yield from _record(item, f"sample {number}", path, found)
    else:
        for number, line in enumerate(text.splitlines(), 1):
            content = line.strip()
            if not content.startswith("{"):
                content = content.partition("#")[0].strip()
            if content:
                yield from _record(_line(content, number, path), f"line {number}", path, found)


def _record(value: object, where: str, path: Path, found: TokenFile) -> Iterator[_Record]:
    """Yield what an item has; nothing for one without a value, which is counted."""
    if isinstance(value, Mapping) and isinstance(value.get("row"), Mapping):
        value = value["row"]  # as the dataset viewer of the hub wraps each row
    if isinstance(value, Mapping):
        inner = [each for each in value.values() if isinstance(each, Mapping) and _has_column(each)]
        # Some programs keep what a tokenizer returned under a name such as "inputs".
        wrapped = inner[0] if len(inner) == 1 and not KNOWN & set(map(plain_name, value)) else value
        yield from _columns(wrapped, where, path, found)
    elif is_missing(value):
        found.num_empty += 1
    else:
        yield _Record(where, _listed(value, where, path))


def _has_column(value: Mapping[str, object]) -> bool:
    """Whether an object has a column of token ids."""
    return any(plain_name(name) in KNOWN and isinstance(cell, list | str) for name, cell in value.items())


def _are_words(cell: object) -> bool:
    """Whether a cell is a list of texts other than numbers, as the column ``tokens`` of some tokenizers."""
    while isinstance(cell, list) and cell:
        cell = cell[0]
    return isinstance(cell, str) and _NUMBER.fullmatch(cell) is None


def _columns(value: Mapping[str, object], where: str, path: Path, found: TokenFile) -> Iterator[_Record]:
    columns = {plain_name(name): cell for name, cell in value.items()}
    names = [name for name in _IDS if name in columns]
    names.sort(key=lambda name: isinstance(columns[name], list) and _are_words(columns[name]))
    name = next((name for name in names if isinstance(columns[name], list | str)), None)
    if name is None or is_missing(columns[name]):
        if any(is_missing(columns[each]) for each in names):
            found.num_empty += 1
            return
        has = ", ".join(map(str, list(value)[:6])) or "nothing"
        hint = "Give a file of text with --calibration." if has_known_columns(value) else TOKENS_HINT
        raise bad(path.name, f"{where} has no list 'input_ids' (it has {has})", hint)
    ambiguous = next((each for each in _AMBIGUOUS if each in columns), None)
    mask = next((columns[each] for each in _MASKS if not is_missing(columns.get(each))), None)
    if mask is None and ambiguous is not None:
        reason = f"{where} has a {ambiguous}, whose ones are padding in some programs and text in others"
        raise bad(path.name, reason, "Write an attention_mask: 1 for text, 0 for padding.")
    ids, answer, used = _listed(columns[name], where, path), None, set(_USED)
    if name.startswith("prompt") and mask is None:
        answer = next((each for each in _ANSWERS if isinstance(columns.get(each), list)), None)
        ids, mask = _prompt_and_answer(columns, name, ids, answer, used)
    others = {each: _weak(cell, where, path) for each, cell in columns.items() if each in _USED and answer is None}
    for each, cell in columns.items():
        if each not in {name, answer} | used | _OTHERS and _has_ids(cell):
            found.unread[each] = None
    yield _Record(where, ids, None if mask is None else _listed(mask, where, path), others)


def _prompt_and_answer(
    columns: Mapping[str, Any], name: str, prompt: object, answer: str | None, used: set[str]
) -> tuple[object, object]:
    """Return the ids of a prompt and of the answer in another column, if any, and their mask or None.

    Each part may have a mask of its own, whose name is added to ``used``: ``prompt_mask``, ``chosen_attention_mask``.
    """
    if not isinstance(prompt, list):
        return prompt, None
    parts = [(name, prompt)]
    suffixes: tuple[str, ...] = ("attention_mask", "mask")
    if answer is not None and columns[answer][: len(prompt)] == prompt:
        parts, suffixes = [(answer, columns[answer])], suffixes[:1]  # completion_mask is 0 for the prompt, too
    elif answer is not None:
        parts.append((answer, columns[answer]))
    ids: list[object] = []
    mask: list[object] = []
    is_masked = False
    for each, cell in parts:
        stem = each.removesuffix("ids").removesuffix("token_").removesuffix("input_")
        names = [stem + suffix for suffix in suffixes if stem]
        found = next((mask_name for mask_name in names if _fits(columns.get(mask_name), cell)), None)
        ids += cell
        mask += [1] * len(cell) if found is None else columns[found]
        if found is not None:
            is_masked = True
            used.add(found)
    return ids, mask if is_masked else None


def _fits(mask: object, ids: list[object]) -> bool:
    """Whether ``mask`` has a value for each id, or for each list of a batch."""
    return isinstance(mask, list) and len(mask) == len(ids) > 0


def _has_ids(cell: object) -> bool:
    """Whether a cell has a list of integers, or one in it."""
    if isinstance(cell, Mapping):
        return any(map(_has_ids, cell.values()))
    if not isinstance(cell, list) or not cell:
        return False
    return type(cell[0]) is int and len(cell) > 1 if not isinstance(cell[0], list | Mapping) else _has_ids(cell[0])


def _weak(cell: object, where: str, path: Path) -> object:
    """Return a column besides the ids, whose texts in tables are lists."""
    is_list = isinstance(cell, str) and (cell.lstrip().startswith("[") or len(_SPLIT.split(cell.strip())) > 1)
    return _listed(cell, where, path) if is_list else cell


def _listed(cell: object, where: str, path: Path) -> object:
    """Return a list that may be in a text: as JSON, as numbers, or as NumPy and torch print it."""
    if not isinstance(cell, str):
        return cell
    text = _PRINTED.sub(r"\1", cell.strip())
    if "..." in text:
        reason = f"{where} holds a list that was shortened with '...' when it was printed"
        raise bad(path.name, reason, "Write the ids with tolist().")
    value = decoded_literal(text)
    if isinstance(value, tuple):
        value = list(value)
    if value is None or type(value) is int:
        words = [word for word in _SPLIT.split(text.strip("[]")) if word]
        if "[" in text.strip("[]") or not words or not all(map(_NUMBER.fullmatch, words)):
            raise bad(path.name, f"{where} holds {cell[:40]!r}, which is no list of integers", TOKENS_HINT)
        value = [_integer(word) for word in words]
    return value


def _line(content: str, number: int, path: Path) -> object:
    if content.startswith("{"):
        value = decoded_literal(content.rstrip(", "))
        if not isinstance(value, dict):
            raise bad(path.name, f"line {number} is no JSON object with a list 'input_ids'", TOKENS_HINT)
        return value
    if content == "null":
        return None
    if content.startswith(("tensor(", "torch.", "array(", "np.", "numpy.")):
        return _listed(content, f"line {number}", path)
    if content.startswith("["):
        nested = decoded_json(content.rstrip(", "))
        if isinstance(nested, list) and any(isinstance(item, list) for item in nested):
            return nested
        content = content[1:].rstrip(", ").removesuffix("]")
    words = [word for word in _SPLIT.split(content) if word]
    for word in words:
        if not _NUMBER.fullmatch(word):
            raise bad(path.name, f"line {number} holds {word[:40]!r}, which is no integer", TOKENS_HINT)
    return [_integer(word) for word in words]


def _integer(word: str) -> int | float:
    """Return the value of a word; that of a float is checked later."""
    return int(word) if word.lstrip("+-").isdigit() else float(word)


def _unbatched(record: _Record, path: Path) -> Iterator[_Record]:
    """Yield the samples of a record, which may be a batch, with their masks."""
    ids, mask, where = record.ids, record.mask, record.where
    if not (isinstance(ids, list) and ids and all(isinstance(row, list) for row in ids)):
        if isinstance(mask, list) and mask and all(isinstance(row, list) for row in mask):
            if len(mask) > 1:
                raise bad(path.name, f"{where} has one list of ids, and an attention_mask of several", TOKENS_HINT)
            record = replace(record, mask=mask[0])
        yield record
        return
    if mask is not None and (not isinstance(mask, list) or len(mask) != len(ids)):
        raise bad(
            path.name, f"{where} has {len(ids)} lists of ids, and an attention_mask of another shape", TOKENS_HINT
        )
    for number, row in enumerate(ids):
        columns = {
            name: cell[number]
            for name, cell in record.columns.items()
            if isinstance(cell, list) and len(cell) == len(ids)
        }
        yield _Record(f"{where}, sample {number + 1}", row, None if mask is None else mask[number], columns)


def _ids(value: Any, where: str, path: Path, vocab_size: int) -> list[int]:
    if not isinstance(value, list):
        raise bad(path.name, f"{where} is no list of ids", TOKENS_HINT)
    if all(isinstance(item, str) and _NUMBER.fullmatch(item.strip()) for item in value):
        value = [_integer(item.strip()) for item in value]
    ids = [int(item) if type(item) is float and item.is_integer() else item for item in value]
    for item in ids:
        if type(item) is not int:
            raise bad(path.name, f"{where} holds {str(item)[:40]!r}, which is no integer", TOKENS_HINT)
        if not 0 <= item < vocab_size:
            hint = "Make the ids with this model's own tokenizer."
            if item < 0:
                hint = "If that is padding, replace it by any id, with 0 in an attention_mask."
            raise bad(path.name, f"{where} holds the id {item}, outside 0..{vocab_size - 1}", hint)
    return ids


# --- padding ----------------------------------------------------------------------------------------------------------


def _note_labels(ids: list[int], columns: Mapping[str, object], found: TokenFile) -> None:
    """Note labels that are another text, as those of models with an encoder, and not the ids or the next ids."""
    for name in LABELS:
        labels = columns.get(name)
        if (
            isinstance(labels, list)
            and _has_ids(labels)
            and not any(
                all(label in (-100, token) for label, token in zip(labels, ids[shift:], strict=False))
                for shift in (0, 1)
            )
        ):
            found.unread[name] = None


def _visible(ids: list[int], sample: _Record, path: Path, found: TokenFile) -> list[list[int]]:
    """Return the runs of tokens whose mask is not 0; a gap ends a sample: its neighbours do not follow each other.

    A mask of packed samples has their numbers: 1, 1, 2, 2, 2, 0.
    """
    mask, where = sample.mask, sample.where
    if isinstance(mask, list) and all(isinstance(item, str) and _NUMBER.fullmatch(item) for item in mask):
        mask = [_integer(item) for item in mask]
    if not isinstance(mask, list) or len(mask) != len(ids):
        length = len(mask) if isinstance(mask, list) else "no"
        raise bad(path.name, f"{where} has {len(ids)} ids and an attention_mask of {length} values", TOKENS_HINT)
    numbers = [value for value in mask if isinstance(value, int | float) and value > 0]
    packed = set(numbers) == set(range(1, len(set(numbers)) + 1))
    runs: list[list[int]] = [[]]
    starts = set(paddings.boundaries(ids, sample.columns))
    previous: object = 0
    for at, (token, visible) in enumerate(zip(ids, mask, strict=True)):
        if visible not in (0, 1) and not (packed and visible in numbers):
            raise bad(path.name, f"{where} has {str(visible)[:40]} in its attention_mask, not 0 or 1", TOKENS_HINT)
        if (visible != previous or at in starts) and runs[-1]:
            runs.append([])
        previous = visible
        if visible:
            runs[-1].append(token)
        else:
            found.num_masked += 1
    return [run for run in runs if run]


def _add_masked(runs: list[list[int]], columns: Mapping[str, object], padding: PaddingIds, found: TokenFile) -> None:
    """Add what a mask shows, without an id that only pads and, if no mask of the file hides anything, without the
    padding that other columns mark.
    """
    if found.num_masked or len(runs) > 1:
        for run in runs:
            found.samples += [run] if padding.kept else _without_padding(run, {}, padding, found)
        return
    for run in runs:
        # The id of the padding also ends texts: the mask says that its runs are text, unless a column marks them.
        found.samples += _without_padding(run, columns, PaddingIds(None, True) if padding.kept else padding, found)


def _without_padding(
    ids: list[int], columns: Mapping[str, object], padding: PaddingIds, found: TokenFile
) -> list[list[int]]:
    """Return the samples in ``ids`` without padding, as far as it is known."""
    begin, end = paddings.trimmed(ids, paddings.marked(ids, columns), padding)
    found.padding_ids.update(ids[:begin], ids[end:])
    starts = [at for at in paddings.boundaries(ids, columns) if begin < at < end]
    if begin and starts[:1] == [begin + 1]:  # the one of a run that was kept would be a sample
        begin = starts.pop(0)
    kept = []
    for first, last in zip([begin, *starts], [*starts, end], strict=True):
        for part in paddings.parts(ids[first:last], padding):
            kept.append(part)
            found.num_suspicious += paddings.is_suspicious(part, padding)
    lost = len(ids) - sum(map(len, kept))
    found.num_padding += lost
    if lost > len(ids) - (end - begin) and padding.pad is not None:
        found.padding_ids.add(padding.pad)
    return kept


def check_tokenized(documents: list[list[int]], vocab_size: int) -> None:
    """Raise ``calibration`` if a tokenizer made ids that the model has no embeddings for."""
    highest = max((max(ids) for ids in documents if ids), default=0)
    if highest >= vocab_size:
        reason = f"the tokenizer made the id {highest}, outside 0..{vocab_size - 1}"
        raise bad("text", reason, "The tokenizer does not belong to this model.")
