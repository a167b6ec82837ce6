"""``aiakq translate``: the command of another server as one of ``aiakq serve``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiakq.errors import GATE, error
from aiakq.terminal import console
from aiakq.terminal.options import with_arguments

if TYPE_CHECKING:
    from aiakq.arguments.common import JsonArguments
    from aiakq.arguments.translate import TranslateArguments
    from aiakq.terminal.translation.result import Translation

_STYLES = {"kept": "green", "ignored": "dim", "differs": "yellow", "lost": "bold red"}


@with_arguments("translate")
def translate(arguments: TranslateArguments, output: JsonArguments) -> int:
    """Translate a command of vLLM, SGLang, llama-server or Ollama to aiakq serve, and say what differs."""
    from aiakq.terminal.translation.translator import translate as translated

    if not any(word.strip() for word in arguments.command):
        raise error(
            "usage", reason="There is no command to translate.", hint="Example: aiakq translate 'vllm serve MODEL'"
        )
    result = translated(list(arguments.command))
    if output.json:
        console.emit(result.document())
    else:
        console.write(result.command + "\n")
        with console.results_on_stdout():
            _show(result)
    return 0 if result.is_complete else GATE


def _show(result: Translation) -> None:
    from rich.text import Text

    table = console.table(f"{result.tool} {result.version}", "is", "aiakq", "because", left=(0, 1, 2, 3))
    for note in result.notes:
        status = Text(note.status, style=_STYLES[note.status])
        table.add_row(Text(console.plain(note.option) or "(default)"), status, Text(note.here), Text(note.reason))
    console.show(table)
    if not result.is_complete:
        console.result_line(
            ("Not the same service: what is marked as lost or differs changes answers or routes.", "bold")
        )
