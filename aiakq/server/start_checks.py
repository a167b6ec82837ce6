"""Checks of what the arguments of ``aiakq serve`` name, before a process is started or a weight is read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from aiakq.arguments.lora import parse_module
from aiakq.arguments.server import ServerArguments
from aiakq.errors import error
from aiakq.formats.model_folder import read_file
from aiakq.runtime.lora.adapter_config import CONFIG, MAX_CONFIG_BYTES, parse_config
from aiakq.server.api.message_format import read_chat_template
from aiakq.server.http.http_server import check_tls
from aiakq.system.user_path import user_path


def check_named_files(args: ServerArguments) -> None:
    """Raise the error for the first file or folder of ``args`` that cannot be used.

    Raises ``bad_option``, ``option_conflict``, ``adapter_missing``, ``adapter_malformed`` and ``adapter_unsupported``.
    """
    # Options of models may also be names on the hub.
    files = {
        "--ssl-certfile": args.ssl_certfile,
        "--ssl-keyfile": args.ssl_keyfile,
        "--ssl-ca-certs": args.ssl_ca_certs,
        "--tokenizer-extension-path": args.tokenizer_extension_path,
    }
    _check_paths({"--lora-root": args.lora_root}, Path.is_dir, "a folder")
    _check_paths(files, Path.is_file, "a file")
    check_tls(args)
    read_chat_template(args.chat_template)
    _check_adapters(args)


def _check_paths(paths: Mapping[str, str | None], exists: Callable[[Path], bool], expected: str) -> None:
    """Raise ``bad_option`` for the first of ``paths``, by option, that does not exist."""
    for option, path in paths.items():
        if path and not _holds(exists, path):
            hint = "There is none at this path."
            raise error("bad_option", option=option, value=path, expected=expected, hint=hint)


def _check_adapters(args: ServerArguments) -> None:
    """Raise the error for adapters without --enable-lora, for one with a name in use, or that cannot be read."""
    for option, value in (("--lora-modules", args.lora_modules), ("--lora-root", args.lora_root)):
        if value and not args.enable_lora:
            reason, hint = "without it requests have no adapters", "Give --enable-lora too."
            raise error("option_conflict", option=option, other="no --enable-lora", reason=reason, hint=hint)
    names = args.served_names
    taken = set(names)
    for module in map(parse_module, args.lora_modules or ()):
        expected = None
        if module.base not in (None, *names):
            expected = f"an adapter of {', '.join(names)}"
        elif module.name in taken:
            expected = "a name of its own for each adapter"
        if expected is not None:
            raise error("bad_option", option="--lora-modules", value=module.name, expected=expected, hint="")
        taken.add(module.name)
        check_adapter_config(user_path(module.path))


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


def _holds(exists: Callable[[Path], bool], path: str | Path) -> bool:
    try:
        return exists(user_path(path))
    except (OSError, ValueError):  # too long a path, a zero byte
        return False
