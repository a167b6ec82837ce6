"""The tokenizer of a model: transformers' own, with what the runtime needs of it and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aiakq.errors import error


class Tokenizer:
    """Text to ids and back, and the chat template. ``hf`` is the transformers tokenizer."""

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        # The Rust tokenizer itself: several times faster than transformers' wrapper around it.
        self._backend = getattr(hf, "_tokenizer", None)

    @staticmethod
    def load(path: str | Path, trust_remote_code: bool = False) -> Tokenizer:
        """Load from a model folder. Raises ``model_malformed`` when its files cannot be read."""
        from transformers import AutoTokenizer

        try:
            hf = AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code)
        except Exception as failure:
            # transformers and the Rust tokenizer raise whatever they meet; the first line says what it was.
            reason = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
            raise error("model_malformed", file=f"the tokenizer in '{path}'", reason=reason.rstrip(".")) from failure
        return Tokenizer(hf)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``, with whatever the tokenizer puts around it if ``add_special_tokens``.

        Safe to call from a thread: the batch call lets other Python threads run, the single one does not.
        """
        if self._backend is not None:
            return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        return self.hf.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``."""
        if self._backend is not None:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return self.hf.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.hf, "chat_template", None))

    def chat_prompt(
        self,
        messages: list[dict[str, Any]],
        template: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **values: Any,
    ) -> str:
        """The prompt text of a conversation; ``template`` replaces the model's own.

        Raises ``no_chat_template``, or ``chat_template`` when the template rejects the messages.
        """
        if template is None and not self.has_chat_template:
            raise error("no_chat_template")
        try:
            return self.hf.apply_chat_template(
                messages,
                tools=tools,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **values,
            )
        except Exception as failure:
            raise error("chat_template", reason=str(failure) or type(failure).__name__) from failure
