"""The tokenizer of a model: transformers' own, with what the runtime needs of it and nothing else."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiakq.errors import error


@dataclass(frozen=True)
class TokenizerSource:
    """Where a tokenizer comes from.

    folder     with the tokenizer's files.
    mode       auto, or slow: through transformers' own code only.
    extension  Python file whose ``get_tokenizer(folder)`` makes it; the operator named it.
    left_out   no text at all: token ids in, token ids out.
    """

    folder: str
    trust_remote_code: bool = False
    mode: str = "auto"
    extension: str | None = None
    left_out: bool = False

    def load(self) -> Tokenizer:
        """Raises ``model_malformed`` when its files cannot be read, ``tokenizer_extension`` when its code fails."""
        if self.left_out:
            return NoTokenizer()
        if self.extension is not None:
            return Tokenizer(_extended(self.extension, self.folder), compiled=False)
        return Tokenizer.load(self.folder, self.trust_remote_code, self.mode)


class Tokenizer:
    """Text to ids and back, and the chat template. ``hf`` is the transformers tokenizer."""

    def __init__(self, hf: Any, compiled: bool = True) -> None:
        self.hf = hf
        # The Rust tokenizer itself: several times faster than transformers' wrapper around it.
        self._backend = getattr(hf, "_tokenizer", None) if compiled else None

    @staticmethod
    def load(path: str | Path, trust_remote_code: bool = False, mode: str = "auto") -> Tokenizer:
        """Load from a model folder. Raises ``model_malformed`` when its files cannot be read."""
        from transformers import AutoTokenizer

        # transformers 5 has one tokenizer per model; before it, some also had one in Python.
        options: dict[str, Any] = {"use_fast": False} if mode == "slow" else {}
        try:
            if _names_its_class(Path(path)):
                options["config"] = _config_of_any_model(Path(path))
            hf = AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code, **options)
        except Exception as failure:
            # transformers and the Rust tokenizer raise whatever they meet; the first line says what it was.
            reason = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
            raise error("model_malformed", file=f"the tokenizer in '{path}'", reason=reason.rstrip(".")) from failure
        return Tokenizer(hf, compiled=mode != "slow")

    @property
    def has_text(self) -> bool:
        """Whether there is a tokenizer at all; see ``NoTokenizer``."""
        return self.hf is not None

    def describe(self) -> str:
        """What it is, for the start-up table."""
        return f"{len(self.hf)} tokens" if hasattr(self.hf, "__len__") else "from an extension"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``, with whatever the tokenizer puts around it if ``add_special_tokens``.

        Safe to call from a thread: the batch call lets other Python threads run, the single one does not.
        """
        if self._backend is not None:
            return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        return self.hf.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int], skip_special_tokens: bool = True, spaces: bool = True) -> str:
        """Text of ``ids``. Only tokenizers in Python know ``spaces``, between special tokens."""
        if self._backend is not None:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        if not getattr(self.hf, "is_fast", True):
            options["spaces_between_special_tokens"] = spaces
        return self.hf.decode(ids, **options)

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


class NoTokenizer(Tokenizer):
    """Stands where the operator wants none: ids have no text, and text has no ids."""

    def __init__(self) -> None:
        super().__init__(None)

    def describe(self) -> str:
        return "left out"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise error("no_tokenizer")

    def decode(self, ids: list[int], skip_special_tokens: bool = True, spaces: bool = True) -> str:
        return ""

    def chat_prompt(self, messages: list[dict[str, Any]], *arguments: Any, **values: Any) -> str:
        raise error("no_tokenizer")


def _names_its_class(folder: Path) -> bool:
    """Whether a tokenizer's own files say which class of transformers reads it."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return False
    named = isinstance(config, dict) and isinstance(config.get("tokenizer_class"), str)
    return named and "auto_map" not in config and (folder / "config.json").is_file()


def _config_of_any_model(folder: Path) -> Any:
    """What transformers looks at where a tokenizer names its class: the type of the model.

    The class for a model's own config would import torch's compiler, images and videos: seconds, and 150 MB in each
    process.
    """
    from transformers.configuration_utils import PreTrainedConfig

    config: Any = PreTrainedConfig()
    config._name_or_path = str(folder)
    config.model_type = json.loads((folder / "config.json").read_text()).get("model_type") or ""
    return config


def _extended(path: str, folder: str) -> Any:
    """The tokenizer that the operator's own code makes. Raises ``tokenizer_extension``."""
    spec = importlib.util.spec_from_file_location("aiakq_tokenizer_extension", path)
    if spec is None or spec.loader is None:
        raise error("tokenizer_extension", path=path, reason="it is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        made = module.get_tokenizer(folder)
    except Exception as failure:
        reason = f"{type(failure).__name__}: {failure}".splitlines()[0]
        raise error("tokenizer_extension", path=path, reason=reason.rstrip(".")) from failure
    lacking = [name for name in ("encode", "decode") if not callable(getattr(made, name, None))]
    if lacking:
        raise error("tokenizer_extension", path=path, reason=f"what get_tokenizer returns has no {lacking[0]}")
    return made
