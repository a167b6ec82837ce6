"""Encoding of bytes in the strings of a vocabulary, such as byte-level BPE and byte fallback."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any


def _byte_characters() -> dict[str, int]:
    """Return GPT-2's table of byte-level vocabularies, character -> byte; printable bytes map to themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_CHARACTERS = _byte_characters()
_CHARACTER_OF = {byte: character for character, byte in _BYTE_CHARACTERS.items()}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def spelled_bytes(text: bytes) -> str:
    """Return bytes as byte-level vocabularies spell them, a character for each."""
    return "".join(_CHARACTER_OF[byte] for byte in text)


@dataclass(frozen=True)
class TokenSpelling:
    """How a vocabulary encodes the bytes of its tokens.

    byte_level     whether every character represents a byte.
    byte_fallback  whether tokens like "<0x0A>" represent a byte.
    replaced       replacements of text, such as "▁" for a space.
    known          whether these rules are complete; otherwise the bytes of a token are only known by decoding.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replaced: tuple[tuple[str, str], ...] = ()
    known: bool = False

    @staticmethod
    def of(backend: Any) -> TokenSpelling:
        """Derive it from the decoder of a Rust tokenizer; for other tokenizers nothing is known."""
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
        """Return ``text`` in the encoding of the vocabulary."""
        if self.byte_level:
            return spelled_bytes(text.encode())
        for pattern, content in self.replaced:
            text = text.replace(content, pattern) if content else text
        return text

    def bytes_of(self, token: str) -> bytes | None:
        """Return the UTF-8 bytes of a token as it is spelled in the vocabulary; None if the spelling is unknown."""
        if not self.known:
            return None
        if self.byte_level:
            # Added tokens are stored as plain text, and may have characters that are not in the table.
            spelled = all(character in _BYTE_CHARACTERS for character in token)
            return bytes(_BYTE_CHARACTERS[character] for character in token) if spelled else token.encode()
        byte = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        for pattern, content in self.replaced:
            token = token.replace(pattern, content)
        return token.encode()


class CompiledModel:
    """Tokenizes with the model of ``Tokenizer.model_json`` only, in time bounded by the length of the text.

    Texts are not pre-tokenized into words; vocabularies have few or no merges across words.
    """

    def __init__(self, serialized: str) -> None:
        import tokenizers

        self._backend = tokenizers.Tokenizer.from_str(serialized)
        self._spelling = TokenSpelling.of(self._backend)

    def split(self, text: str) -> list[int]:
        """Return the ids of ``text``, without special tokens."""
        return self._backend.encode(self._spelling.spelled(text), add_special_tokens=False).ids
