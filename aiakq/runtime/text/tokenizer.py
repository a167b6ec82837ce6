"""Tokenizer: a transformers tokenizer reduced to what the runtime needs."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from aiakq.errors import AiakqError, error
from aiakq.formats.hub import resolve_model
from aiakq.formats.model_folder import check_files, read_json
from aiakq.runtime.text.message_forms import message_forms
from aiakq.runtime.text.spelling import TokenSpelling
from aiakq.runtime.text.tokenizer_files import why_unreadable


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

    @staticmethod
    def from_args(args: Mapping[str, Any], model: Path) -> TokenizerSource:
        """That of the model folder, or what the arguments name. A revision of its own needs a hub name: that of the
        tokenizer, or the model's. Raises ``bad_option`` and model_*.
        """
        name, revision = args["tokenizer"], args["tokenizer_revision"]
        folder = model
        if name or revision:
            revision = revision or (args["revision"] if name in (None, args["model"]) else None)
            folder = resolve_model(
                name or args["model"], revision, args["download_dir"], weights="none", token=args["hf_token"]
            )
        extension = args["tokenizer_extension_path"]
        if extension is not None and not (Path(extension).is_absolute() and Path(extension).is_file()):
            raise error(
                "bad_option",
                option="--tokenizer-extension-path",
                value=extension,
                expected="the absolute path of a Python file",
                hint="It is run as code, so it has to be named exactly.",
            )
        trusts, mode, left_out = (args[name] for name in ("trust_remote_code", "tokenizer_mode", "skip_tokenizer_init"))
        return TokenizerSource(str(folder), trusts, mode, extension, left_out)

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
        if self._backend is not None:
            # The tokenizer's files may ask for either; a padding of 2^30 tokens would end the process.
            self._backend.no_padding()
            self._backend.no_truncation()
        self._token_bytes: dict[int, bytes] = {}

    @staticmethod
    def load(path: str | Path, trust_remote_code: bool = False, mode: str = "auto") -> Tokenizer:
        """Load from a model folder. Raises ``tokenizer_missing``, ``model_malformed`` and ``path_outside_model``."""
        check_files(path)
        from transformers import AutoTokenizer

        # transformers 5 has one tokenizer per model; before it, some also had one in Python.
        options: dict[str, Any] = {"use_fast": False} if mode == "slow" else {}
        try:
            if _names_its_class(Path(path)):
                options["config"] = _config_of_any_model(Path(path))
            hf = AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code, **options)
        except BaseException as failure:
            # transformers and the Rust tokenizer raise whatever they meet; the first line says what it was.
            if not isinstance(failure, Exception) and not is_panic(failure):
                raise
            raise why_unreadable(Path(path), failure) from failure
        return Tokenizer(hf, compiled=mode != "slow")

    def check_growth(self) -> None:
        """Refuse a normalizer that makes texts far longer, which exhausts the memory of the process it runs in.

        The server does not ask: its tokenizers run in processes that may end. Raises ``model_malformed``.
        """
        normalizer = getattr(self._backend or getattr(self.hf, "_tokenizer", None), "normalizer", None)
        if normalizer is not None and _growth(json.loads(normalizer.__getstate__())) > _MAX_GROWTH:
            reason = f"its normalizer makes texts more than {_MAX_GROWTH} times longer"
            raise error("model_malformed", file="the tokenizer", reason=reason)

    @property
    def has_text(self) -> bool:
        """Whether there is a tokenizer at all; see ``NoTokenizer``."""
        return self.hf is not None

    def describe(self) -> str:
        """What it is, for the start-up table."""
        return f"{len(self.hf)} tokens" if hasattr(self.hf, "__len__") else "from an extension"

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id; 0 if the tokenizer does not tell."""
        if self._backend is None and not hasattr(self.hf, "get_vocab"):
            return 0
        vocab = self._backend.get_vocab() if self._backend is not None else self.hf.get_vocab()
        return max(vocab.values(), default=-1) + 1

    @property
    def longest_token(self) -> int:
        """The most characters a token of the vocabulary stands for; 0 if the tokenizer does not tell."""
        if not hasattr(self.hf, "get_vocab"):
            return 0
        return max(map(len, self.hf.get_vocab()), default=0)

    def decoder_json(self) -> str:
        """What ``TokenDecoder`` takes; empty if the tokenizer is not compiled. Raises as ``check_decoder``."""
        if self._backend is None:
            return ""
        serialized = json.loads(self._backend.to_str())
        check_decoder(serialized.get("decoder"))
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            serialized[part] = None
        return json.dumps(serialized)

    def model_json(self) -> str:
        """What ``CompiledModel`` takes; empty if the tokenizer is not compiled."""
        if self._backend is None:
            return ""
        serialized = json.loads(self._backend.to_str())
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            serialized[part] = None
        return json.dumps({**serialized, "added_tokens": []})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``, with whatever the tokenizer puts around it if ``add_special_tokens``.

        Safe to call from a thread: the batch call lets other Python threads run, the single one does not.
        """
        if self._backend is not None:
            return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        return self.hf.encode(text, add_special_tokens=add_special_tokens)

    def encode_pair(self, text: str, other: str) -> list[int]:
        """Ids of two texts as one sequence, with whatever the tokenizer puts around and between them."""
        if self._backend is not None:
            return self._backend.encode_batch([(text, other)])[0].ids
        return list(self.hf(text, text_pair=other)["input_ids"])

    def decode(self, ids: list[int], skip_special_tokens: bool = True, spaces: bool = True) -> str:
        """Text of ``ids``. Only tokenizers in Python know ``spaces``, between special tokens."""
        if self._backend is not None:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        if not getattr(self.hf, "is_fast", True):
            options["spaces_between_special_tokens"] = spaces
        return self.hf.decode(ids, **options)

    def raw_tokens(self, ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary spells them: "Ġthe" or "▁the"."""
        if self._backend is not None:
            return [self._backend.id_to_token(id) or "" for id in ids]
        if hasattr(self.hf, "convert_ids_to_tokens"):
            return [token or "" for token in self.hf.convert_ids_to_tokens(list(ids))]
        return [self.decode([id], skip_special_tokens=False) for id in ids]

    def token_bytes(self, id: int) -> bytes:
        """What a token adds to a text, in UTF-8. A character may be spread over several tokens."""
        found = self._token_bytes.get(id)
        if found is None:
            found = self._spelling.bytes_of(self.raw_tokens([id])[0])
            if found is None:
                found = self.decode([id], skip_special_tokens=False).encode()
            self._token_bytes[id] = found
        return found

    def token_text(self, id: int) -> str:
        """The text of a single token; U+FFFD in the place of an incomplete character."""
        try:
            return self.token_bytes(id).decode()
        except UnicodeDecodeError:
            return self.decode([id], skip_special_tokens=False)

    def config(self, chat_template: str | None = None) -> dict[str, Any]:
        """What tokenizer_config.json says, without local paths, and the class; ``chat_template`` replaces its own."""
        values = dict(getattr(self.hf, "init_kwargs", None) or {})
        found = {name: _plain(value) for name, value in values.items() if name not in _LOCAL_CONFIG}
        for id, token in values.get("added_tokens_decoder", {}).items():
            if hasattr(token, "content"):
                found["added_tokens_decoder"][str(id)] = {"content": token.content, "special": token.special}
        found["tokenizer_class"] = type(self.hf).__name__
        template = chat_template or getattr(self.hf, "chat_template", None)
        return found | ({"chat_template": template} if template else {})

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The tokens that ``skip_special_tokens`` leaves out."""
        backend = self._backend or getattr(self.hf, "_tokenizer", None)
        if backend is not None:
            return frozenset(id for id, token in backend.get_added_tokens_decoder().items() if token.special)
        return frozenset(getattr(self.hf, "all_special_ids", ()))

    @property
    def added_ids(self) -> frozenset[int]:
        """Tokens that a text is split at before anything else, and that are part of it."""
        backend = self._backend or getattr(self.hf, "_tokenizer", None)
        found = {} if backend is None else backend.get_added_tokens_decoder()
        return frozenset(id for id, token in found.items() if not token.special)

    @cached_property
    def _spelling(self) -> TokenSpelling:
        return TokenSpelling.of(self._backend or getattr(self.hf, "_tokenizer", None))

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

        Past calls of tools may have their arguments as text or as an object; see ``message_forms``.
        Raises ``no_chat_template``, or ``chat_template`` when the template rejects the messages.
        """
        if template is None and not self.has_chat_template:
            raise error("no_chat_template")
        values |= {"tools": tools, "chat_template": template, "add_generation_prompt": add_generation_prompt}
        failure: Exception | None = None
        for given in message_forms(messages):
            try:
                return self.hf.apply_chat_template(given, tokenize=False, **values)
            except Exception as exception:  # of the first form: the template may refuse all of them for one reason
                failure = failure or exception
        raise error("chat_template", reason=str(failure) or type(failure).__name__) from failure


