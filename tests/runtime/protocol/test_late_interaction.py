"""How queries and documents of ColBERT models are marked, filled up and scored."""

from __future__ import annotations

import numpy as np
import pytest

from aiakq.runtime.protocol.late_interaction import LateInteraction
from aiakq.runtime.protocol.pooling_params import Pooled, Pooling, max_similarity

TEXTS = LateInteraction(7, 8, query_length=6, document_length=5, expansion=9)


def _pooled(rows: list[list[float]]) -> Pooled:
    return Pooled(np.array(rows, np.float32).tobytes(), 2)


def test_markers_and_expansion():
    assert TEXTS.marked("query", [1, 5, 2]) == ([1, 7, 5, 2, 9, 9], 2)
    assert TEXTS.marked("document", [1, 5, 2]) == ([1, 8, 5, 2], 0)
    assert LateInteraction(None, None, 5, 5, 9, is_read=True).marked("query", [1, 2]) == ([1, 2, 9, 9, 9], 0)
    assert LateInteraction(7, 8, 5, 5).marked("query", [1, 2]) == ([1, 7, 2], 0)


@pytest.mark.parametrize(("longest", "limit", "room"), [(99, None, 5), (99, -1, 5), (4, None, 3), (99, 3, 2)])
def test_room_without_the_marker(longest, limit, room):
    assert TEXTS.room("query", longest, limit) == room


def test_the_score_is_the_sum_of_the_largest_products():
    queries, documents = _pooled([[1, 0], [0, 1], [-1, 0]]), _pooled([[0.5, 0.25], [0.75, -1]])
    assert max_similarity(queries, documents) == 0.75 + 0.25 - 0.5
    assert max_similarity(queries, Pooled(b"", 2)) == 0


def test_skipped_tokens_have_no_row():
    pooling = Pooling("ALL", skipped=(3, 4))
    assert pooling.positions([1, 3, 2, 4, 5], 1, 5, 5) == [2, 4] and pooling.num_rows([1, 3, 2, 4, 5]) == 3
