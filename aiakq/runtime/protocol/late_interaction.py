"""LateInteraction: how a ColBERT model reads queries and documents, which have a vector per token.

Source: Khattab and Zaharia 2020 (arXiv:2004.12832), section 3; Santhanam et al. 2021 (arXiv:2112.01488).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from aiakq.errors import error
from aiakq.runtime.protocol.text_prompts import role_of


class LateInteraction(msgspec.Struct, frozen=True):
    """Tokens around queries and documents, and their lengths.

    query_marker, document_marker  token behind the first token of a text, which says what the text is, or None.
    query_length, document_length  maximum number of tokens of a text, special ones included; longer ones are cut.
    expansion  token that fills up queries; None: they are not filled up.
    filled_length  number of tokens to which queries are filled up; 0: ``query_length``.
    is_read    whether the tokens of a query attend to those that fill it up, whose own vectors count in any case.
    skipped    tokens of documents that have no vectors, such as punctuation.
    """

    query_marker: int | None
    document_marker: int | None
    query_length: int
    document_length: int
    expansion: int | None = None
    is_read: bool = False
    skipped: tuple[int, ...] = ()
    filled_length: int = 0

    def role(self, input_type: str | None) -> str:
        """Return query or document for the ``input_type`` of texts. Raises ``unsupported_parameter``."""
        role = None if input_type is None else role_of(input_type)
        if role is None:
            reason = "the model embeds queries and documents differently; it is query or document"
            raise error("unsupported_parameter", param="input_type", reason=reason)
        return role

    def room(self, role: str, longest: int, limit: int | None) -> int:
        """Return the number of tokens to keep of a text, without its marker.

        longest  maximum number of tokens of a text of the model.
        limit    the request's own limit, or None; -1 is that of the model.
        """
        length, marker = self._of(role)
        own = longest if limit in (None, -1) else limit
        return min(length, longest, own) - (marker is not None)

    def marked(self, role: str, token_ids: Sequence[int]) -> tuple[list[int], int]:
        """Return the tokens of a text with its marker, a query also filled up, and how many of them, at the end, no
        token attends to."""
        _, marker = self._of(role)
        ids = [*token_ids[:1], *([] if marker is None else [marker]), *token_ids[1:]]
        if role == "document" or self.expansion is None:
            return ids, 0
        missing = max((self.filled_length or self.query_length) - len(ids), 0)
        return ids + [self.expansion] * missing, 0 if self.is_read else missing

    def _of(self, role: str) -> tuple[int, int | None]:
        if role == "query":
            return self.query_length, self.query_marker
        return self.document_length, self.document_marker
