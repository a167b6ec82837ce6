"""Publishing a checkpoint folder so that it is either wholly there or not there at all.

Everything is written into a sibling folder ``.<name>.aiakq-partial-<random>`` and synced; the manifest comes last;
one rename makes it the output; the parent folder is synced. After a kill -9 the output is absent or the old one, and
the next run on the same output continues from the remains or sweeps them. A lock file beside the output keeps a second
writer away.

Work is committed step by step: the tensors of a step go into a file of their own, and a note beside it says that it is
whole. At the end the files of the steps are joined into shards, which therefore do not depend on how often the work
was interrupted.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import safetensors
from torch import Tensor

import aiakq
from aiakq.errors import AiakqError, error
from aiakq.formats.model_folder import INDEX, MANIFEST, PARTIAL_MARK
from aiakq.formats.safetensors_file import write_file
from aiakq.formats.steps import STEP_PREFIX, Mapped, Step, whole_steps, write_synced

_OLD_MARK = ".aiakq-old-"
_LOCK_SUFFIX = ".aiakq-lock"
_SCRATCH = "scratch"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
#: Files of a source folder that describe how text becomes tokens, or under what terms it may be used; published byte
#: for byte.
VERBATIM_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "LICENSE",
    "LICENSE.md",
    "LICENSE.txt",
    "NOTICE",
    "NOTICE.txt",
    "USE_POLICY.md",
)


def check_output(output: str | Path, inputs: Iterable[str | Path] = (), overwrite: bool = False) -> Path:
    """The real path an output would take, after every check that needs no lock.

    Raises ``output_is_input``, ``output_exists``, ``output_not_folder``, ``output_not_model`` and ``output_failed``.
    """
    try:
        real = Path(os.path.realpath(Path(output).expanduser()))
        real.lstat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as problem:  # too long, through a file, with a zero byte
        reason = getattr(problem, "strerror", None) or str(problem)
        raise error("output_failed", path=str(output), reason=reason) from None
    for source in inputs:
        given = Path(os.path.realpath(source))
        if _contains(real, given) or _contains(given, real):
            raise error("output_is_input", path=str(output))
    if real.is_dir():
        if any(real.iterdir()):
            if not overwrite:
                raise error("output_exists", path=str(output))
            # --overwrite deletes a folder: only one that looks like a model, never somebody's home.
            if not any((real / file).is_file() for file in (MANIFEST, "config.json")):
                raise error("output_not_model", path=str(output))
    elif os.path.lexists(real):
        raise error("output_not_folder", path=str(output))
    return real


def _contains(outer: Path, inner: Path) -> bool:
    """Whether ``inner`` is ``outer`` or lies inside it, by inode too, so that bind mounts do not hide it."""
    if inner.is_relative_to(outer):
        return True
    try:
        wanted = outer.stat()
    except OSError:
        return False
    for step in (inner, *inner.parents):
        with contextlib.suppress(OSError):
            if os.path.samestat(step.stat(), wanted):
                return True
    return False


class CheckpointWriter:
    """Writes one checkpoint folder; a context manager that leaves nothing behind unless ``publish`` was reached.

    Use: ``with CheckpointWriter(output, inputs=[source]) as writer: writer.add(...); ...; writer.publish()``.
    ``commit`` puts what was added since the last one on disk, so that memory holds one step at a time. With a
    ``fingerprint`` of the work and ``resume``, steps that an earlier run with the same fingerprint committed are taken
    over (``steps``), and are kept again when this run fails.
    """

    def __init__(
        self,
        output: str | Path,
        inputs: Iterable[str | Path] = (),
        overwrite: bool = False,
        expected_bytes: int = 0,
        max_shard_bytes: int = 5_000_000_000,
        fingerprint: str = "",
        resume: bool = False,
    ) -> None:
        self.output = check_output(output, inputs, overwrite)
        self.overwrite = overwrite
        self.expected_bytes = expected_bytes
        self.max_shard_bytes = max_shard_bytes
        self.fingerprint = fingerprint
        self.resume = resume and bool(fingerprint)
        #: The folder being written; readable as a checkpoint once ``seal`` returned.
        self.folder = self.output.parent / f".{self.output.name}{PARTIAL_MARK}{secrets.token_hex(6)}"
        #: The committed steps, in order; those of an earlier run come first.
        self.steps: list[Step] = []
        self._pending: dict[str, Tensor] = {}
        self._shards: list[tuple[Path, list[str]]] = []
        self._names: set[str] = set()
        self._files: dict[str, dict[str, Any]] = {}
        self._lock: int | None = None
        self._made_parents: list[Path] = []
        self._published = False

    # --- the context ----------------------------------------------------------------------------------------------

    def __enter__(self) -> CheckpointWriter:
        """Take the lock, sweep remains, check the space. Raises ``output_locked``, ``no_space``, ``output_failed``."""
        try:
            with self._failures():
                self._make_parents()
                self._take_lock()
                self._sweep()
                free = shutil.disk_usage(self.output.parent).free
                # Steps and the shards made of them are on the disk together for a while.
                needed = int(2.02 * self.expected_bytes) - self.total_bytes
                if free < needed:
                    raise error(
                        "no_space", path=str(self.output), needed=_gigabytes(needed), available=_gigabytes(free)
                    )
                self.scratch.mkdir(parents=True, exist_ok=True)
        except BaseException:
            self._clean_up()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clean_up()

    # --- content --------------------------------------------------------------------------------------------------

    @property
    def scratch(self) -> Path:
        """A folder for files that live no longer than this writer."""
        return self.folder / _SCRATCH

    @property
    def total_bytes(self) -> int:
        """Of all committed tensors."""
        return sum(sum(step.sizes) for step in self.steps)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one tensor; it must not be modified until the next commit."""
        assert name not in self._names, f"tensor {name} was added twice"
        self._names.add(name)
        self._pending[name] = tensor

    def commit(self, name: str, note: Mapping[str, Any] | None = None) -> Step:
        """Put what was added since the last commit on disk as one step. ``note`` holds JSON values."""
        pending, self._pending = self._pending, {}
        file = self.folder / f"{STEP_PREFIX}{len(self.steps):05d}.safetensors"
        with self._failures():
            size, digest = write_file(file, pending)
            sizes = tuple(tensor.numel() * tensor.element_size() for tensor in pending.values())
            step = Step(name, file, tuple(pending), sizes, dict(note or {}))
            entry = {
                "fingerprint": self.fingerprint,
                "name": name,
                "size": size,
                "sha256": digest,
                "tensors": dict(zip(step.tensors, sizes, strict=True)),
                "note": step.note,
            }
            # The note makes the step count, so it appears whole or not at all.
            draft = file.with_suffix(".tmp")
            write_synced(draft, json.dumps(entry).encode())
            os.rename(draft, file.with_suffix(".json"))
            _sync_folder(self.folder)
        self.steps.append(step)
        return step

    def read(self, step: Step) -> dict[str, Tensor]:
        """The tensors of a committed step, mapped from its file."""
        with self._failures(), safetensors.safe_open(step.file, framework="pt", device="cpu") as handle:
            return {name: handle.get_tensor(name) for name in step.tensors}

    def copy_file(self, source: Path) -> None:
        """Copy one file byte for byte, following a link, under its own name."""
        with self._failures():
            self._write_bytes(source.name, source.read_bytes())

    def add_text(self, name: str, text: str) -> None:
        """Write a text file, replacing an earlier one of that name."""
        with self._failures():
            self._write_bytes(name, text.encode())

    def add_json(self, name: str, value: Any) -> None:
        """Write ``value`` as an indented JSON file, replacing an earlier one of that name."""
        self.add_text(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def seal(self) -> Path:
        """Join the steps into shards, write the index and the manifest; the folder can now be opened as a checkpoint.

        Files may still be added (a report of measurements on it); ``publish`` then renews the manifest.
        """
        with self._failures():
            if self._pending:
                self.commit("rest")
            if not self._shards:
                self._write_shards()
            self._write_manifest()
        return self.folder

    def publish(self) -> Path:
        """Make the folder the output in one step, and return its path. Raises ``output_failed``."""
        self.seal()
        with self._failures():
            self._verify()
            for path in list(self.folder.iterdir()):
                if path.name not in self._files and path.name != MANIFEST:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            _sync_folder(self.folder)
            if self.output.is_dir() and any(self.output.iterdir()):
                if not self.overwrite:  # it appeared while we worked
                    raise error("output_exists", path=str(self.output))
                _replace(self.folder, self.output)
            else:
                os.rename(self.folder, self.output)
            self._published = True
            _sync_folder(self.output.parent)
        return self.output

    # --- inside ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _failures(self) -> Any:
        """Turn an OSError into ``output_failed`` with its cause."""
        try:
            yield
        except AiakqError:
            raise
        except OSError as problem:
            reason = problem.strerror or str(problem)
            raise error("output_failed", path=str(self.output), reason=reason) from problem

    def _make_parents(self) -> None:
        missing = [parent for parent in (self.output.parent, *self.output.parent.parents) if not parent.exists()]
        for parent in reversed(missing):
            parent.mkdir(exist_ok=True)
            self._made_parents.append(parent)

    def _take_lock(self) -> None:
        path = self._lock_path()
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as problem:
                os.close(descriptor)
                if problem.errno in (errno.EAGAIN, errno.EACCES):
                    raise error("output_locked", path=str(self.output)) from None
                raise
            # The holder before us may have removed the file between our open and our lock.
            try:
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    self._lock = descriptor
                    return
            except FileNotFoundError:
                pass
            os.close(descriptor)

    def _lock_path(self) -> Path:
        return self.output.parent / f".{self.output.name}{_LOCK_SUFFIX}"

    def _sweep(self) -> None:
        """Remove what killed runs on this output left, but take over steps; put back an old output moved aside."""
        prefix = f".{self.output.name}"
        for path in sorted(self.output.parent.iterdir()):
            if path.name.startswith(prefix + _OLD_MARK) and not self.output.exists():
                os.rename(path, self.output)
                self.output = check_output(self.output, (), self.overwrite)
            elif path.name.startswith(prefix + PARTIAL_MARK) and self.resume and not self.steps:
                self._take_over(path)
            elif path.name.startswith((prefix + PARTIAL_MARK, prefix + _OLD_MARK)):
                shutil.rmtree(path)

    def _take_over(self, folder: Path) -> None:
        """Make ``folder``, which an earlier run left, this run's, if it holds steps of the same work."""
        self.steps = list(whole_steps(folder, self.fingerprint))
        if not self.steps:
            shutil.rmtree(folder)
            return
        self.folder = folder
        keep = {path for step in self.steps for path in (step.file, step.file.with_suffix(".json"))}
        for path in list(folder.iterdir()):
            if path not in keep:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._names = {name for step in self.steps for name in step.tensors}

    def _write_bytes(self, name: str, data: bytes) -> None:
        assert _FILE_NAME.fullmatch(name), f"{name!r} is no plain file name"
        path = self.folder / name
        # A manifest that no longer fits must not survive beside the changed file.
        (self.folder / MANIFEST).unlink(missing_ok=True)
        write_synced(path, data)
        if name != MANIFEST:
            self._files[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def _write_shards(self) -> None:
        """Join the files of the steps, in order, into files of at most ``max_shard_bytes`` (or one tensor)."""
        plan: list[dict[str, Path]] = [{}]
        filled = 0
        for step in self.steps:
            for name, size in zip(step.tensors, step.sizes, strict=True):
                if plan[-1] and filled + size > self.max_shard_bytes:
                    plan.append({})
                    filled = 0
                plan[-1][name] = step.file
                filled += size
        for number, sources in enumerate(plan):
            path = self.folder / f"shard-{number:05d}"
            size, digest = write_file(path, Mapped(sources))
            self._shards.append((path, list(sources)))
            self._files[path.name] = {"size": size, "sha256": digest}
        self._name_shards()

    def _name_shards(self) -> None:
        """Give the shards their final names, which say how many there are, and write the index."""
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._shards):
            final = "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            if path.name != final:
                os.rename(path, self.folder / final)
                self._files[final] = self._files.pop(path.name)
                self._shards[number] = (self.folder / final, names)
            weight_map.update(dict.fromkeys(names, final))
        if count > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            self._write_bytes(INDEX, (json.dumps(index, indent=2) + "\n").encode())

    def _write_manifest(self) -> None:
        manifest = {"aiakq": aiakq.__version__, "files": dict(sorted(self._files.items()))}
        self._write_bytes(MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())

    def _verify(self) -> None:
        """Read every file back: a disk that lost a byte must be found now, not when the model answers nonsense."""
        for name, entry in self._files.items():
            with open(self.folder / name, "rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            if digest != entry["sha256"]:
                raise error("output_failed", path=str(self.output), reason=f"{name} does not read back as written")

    def _clean_up(self) -> None:
        self._pending = {}
        if not self._published:
            if self.resume and self.steps:
                shutil.rmtree(self.scratch, ignore_errors=True)
            else:
                shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            self._lock_path().unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None
        if not self._published:
            for parent in reversed(self._made_parents):
                with contextlib.suppress(OSError):
                    parent.rmdir()


def _replace(new: Path, old: Path) -> None:
    """Put ``new`` where ``old`` is, in one step where the system can exchange names, and remove the old folder."""
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    done = exchange is not None and not exchange(
        _AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE
    )
    if done:
        leftover = new
    else:
        # Two steps: a crash between them leaves the old folder under a name that the next sweep puts back.
        leftover = old.parent / f".{old.name}{_OLD_MARK}{secrets.token_hex(6)}"
        os.rename(old, leftover)
        try:
            os.rename(new, old)
        except OSError:
            os.rename(leftover, old)
            raise
    _sync_folder(old.parent)
    shutil.rmtree(leftover, ignore_errors=True)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"
