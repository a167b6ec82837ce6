"""How byte-level BPE splits texts before merging, by ``tokenizer.ggml.pre``: the parts of a tokenizer.json.

llama.cpp's converter recognizes the pre-tokenizer of a model by what it does to a test text, and stores a name for it.
The expressions are those of the models' tokenizer.json; llama.cpp uses equivalent ones. Names whose normalizer and
expressions are not known exactly are left out: such files are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BYTES: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
#: GPT-2's expression is part of ByteLevel.
_GPT2 = {**_BYTES, "use_regex": True}
_DIGIT = {"type": "Digits", "individual_digits": True}
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}" + _REST
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}" + _REST
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+")
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"


@dataclass(frozen=True)
class PreTokenizer:
    """How texts are normalized and split.

    steps          parts of ``pre_tokenizer`` in tokenizer.json; ByteLevel is the last.
    normalizer     NFC, or "".
    ignore_merges  whether a whole piece that is a token is not merged from parts.
    add_bos        whether texts begin with the bos token, if the file does not say it.
    """

    steps: tuple[Mapping[str, Any], ...] = (_GPT2,)
    normalizer: str = ""
    ignore_merges: bool = False
    add_bos: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return ``pre_tokenizer`` of tokenizer.json."""
        if len(self.steps) == 1:
            return dict(self.steps[0])
        return {"type": "Sequence", "pretokenizers": [dict(step) for step in self.steps]}


def _split(*expressions: str) -> tuple[Mapping[str, Any], ...]:
    """Return the steps that split at every match of each expression in turn."""
    return tuple(
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in expressions
    )


_LLAMA3_STEPS = (*_split(_LLAMA3), _BYTES)
_BY_DIGIT = (_DIGIT, _GPT2)
_FALCON = (
    {"type": "Punctuation", "behavior": "Contiguous"},
    _GPT2,
    {"type": "Digits", "individual_digits": False},
    *_split("[0-9][0-9][0-9]"),
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mellum"), PreTokenizer()),
    **dict.fromkeys(("mpt", "olmo"), PreTokenizer(normalizer="NFC")),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3"),
        PreTokenizer(_LLAMA3_STEPS, ignore_merges=True, add_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer(_LLAMA3_STEPS)),
    "glm4": PreTokenizer(_LLAMA3_STEPS, ignore_merges=True),
    **dict.fromkeys(("qwen2", "stablelm2"), PreTokenizer((*_split(_QWEN2), _BYTES), normalizer="NFC")),
    "qwen35": PreTokenizer((*_split(_QWEN35), _BYTES), normalizer="NFC"),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez"), PreTokenizer((*_split(_QWEN2), _BYTES))),
    "tekken": PreTokenizer((*_split(_TEKKEN), _BYTES), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer((*_split(_GPT4O), _BYTES))),
    **dict.fromkeys(("starcoder", "refact", "smollm", "codeshell"), PreTokenizer(_BY_DIGIT)),
    "command-r": PreTokenizer(_BY_DIGIT, normalizer="NFC"),
    "deepseek-v3": PreTokenizer((*_split(*_DEEPSEEK3), _BYTES)),
    "deepseek-coder": PreTokenizer((*_split(*_DEEPSEEK_CODER), _DIGIT, _BYTES)),
    "falcon": PreTokenizer(_FALCON),
    "bloom": PreTokenizer((*_split(_BLOOM), _BYTES)),
}
