"""Map reasoning effort and switches of requests to the arguments of chat templates."""

from __future__ import annotations

import functools
import re
from typing import Literal

#: All effort values of the APIs; a template supports some of them.
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_TAG = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)
_TEXT = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
#: Names of the switch in chat templates.
_SWITCHES = ("enable_thinking", "thinking")


@functools.lru_cache(maxsize=8)
def template_names(template: str) -> frozenset[str]:
    """Return the names in the statements and expressions of a chat template."""
    code = " ".join(_TEXT.sub("''", tag) for tag in _TAG.findall(template))
    return frozenset(_NAME.findall(code))


def reasoning_arguments(
    template: str, effort: ReasoningEffort | None = None, thinks: bool | None = None
) -> dict[str, object]:
    """Return the arguments of ``template`` that control reasoning; empty if it has none.

    effort  reasoning effort; for templates with only a switch, "none" turns reasoning off.
    thinks  whether to reason; None to derive it from the effort.
    """
    names = template_names(template)
    arguments: dict[str, object] = {}
    if effort is not None and "reasoning_effort" in names:
        arguments["reasoning_effort"] = effort
    if thinks is None and effort is not None:
        thinks = effort != "none"
    if thinks is not None:
        arguments.update({name: thinks for name in _SWITCHES if name in names})
    return arguments
