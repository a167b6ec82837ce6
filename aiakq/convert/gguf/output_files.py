"""OutputFiles: a GGUF file, or the parts of one, that appears under its name when all of it is proved."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from aiakq.arguments.byte_size import shard_bytes
from aiakq.errors import AiakqError, error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.gguf.splitting import files_of, is_part, write_parts
from aiakq.formats.gguf.writing import WrittenTensor
from aiakq.formats.gguf_model.written import file_of
from aiakq.formats.model_folder import PARTIAL_MARK
from aiakq.system.user_path import user_path

_SUFFIX = ".gguf"
_EXPECTED = "the name of a file that ends with .gguf"


def checked_name(name: str, option: str = "DIR") -> Path:
    """Return the path of a new file. Raises ``bad_option`` for a name that no whole GGUF file has, without looking for
    files: programs that read one called like a part of several look for the others.
    """
    output = user_path(name).absolute()
    if output.suffix.lower() != _SUFFIX:
        raise error("bad_option", option=option, value=name, expected=_EXPECTED, hint="")
    if is_part(output.with_suffix(_SUFFIX)):
        expected = f"{_EXPECTED}, and not that of one of several files"
        hint = "Leave -00001-of-00002 away; with --max-shard-size, every file gets its own."
        raise error("bad_option", option=option, value=name, expected=expected, hint=hint)
    return output


def checked_output(name: str, overwrite: bool, checkpoint: Checkpoint, option: str = "DIR") -> Path:
    """Return the path of the new file. Raises ``bad_option``, and ``output_*`` for one that cannot be it."""
    output = checked_name(name, option)
    try:
        exists = output.exists()
    except OSError as problem:
        raise error("output_failed", path=str(output), reason=problem.strerror or str(problem)) from problem
    if output.is_dir():
        raise error("bad_option", option=option, value=name, expected=_EXPECTED, hint="")
    file = file_of(checkpoint.foreign)
    files = [] if file is None else [checkpoint.weights_folder / name for name in file.files]
    for old in [output] * exists + files_of(output):
        if any(each.exists() and old.samefile(each) for each in (*files, checkpoint.named_path)):
            raise error("output_is_input", path=str(old))
        if not overwrite:
            raise error("output_exists", path=str(old))
    return output


class OutputFiles:
    """Files that are written to a new folder beside ``output``, of at most ``limit`` (``--max-shard-size``) each.

    nbytes  size of all of them.

    As a context it removes the folder; it raises ``output_failed`` for an OSError.
    """

    def __init__(self, output: Path, limit: str | None) -> None:
        """Raises ``bad_option``."""
        self.output, self.nbytes = output, 0
        self._limit = shard_bytes(limit)
        self._folder = output.parent / f".{output.name}{PARTIAL_MARK}{secrets.token_hex(6)}"
        self._written: list[Path] = []

    def __enter__(self) -> OutputFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        if isinstance(value, OSError) and not isinstance(value, AiakqError):
            raise error("output_failed", path=str(self.output), reason=value.strerror or str(value)) from value

    def write(self, metadata: Mapping[str, object], tensors: Mapping[str, WrittenTensor]) -> Path:
        """Write all files and return the path of the first one. See ``write_parts``."""
        self._folder.mkdir(parents=True)
        self._written = write_parts(self._folder, self.output.name, metadata, tensors, self._limit)
        self.nbytes = sum(path.stat().st_size for path in self._written)
        return self._written[0]

    def publish(self) -> Path:
        """Give the files their names in place of old ones, the first one last, and return its path."""
        files = [self.output.with_name(path.name) for path in self._written]
        for path, final in reversed(list(zip(self._written, files, strict=True))):
            os.replace(path, final)
        for old in files_of(self.output):
            if old not in files:
                old.unlink()
        return files[0]
