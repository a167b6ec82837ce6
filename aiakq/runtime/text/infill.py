"""Fill-in-the-middle prompts, which ask a model for the text between a prefix and a suffix.

Models trained for it have special tokens that mark the parts, which are looked up in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from aiakq.runtime.text.tokenizer import Tokenizer

#: Marker tokens before the prefix, the suffix and the middle; then the tokens that may end the middle, if they exist.
_MARKS: tuple[tuple[tuple[str, str, str], tuple[str, ...]], ...] = (
    # Qwen2.5-Coder, CodeGemma
    (
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder, StarCoder2, Granite
    (
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<|endoftext|>", "<|end_of_text|>", "<fim_pad>", "<file_sep>", "<repo_name>", "<filename>"),
    ),
    (("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), ("<|endoftext|>", "<fim-pad>")),  # SantaCoder
    (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), ("<｜end▁of▁sentence｜>",)),  # DeepSeek
    (("▁<PRE>", "▁<SUF>", "▁<MID>"), ("▁<EOT>",)),  # CodeLlama
)
#: Mistral, where the suffix comes first.
_SUFFIX_FIRST = ("[PREFIX]", "[SUFFIX]")


class Infill(msgspec.Struct):
    """Token ids around the parts of a fill-in-the-middle prompt.

    begin         tokens that the tokenizer adds before every text.
    prefix, suffix, middle  markers before the parts; ``middle`` is None if the prefix comes last.
    ends          tokens that end the middle.
    lead          text put before the suffix when it is tokenized, so that the tokenizer adds no space.
    num_lead_ids  number of tokens of ``lead``, which are removed.
    """

    begin: list[int]
    prefix: int
    suffix: int
    middle: int | None
    ends: list[int]
    lead: str = ""
    num_lead_ids: int = 0

    def prompt(self, prefix_ids: list[int], suffix_ids: list[int], with_begin: bool) -> list[int]:
        """Return the prompt; ``suffix_ids`` are the tokens of ``lead`` followed by the suffix."""
        before = [self.prefix, *prefix_ids]
        after = [self.suffix, *suffix_ids[self.num_lead_ids :]]
        parts = [*after, *before] if self.middle is None else [*before, *after, self.middle]
        return [*self.begin, *parts] if with_begin else parts


def find_infill(tokenizer: Tokenizer, vocabulary: Mapping[str, int]) -> Infill | None:
    """Return the prompt format of the model; None if its ``vocabulary`` has no marker tokens."""
    for marks, ends in _MARKS:
        if all(mark in vocabulary for mark in marks):
            prefix, suffix, middle = (vocabulary[mark] for mark in marks)
            return _infill(tokenizer, prefix, suffix, middle, [vocabulary[end] for end in ends if end in vocabulary])
    if all(mark in vocabulary for mark in _SUFFIX_FIRST):
        prefix, suffix = (vocabulary[mark] for mark in _SUFFIX_FIRST)
        return _infill(tokenizer, prefix, suffix, None, [])
    return None


def _infill(tokenizer: Tokenizer, prefix: int, suffix: int, middle: int | None, ends: list[int]) -> Infill:
    plain, with_special = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    index = next((index for index in range(len(with_special)) if with_special[index : index + len(plain)] == plain), 0)
    infill = Infill(with_special[:index], prefix, suffix, middle, ends)
    if plain and tokenizer.token_bytes(plain[0]).startswith(b" "):
        lead = tokenizer.encode("\n", add_special_tokens=False)
        if tokenizer.encode("\na", add_special_tokens=False)[: len(lead)] == lead:
            infill.lead, infill.num_lead_ids = "\n", len(lead)
    return infill
