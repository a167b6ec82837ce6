"""Options from a YAML file: ``--config FILE`` of every command."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from aiakq.arguments import renamed, unsupported
from aiakq.arguments.spelling import plain_keys
from aiakq.errors import AiakqError, error
from aiakq.system.files import read_named_text
from aiakq.terminal import console

if TYPE_CHECKING:
    from aiakq.arguments.argument import Argument

_MAX_BYTES = 1 << 20


def read_config_file(path: Path, rows: Iterable[Argument] = (), engine: bool = True) -> dict[str, object]:
    """Return the options of a YAML file by their keys, in any spelling that the command line accepts, without dashes.

    rows    the options of the command.
    engine  whether the command takes the engine's arguments: unsupported ones are then dropped, with a notice.

    Raises ``bad_option`` for a file that cannot be read as options, and ``option_refused``.
    """
    from aiakq.formats.yaml_text import InvalidYaml, parse_yaml

    try:
        document = parse_yaml(read_named_text(path, _MAX_BYTES, lambda reason: _bad(path, reason)))
    except InvalidYaml as problem:
        raise _bad(path, str(problem)) from None
    if document is None:
        return {}
    if not isinstance(document, dict) or not all(isinstance(name, str) for name in document):
        raise _bad(path, "it is not a mapping of option names to values")
    keys = {name: row for row in rows for name in row.keys}
    objects = {name for name, row in keys.items() if row.type is dict}
    if engine:
        objects |= {row.name for row in unsupported.UNSUPPORTED}
    given = plain_keys(document, objects.__contains__, lambda name: _bad(path, f"it sets {name} twice"))
    options: dict[str, object] = {}
    for name, value in given.items():
        key = keys[name].key if name in keys else name
        if key in options:
            raise _bad(path, f"it sets {key} twice")
        if value is not None:
            options[key] = value
    if not engine:
        return options
    unsupported.refuse(options)
    for line in (*renamed.notices(options), *unsupported.notices(options)):
        console.warning(line)
    return {name: value for name, value in renamed.replaced(options).items() if name not in unsupported.BY_NAME}


def _bad(path: Path, reason: str) -> AiakqError:
    hint = "Write an option per line, like port: 8000."
    return error(
        "bad_option", option="--config", value=str(path), expected=f"a readable file of options ({reason})", hint=hint
    )
