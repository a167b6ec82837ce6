"""POST /v1/embeddings, /pooling and /classify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, WithJsonSchema
from starlette.responses import Response

from aiakq.errors import error
from aiakq.runtime.protocol.pooling_params import PoolingLimits, PoolingParams
from aiakq.server.api.completions import split_prompts
from aiakq.server.api.conversation import TEMPLATE_KWARGS_SCHEMA, ChatMessage, ConversationFields
from aiakq.server.api.foreign_fields import EMBEDDING_FIELDS
from aiakq.server.api.pooling.number_encoding import (
    EmbedDtype,
    EncodingFormat,
    Endianness,
    NumberEncoding,
    encoded,
    metadata_header,
)
from aiakq.server.api.pooling.pooled_results import (
    MAX_INPUTS,
    PooledList,
    PooledPrompt,
    PooledResults,
    pooling_route,
)
from aiakq.server.api.pooling.pooling_fields import PoolingFields, same
from aiakq.server.api.request_model import FailFastList, Integer

_TOKEN_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_INPUT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_INPUTS},
        _TOKEN_IDS,
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MAX_INPUTS},
    ]
}


class InputFields(PoolingFields):
    """Fields of requests with one result per text, or for a conversation."""

    input: Annotated[object, WithJsonSchema(_INPUT_SCHEMA)] = Field(
        None, description="A text, a list of texts, a list of token ids, or a list of such lists."
    )
    messages: Annotated[FailFastList[ChatMessage], Field(min_length=1)] | None = Field(
        None, description="A conversation in place of input, rendered with the chat template."
    )
    add_special_tokens: bool | None = Field(
        None, description="Whether tokenization adds special tokens; true if not given for input, false for messages."
    )
    add_generation_prompt: bool | None = Field(
        None, description="Begin the assistant's message after the last of messages; false if not given."
    )
    continue_final_message: bool | None = Field(None, description="Leave the last of messages open.")
    chat_template_kwargs: Annotated[dict[str, Any], WithJsonSchema(TEMPLATE_KWARGS_SCHEMA)] | None = Field(
        None, description="Arguments of the chat template."
    )

    async def inputs(self, results: PooledResults[Any]) -> list[str | list[int]]:
        """Return the texts or token ids. Raises ``invalid_type``, ``empty_prompt``, ``missing_field`` and others."""
        if self.messages is None:
            if self.input is None:
                raise error("missing_field", param="input")
            return split_prompts(self.input, "input")
        if self.input is not None:
            raise error("unsupported_parameter", param="messages", reason="input is given too")
        conversation = ConversationFields.model_construct(
            messages=self.messages,
            add_generation_prompt=bool(self.add_generation_prompt),
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        service = results.service
        arguments = conversation.template_kwargs(service.renderer.chat_template, service.renderer.unknown_fields)
        messages, adds = conversation.conversation(), bool(self.add_special_tokens)
        return [(await service.renderer.tokenize_chat(messages, arguments, adds, results.params)).token_ids]

    async def pool(self, results: PooledResults[Any]) -> list[PooledPrompt]:
        """Return the pooled prompts."""
        params = self.params()
        return await results.pool(await self.inputs(results), params, self.add_special_tokens is not False)

    def params(self) -> PoolingParams:
        """Return the pooling parameters of the inputs."""
        raise NotImplementedError


class EmbeddingRequest(InputFields):
    """The body of POST /v1/embeddings."""

    foreign_fields = EMBEDDING_FIELDS

    prompt_name: str | None = Field(
        None, description="Name of the prompt of the model's files (sentence-transformers) to put before each text."
    )
    input_type: str | None = Field(
        None,
        description="Kind of the texts: query or document, whose prompts the model's files name, or the name of a "
        "prompt. search_query, search_document and passage are other names of these kinds.",
    )
    encoding_format: EncodingFormat | None = Field(
        None,
        description="float: lists of numbers; base64: those of embed_dtype; bytes: these one after the other, with a "
        "header metadata that has their positions; bytes_only: without this header.",
    )
    embed_dtype: EmbedDtype | None = Field(
        None, description="float32, the default, float16 or bfloat16, for base64 and bytes."
    )
    endianness: Endianness | None = Field(
        None, description="Order of the bytes of a number for base64 and bytes; that of the server if not given."
    )
    dimensions: Integer | None = Field(
        None, description="The first numbers of each embedding, of models that were trained for it (Matryoshka)."
    )
    normalize: bool | None = Field(None, description="Whether embeddings have the length 1; as the model says.")
    use_activation: bool | None = Field(None, description="vLLM's name of normalize.")

    def params(self) -> PoolingParams:
        normalize = same(self, "normalize", "use_activation")
        return PoolingParams(self.dimensions, normalize, None, *self.kind_of_text())

    def kind_of_text(self) -> tuple[str | None, str | None]:
        """Return ``prompt_name`` and ``input_type``. Raises ``unsupported_parameter`` for other inputs than texts."""
        given = next((name for name in ("prompt_name", "input_type") if getattr(self, name)), None)
        if given is not None and not _has_texts(self.input):
            raise error("unsupported_parameter", param=given, reason="it is for texts in input")
        return self.prompt_name or None, self.input_type or None

    def encoding(self) -> NumberEncoding:
        """Return the encoding of the response. Raises ``unsupported_parameter``."""
        encoding = NumberEncoding(
            self.encoding_format or "float", self.embed_dtype or "float32", self.endianness or "native"
        )
        encoding.check()
        return encoding


class PoolingRequest(EmbeddingRequest):
    """The body of POST /pooling."""

    activation: bool | None = Field(None, description="Whether scores become probabilities; as the model says.")
    use_activation: bool | None = Field(None, description="vLLM's name of activation, and of normalize of embeddings.")
    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = Field(
        None, description="What the server does; any other value is refused."
    )

    def params_for(self, limits: PoolingLimits) -> PoolingParams:
        """Return the pooling parameters for a model of ``limits``. Raises ``unsupported_parameter``."""
        limits.check_task("task", self.task)
        if limits.is_classifier:
            activation = same(self, "activation", "use_activation")
            return PoolingParams(self.dimensions, self.normalize, activation, *self.kind_of_text())
        normalize = same(self, "normalize", "use_activation")
        return PoolingParams(self.dimensions, normalize, self.activation, *self.kind_of_text())


def _has_texts(inputs: object) -> bool:
    first = inputs[0] if isinstance(inputs, list) and inputs else inputs
    return isinstance(first, str)


class ClassificationRequest(InputFields):
    """The body of POST /classify."""

    activation: bool | None = Field(None, description="Whether scores become probabilities; as the model says.")
    use_activation: bool | None = Field(None, description="vLLM's name of activation.")

    def params(self) -> PoolingParams:
        return PoolingParams(activation=same(self, "activation", "use_activation"))


class Embedding(msgspec.Struct):
    """One embedding, as a list of numbers or base64."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingResponse(PooledList):
    """Embeddings in the order of the inputs."""

    data: list[Embedding]


