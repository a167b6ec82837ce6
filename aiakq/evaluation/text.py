"""The evaluation text, split into windows of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import aiakq.data
from aiakq.data.evaluation_texts import BUNDLED, is_bundled, text_names
from aiakq.data.tokens import read_documents, tokenize
from aiakq.errors import AiakqError, error
from aiakq.evaluation.wording import counted

if TYPE_CHECKING:
    from torch import Tensor

#: Tokens per window, if the model's context allows it.
WINDOW = 512
#: A text of fewer tokens says nothing of a model.
MIN_TOKENS = 32
#: Tokens of text used by default.
LIMIT = 64 * WINDOW


@dataclass(frozen=True)
class EvaluationText:
    """A text to predict.

    name     short and unique among the texts of an evaluation.
    title    for sentences; a bundled text is described.
    windows  token ids [W, T] int64.
    """

    name: str
    title: str
    windows: Tensor


def load_texts(
    sources: Sequence[str], tokenizer: object, length: int, vocab_size: int, limit: int = LIMIT
) -> list[EvaluationText]:
    """Load each source as ``load_windows`` does; names of bundled texts select those."""
    texts = []
    for source, name in zip(sources, text_names(sources), strict=True):
        windows, title = load_windows(source, tokenizer, length, vocab_size, limit)
        texts.append(EvaluationText(name, title, windows))
    return texts


def load_windows(
    source: str | Path | None, tokenizer: object, length: int, vocab_size: int, limit: int = LIMIT
) -> tuple[Tensor, str]:
    """Return windows [W, length] int64 of a file or a bundled text, and its title. None is the held-out prose.

    At most ``limit`` tokens are used, but at least one window. Documents are concatenated without special tokens.
    ``tokenizer`` is a transformers tokenizer. Raises ``evaluation_text`` for a file that cannot be read, for fewer than
    ``MIN_TOKENS``, and for ids outside a vocabulary of ``vocab_size``.
    """
    from aiakq.evaluation.metrics import windows

    source = "prose" if source is None else str(source)
    if is_bundled(source):
        file, name = BUNDLED[source]
        documents = [aiakq.data.text(file)]
    else:
        documents, name = read_text(source, tokenizer), Path(source).name
    ids = [token for document in tokenize(documents, tokenizer) for token in document]
    if (highest := max(ids, default=0)) >= vocab_size:
        reason = f"the tokenizer made the id {highest}, outside 0..{vocab_size - 1}: it does not belong to this model"
        raise error("evaluation_text", reason=reason)
    if len(ids) < MIN_TOKENS:
        raise error(
            "evaluation_text", reason=f"{name} has {counted(len(ids), 'token')}; at least {MIN_TOKENS} are needed"
        )
    return windows(ids, length, max(1, limit // length)), name


def read_text(source: str, tokenizer: object) -> list[str]:
    """Return the documents of a file. Raises ``evaluation_text`` if it cannot be read."""
    try:
        return read_documents(Path(source), tokenizer)
    except AiakqError as problem:
        reason = problem.fields.get("reason", problem.message)
        raise error("evaluation_text", reason=f"{source}: {reason}") from None
