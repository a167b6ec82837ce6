"""Tokenizer: a transformers tokenizer reduced to what the runtime needs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiakq.errors import AiakqError, error
from aiakq.formats.gguf.choice import missing_tokenizer
from aiakq.formats.model_folder import check_files
from aiakq.runtime.protocol.media import MediaKind
from aiakq.runtime.protocol.unicode_text import well_formed
from aiakq.runtime.text.spelling import TokenSpelling
from aiakq.runtime.text.tokenizer_files import (
    LOCAL_CONFIG,
    check_encoding,
    check_settings,
    config_of_any_model,
    image_template,
    names_its_class,
    plain_value,
    read_settings,
    unused_template,
)
from aiakq.runtime.text.tokenizer_growth import MAX_GROWTH, check_decoder, growth_of
from aiakq.runtime.text.tokenizer_keys import remark

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

    from aiakq.runtime.text.chat_template import ChatTemplate


class Tokenizer:
    """Tokenizer, detokenizer and chat template.

    hf               the transformers tokenizer.
    unused_template  a sentence about a template of the model that is not used, or "".
    encodes_chats    whether conversations become ids by ``chat_ids``, not as the text of a template.
    """

    unused_template = ""
    encodes_chats = False

    def __init__(self, hf: Any, compiled: bool = True, settings: Mapping[str, object] | None = None) -> None:
        """
        settings  the keys and values of the tokenizer's files, to name those that are not applied.
        """
        self.hf = hf
        self._settings = settings or {}
        # The Rust tokenizer itself, which is several times faster than transformers' wrapper.
        self._backend: RustTokenizer | None = getattr(hf, "_tokenizer", None) if compiled else None
        if self._backend is not None:
            # The tokenizer's files may enable either; padding to 2^30 tokens would kill the process.
            self._backend.no_padding()
            self._backend.no_truncation()
        self._token_bytes: dict[int, bytes] = {}
        self._chat_templates: dict[tuple[str, str, bool], ChatTemplate] = {}

    @staticmethod
    def load(path: str | Path, trust_remote_code: bool = False, mode: str = "auto") -> Tokenizer:
        """Load from a model folder. Raises ``tokenizer_missing``, ``model_malformed`` and ``path_outside_model``."""
        check_files(path)
        if problem := missing_tokenizer(Path(path)):
            raise problem
        check_encoding(Path(path))
        check_settings(Path(path))
        from transformers import AutoTokenizer

        # transformers 5 has one tokenizer per model; earlier versions also had Python ones for some.
        options: dict[str, Any] = {"use_fast": False} if mode == "slow" else {}
        try:
            if names_its_class(Path(path)):
                options["config"] = config_of_any_model(Path(path))
            hf = AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code, **options)
        except BaseException as failure:
            # transformers and the Rust tokenizer may raise anything; the first line of the message is the cause.
            if not isinstance(failure, Exception) and not is_panic(failure):
                raise
            from aiakq.runtime.text.tokenizer_diagnosis import why_unreadable

            raise why_unreadable(Path(path), failure) from failure
        hf.chat_template = hf.chat_template or image_template(Path(path))
        tokenizer = Tokenizer(hf, compiled=mode != "slow", settings=read_settings(Path(path)))
        tokenizer.unused_template = unused_template(Path(path), hf.chat_template)
        return tokenizer

    def check_growth(self) -> None:
        """Raise ``model_malformed`` for a normalizer that makes texts far longer, which could exhaust memory.

        The server does not need this check, because its tokenizers run in expendable processes.
        """
        normalizer = getattr(self._backend or getattr(self.hf, "_tokenizer", None), "normalizer", None)
        if normalizer is not None and growth_of(json.loads(normalizer.__getstate__())) > MAX_GROWTH:
            reason = f"its normalizer makes texts more than {MAX_GROWTH} times longer"
            raise error("model_malformed", file="the tokenizer", reason=reason)

    @property
    def has_text(self) -> bool:
        """Whether there is a tokenizer; see ``NoTokenizer``."""
        return self.hf is not None

    def describe(self) -> str:
        """Return a description for the start-up table, with the settings that are not applied."""
        size = f"{len(self.hf)} tokens" if hasattr(self.hf, "__len__") else "from an extension"
        return size + remark(self._settings, self.hf)

    @property
    def vocab_size(self) -> int:
        """Return the largest token id plus one; 0 if unknown."""
        if self._backend is None and not hasattr(self.hf, "get_vocab"):
            return 0
        vocab = self._backend.get_vocab() if self._backend is not None else self.hf.get_vocab()
        return max(vocab.values(), default=-1) + 1

    @property
    def longest_token(self) -> int:
        """Return the maximum number of characters of a token in the vocabulary; 0 if unknown."""
        if not hasattr(self.hf, "get_vocab"):
            return 0
        return max(map(len, self.hf.get_vocab()), default=0)

    def decoder_json(self) -> str:
        """Return the input of ``TokenDecoder``; empty if it is not a Rust tokenizer. Raises as ``check_decoder``."""
        if self._backend is None:
            return ""
        serialized = json.loads(self._backend.to_str())
        check_decoder(serialized.get("decoder"))
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            serialized[part] = None
        return json.dumps(serialized)

    def model_json(self) -> str:
        """Return the input of ``CompiledModel``; empty if it is not a Rust tokenizer."""
        if self._backend is None:
            return ""
        serialized = json.loads(self._backend.to_str())
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            serialized[part] = None
        return json.dumps({**serialized, "added_tokens": []})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``, with the tokenizer's special tokens around it if ``add_special_tokens``.

        Lone surrogates become U+FFFD. Uses the batch call, which releases the GIL, unlike the call for a single text.
        """
        text = well_formed(text)
        if self._backend is not None:
            return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        ids: list[int] = self.hf.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def encode_pair(self, text: str, other: str) -> list[int]:
        """Return the ids of two texts as one sequence, with the tokenizer's special tokens around and between them."""
        text, other = well_formed(text), well_formed(other)
        if self._backend is not None:
            return self._backend.encode_batch([(text, other)])[0].ids
        return list(self.hf(text, text_pair=other)["input_ids"])

    def spans(self, text: str) -> list[tuple[int, int]] | None:
        """Return begin and end in ``text`` of each token, without special tokens; None if the tokenizer has none."""
        if self._backend is None:
            return None
        return self._backend.encode_batch([text], add_special_tokens=False)[0].offsets

    def decode(self, ids: list[int], skip_special_tokens: bool = True, spaces: bool = True) -> str:
        """Return the text of ``ids``. Only Python tokenizers support ``spaces`` between special tokens."""
        if self._backend is not None:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        if not getattr(self.hf, "is_fast", True):
            options["spaces_between_special_tokens"] = spaces
        text: str = self.hf.decode(ids, **options)
        return text

    def raw_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the tokens as they are stored in the vocabulary, such as "Ġthe" or "▁the"."""
        if self._backend is not None:
            return [self._backend.id_to_token(id) or "" for id in ids]
        if hasattr(self.hf, "convert_ids_to_tokens"):
            return [token or "" for token in self.hf.convert_ids_to_tokens(list(ids))]
        return [self.decode([id], skip_special_tokens=False) for id in ids]

    def token_bytes(self, id: int) -> bytes:
        """Return the UTF-8 bytes that a token adds to a text. A character may be spread over several tokens."""
        cached = self._token_bytes.get(id)
        if cached is None:
            cached = self._spelling.bytes_of(self.raw_tokens([id])[0])
            if cached is None:
                cached = self.decode([id], skip_special_tokens=False).encode()
            self._token_bytes[id] = cached
        return cached

    def token_text(self, id: int) -> str:
        """Return the text of a single token, with U+FFFD for an incomplete character."""
        try:
            return self.token_bytes(id).decode()
        except UnicodeDecodeError:
            return self.decode([id], skip_special_tokens=False)

    def config(self, chat_template: str | None = None) -> dict[str, Any]:
        """Return tokenizer_config.json without local paths, and the class; ``chat_template`` replaces its own."""
        values = dict(getattr(self.hf, "init_kwargs", None) or {})
        public = {name: plain_value(value) for name, value in values.items() if name not in LOCAL_CONFIG}
        for id, token in values.get("added_tokens_decoder", {}).items():
            if hasattr(token, "content"):
                public["added_tokens_decoder"][str(id)] = {"content": token.content, "special": token.special}
        public["tokenizer_class"] = type(self.hf).__name__
        template = chat_template or getattr(self.hf, "chat_template", None)
        return public | ({"chat_template": template} if template else {})

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that ``skip_special_tokens`` skips."""
        backend = self._backend or getattr(self.hf, "_tokenizer", None)
        if backend is not None:
            return frozenset(id for id, token in backend.get_added_tokens_decoder().items() if token.special)
        return frozenset(getattr(self.hf, "all_special_ids", ()))

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids of added tokens that are not special: text is split at them first, and they are part of it."""
        backend = self._backend or getattr(self.hf, "_tokenizer", None)
        added = {} if backend is None else backend.get_added_tokens_decoder()
        return frozenset(id for id, token in added.items() if not token.special)

    @cached_property
    def _spelling(self) -> TokenSpelling:
        return TokenSpelling.of(self._backend or getattr(self.hf, "_tokenizer", None))

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.hf, "chat_template", None))

    def chat_prompt(
        self,
        messages: list[dict[str, object]],
        template: str | None = None,
        tools: Sequence[dict[str, object] | Callable[..., object]] | None = None,
        add_generation_prompt: bool = True,
        content_format: str = "auto",
        continue_final_message: bool = False,
        arguments: Mapping[str, object] | None = None,
        placeholders: Mapping[MediaKind, str] = {},
    ) -> str:
        """Render a conversation to the prompt text; ``template`` replaces the model's own.

        ``placeholders`` are those of media by kind; those without one raise ``unsupported_parameter``.
        Content may be parts of other APIs, see ``read_messages``; for ``content_format``, see ``ChatTemplate.checked``.
        ``arguments`` are further variables of the template. Raises ``no_chat_template``, ``chat_template`` when the
        template rejects the messages, and as ``check_chat_arguments``, ``described_tools``, ``read_conversation`` and
        ``ChatTemplate`` do.
        """
        if template is None and not self.has_chat_template:
            raise error("no_chat_template")
        from aiakq.runtime.text.chat_template import as_template_error, check_chat_arguments
        from aiakq.runtime.text.message_parts import described_tools, read_conversation

        read = read_conversation(messages, placeholders)
        described = described_tools(tools)
        check_chat_arguments(content_format, arguments or {})
        values = {**(arguments or {}), "add_generation_prompt": add_generation_prompt}
        values |= {"continue_final_message": True} if continue_final_message else {}
        values |= {"tools": described} if described else {}
        try:
            if _renders_as_transformers(self.hf):
                found = self._chat_template(template, bool(tools), content_format, arguments or {})
                found.placeholders = placeholders
                return found.render(read, **values)
            prompt: str = self.hf.apply_chat_template(read, tokenize=False, chat_template=template, **values)
        except AiakqError:
            raise
        except Exception as failure:
            raise as_template_error(failure) from failure
        return prompt

    def chat_tokens(self, messages: list[dict[str, object]], *arguments: Any, **values: Any) -> tuple[str, list[int]]:
        """Return the text of ``chat_prompt`` and its ids. The text already contains the special tokens."""
        text = self.chat_prompt(messages, *arguments, **values)
        return text, self.encode(text, add_special_tokens=False)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> list[int]:
        """Return the ids of a conversation, if ``encodes_chats``; see MistralTokenizer."""
        raise NotImplementedError

    def check_takes_template(self, option: str) -> None:
        """Raise ``option_conflict`` if no chat template can replace the tokenizer's own."""
        if self.encodes_chats:
            why = {"other": "a tokenizer in Mistral's format", "hint": "Leave it out, or set --tokenizer-mode hf."}
            raise error("option_conflict", option=option, reason="mistral-common encodes conversations", **why)

    def prepare_chat(self) -> None:
        """Check the model's own template, which otherwise happens with the first conversation. Raises as that."""
        if _renders_as_transformers(self.hf):
            self._chat_template(None, with_tools=False, content_format="auto", arguments={})

    def _chat_template(
        self, given: str | None, with_tools: bool, content_format: str, arguments: Mapping[str, object]
    ) -> ChatTemplate:
        """Return the template, checked at its first use. Raises as ``template_of`` and ``ChatTemplate.checked``."""
        from aiakq.runtime.text.chat_template import ChatTemplate, template_of
        from aiakq.runtime.text.template_facts import TemplateFacts

        source = "of the model" if given is None else "that was given"
        text = template_of(self.hf, given, with_tools)
        key = (text, content_format, with_tools)
        if key not in self._chat_templates:
            special_tokens = dict(self.hf.special_tokens_map)
            try:
                template = ChatTemplate.checked(text, special_tokens, content_format, source, with_tools, arguments)
            except TimeoutError:  # the caller has set a timer
                template = ChatTemplate(text, special_tokens, TemplateFacts())
            self._chat_templates[key] = template
        return self._chat_templates[key]


def _renders_as_transformers(hf: object) -> bool:
    """Whether a tokenizer renders conversations with transformers' method, not one of its own."""
    return (
        getattr(getattr(type(hf), "apply_chat_template", None), "__module__", "")
        == "transformers.tokenization_utils_base"
    )


class NoTokenizer(Tokenizer):
    """Placeholder for --skip-tokenizer-init, without any conversion between text and ids."""

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

    def chat_prompt(self, messages: list[dict[str, object]], *arguments: object, **values: object) -> str:
        raise error("no_tokenizer")


class TokenDecoder(Tokenizer):
    """Decodes ids only, from ``Tokenizer.decoder_json``, without the regular expressions of a tokenizer.

    Its time and memory are proportional to the number of ids.
    """

    def __init__(self, serialized: str) -> None:
        import tokenizers

        super().__init__(None)
        self._backend = tokenizers.Tokenizer.from_str(serialized)

    @property
    def has_text(self) -> bool:
        return True

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError("TokenDecoder only decodes")


def is_panic(failure: BaseException) -> bool:
    """Whether the Rust tokenizer panicked, which Python shows as an exception outside ``Exception``."""
    return type(failure).__name__ == "PanicException"
