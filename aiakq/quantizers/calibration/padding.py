"""Padding of token ids: where it is, from a mask or from what else was stored, and the samples without it.

An ``attention_mask`` says what is text. Other columns say it only together with the ids: labels of -100, zeros in a
mask of the loss, ones in ``special_tokens_mask``, a ``length`` below the number of ids and repeated ``position_ids``
also mark prompts and special tokens, which are text. Where they mark a run of one id at either end, it is padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Value of labels that a loss ignores.
_IGNORED = -100
#: Columns whose zeros may mark padding, and columns with the number of ids without it.
LOSS_MASKS = tuple(
    "input_mask attn_mask mask loss_mask loss_masks loss_weights completion_mask assistant_masks assistant_mask "
    "labels_mask label_mask response_mask target_mask segment_ids".split()
)
LENGTHS = ("length", "lengths", "seq_len", "seq_length", "seqlen", "num_tokens", "valid_length", "valid_len")
LABELS = ("labels", "label_ids", "target_ids")
#: Number of equal ids that no text has at its end, and between two texts.
_RUN = 4
_LONG_RUN = 8


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


def marked(ids: Sequence[int], columns: Mapping[str, object]) -> list[bool]:
    """Return which positions may be padding according to columns other than the mask; those that do not fit are not
    used.
    """
    marks = [False] * len(ids)

    def add(values: object, is_marked: Any) -> None:
        if isinstance(values, list) and len(values) == len(ids):
            marks[:] = [mark or is_marked(value) for mark, value in zip(marks, values, strict=True)]

    for name in LABELS:
        add(columns.get(name), lambda value: value == _IGNORED)
    for name in LOSS_MASKS:
        cell = columns.get(name)
        if name != "segment_ids" or (isinstance(cell, list) and 1 in cell):  # else they count from 0
            add(cell, lambda value: value == 0)
    add(columns.get("special_tokens_mask"), lambda value: value == 1)
    for name in LENGTHS:
        length = columns.get(name)
        length = length[0] if isinstance(length, list) and len(length) == 1 else length
        if isinstance(length, int) and 0 < length < len(ids):
            add(list(range(len(ids))), lambda at, length=length: at >= length)
    positions = columns.get("position_ids")
    if isinstance(positions, list) and len(positions) == len(ids):
        equal = [a == b for a, b in zip(positions, positions[1:], strict=False)]
        add([a or b for a, b in zip([False, *equal], [*equal, False], strict=True)], bool)
    return marks


def boundaries(ids: Sequence[int], columns: Mapping[str, object]) -> list[int]:
    """Return where packed samples begin: where ``position_ids`` start at 0 again."""
    positions = columns.get("position_ids")
    if not isinstance(positions, list) or len(positions) != len(ids):
        return []
    return [at for at in range(1, len(ids)) if positions[at] == 0 and positions[at - 1] != 0]


def trimmed(ids: list[int], marks: Sequence[bool], padding: PaddingIds) -> tuple[int, int]:
    """Return the begin and the end of ``ids`` without runs of the padding id, or of a marked id, at either end."""
    begin = _run(ids, marks, padding)
    if begin == len(ids):
        return 0, 0
    return begin, len(ids) - _run(ids[::-1], marks[::-1], padding)


def _run(ids: Sequence[int], marks: Sequence[bool], padding: PaddingIds) -> int:
    """Return how many ids at the beginning are padding."""
    if not ids:
        return 0
    first = ids[0]
    run = next((at for at, token in enumerate(ids) if token != first), len(ids))
    if first == padding.pad:
        # A single one is the end or the beginning of a text.
        return run - 1 if padding.kept and run < len(ids) else run
    length = next((at for at in range(run) if not marks[at]), run)
    if length < 2:
        return 0
    # A run without a mark contains the end or the beginning of the text.
    return length - 1 if padding.kept and padding.pad is None and length == run < len(ids) else length


def parts(ids: list[int], padding: PaddingIds) -> list[list[int]]:
    """Return the texts between long runs of the padding id."""
    if padding.pad is None or ids.count(padding.pad) < _RUN:
        return [ids]
    found: list[list[int]] = [[]]
    at = 0
    while at < len(ids):
        end = at
        while end < len(ids) and ids[end] == padding.pad:
            end += 1
        if end - at >= _RUN:
            if padding.kept and found[-1]:
                found[-1].append(padding.pad)
            found.append([])
        else:
            end = max(end, at + 1)
            found[-1] += ids[at:end]
        at = end
    return [part for part in found if part]


def is_suspicious(ids: list[int], padding: PaddingIds) -> bool:
    """Whether a sample has a run of one id at either end that is probably padding, with an id that is not known."""
    size = _RUN if padding.pad is None else _LONG_RUN
    return len(ids) > 2 * size and (len(set(ids[-size:])) == 1 or len(set(ids[:size])) == 1)


def common_padding(samples: Sequence[list[int]]) -> int | None:
    """Return the id that fills samples of one length up at one end; None if there is none.

    Several samples end, or begin, with runs of the same id, and no sample with another run.
    """
    if len(samples) < 2 or len({len(ids) for ids in samples}) > 1 or len(samples[0]) <= _RUN:
        return None
    for step in (-1, 1):
        ends = [ids[::step][:_RUN] for ids in samples]
        found = Counter(end[0] for end in ends if len(set(end)) == 1)
        if len(found) == 1 and next(iter(found.values())) > 1:
            return next(iter(found))
    return None
