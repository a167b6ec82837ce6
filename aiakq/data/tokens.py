"""Documents rendered to text and tokenized."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from aiakq.data import chat
from aiakq.data.documents import read_file
from aiakq.data.rows import Document
from aiakq.errors import error, first_line

#: Text is tokenized in pieces of about this many characters, so that one huge line cannot stall the tokenizer.
_PIECE = 8192
#: Number of pieces passed to the tokenizer at a time.
_PIECES_AT_ONCE = 64


def read_documents(path: Path, tokenizer: object = None) -> list[str]:
    """Return the texts of a file, in order. Conversations need a ``tokenizer`` with a chat template."""
    return render_documents(read_file(path), tokenizer, path.name)


def render_documents(documents: Iterable[Document], tokenizer: object, source: str) -> list[str]:
    """Return the text of each document; conversations are rendered with the tokenizer's chat template."""
    given = list(documents)
    conversations = [
        (document.where, list(document.messages), list(document.tools)) for document in given if document.text is None
    ]
    rendered = iter(chat.render(conversations, tokenizer, source))
    return [next(rendered) if document.text is None else document.text for document in given]


def tokenize(documents: list[str], tokenizer: Any) -> list[list[int]]:
    """Return token ids of each document, without special tokens. ``tokenizer`` is a transformers tokenizer.

    Long documents are tokenized in pieces that end at line ends.
    """
    result = []
    for document in documents:
        ids: list[int] = []
        pieces = list(_pieces(document))
        for start in range(0, len(pieces), _PIECES_AT_ONCE):
            batch = pieces[start : start + _PIECES_AT_ONCE]
            for piece_ids in _ids(batch, tokenizer):
                ids.extend(piece_ids)
        result.append(ids)
    return result


def _ids(pieces: list[str], tokenizer: Any) -> list[list[int]]:
    """Return token ids of each piece. Raises ``model_malformed`` if the tokenizer fails."""
    try:
        ids: list[list[int]] = tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"]
        return ids
    except BaseException as problem:
        # The Rust tokenizer raises plain exceptions, and panics derive from BaseException.
        if type(problem) is not Exception and type(problem).__name__ != "PanicException":
            raise
        raise error("model_malformed", file="the tokenizer", reason=first_line(problem, "it fails")) from problem


def _pieces(document: str) -> Iterator[str]:
    """Split the document at line ends into pieces of at least _PIECE and at most 4 * _PIECE characters."""
    piece = ""
    for line in document.splitlines(keepends=True):
        for start in range(0, len(line), 4 * _PIECE):
            piece += line[start : start + 4 * _PIECE]
            if len(piece) >= _PIECE:
                yield piece
                piece = ""
    if piece:
        yield piece
