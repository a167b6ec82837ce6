"""Reasoning parsers by the names of ``--reasoning-parser``. Each separates the reasoning from the answer.

Other packages add parsers as entry points of ``aiakq.reasoning_parsers``; see docs/adding.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiakq.registry import Registry

if TYPE_CHECKING:
    from aiakq.server.api.reasoning_parsers.base import ReasoningParser

_HERE = "aiakq.server.api.reasoning_parsers"

#: Name -> subclass of ``ReasoningParser``, in the order in which they are matched with the chat template.
REASONING_PARSERS: Registry[type[ReasoningParser]] = Registry(
    "aiakq.reasoning_parsers",
    {
        "gptoss": f"{_HERE}.gptoss:GptossReasoningParser",
        "mistral": f"{_HERE}.mistral:MistralReasoningParser",
        "granite": f"{_HERE}.granite:GraniteReasoningParser",
        "deepseek_r1": f"{_HERE}.deepseek_r1:DeepseekR1ReasoningParser",
        "glm45": f"{_HERE}.glm45:Glm45ReasoningParser",
        "qwen3": f"{_HERE}.qwen3:Qwen3ReasoningParser",
    },
)
