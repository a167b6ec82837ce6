"""Options of ``aiakq translate``. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from aiakq.arguments.argument import argument


@dataclass(frozen=True, kw_only=True)
class TranslateArguments:
    """The command to translate."""

    command: tuple[str, ...] = argument(
        ...,
        "Command of another server, in quotation marks: vllm serve, python -m vllm.entrypoints.openai.api_server, "
        "docker run, sglang serve, python -m sglang.launch_server, llama-server, ollama run; or the path of a "
        "Modelfile.",
        positional=True,
        metavar="COMMAND...",
        separator="\0",
        environment=False,
    )
