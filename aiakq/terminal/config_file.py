"""Options from a YAML file: ``--config FILE`` of every command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aiakq.arguments import unsupported
from aiakq.errors import AiakqError, error
from aiakq.terminal import console

_MAX_BYTES = 1 << 20


def read_config_file(path: Path, engine: bool = True) -> dict[str, Any]:
    """Return the options of a YAML file by their keys; dashes and underscores are equivalent.

    engine  whether the command takes the engine's arguments: unsupported ones are then dropped, with a notice.

    Raises ``bad_option`` for a file that cannot be read as options, and ``option_refused``.
    """
    import yaml

    try:
        if path.stat().st_size > _MAX_BYTES:
            raise _bad(path, "it is larger than 1 MiB")
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        raise _bad(path, getattr(problem, "strerror", None) or "it is not UTF-8 text") from None
    except (yaml.YAMLError, RecursionError) as problem:
        mark = getattr(problem, "problem_mark", None)
        raise _bad(path, f"line {mark.line + 1} is not valid YAML" if mark else "it is not valid YAML") from None
    if document is None:
        return {}
    if not isinstance(document, dict) or not all(isinstance(name, str) for name in document):
        raise _bad(path, "it is not a mapping of option names to values")
    options = {name.lstrip("-").replace("-", "_"): value for name, value in document.items()}
    if len(options) < len(document):
        raise _bad(path, "it sets an option twice")
    options = {name: value for name, value in options.items() if value is not None}
    if not engine:
        return options
    unsupported.refuse(options)
    for line in unsupported.notices(options):
        console.warning(line)
    return {name: value for name, value in options.items() if name not in unsupported.BY_NAME}


def _bad(path: Path, reason: str) -> AiakqError:
    hint = "Write an option per line, like port: 8000."
    return error(
        "bad_option", option="--config", value=str(path), expected=f"a readable file of options ({reason})", hint=hint
    )
