"""Sizes as users write them."""

from __future__ import annotations

import pytest

from aiakq.arguments.byte_size import byte_size, shard_bytes
from aiakq.errors import AiakqError


@pytest.mark.parametrize(
    ("word", "size"), [("5GB", 5 * 10**9), (" 2 gib ", 2**31), ("1.5MB", 1_500_000), ("1TiB", 2**40)]
)
def test_units_are_decimal_and_binary(word, size):
    assert byte_size(word) == size


@pytest.mark.parametrize("word", ["", "5", "GB", "-1GB", "0GB", "5kB", "1e3GB", "nanGB"])
def test_other_words_are_no_sizes(word):
    assert byte_size(word) is None
    with pytest.raises(AiakqError, match="--max-shard-size"):
        shard_bytes(word)


def test_no_size_is_none():
    assert shard_bytes(None) is None
