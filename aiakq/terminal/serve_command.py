"""``aiakq serve``."""

from __future__ import annotations

from aiakq.errors import AiakqError, error
from aiakq.terminal import console
from aiakq.terminal.json_log import JsonLog
from aiakq.terminal.options import with_arguments
from aiakq.terminal.server_log import ServerLog


@with_arguments("serve")
def serve(engine: dict[str, object]) -> int:
    """Serve a model over HTTP with the OpenAI API."""
    from aiakq.arguments.server import checked

    arguments = checked(engine, server=True)
    if not arguments.model:
        raise error("usage", reason="No model is given.", hint="Example: aiakq serve MODEL --port 8000")
    from aiakq.formats.hub import check_model_name

    check_model_name(arguments.model)
    if arguments.log_format != "json":
        console.note_missing_folder(arguments.model)
    from aiakq.server.launch import serve as launch

    if arguments.log_format == "json":
        lines = JsonLog()
        try:
            return launch(arguments, lines.event)
        except AiakqError as problem:
            return lines.failure(problem)
    with ServerLog(arguments.model) as log:
        return launch(arguments, log.event)
