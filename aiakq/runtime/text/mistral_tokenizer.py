"""MistralTokenizer: tekken.json and tokenizer.model.v*, read by mistral-common, which also encodes conversations.

mistral-common is Mistral's own package, an extra of aiakq. It never reads special tokens in the text of a message, and
encodes each part of a conversation on its own, so that no chat template can give the same ids for every text.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import json
import re
import wave
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from aiakq.errors import AiakqError, error, first_line
from aiakq.formats.made_folder import MISTRAL, source_of
from aiakq.formats.mistral.choice import tokenizer_file
from aiakq.formats.model_folder import check_files, read_json
from aiakq.runtime.protocol.media import MediaKind
from aiakq.runtime.protocol.unicode_text import well_formed
from aiakq.runtime.text.message_parts import described_tools, read_conversation
from aiakq.runtime.text.mistral_vocabulary import sentencepiece_tokenizer, tekken_tokenizer
from aiakq.runtime.text.tokenizer import Tokenizer

#: Ids of calls that every version of these tokenizers takes.
_CALL_ID = re.compile(r"[a-zA-Z0-9]{9}")
_FIRST_WITH_TOOLS = 2
#: Variables of chat templates that mean something to these tokenizers.
_VARIABLES = frozenset({"add_generation_prompt", "continue_final_message", "tools", "reasoning_effort"})


class MistralTokenizer(Tokenizer):
    """A tokenizer in Mistral's own format.

    hf  transformers' wrapper of it, for programs that expect one.
    """

    encodes_chats = True

    def __init__(self, file: Path) -> None:
        """Raises ``mistral_common_missing``, ``model_malformed`` for an unreadable file."""
        hf = _wrapper(file)
        super().__init__(hf, compiled=False)
        self._common: Any = hf.tokenizer
        self._words: Any = self._common.instruct_tokenizer.tokenizer
        self._file = file
        self._backend = _decoder(self._words, file)
        hf.chat_template = self.template

    @staticmethod
    def of(folder: Path) -> MistralTokenizer:
        """Load the tokenizer of a model folder.

        Raises ``tokenizer_missing``, ``mistral_common_missing``, ``model_malformed`` and ``path_outside_model``.
        """
        check_files(folder)
        file = tokenizer_file(folder)
        if file is None:
            raise error("tokenizer_missing", path=str(folder), elsewhere=" in Mistral's format (tekken.json)")
        tokenizer = MistralTokenizer(file)
        if source_of(folder, MISTRAL) is not None:
            tokenizer.check_ends(read_json(folder / "config.json", "config.json"))
        return tokenizer

    def check_ends(self, config: Mapping[str, object]) -> None:
        """Raise ``model_malformed`` if texts do not begin and end with the tokens of ``config``."""
        for name in ("bos_token_id", "eos_token_id"):
            found = getattr(self._words, name.removesuffix("_token_id") + "_id")
            if config.get(name) != found:
                reason = f"{name} is {found}, which is {config.get(name)!r:.40} in every tokenizer of Mistral's"
                raise error("model_malformed", file=self._file.name, reason=reason)

    @cached_property
    def template(self) -> str:
        """A chat template that resembles what mistral-common does, from which programs see what the model can do."""
        from mistral_common.integrations.chat_templates import chat_templates

        try:
            return str(chat_templates.convert_tokenizer_to_chat_template(self._file))
        except (ValueError, AssertionError):
            return ""

    @property
    def has_chat_template(self) -> bool:
        return True

    def describe(self) -> str:
        version = self._words.version.value
        return f"{self.vocab_size} tokens, read by mistral-common ({self._file.name}, {version})"

    def config(self, chat_template: str | None = None) -> dict[str, Any]:
        return {"tokenizer_class": "MistralCommonBackend", "chat_template": chat_template or self.template}

    @property
    def longest_token(self) -> int:
        assert self._backend is not None
        return max(map(len, self._backend.get_vocab()), default=0)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``, after the bos token if ``add_special_tokens``. Nothing in a text is special."""
        ids: list[int] = self._words.encode(well_formed(text), bos=add_special_tokens, eos=False)
        return ids

    def encode_pair(self, text: str, other: str) -> list[int]:
        raise error("unsupported_parameter", param="text_2", reason="tokenizers of Mistral's encode no pairs of texts")

    def spans(self, text: str) -> list[tuple[int, int]] | None:
        return None

    def prepare_chat(self) -> None:
        """Do nothing: there is no template to check."""

    def chat_tokens(
        self,
        messages: list[dict[str, object]],
        template: str | None = None,
        tools: Sequence[dict[str, object] | Callable[..., object]] | None = None,
        add_generation_prompt: bool = True,
        content_format: str = "auto",
        continue_final_message: bool = False,
        arguments: Mapping[str, object] | None = None,
        placeholders: Mapping[MediaKind, str] = {},
    ) -> tuple[str, list[int]]:
        """Return the text of a conversation, and its ids, which the text alone does not determine.

        ``placeholders`` has that of audio; without it, audio raises ``unsupported_parameter``. Raises as
        ``read_conversation``, ``described_tools``, ``chat_ids``, and ``option_conflict`` for a template.
        """
        if template is not None:
            self.check_takes_template("chat_template")
        given = {**(arguments or {}), "tools": described_tools(tools), "continue_final_message": continue_final_message}
        ids = self.chat_ids(read_conversation(messages, placeholders), given)
        return self.decode(ids, skip_special_tokens=False), ids

    def chat_prompt(self, messages: list[dict[str, object]], *arguments: Any, **values: Any) -> str:
        """Return the text of ``chat_tokens``, for people and for calibration."""
        return self.chat_tokens(messages, *arguments, **values)[0]

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> list[int]:
        """Return the ids of a conversation, in the form of ``read_conversation``, with one token for each audio.

        arguments  variables of chat templates: tools, continue_final_message, and reasoning_effort, where there is one.

        Raises ``unsupported_parameter`` for others, and ``chat_template`` if mistral-common refuses the conversation.
        """
        given = {name: value for name, value in arguments.items() if value is not None and value is not False}
        if unknown := sorted(given.keys() - _VARIABLES):
            param = f"chat_template_kwargs.{unknown[0]:.64}"
            raise error("unsupported_parameter", param=param, reason="tokenizers of Mistral's have no such variable")
        if given.get("tools") and self._words.version.version_num < _FIRST_WITH_TOOLS:
            raise error("template_loses", param="tools", what="tools (its tokenizer is of version 1)")
        continues = bool(given.get("continue_final_message"))
        effort = {"reasoning_effort": given["reasoning_effort"]} if "reasoning_effort" in given else {}
        try:
            return self._with_one_each(self._encoded(messages, given.get("tools"), continues, effort))
        except (AiakqError, MemoryError):
            raise
        except Exception as failure:
            raise error("chat_template", reason=_reason(failure)) from failure

    def _with_one_each(self, ids: list[int]) -> list[int]:
        """Return ``ids`` with one of the tokens of each audio: between two audios there is another token."""
        if self._common.instruct_tokenizer.audio_encoder is None:
            return ids
        token = self._common.instruct_tokenizer.audio_encoder.special_ids.audio
        return [id for at, id in enumerate(ids) if id != token or at == 0 or ids[at - 1] != token]

    def _encoded(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, continues: bool, options: Mapping[str, Any]
    ) -> list[int]:
        from mistral_common.protocol.instruct.request import ChatCompletionRequest
        from mistral_common.protocol.instruct.validator import ValidationMode, get_validator

        request = ChatCompletionRequest.from_openai(
            list(map(_openai_message, messages)),
            tools=[_openai_tool(tool) for tool in tools] if tools else None,
            continue_final_message=continues,
            **options,
        )
        if continues or messages[-1].get("role") != "assistant":
            return list(self._common.encode_chat_completion(request).tokens)
        # A conversation that has ended, of calibration data.
        validator = get_validator(self._words.version, mode=ValidationMode.finetuning)
        normalizer: Any = self._common._instruct_request_normalizer
        instruct = normalizer.from_chat_completion_request(validator.validate_request(request))
        return list(self._common.instruct_tokenizer.encode_instruct(instruct).tokens)


