"""How vocabularies spell the bytes of their tokens, and texts in that spelling."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any


def _byte_characters() -> dict[str, int]:
    """Character -> byte of byte-level vocabularies: printable bytes stand for themselves (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTE_CHARACTERS = _byte_characters()
_CHARACTER_OF = {byte: character for character, byte in _BYTE_CHARACTERS.items()}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class TokenSpelling:
    """How a vocabulary spells the bytes of its tokens.

    byte_level     every character stands for a byte.
    byte_fallback  "<0x0A>" is a byte.
    replaced       what stands for other text, such as "▁" for a space.
    known          whether this says it all; else only decoding tells what a token adds.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replaced: tuple[tuple[str, str], ...] = ()
    known: bool = False

    @staticmethod
    def of(backend: Any) -> TokenSpelling:
        """From the decoder of a compiled tokenizer; of any other one nothing is known."""
        decoder = getattr(backend, "decoder", None)
        if decoder is None:
            return TokenSpelling()
        state = json.loads(decoder.__getstate__())
        steps = state["decoders"] if state["type"] == "Sequence" else [state]
        kinds = {step["type"] for step in steps}
        replaced = [
            (step["pattern"]["String"], step["content"])
            for step in steps
            if step["type"] == "Replace" and "String" in step["pattern"]
        ]
        replaced += [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
        return TokenSpelling(
            byte_level="ByteLevel" in kinds,
            byte_fallback="ByteFallback" in kinds,
            replaced=tuple(replaced),
            known=kinds <= {"ByteLevel", "ByteFallback", "Replace", "Metaspace", "Fuse", "Strip"},
        )

    def spelled(self, text: str) -> str:
        """``text`` in the characters of the vocabulary."""
        if self.byte_level:
            return "".join(_CHARACTER_OF[byte] for byte in text.encode())
        for pattern, content in self.replaced:
            text = text.replace(content, pattern) if content else text
        return text

    def bytes_of(self, token: str) -> bytes | None:
        if not self.known:
            return None
        if self.byte_level:
            # Added tokens are spelled as they are; characters of theirs need not be in the table.
            spelled = all(character in _BYTE_CHARACTERS for character in token)
            return bytes(_BYTE_CHARACTERS[character] for character in token) if spelled else token.encode()
        byte = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        for pattern, content in self.replaced:
            token = token.replace(pattern, content)
        return token.encode()


class CompiledModel:
    """Text to ids from ``Tokenizer.model_json``, in time that the length of the text bounds.

    Texts are not split into words before. Merges that cross words are not in a vocabulary, or rare.
    """

    def __init__(self, serialized: str) -> None:
        import tokenizers

        self._backend = tokenizers.Tokenizer.from_str(serialized)
        self._spelling = TokenSpelling.of(self._backend)

    def split(self, text: str) -> list[int]:
        """The ids of ``text``, without special tokens."""
        return self._backend.encode(self._spelling.spelled(text), add_special_tokens=False).ids
