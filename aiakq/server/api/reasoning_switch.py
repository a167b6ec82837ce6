"""Whether and how much the model reasons before it answers: what requests say of it, in the words of chat templates."""

from __future__ import annotations

import functools
import re
from typing import Any, Literal

#: Every value that an API has; templates have their own choice of them.
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_TAG = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)
_TEXT = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
#: Names that templates give to the switch.
_SWITCHES = ("enable_thinking", "thinking")


@functools.lru_cache(maxsize=8)
def template_names(template: str) -> frozenset[str]:
    """The names in the statements and expressions of a chat template."""
    code = " ".join(_TEXT.sub("''", tag) for tag in _TAG.findall(template))
    return frozenset(_NAME.findall(code))


def reasoning_arguments(
    template: str, effort: ReasoningEffort | None = None, thinks: bool | None = None
) -> dict[str, Any]:
    """The arguments of ``template`` that say so; empty if it has none.

    effort  a template that can only switch reasoning on and off is told that.
    thinks  None: what the effort says.
    """
    names = template_names(template)
    arguments: dict[str, Any] = {}
    if effort is not None and "reasoning_effort" in names:
        arguments["reasoning_effort"] = effort
    if thinks is None and effort is not None:
        thinks = effort != "none"
    if thinks is not None:
        arguments.update({name: thinks for name in _SWITCHES if name in names})
    return arguments
