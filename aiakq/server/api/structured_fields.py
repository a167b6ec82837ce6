"""Request fields for structured output: OpenAI's ``response_format``, and both generations of vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from aiakq.errors import error
from aiakq.runtime.protocol.grammar import BACKENDS, Grammar, grammar_of, new_grammar
from aiakq.server.api.foreign_fields import FORMAT_FIELDS
from aiakq.server.api.request_model import RequestModel

_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "string"}]}
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}


class JsonSchemaFormat(RequestModel):
    """A JSON schema. It is enforced whether ``strict`` or not."""

    ignored_fields = frozenset({"description"})
    unsupported_fields = {}

    name: str | None = None
    schema_: dict[str, object] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """OpenAI's ``response_format``, and vLLM's structural tags, in both of their forms."""

    ignored_fields = frozenset()
    unsupported_fields = {}
    foreign_fields = FORMAT_FIELDS

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, object]] | None = None
    triggers: list[str] | None = None
    format: dict[str, object] | None = None

    def grammar(self) -> Grammar | None:
        """Return the requested grammar. Raises missing_field and the errors of ``grammar_of``."""
        if self.type == "json_object":
            return new_grammar("json_object", "response_format", True)
        if self.type == "json_schema":
            if self.json_schema is None:
                raise error("missing_field", param="response_format.json_schema")
            schema = {"type": "object"} if self.json_schema.schema_ is None else self.json_schema.schema_
            return new_grammar("json", "response_format.json_schema.schema", schema)
        if self.type == "structural_tag":
            fields = {"structures": self.structures, "triggers": self.triggers, "format": self.format}
            present = {name: value for name, value in fields.items() if value is not None}
            return new_grammar("structural_tag", "response_format", present)
        return None


class StructuredFields(RequestModel):
    """The fields for structured output, at most one of which may be set."""

    response_format: ResponseFormat | None = Field(
        None, description="text, json_object, json_schema (enforced whether strict or not) or structural_tag."
    )
    structured_outputs: dict[str, object] | None = Field(
        None,
        description="One of json, regex, choice, grammar, json_object and structural_tag; and whitespace_pattern, "
        "disable_any_whitespace, disable_additional_properties.",
    )
    guided_json: Annotated[object, WithJsonSchema(_SCHEMA)] = Field(
        None, description="The text is JSON of this schema."
    )
    guided_regex: str | None = Field(None, description="The text matches this regular expression.")
    guided_choice: list[str] | None = Field(None, description="The text is one of these.")
    guided_grammar: str | None = Field(None, description="The text matches this grammar, Lark or GBNF.")
    structural_tag: Annotated[object, WithJsonSchema(_SCHEMA)] = Field(
        None, description="The text has tags, in which it matches something."
    )
    guided_whitespace_pattern: str | None = Field(None, description="Blanks between the tokens of JSON.")
    guided_decoding_backend: str | None = Field(
        None, description=f"Without effect: {', '.join(BACKENDS)}, which are all one here."
    )

    def grammar_and_name(self) -> tuple[Grammar, str] | None:
        """Return the grammar of the response and the name of its field; None if there is none.

        Raises invalid_type, value_out_of_range, missing_field, unknown_field, unsupported_parameter.
        """
        self._check_backend()
        grammars: dict[str, Grammar | None] = {}
        if self.response_format is not None:
            grammars["response_format"] = self.response_format.grammar()
        if self.structured_outputs is not None:
            grammars["structured_outputs"] = grammar_of("structured_outputs", self.structured_outputs)
        for name, kind in _GUIDED.items():
            value = getattr(self, name)
            if value is not None:
                grammars[name] = new_grammar(kind, name, value, self.guided_whitespace_pattern)
        present = [(grammar, name) for name, grammar in grammars.items() if grammar is not None]
        if len(present) > 1:
            raise error("unsupported_parameter", param=present[1][1], reason=f"{present[0][1]} is given too")
        return present[0] if present else None

    def grammar_name(self) -> str:
        """Return the name of the field that is set."""
        named_grammar = self.grammar_and_name()
        return "structured_outputs" if named_grammar is None else named_grammar[1]

    def _check_backend(self) -> None:
        backend = self.guided_decoding_backend
        if backend is not None and backend.partition(":")[0] not in BACKENDS:
            allowed = ", ".join(BACKENDS)
            raise error("value_out_of_range", param="guided_decoding_backend", value=backend[:64], allowed=allowed)


def structured_values(fields: StructuredFields) -> Mapping[str, object]:
    """Return the structured-output sampling parameter for ``fields``."""
    named_grammar = fields.grammar_and_name()
    return {} if named_grammar is None else {"structured_outputs": named_grammar[0]}