def _wrapper(file: Path) -> Any:
    """Return transformers' wrapper of the tokenizer. Raises ``mistral_common_missing`` and ``model_malformed``."""
    try:
        import mistral_common.tokens.tokenizers.mistral  # noqa: F401
        from transformers.tokenization_mistral_common import MistralCommonBackend
    except ImportError as failure:
        missing = failure.name or str(failure)
        raise error("mistral_common_missing", file=file.name, package=missing.partition(".")[0]) from None

    class Wrapper(MistralCommonBackend):  # type: ignore[misc, unused-ignore]
        """With a chat template, which nothing renders."""

        encodes_chats = True

        def get_chat_template(self, chat_template: str | None = None, tools: list[Any] | None = None) -> str:
            return str(self.chat_template)

    try:
        return Wrapper(tokenizer_path=str(file))
    except AiakqError:
        raise
    except Exception as failure:
        if "sentencepiece" in str(failure):
            raise error("mistral_common_missing", file=file.name, package="sentencepiece") from None
        raise error("model_malformed", file=file.name, reason=_reason(failure)) from failure


def _decoder(words: Any, file: Path) -> Any:
    """Return the compiled tokenizer with the vocabulary of mistral-common's. Raises ``model_malformed``."""
    import tokenizers

    special = sorted(words.special_ids)
    try:
        if hasattr(words, "id_to_byte_piece"):
            count = words.num_special_tokens
            names = [words.id_to_piece(id) for id in range(count)]
            serialized = tekken_tokenizer([words.id_to_byte_piece(id) for id in range(count, words.n_words)], names)
        else:
            model, ids = words._model, range(words.n_words)
            special = [id for id in ids if model.is_control(id) or model.is_unknown(id)]
            scores = [model.get_score(id) for id in ids]
            serialized = sentencepiece_tokenizer([words.id_to_piece(id) for id in ids], scores, special)
    except ValueError as failure:
        raise error("model_malformed", file=file.name, reason=str(failure)) from None
    return tokenizers.Tokenizer.from_str(serialized)


