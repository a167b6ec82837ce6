"""The form of requests for transcriptions and translations, with the fields of OpenAI's and vLLM's servers."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from aiakq.errors import error
from aiakq.runtime.multimodal.audio_files import MAX_FILE_BYTES, refused
from aiakq.runtime.protocol.sampling_params import PARAMETERS, SamplingParams
from aiakq.server.api.generation_request import RequestFields
from aiakq.server.api.request_model import Integer
from aiakq.server.api.unsupported_fields import UNSUPPORTED_AUDIO_FIELDS
from aiakq.server.http.form import FormPart, malformed, parse_form

#: Sampling parameters of requests.
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty"),
    *("frequency_penalty", "presence_penalty"),
)
_WORDS = "times of words are not computed, only those of segments"


class TranslationRequest(RequestFields):
    """A form with an audio ``file``."""

    unsupported_fields: ClassVar = UNSUPPORTED_AUDIO_FIELDS

    prompt: str | None = Field(None, description="Text before the audio, whose spelling and style are taken up.")
    language: str | None = Field(None, description="Code of the language of the audio; found out if not given.")
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] | None = Field(
        None, description="json, the default, has the text; srt and vtt are subtitles; verbose_json has the segments."
    )
    temperature: Annotated[float, PARAMETERS["temperature"]] | None = Field(
        None, description="0, the default, is greedy."
    )
    top_p: Annotated[float, PARAMETERS["top_p"]] | None = Field(None, description=PARAMETERS["top_p"].help)
    top_k: Annotated[Integer, PARAMETERS["top_k"]] | None = Field(None, description=PARAMETERS["top_k"].help)
    min_p: Annotated[float, PARAMETERS["min_p"]] | None = Field(None, description=PARAMETERS["min_p"].help)
    seed: Annotated[Integer, PARAMETERS["seed"]] | None = Field(None, description=PARAMETERS["seed"].help)
    repetition_penalty: Annotated[float, PARAMETERS["repetition_penalty"]] | None = Field(
        None, description=PARAMETERS["repetition_penalty"].help
    )
    frequency_penalty: Annotated[float, PARAMETERS["frequency_penalty"]] | None = Field(
        None, description=PARAMETERS["frequency_penalty"].help
    )
    presence_penalty: Annotated[float, PARAMETERS["presence_penalty"]] | None = Field(
        None, description=PARAMETERS["presence_penalty"].help
    )

    @property
    def format(self) -> str:
        """The format of the response."""
        return self.response_format or "json"

    def check(self) -> None:
        """Raise ``unsupported_parameter`` for values that do not go together."""
        if self.stream and self.format not in ("json", "text"):
            reason = "a stream has the text only: json or text"
            raise error("unsupported_parameter", param="response_format", reason=reason)

    def sampling_params(self, defaults: Mapping[str, object]) -> SamplingParams:
        """Return how the text is sampled: greedily, with ``defaults`` of the model for what the form does not say."""
        values = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        fixed = {"max_tokens": None, "logprobs": 0, "detokenize": False}
        return SamplingParams(**{**defaults, "temperature": 0.0, **values, **fixed})


class TranscriptionRequest(TranslationRequest):
    """A form with an audio ``file``."""

    timestamp_granularities: list[Literal["segment", "word"]] | None = Field(
        None, description="segment, the default; with verbose_json."
    )

    def check(self) -> None:
        """See TranslationRequest."""
        super().check()
        if not self.timestamp_granularities:
            return
        if "word" in self.timestamp_granularities:
            raise error("unsupported_parameter", param="timestamp_granularities", reason=_WORDS)
        if self.format != "verbose_json":
            reason = "it needs response_format=verbose_json"
            raise error("unsupported_parameter", param="timestamp_granularities", reason=reason)


def read_audio_form(model: type[TranslationRequest], body: bytes, content_type: str) -> tuple[bytes, bytes]:
    """Return the fields of a form as the JSON of a ``model``, and its file.

    Empty texts are fields that are not set, as of HTML forms.

    Raises as ``parse_form``, ``missing_field`` and ``media_refused`` for the file, ``duplicate_key``.
    """
    file: bytes | None = None
    values: dict[str, Any] = {}
    kinds = _kinds(model)
    for part in parse_form(body, content_type):
        if part.name == "file":
            if file is not None:
                raise error("duplicate_key", param="file")
            file = bytes(part.data)
            continue
        name, text = part.name.removesuffix("[]"), _text(part)
        if "array" in kinds.get(name, ()):
            values.setdefault(name, []).append(text)
        elif name in values:
            raise error("duplicate_key", param=f"{name:.64}")
        elif text:
            values[name] = _value(text, kinds.get(name, frozenset()))
    if file is None:
        raise error("missing_field", param="file")
    if len(file) > MAX_FILE_BYTES:
        raise refused("file", f"it is larger than {MAX_FILE_BYTES >> 20} MiB")
    return json.dumps(values).encode(), file


def _text(part: FormPart) -> str:
    try:
        return part.data.decode()
    except UnicodeDecodeError:
        raise malformed(f"the field {part.name:.64} is not UTF-8") from None


def _value(text: str, kinds: frozenset[str]) -> object:
    """Return the value that a text of a form stands for; validation refuses what is none."""
    if "boolean" in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kinds & {"number", "integer"}:
        try:
            value: object = json.loads(text, parse_constant=lambda name: name)
        except (ValueError, RecursionError):
            return text
        return value if type(value) in (int, float) else text
    return text


@functools.cache
def _kinds(model: type[TranslationRequest]) -> Mapping[str, frozenset[str]]:
    """Return the JSON types of each field."""
    properties = model.model_json_schema()["properties"]
    return {
        name: frozenset(str(each.get("type")) for each in schema.get("anyOf", [schema]))
        for name, schema in properties.items()
    }
