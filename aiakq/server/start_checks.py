"""Checks of what the arguments of ``aiakq serve`` name, before a process is started or a weight is read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiakq.arguments.lora import parse_module
from aiakq.errors import error
from aiakq.formats.model_folder import read_file
from aiakq.runtime.lora.adapter_config import CONFIG, MAX_CONFIG_BYTES, parse_config
from aiakq.server.http.http_server import check_tls
from aiakq.server.loading import read_chat_template

#: Options that name a local folder, and those that name a file. Options of models may also be names on the hub.
_FOLDERS = ("lora_root",)
_FILES = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "tokenizer_extension_path")


def check_named_files(args: Mapping[str, Any]) -> None:
    """Raise the error for the first file or folder of ``args`` that cannot be used.

    Raises ``bad_option``, ``option_conflict``, ``adapter_missing``, ``adapter_malformed`` and ``adapter_unsupported``.
    """
    for names, exists, expected in ((_FOLDERS, Path.is_dir, "a folder"), (_FILES, Path.is_file, "a file")):
        for name in names:
            if args[name] and not _holds(exists, args[name]):
                option, hint = f"--{name.replace('_', '-')}", "There is none at this path."
                raise error("bad_option", option=option, value=args[name], expected=expected, hint=hint)
    check_tls(args)
    read_chat_template(args["chat_template"])
    _check_adapters(args)


def _check_adapters(args: Mapping[str, Any]) -> None:
    """Raise the error for adapters without --enable-lora, for one with a name in use, or that cannot be read."""
    for name in ("lora_modules", "lora_root"):
        if args[name] and not args["enable_lora"]:
            option, reason = f"--{name.replace('_', '-')}", "without it requests have no adapters"
            hint = "Give --enable-lora too."
            raise error("option_conflict", option=option, other="no --enable-lora", reason=reason, hint=hint)
    names = args["served_model_name"] or [args["model"]]
    taken = set(names)
    for module in map(parse_module, args["lora_modules"] or ()):
        expected = None
        if module.base not in (None, *names):
            expected = f"an adapter of {', '.join(names)}"
        elif module.name in taken:
            expected = "a name of its own for each adapter"
        if expected is not None:
            raise error("bad_option", option="--lora-modules", value=module.name, expected=expected, hint="")
        taken.add(module.name)
        check_adapter_config(Path(module.path).expanduser())


def check_adapter_config(folder: Path) -> None:
    """Raise the error for an adapter whose folder is missing, or whose config is not supported."""
    if not _holds(Path.is_dir, folder) or not os.path.lexists(folder / CONFIG):
        raise error("adapter_missing", path=folder)
    try:
        values = json.loads(read_file(folder, CONFIG, limit=MAX_CONFIG_BYTES))
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise error("adapter_malformed", adapter=folder, reason=f"{CONFIG} is not a JSON object")
    parse_config(values, str(folder))


def _holds(exists: Any, path: str | Path) -> bool:
    try:
        return bool(exists(Path(path).expanduser()))
    except (OSError, ValueError):  # too long a path, a zero byte
        return False
