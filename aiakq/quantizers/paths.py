"""Checks that the files of ``aiakq quantize`` exist, before anything heavy is imported or loaded."""

from __future__ import annotations

from pathlib import Path

from aiakq.arguments.quantize import QuantizeArguments
from aiakq.data.documents import sources
from aiakq.data.evaluation_texts import check_sources
from aiakq.data.files import COMPRESSED, TABLES, bad
from aiakq.errors import error
from aiakq.formats.hub import check_model_name

#: What a file of token ids looks like.
TOKENS_HINT = "One sample per line: token ids separated by commas or spaces; or a JSON list of lists of ids."
_MISSING = "there is no such file"
_SUFFIXES = (".txt", ".md", ".json", ".jsonl", ".ndjson", *TABLES, *COMPRESSED)


def check_paths(options: QuantizeArguments) -> None:
    """Raise ``model_missing``, ``model_is_file``, ``calibration`` or ``evaluation_text`` for a path that is wrong."""
    check_model_name(options.input)
    if options.token_ids is not None and not Path(options.token_ids).is_file():
        is_folder = Path(options.token_ids).is_dir()
        raise bad(str(options.token_ids), "it is a folder" if is_folder else _MISSING, TOKENS_HINT)
    if options.lora is not None and not Path(options.lora).is_dir():
        raise error("adapter_missing", path=str(options.lora))
    for name in sources(options.calibration):
        if name is not None and not Path(name).exists() and is_path(name):
            raise bad(name, _MISSING)
    if options.evaluate and options.eval_text is not None:
        check_sources([str(source) for source in sources(options.eval_text)])


def is_path(name: str) -> bool:
    """Whether a source of calibration data that does not exist can only be a path, as the hub has no such names."""
    folder, colon, _ = name.rpartition(":")
    if colon and Path(folder).is_dir():  # a saved data set and its split
        return False
    return Path(name).suffix.lower() in _SUFFIXES or name.startswith(("/", "./", "../", "~"))
