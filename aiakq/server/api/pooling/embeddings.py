"""POST /v1/embeddings, /pooling and /classify."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from aiakq.runtime.pooling_params import PoolingParams
from aiakq.server.api.completions import split_prompts
from aiakq.server.api.pooling.pooled_request import (
    MAX_INPUTS,
    PoolingCall,
    PoolingFields,
    PoolingUsage,
    answer,
    encoded,
    pooling_route,
    usage_of,
)
from aiakq.server.api.request_model import Integer
from aiakq.server.api.service import Service

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
    """Fields of requests with one result per text."""

    input: Annotated[Any, WithJsonSchema(_INPUT_SCHEMA)] = Field(
        description="A text, a list of texts, a list of token ids, or a list of such lists."
    )
    add_special_tokens: bool | None = Field(None, description="Whether tokenization adds special tokens.")

    def inputs(self) -> list[str | list[int]]:
        """Return the texts or token ids. Raises ``invalid_type`` and ``empty_prompt``."""
        return split_prompts(self.input, "input")


class EmbeddingRequest(InputFields):
    """The body of POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="float: lists of numbers; base64: those of float32 in little-endian order."
    )
    dimensions: Integer | None = Field(
        None, description="The first numbers of each embedding, of models that were trained for it (Matryoshka)."
    )
    normalize: bool | None = Field(None, description="Whether embeddings have the length 1; as the model says.")

    def params(self) -> PoolingParams:
        """Return the pooling parameters of the inputs."""
        return PoolingParams(dimensions=self.dimensions, normalize=self.normalize)


class PoolingRequest(EmbeddingRequest):
    """The body of POST /pooling."""

    activation: bool | None = Field(None, description="Whether scores become probabilities; as the model says.")

    def params(self) -> PoolingParams:
        """Return the pooling parameters of the inputs."""
        return PoolingParams(self.dimensions, self.normalize, self.activation)


class ClassificationRequest(InputFields):
    """The body of POST /classify."""

    activation: bool | None = Field(None, description="Whether scores become probabilities; as the model says.")

    def params(self) -> PoolingParams:
        """Return the pooling parameters of the inputs."""
        return PoolingParams(activation=self.activation)


class Embedding(msgspec.Struct):
    """One embedding, as a list of numbers or base64."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingResponse(msgspec.Struct):
    """Embeddings in the order of the inputs."""

    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage
    object: Literal["list"] = "list"


class PoolingData(msgspec.Struct):
    """Output for one input: a vector, a row for each token, or base64 of either."""

    index: int
    data: list[float | list[float]] | str
    object: Literal["pooling"] = "pooling"


class PoolingResponse(msgspec.Struct):
    """Outputs in the order of the inputs."""

    id: str
    created: int
    model: str
    data: list[PoolingData]
    usage: PoolingUsage
    object: Literal["list"] = "list"


class Classification(msgspec.Struct):
    """The most likely label, and the probability of every label."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationResponse(msgspec.Struct):
    """Labels in the order of the inputs."""

    id: str
    created: int
    model: str
    data: list[Classification]
    usage: PoolingUsage
    object: Literal["list"] = "list"


async def embeddings(service: Service, request: Request) -> Response:
    """Return an embedding for each text."""

    async def respond(call: PoolingCall[EmbeddingRequest]) -> EmbeddingResponse:
        call.limits.check_embeds()
        payload = call.payload
        outputs = await call.pool(payload.inputs(), payload.params(), payload.add_special_tokens is not False)
        values = await encoded(outputs, payload.encoding_format or "float", one_row=True)
        data = [Embedding(index, value) for index, value in enumerate(values)]
        return EmbeddingResponse(call.id, int(time.time()), call.model, data, usage_of(outputs))

    return await answer(service, request, EmbeddingRequest, "embd-", respond)


async def pooling(service: Service, request: Request) -> Response:
    """Return the model's output for each text: an embedding, scores, or a row for each token."""

    async def respond(call: PoolingCall[PoolingRequest]) -> PoolingResponse:
        payload, one_row = call.payload, call.limits.pooling.has_one_row
        outputs = await call.pool(payload.inputs(), payload.params(), payload.add_special_tokens is not False)
        values = await encoded(outputs, payload.encoding_format or "float", one_row)
        data = [PoolingData(index, value) for index, value in enumerate(values)]
        return PoolingResponse(call.id, int(time.time()), call.model, data, usage_of(outputs))

    return await answer(service, request, PoolingRequest, "pool-", respond)


async def classify(service: Service, request: Request) -> Response:
    """Return the probability of each label for each text."""

    async def respond(call: PoolingCall[ClassificationRequest]) -> ClassificationResponse:
        call.limits.check_classifies()
        payload, names = call.payload, call.limits.labels
        outputs = await call.pool(payload.inputs(), payload.params(), payload.add_special_tokens is not False)
        data = []
        for index, prompt in enumerate(outputs):
            probs = prompt.pooled.vector()
            data.append(Classification(index, names[probs.index(max(probs))], probs, len(probs)))
        return ClassificationResponse(call.id, int(time.time()), call.model, data, usage_of(outputs))

    return await answer(service, request, ClassificationRequest, "classify-", respond)


ROUTES = (
    pooling_route("/v1/embeddings", embeddings, EmbeddingRequest, EmbeddingResponse, "The embeddings."),
    pooling_route("/pooling", pooling, PoolingRequest, PoolingResponse, "The vectors."),
    pooling_route("/classify", classify, ClassificationRequest, ClassificationResponse, "The labels."),
)
