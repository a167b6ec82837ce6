"""The fields of all pooling requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from aiakq.errors import error
from aiakq.runtime.protocol.sampling_params import PARAMETERS
from aiakq.server.api.foreign_fields import POOLING_FIELDS
from aiakq.server.api.generation_request import ModelName, Priority
from aiakq.server.api.request_model import Integer, RequestModel


class PoolingFields(RequestModel):
    """Fields of all pooling requests."""

    foreign_fields = POOLING_FIELDS

    model: ModelName | None = Field(None, description="A served name; the only one if not given.")
    truncate_prompt_tokens: Annotated[Integer, PARAMETERS["truncate_prompt_tokens"]] | None = Field(
        None, description="Tokens of a prompt to keep; -1: as many as the model takes."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Which side is cut: left, the default, keeps the end of a prompt, right its beginning."
    )
    padding: Literal["do_not_pad", "longest", "max_length", True, False] | None = Field(
        None,
        description="max_length: the tokenizer's padding token comes behind a prompt up to the longest that the model "
        "takes, and is read like any other, as in vLLM. Other values have no effect.",
    )
    priority: Priority | None = Field(
        None, description="Lower ones are scheduled first, with --scheduling-policy priority."
    )


def same(request: RequestModel, name: str, other: str) -> Any:
    """Return the value of a field with two names. Raises ``unsupported_parameter`` for two values."""
    value, again = getattr(request, name), getattr(request, other)
    if value is not None and again is not None and value != again:
        raise error("unsupported_parameter", param=other, reason=f"{name} is given too, with another value")
    return again if value is None else value
