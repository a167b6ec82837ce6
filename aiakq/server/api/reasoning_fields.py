"""Fields of requests that say how much the model reasons: those of three APIs and of other servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, get_args

from pydantic import PrivateAttr

from aiakq.errors import error
from aiakq.server.api.foreign_field import ForeignField
from aiakq.server.api.reasoning_switch import ReasoningEffort, reasoning_arguments
from aiakq.server.api.request_model import RequestModel
from aiakq.server.api.unknown_fields import UnknownFields

#: What a request asks for -> (value, name of the field). The keys are ``_EFFORT`` and ``_THINKS``.
Asked = Mapping[str, tuple[Any, str]]
_EFFORT, _THINKS = "reasoning_effort", "thinks"
_NO_SWITCH = "the chat template has no switch for it; a server with --unknown-fields ignore ignores it"


class ReasoningFields(RequestModel):
    """A request about a conversation.

    refuses_effort  whether --unknown-fields refuse also refuses an effort that the template has no argument for.
    """

    refuses_effort: ClassVar[bool] = False

    _asked_by_others: dict[str, tuple[Any, str]] = PrivateAttr(default_factory=dict)

    def asked_reasoning(self) -> dict[str, tuple[object, str]]:
        """Return what the declared fields ask for, see ``Asked``."""
        return {}

    def has_budget_in(self, param: str) -> bool:
        """Whether the field ``param`` also has the budget of thoughts, which has an effect."""
        return False

    def take(self, name: str, value: object, param: str, field: ForeignField, unknown: UnknownFields) -> None:
        if name not in (_EFFORT, _THINKS):
            super().take(name, value, param, field, unknown)
            return
        if name == _EFFORT and value not in get_args(ReasoningEffort):
            raise error(
                "invalid_type", param=param, reason=f"one of {', '.join(get_args(ReasoningEffort))} is expected"
            )
        known = (self.asked_reasoning() | self._asked_by_others).get(name)
        if known is not None and known[0] != value:
            raise error("unsupported_parameter", param=param, reason=f"{known[1]} is given too, with another value")
        self._asked_by_others.setdefault(name, (value, param))

    def switches(self, template: str) -> dict[str, object]:
        """Return the arguments of ``template`` that switch reasoning as the request asks."""
        effort, thinks = self._asked()
        return reasoning_arguments(template, effort, thinks)

    def effective_effort(self, template: str, given: Mapping[str, object]) -> ReasoningEffort | None:
        """Return the effort that ``template`` is given; ``given`` are arguments that take precedence."""
        effort, _ = self._asked()
        return None if _EFFORT in self._without_effect(template, given) else effort

    def name_without_effect(self, template: str, given: Mapping[str, object], unknown: UnknownFields) -> None:
        """Ignore the fields by name that ``template`` has no switch for. Raises ``unsupported_parameter``."""
        for value, param in self._without_effect(template, given).values():
            if value is True and self.has_budget_in(param):
                continue
            refusal = error("unsupported_parameter", param=param, reason=_NO_SWITCH)
            if unknown.refuses and self.refuses_effort:
                if value != "none":
                    raise refusal
            else:
                unknown.ignore(refusal)

    def _asked(self) -> tuple[ReasoningEffort | None, bool | None]:
        """Return the effort, and whether to reason."""
        asked = self.asked_reasoning() | self._asked_by_others
        return asked.get(_EFFORT, (None,))[0], asked.get(_THINKS, (None,))[0]

    def _without_effect(self, template: str, given: Mapping[str, object]) -> Asked:
        """Return the settings of the request that ``template`` has no argument for."""
        told = {name: value for name, value in self.switches(template).items() if given.get(name, value) == value}
        switched = {value for name, value in told.items() if name != _EFFORT}
        asked = self.asked_reasoning() | self._asked_by_others
        has_effect = {
            _EFFORT: _EFFORT in told or (asked.get(_EFFORT, (None,))[0] != "none") in switched,
            _THINKS: bool(switched),
        }
        return {name: each for name, each in asked.items() if not has_effect[name]}