def _openai_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of ``read_conversation`` as mistral-common reads it, with ids of calls in the form it takes."""
    read = {key: value for key, value in message.items() if value is not None}
    if isinstance(read.get("content"), list):
        read["content"] = [_silence() if part.get("type") == "audio" else part for part in read["content"]]
    if "tool_calls" in read:
        read["tool_calls"] = [_openai_call(call) for call in read["tool_calls"]]
    if "tool_call_id" in read:
        read["tool_call_id"] = call_id(read["tool_call_id"])
    if read.get("role") != "assistant":
        read.setdefault("content", "")
    return read


@functools.cache
def _silence() -> dict[str, Any]:
    """Return a part with an audio: mistral-common counts its tokens, in whose place come those of the right one."""
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(16000)
        written.writeframes(bytes(2 * 1600))
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(file.getvalue()).decode(), "format": "wav"}}


def _openai_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    called = {"name": function["name"], "arguments": text}
    return {"id": call_id(call.get("id") or ""), "type": "function", "function": called}


def call_id(given: str) -> str:
    """Return an id of nine letters and digits, which these tokenizers demand: the given one, or one made from it."""
    return given if _CALL_ID.fullmatch(given) else hashlib.sha256(given.encode()).hexdigest()[:9]


def _openai_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function") or tool
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    known = {"name": function.get("name"), "description": function.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": known}


def _reason(failure: Exception) -> str:
    """Return why mistral-common refuses something, in one line."""
    details = getattr(failure, "errors", None)
    if callable(details) and (listed := details()):
        where = ".".join(map(str, listed[0].get("loc", ())))
        return f"{where}: {listed[0].get('msg', '')}"[:200].rstrip(".")
    return first_line(failure)[:200]
