"""The evaluation text, split into windows of token ids."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import aiakq.data
from aiakq.data.tokens import read_documents, tokenize
from aiakq.errors import error

if TYPE_CHECKING:
    from torch import Tensor

#: Tokens per window, if the model's context allows it.
WINDOW = 512
#: A text of fewer tokens says nothing of a model.
MIN_TOKENS = 32
#: Tokens of text used by default.
LIMIT = 64 * WINDOW


def load_windows(
    path: Path | None, tokenizer: object, length: int, vocab_size: int, limit: int = LIMIT
) -> tuple[Tensor, str]:
    """Return windows [W, length] int64 of the text at ``path`` or of the bundled held-out text, and its name.

    At most ``limit`` tokens are used, but at least one window. Documents are concatenated without special tokens.
    ``tokenizer`` is a transformers tokenizer. Raises ``calibration`` for a file that cannot be read and
    ``evaluation_text`` for fewer than ``MIN_TOKENS``, or ids outside a vocabulary of ``vocab_size``.
    """
    from aiakq.evaluation.metrics import windows

    if path is None:
        documents, name = [aiakq.data.text("heldout")], "the bundled held-out text"
    else:
        documents, name = read_documents(path, tokenizer), path.name
    ids = [token for document in tokenize(documents, tokenizer) for token in document]
    if (highest := max(ids, default=0)) >= vocab_size:
        reason = f"the tokenizer made the id {highest}, outside 0..{vocab_size - 1}: it does not belong to this model"
        raise error("evaluation_text", reason=reason)
    if len(ids) < MIN_TOKENS:
        raise error("evaluation_text", reason=f"{name} has {len(ids)} tokens; at least {MIN_TOKENS} are needed")
    return windows(ids, length, max(1, limit // length)), name
