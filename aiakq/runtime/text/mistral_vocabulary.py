"""The vocabulary of a tokenizer of Mistral's as a compiled tokenizer, which decodes; mistral-common encodes.

It gives every id the bytes that mistral-common gives it. Its merges only approximate how texts are divided
(``CompiledModel``), and nothing is encoded with them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from aiakq.runtime.text.spelling import spelled_bytes

_SPACE = "\u2581"


def tekken_tokenizer(words: Sequence[bytes], special: Sequence[str]) -> str:
    """Return the tokenizer.json of a tekken vocabulary.

    words    the bytes of each token, in the order of their ranks.
    special  the special tokens, which come first.

    Raises ValueError if a token has the text of a special one.
    """
    names = [spelled_bytes(word) for word in words]
    ids = {name: len(special) + rank for rank, name in enumerate(names)}
    if doubled := sorted(ids.keys() & set(special)):
        raise ValueError(f"the special token {doubled[0]!r:.40} is also an ordinary one")
    ranks = {word: rank for rank, word in enumerate(words)}
    merges = []
    for word in words:
        parts = [(word[:cut], word[cut:]) for cut in range(1, len(word))]
        found = [(ranks[left], ranks[right]) for left, right in parts if left in ranks and right in ranks]
        merges += [[names[left], names[right]] for left, right in sorted(found)]
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return _tokenizer(ids, merges, {text: id for id, text in enumerate(special)}, decoder)


def sentencepiece_tokenizer(pieces: Sequence[str], scores: Sequence[float], control: Sequence[int]) -> str:
    """Return the tokenizer.json of a SentencePiece vocabulary.

    pieces, scores  of each id.
    control         ids of control tokens, and of the unknown one.
    """
    ids = {piece: id for id, piece in enumerate(pieces)}
    ordinary = {piece: id for piece, id in ids.items() if id not in set(control)}
    merges = []
    for piece in sorted(ordinary, key=lambda each: -scores[ids[each]]):
        parts = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        found = [(ids[left], ids[right]) for left, right in parts if left in ordinary and right in ordinary]
        merges += [[pieces[left], pieces[right]] for left, right in sorted(found)]
    decoders = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    special = {pieces[id]: id for id in control}
    return _tokenizer(ids, merges, special, {"type": "Sequence", "decoders": decoders}, byte_fallback=True)


def _tokenizer(
    ids: Mapping[str, int],
    merges: list[list[str]],
    special: Mapping[str, int],
    decoder: Mapping[str, Any],
    byte_fallback: bool = False,
) -> str:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": byte_fallback,
        "ignore_merges": False,
        "vocab": {**special, **ids},
        "merges": merges,
    }
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    added = [{"id": id, "content": text, **flags} for text, id in special.items()]
    return json.dumps({"version": "1.0", **parts, "added_tokens": added, "decoder": decoder, "model": model})
