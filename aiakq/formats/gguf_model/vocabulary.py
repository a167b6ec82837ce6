"""GGUFVocabulary: the tokens of a GGUF file, with their kinds and scores, read and validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from aiakq.formats.gguf_model.keys import Metadata, unsupported

#: Kinds of tokens in ``tokenizer.ggml.token_type``.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_PREFIX = "tokenizer.ggml."
#: Names of special tokens in the file -> in tokenizer_config.json.
SPECIAL: Mapping[str, str] = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "seperator": "sep_token",
    "padding": "pad_token",
    "mask": "mask_token",
}
#: Control tokens that end an answer in some model; with a chat template, llama.cpp ends at each of them.
_ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn> <|endoftext|> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] "
    "<|end_of_text|> <end_of_utterance> <turn|> <｜end▁of▁sentence｜>".split()
)
#: Metadata that do not change which ids a text has; those of text around a gap are in the template of the request.
_HARMLESS = (
    *(f"{_PREFIX}{name}_token_id" for name in ("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")),
    *(f"{_PREFIX}{name}_token_id" for name in ("prefix", "suffix", "middle", "cls", "eot", "eom", "seperator")),
    *(f"{_PREFIX}{name}" for name in ("token_type_count", "suppress_tokens", "add_sep_token")),
    f"{_PREFIX}remove_extra_whitespaces",
)


@dataclass(frozen=True)
class GGUFVocabulary:
    """The vocabulary of a GGUF file.

    keys    the metadata.
    model   gpt2 for byte-level BPE, llama for SentencePiece's BPE.
    tokens  by id.
    kinds   NORMAL, CONTROL and so on, by id.
    scores  by id, for SentencePiece; empty if there are none.
    merges  pairs of tokens, in order; empty if there are none.
    """

    keys: Metadata
    model: str
    tokens: list[str]
    kinds: list[int]
    scores: list[float]
    merges: list[tuple[str, str]]

    @staticmethod
    def of(keys: Metadata) -> GGUFVocabulary:
        """Read it. Raises ``model_malformed`` for lists of wrong types or lengths, ``gguf_unsupported`` for another
        kind of tokenizer.
        """
        model = keys.text(_PREFIX + "model")
        if model not in ("gpt2", "llama"):
            raise unsupported(no_tokenizer(f"of the kind {model!r:.40}" if model else "without tokenizer.ggml.model"))
        tokens = keys.array(_PREFIX + "tokens", str, "strings")
        if not tokens:
            raise keys.malformed(_PREFIX + "tokens", tokens, "a list of strings")
        kinds = keys.array(_PREFIX + "token_type", int, "integers", len(tokens)) or [NORMAL] * len(tokens)
        scores = keys.array(_PREFIX + "scores", float, "numbers", len(tokens)) or []
        merges = _merges(keys, tokens)
        needed = model == "gpt2" and any(kind == NORMAL and len(tokens[id]) > 1 for id, kind in enumerate(kinds))
        if merges is None and needed:
            raise keys.malformed(_PREFIX + "merges", None, "a list of strings")
        return GGUFVocabulary(keys, model, tokens, kinds, scores, merges or [])

    @cached_property
    def ids(self) -> dict[str, int]:
        """Token -> id; of tokens that occur twice, the first."""
        found: dict[str, int] = {}
        for id, token in enumerate(self.tokens):
            found.setdefault(token, id)
        return found

    def special(self, name: str) -> int | None:
        """Return the id of the special token ``name``, as in SPECIAL, or eot, eom. Raises ``model_malformed``."""
        key = f"{_PREFIX}{name}_token_id"
        value = self.keys.get(key)
        if value is None:
            return None
        if type(value) is not int or value < 0:
            raise self.keys.malformed(key, value, f"an id below {len(self.tokens)}")
        return value if value < len(self.tokens) else None  # 2^32 - 1 says that there is none

    def switch(self, name: str) -> bool | None:
        """Return the switch ``name``, like add_bos_token, or None. Raises ``model_malformed``."""
        value = self.keys.get(_PREFIX + name)
        if value is not None and not isinstance(value, bool):
            raise self.keys.malformed(_PREFIX + name, value, "true or false")
        return value

    def end_ids(self, with_template: bool) -> list[int]:
        """Return the ids that end an answer: eos, eot and eom; with a chat template also other ends of turns."""
        named = [self.special(name) for name in ("eos", "eot", "eom")]
        if with_template:
            control = ((self.ids[token], token) for token in _ENDS if token in self.ids)
            named += sorted(id for id, token in control if self.kinds[id] in (CONTROL, USER_DEFINED))
        return list(dict.fromkeys(id for id in named if id is not None))

    def check_all_read(self) -> None:
        """Raise ``gguf_unsupported`` for a key of the tokenizer that nothing read and that may change ids."""
        for key in _HARMLESS:
            self.keys.get(key)
        for key in self.keys.unread_tokenizer():
            raise unsupported(no_tokenizer(f"with {key[:80]!r} ({self.keys.values[key]!r:.40})"))


def no_tokenizer(kind: str) -> str:
    """Return the reason why the tokenizer of a file, which is ``kind``, cannot be read, with the remedy."""
    return f"it has a tokenizer {kind}; name a folder that has its tokenizer with --tokenizer"


def _merges(keys: Metadata, tokens: list[str]) -> list[tuple[str, str]] | None:
    """Return the merges, or None without them. Raises ``model_malformed`` for one that does not give a token."""
    lines = keys.array(_PREFIX + "merges", str, "strings")
    if lines is None:
        return None
    known, pairs = set(tokens), []
    for line in lines:
        left, space, right = line.partition(" ")
        if not space or left not in known or right not in known or left + right not in known:
            left, right = _other_split(line, known)
        if not left:
            raise keys.malformed(_PREFIX + "merges", line, "two tokens whose sum is a token")
        pairs.append((left, right))
    return pairs


def _other_split(line: str, known: set[str]) -> tuple[str, str]:
    """Return the tokens of a merge with more than one space, or empty ones."""
    for index, character in enumerate(line):
        left, right = line[:index], line[index + 1 :]
        if character == " " and left in known and right in known and left + right in known:
            return left, right
    return "", ""


def token_scores(vocabulary: GGUFVocabulary) -> dict[str, float]:
    """Return token -> score of the pieces that SentencePiece may merge."""
    kinds, scores = vocabulary.kinds, vocabulary.scores
    return {
        token: scores[id]
        for token, id in vocabulary.ids.items()
        if kinds[id] == NORMAL or (kinds[id] == USER_DEFINED and scores[id] > -1000.0)
    }


def merges_by_score(pieces: Mapping[str, float], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the merges that give the same tokens as SentencePiece's BPE, which merges the piece of the highest score
    first: every split of every piece into two pieces, by descending score, and by descending lengths where equal.
    """
    found: list[Any] = []
    for piece, score in pieces.items():
        splits = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        pairs = sorted((pair for pair in splits if pair[0] in ids and pair[1] in ids), key=lambda pair: ids[pair[0]])
        found += [(score, len(left), len(right), left, right) for left, right in pairs]
    found.sort(key=lambda each: each[:3], reverse=True)
    return [(left, right) for *_, left, right in found]
