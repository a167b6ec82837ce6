"""OutputFolder: an output folder that is published atomically.

Everything is written to a hidden sibling folder, ``.<name>.aiakq-partial-<random>``; a rename publishes it, and the
parent folder is synced. After a kill -9 the output is absent or the old one, and the next run either resumes from the
leftovers or removes them. A lock file beside the output excludes a second writer.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from aiakq.errors import AiakqError, error
from aiakq.formats.model_folder import PARTIAL_MARK, kept_reason
from aiakq.system.user_path import user_path

_OLD_MARK = ".aiakq-old-"
_LOCK_SUFFIX = ".aiakq-lock"
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_SPARE_DESCRIPTORS = 6


def check_output(output: str | Path, inputs: Iterable[str | Path] = (), overwrite: bool = False) -> Path:
    """Return the real path of an output, after all checks that do not need the lock.

    Raises ``output_is_input``, ``output_exists``, ``output_not_folder``, ``output_not_model`` and ``output_failed``.
    """
    try:
        real = Path(os.path.realpath(user_path(output)))
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
            reason = kept_reason(real)
            if reason is not None:
                raise error("output_not_model", path=str(output), reason=reason)
    elif os.path.lexists(real):
        raise error("output_not_folder", path=str(output))
    return real


def _contains(outer: Path, inner: Path) -> bool:
    """Whether ``inner`` is ``outer`` or lies inside it, by inode too, so that bind mounts do not hide it."""
    if inner.is_relative_to(outer):
        return True
    try:
        status = outer.stat()
    except OSError:
        return False
    for step in (inner, *inner.parents):
        with contextlib.suppress(OSError):
            if os.path.samestat(step.stat(), status):
                return True
    return False


class OutputFolder:
    """An output in progress: ``claim``, write into ``partial``, ``publish``, and always ``release``.

    path     final path of the output.
    partial  folder to write into.
    """

    def __init__(self, output: str | Path, inputs: Iterable[str | Path] = (), overwrite: bool = False) -> None:
        """Raises what ``check_output`` raises."""
        self.path = check_output(output, inputs, overwrite)
        self.overwrite = overwrite
        self.partial = self.path.parent / f".{self.path.name}{PARTIAL_MARK}{secrets.token_hex(6)}"
        self._lock: int | None = None
        self._made_parents: list[Path] = []
        self._spare: list[int] = []
        self._published = False

    def claim(self, adopt: Callable[[Path], bool]) -> None:
        """Create parent folders, take the lock, and remove what killed runs on this output left.

        A leftover folder is kept and becomes ``partial`` if ``adopt(folder)`` is true. Raises ``output_locked``,
        ``output_exists`` and OSError.
        """
        self._make_parents()
        # Removing a folder needs a few file descriptors, even after a failure due to a lack of them: reserve some.
        self._spare += [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(_SPARE_DESCRIPTORS)]
        self._take_lock()
        self._sweep(adopt)

    def publish(self) -> None:
        """Publish ``partial`` as the output atomically. Raises ``output_exists`` and OSError."""
        sync_folder(self.partial)
        if self.path.is_dir() and any(self.path.iterdir()):
            if not self.overwrite:  # it may have appeared in the meantime
                raise error("output_exists", path=str(self.path))
            _replace(self.partial, self.path)
        else:
            os.rename(self.partial, self.path)
        self._published = True
        sync_folder(self.path.parent)

    def release(self, keep: bool = False) -> None:
        """Release the lock and remove unpublished files; ``keep`` spares ``partial``."""
        while self._spare:
            os.close(self._spare.pop())
        if not self._published and not keep:
            shutil.rmtree(self.partial, ignore_errors=True)
        if self._lock is not None:
            with contextlib.suppress(OSError):  # the lock ends with its descriptor; a leftover empty file is harmless
                self._lock_path().unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None
        if not self._published:
            for parent in reversed(self._made_parents):
                with contextlib.suppress(OSError):
                    parent.rmdir()

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """Convert an OSError to ``output_failed`` with its cause."""
        try:
            yield
        except AiakqError:
            raise
        except OSError as problem:
            reason = problem.strerror or str(problem)
            raise error("output_failed", path=str(self.path), reason=reason) from problem

    def _make_parents(self) -> None:
        missing = [parent for parent in (self.path.parent, *self.path.parent.parents) if not parent.exists()]
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
                    raise error("output_locked", path=str(self.path)) from None
                raise
            # The previous holder may have removed the file between our open and our lock.
            try:
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    self._lock = descriptor
                    return
            except FileNotFoundError:
                pass
            os.close(descriptor)

    def _lock_path(self) -> Path:
        return self.path.parent / f".{self.path.name}{_LOCK_SUFFIX}"

    def _sweep(self, adopt: Callable[[Path], bool]) -> None:
        """Remove leftovers of killed runs, or adopt them; restore an old output that was moved aside."""
        prefix = f".{self.path.name}"
        for path in sorted(self.path.parent.iterdir()):
            if path.name.startswith(prefix + _OLD_MARK) and not self.path.exists():
                os.rename(path, self.path)
                self.path = check_output(self.path, (), self.overwrite)
            elif path.name.startswith(prefix + PARTIAL_MARK) and adopt(path):
                self.partial = path
            elif path.name.startswith((prefix + PARTIAL_MARK, prefix + _OLD_MARK)):
                shutil.rmtree(path)


def _replace(new: Path, old: Path) -> None:
    """Replace ``old`` by ``new``, atomically if the system can exchange names, and remove the old folder."""
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    done = exchange is not None and not exchange(
        _AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE
    )
    if done:
        leftover = new
    else:
        # Two steps: after a crash between them, the next sweep restores the old folder.
        leftover = old.parent / f".{old.name}{_OLD_MARK}{secrets.token_hex(6)}"
        os.rename(old, leftover)
        try:
            os.rename(new, old)
        except OSError:
            os.rename(leftover, old)
            raise
    sync_folder(old.parent)
    shutil.rmtree(leftover, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Sync the entries of a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