class PoolingData(msgspec.Struct):
    """Output for one input: a vector, a row for each token, or base64 of either."""

    index: int
    data: list[float | list[float]] | str
    object: Literal["pooling"] = "pooling"


class PoolingResponse(PooledList):
    """Outputs in the order of the inputs."""

    data: list[PoolingData]


class Classification(msgspec.Struct):
    """The most likely label, and the probability of every label."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationResponse(PooledList):
    """Labels in the order of the inputs."""

    data: list[Classification]


class EmbeddingResults(PooledResults[EmbeddingRequest]):
    """An embedding for each text."""

    fields, id_prefix = EmbeddingRequest, "embd-"

    async def response(self) -> EmbeddingResponse | Response:
        """Return an embedding for each text."""
        self.limits.check_embeds()
        encoding = self.payload.encoding()
        outputs = await self.payload.pool(self)
        if encoding.format in ("bytes", "bytes_only"):
            return _bytes_response(self, encoding, outputs, one_row=True)
        values = await encoded([each.pooled for each in outputs], encoding, one_row=True)
        return self.listed(EmbeddingResponse, [Embedding(index, value) for index, value in enumerate(values)], outputs)


class VectorResults(PooledResults[PoolingRequest]):
    """An embedding, scores, or a row for each token, for each text."""

    fields, id_prefix = PoolingRequest, "pool-"

    async def response(self) -> PoolingResponse | Response:
        """Return the model's output for each text: an embedding, scores, or a row for each token."""
        payload, one_row = self.payload, self.limits.pooling.has_one_row
        encoding, params = payload.encoding(), payload.params_for(self.limits)
        outputs = await self.pool(await payload.inputs(self), params, payload.add_special_tokens is not False)
        if encoding.format in ("bytes", "bytes_only"):
            return _bytes_response(self, encoding, outputs, one_row)
        values = await encoded([each.pooled for each in outputs], encoding, one_row)
        return self.listed(PoolingResponse, [PoolingData(index, value) for index, value in enumerate(values)], outputs)


class ClassificationResults(PooledResults[ClassificationRequest]):
    """The label of each text."""

    fields, id_prefix = ClassificationRequest, "classify-"

    async def response(self) -> ClassificationResponse:
        """Return the probability of each label for each text."""
        self.limits.check_classifies()
        names, data = self.limits.labels, []
        outputs = await self.payload.pool(self)
        for index, prompt in enumerate(outputs):
            probs = prompt.pooled.vector()
            data.append(Classification(index, names[probs.index(max(probs))], probs, len(probs)))
        return self.listed(ClassificationResponse, data, outputs)


def _bytes_response(
    results: PooledResults[Any], encoding: NumberEncoding, outputs: Sequence[PooledPrompt], one_row: bool
) -> Response:
    """Return the vectors one after the other, and their positions in a header."""
    pooled = [each.pooled for each in outputs]
    shapes = [(len(one.data) // 4,) if one_row else (one.num_rows, one.width) for one in pooled]
    body, items = encoding.body([one.data for one in pooled], shapes)
    headers = None
    if encoding.format == "bytes":
        metadata = msgspec.to_builtins(results.listed(PooledList, items, outputs))
        del metadata["object"]
        headers = {"metadata": metadata_header(metadata)}
    return Response(body, headers=headers, media_type="application/octet-stream")


ROUTES = (
    pooling_route("/v1/embeddings", EmbeddingResults, EmbeddingResponse, "The embeddings."),
    pooling_route("/pooling", VectorResults, PoolingResponse, "The vectors."),
    pooling_route("/classify", ClassificationResults, ClassificationResponse, "The labels."),
)