#: What transformers adds to a tokenizer's configuration: where its files are.
_LOCAL_CONFIG = frozenset(
    {
        *("vocab_file", "merges_file", "tokenizer_file", "tokenizer_object", "name_or_path"),
        *("is_local", "local_files_only", "backend", "files_loaded"),
    }
)


def _plain(value: Any) -> Any:
    """``value`` as JSON has it; an added token is its text."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return getattr(value, "content", str(value))


class NoTokenizer(Tokenizer):
    """Stands where the operator wants none: ids have no text, and text has no ids."""

    def __init__(self) -> None:
        super().__init__(None)

    def describe(self) -> str:
        return "left out"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise error("no_tokenizer")

    def encode_pair(self, text: str, other: str) -> list[int]:
        raise error("no_tokenizer")

    def decode(self, ids: list[int], skip_special_tokens: bool = True, spaces: bool = True) -> str:
        return ""

    def raw_tokens(self, ids: Sequence[int]) -> list[str]:
        return [""] * len(ids)

    def token_bytes(self, id: int) -> bytes:
        return b""

    def chat_prompt(self, messages: list[dict[str, Any]], *arguments: Any, **values: Any) -> str:
        raise error("no_tokenizer")


class TokenDecoder(Tokenizer):
    """Ids to text only, from ``Tokenizer.decoder_json``: without the regular expressions of a tokenizer.

    What is left takes time and memory in proportion to the ids.
    """

    def __init__(self, serialized: str) -> None:
        import tokenizers

        super().__init__(None)
        self._backend = tokenizers.Tokenizer.from_str(serialized)

    @property
    def has_text(self) -> bool:
        return True

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError("it only decodes")


#: How much longer the replacements of a decoder or a normalizer may make a text.
_MAX_GROWTH = 16


def is_panic(failure: BaseException) -> bool:
    """Whether the Rust tokenizer panicked, which Python shows as an exception outside ``Exception``."""
    return type(failure).__name__ == "PanicException"


def _growth(part: Any) -> float:
    """How many times longer a normalizer of tokenizer.json can make a text of a few words."""
    if not isinstance(part, dict):
        return 1.0
    pattern = part.get("pattern")
    replaced = len(pattern.get("String") or " ") if isinstance(pattern, dict) else 1
    own = max(1.0, len(part.get("content") or "") / replaced, len(part.get("prepend") or "") / _MAX_GROWTH)
    return own * math.prod(_growth(each) for each in part.get("normalizers") or [])


def check_decoder(decoder: Any) -> None:
    """Raise ValueError for a decoder of tokenizer.json whose time or output is not bounded by its input."""
    growth, left = 1.0, [decoder]
    while left:
        part = left.pop()
        if not isinstance(part, dict):
            continue
        left += part.get("decoders") or []
        pattern = part.get("pattern")
        if isinstance(pattern, dict) and "Regex" in pattern:
            raise ValueError("its decoder has a regular expression, which can take any time")
        if isinstance(pattern, dict):
            growth *= max(1.0, len(part.get("content") or "") / max(1, len(pattern.get("String") or "")))
    if growth > _MAX_GROWTH:
        raise ValueError(f"its decoder makes texts more than {_MAX_GROWTH} times longer")


def _names_its_class(folder: Path) -> bool:
    """Whether a tokenizer's own files say which class of transformers reads it."""
    try:
        config = read_json(folder / "tokenizer_config.json", "tokenizer_config.json")
    except AiakqError:
        return False
    named = isinstance(config.get("tokenizer_class"), str)
    return named and "auto_map" not in config and (folder / "config.json").is_file()


def _config_of_any_model(folder: Path) -> Any:
    """What transformers looks at where a tokenizer names its class: the type of the model.

    The class for a model's own config would import torch's compiler, images and videos: seconds, and 150 MB in each
    process.
    """
    from transformers.configuration_utils import PreTrainedConfig

    config: Any = PreTrainedConfig()
    config._name_or_path = str(folder)
    config.model_type = read_json(folder / "config.json", "config.json").get("model_type") or ""
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
