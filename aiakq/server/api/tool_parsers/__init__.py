"""Tool parsers by the names of ``--tool-call-parser``. Each parses the tool calls of one family of models.

Other packages add parsers as entry points of ``aiakq.tool_parsers``; see docs/adding.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiakq.registry import Registry

if TYPE_CHECKING:
    from aiakq.server.api.tool_parsers.base import ToolParser

_HERE = "aiakq.server.api.tool_parsers"

#: Name -> subclass of ``ToolParser``, in the order in which they are matched with the chat template.
TOOL_PARSERS: Registry[type[ToolParser]] = Registry(
    "aiakq.tool_parsers",
    {
        "gptoss": f"{_HERE}.gptoss:GptossParser",
        "openai": f"{_HERE}.gptoss:GptossParser",
        "qwen3_coder": f"{_HERE}.qwen3_coder:Qwen3CoderParser",
        "qwen3_xml": f"{_HERE}.qwen3_coder:Qwen3CoderParser",
        "glm45": f"{_HERE}.glm45:Glm45Parser",
        "glm47": f"{_HERE}.glm45:Glm45Parser",
        "deepseek_v3": f"{_HERE}.deepseek_v3:DeepseekV3Parser",
        "kimi_k2": f"{_HERE}.kimi_k2:KimiK2Parser",
        "mistral": f"{_HERE}.mistral:MistralParser",
        "internlm": f"{_HERE}.internlm:InternlmParser",
        "jamba": f"{_HERE}.jamba:JambaParser",
        "phi4_mini_json": f"{_HERE}.phi4_mini_json:Phi4MiniJsonParser",
        "granite-20b-fc": f"{_HERE}.granite_20b_fc:Granite20bFcParser",
        "granite": f"{_HERE}.granite:GraniteParser",
        "llama4_pythonic": f"{_HERE}.llama4_pythonic:Llama4PythonicParser",
        "hermes": f"{_HERE}.hermes:HermesParser",
        "qwen3_json": f"{_HERE}.hermes:HermesParser",
        "llama3_json": f"{_HERE}.llama3_json:Llama3JsonParser",
        "llama4_json": f"{_HERE}.llama3_json:Llama3JsonParser",
        "pythonic": f"{_HERE}.pythonic:PythonicParser",
    },
)
