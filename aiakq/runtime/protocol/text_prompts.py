"""TextPrompts: what a model's files say is put before the texts that it embeds, by name and by kind of text."""

from __future__ import annotations

import msgspec

from aiakq.errors import AiakqError, error

#: Names of kinds of texts in requests (Cohere, Voyage, NVIDIA, sentence-transformers) -> query or document.
_ROLES = {
    **dict.fromkeys(("query", "search_query"), "query"),
    **dict.fromkeys(("document", "search_document", "passage"), "document"),
}
#: Names of the prompt of a kind of text, the first of which counts, as sentence-transformers' ``encode_query`` and
#: ``encode_document`` look for them.
_NAMES = {"query": ("query",), "document": ("document", "passage", "corpus")}


class TextPrompts(msgspec.Struct, frozen=True):
    """Prompts of sentence-transformers: texts before the texts of a request.

    named    name -> prompt.
    default  name of the prompt of texts whose request names none; None: they have none.
    """

    named: dict[str, str] = {}
    default: str | None = None

    def before(self, prompt_name: str | None, input_type: str | None) -> str:
        """Return what is put before a text: the prompt of a name, or of a kind of text, or else the default.

        Raises ``unsupported_parameter`` for a name or a kind without a prompt.
        """
        if prompt_name is not None:
            if input_type is not None:
                raise error("unsupported_parameter", param="input_type", reason="prompt_name is given too")
            return self._of_name("prompt_name", prompt_name)
        if input_type is None:
            return "" if self.default is None else self.named[self.default]
        role = role_of(input_type)
        if role is None:
            return self._of_name("input_type", input_type)
        if not self.has_roles:
            raise self._unknown("input_type", "the model's files have no prompts for queries and documents")
        return next((self.named[name] for name in _NAMES[role] if name in self.named), "")

    @property
    def has_roles(self) -> bool:
        """Whether queries or documents have a prompt of their own."""
        return any(name in self.named for names in _NAMES.values() for name in names)

    def _of_name(self, param: str, name: str) -> str:
        if name not in self.named:
            raise self._unknown(param, f"the model's files have no prompt {name!r:.64}")
        return self.named[name]

    def _unknown(self, param: str, reason: str) -> AiakqError:
        names = ", ".join(self.named)
        has = f"; they name {names:.400}" if names else ", and name no others (config_sentence_transformers.json)"
        return error("unsupported_parameter", param=param, reason=reason + has)


def role_of(input_type: str) -> str | None:
    """Return query or document for the ``input_type`` of a request; None for another kind of text."""
    return _ROLES.get(input_type)
