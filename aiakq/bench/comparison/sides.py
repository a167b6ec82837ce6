"""Resolve the sides of ``bench ab``: checkouts, git revisions, wheels, interpreters, models, and their settings."""

from __future__ import annotations

import contextlib
import filecmp
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import aiakq
from aiakq.arguments.argument import Argument, checked_value, value_of_text
from aiakq.arguments.engine import ENGINE_ARGUMENTS
from aiakq.arguments.server import ARGUMENTS
from aiakq.errors import error
from aiakq.records import finite
from aiakq.system.user_path import user_path

#: Sources of the native kernels and the library built from them, relative to a checkout.
_NATIVE_SOURCES, _NATIVE = ("kernels/cpu/src", "kernels/cpu/build.py"), "kernels/cpu/_native.so"
#: Environment variable with the path of a native library to load instead of the package's own.
_LIBRARY = "AIAKQ_CPU_LIBRARY"


@dataclass(frozen=True)
class Side:
    """One side of a comparison.

    name         "base" or "new".
    label        description for reports and messages.
    interpreter  path of the Python interpreter that runs it.
    path         folder to put on PYTHONPATH, or None to use the installed package.
    engine       keyword arguments of ``LLM``.
    """

    name: str
    label: str
    interpreter: str
    path: Path | None
    engine: Mapping[str, object]

    def environment(self, library: Path | None = None) -> dict[str, str]:
        """Return the environment variables of its process, which loads ``library`` if one is given."""
        own = dict(os.environ) if self.path is None else {**os.environ, "PYTHONPATH": str(self.path)}
        return own if library is None else {**own, _LIBRARY: str(library)}

    @cached_property
    def library(self) -> Path | None:
        """Path of its native library, or None if it has none or ``AIAKQ_CPU_LIBRARY`` is set."""
        if _LIBRARY in os.environ:
            return None
        code = "from aiakq.kernels.cpu import build; print(build.TARGET)"
        result = subprocess.run(
            [self.interpreter, "-P", "-c", code], capture_output=True, text=True, env=self.environment(), check=False
        )
        file = Path(result.stdout.strip() or os.devnull)
        return file if file.is_file() else None


def fresh_libraries(sides: Sequence[Side], folder: Path) -> list[Path | None]:
    """Copy the native libraries of ``sides`` into ``folder`` and return the copies; identical libraries share one.

    The speed of a library depends by a percent or more on its physical pages in the page cache, and so stays the same
    from process to process. A new copy for each round turns this bias into noise.
    """
    copies: list[Path | None] = []
    for number, side in enumerate(sides):
        file, copy = side.library, folder / f"{number}.so"
        equal = [one for one in copies if one is not None and file is not None and filecmp.cmp(one, file, False)]
        if file is not None and not equal:
            shutil.copyfile(file, copy)
        copies.append(equal[0] if equal else None if file is None else copy)
    return copies


def open_side(
    name: str,
    word: str | None,
    settings: Sequence[str],
    engine: Mapping[str, object],
    stack: contextlib.ExitStack,
    serve: bool = False,
) -> Side:
    """Return the side that ``word`` names, or this installation if it is None.

    settings  ``key=value`` engine arguments of this side only; with ``serve`` also server arguments.
    stack     removes the temporary folders of the side when it closes.
    Raises ``usage`` if ``word`` names nothing, ``bad_option``, and ``side_failed`` if its kernels cannot be built.
    """
    own = {**engine, **_parsed(name, settings, ARGUMENTS if serve else ENGINE_ARGUMENTS)}
    label = f"{name}: {word or 'this installation'}" + "".join(f", {setting}" for setting in settings)
    interpreter, front = sys.executable, None
    path = None if word is None else user_path(word)
    if word is None or path is None:
        pass
    elif path.suffix == ".whl" and path.is_file():
        front = _temporary(stack)
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(front)
    elif path.is_file() and os.access(path, os.X_OK):
        interpreter = str(path.absolute())  # not resolved: Python finds its virtual environment from the symlink
    elif (path / "bin" / "python").exists():
        interpreter = str((path / "bin" / "python").absolute())
    elif (path / "aiakq" / "__init__.py").exists():
        front = _linked(path.resolve(), stack)
    elif (path / "config.json").exists():
        own["model"] = str(path)
    else:
        commit = _commit_of(word)
        if commit is None:
            raise error(
                "usage",
                reason=f"--{name} {word} is not a checkout, wheel, interpreter, environment, model or git revision.",
                hint=f"Examples: --{name} HEAD~1, --{name} ../other-checkout, --{name} dist/aiakq-0.1.0.whl",
            )
        label += f" ({commit[:12]})"
        front = _linked(_extract(name, commit, stack), stack)
    if not own.get("model"):
        raise error("usage", reason="No model is given.", hint="Example: aiakq bench ab MODEL --base HEAD~1")
    return Side(name, label, interpreter, front, finite(own))


def _parsed(name: str, settings: Sequence[str], known: Sequence[Argument]) -> dict[str, object]:
    """Parse ``key=value`` settings into keyword arguments. Raises ``usage`` and ``bad_option``."""
    rows = {row.key: row for row in known}
    values = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        row = rows.get(key.strip().lstrip("-").replace("-", "_"))
        if row is None or not equals:
            raise error(
                "usage",
                reason=f"--{name}-set {setting} is not KEY=VALUE of an engine argument.",
                hint=f"Example: --{name}-set max_num_seqs=8; docs/arguments.md lists them.",
            )
        values[row.name] = checked_value(row, value_of_text(row, text, f"--{name}-set {key}"))
    return values


def _temporary(stack: contextlib.ExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aiakq-ab-")))


def _linked(checkout: Path, stack: contextlib.ExitStack) -> Path:
    """Return a folder for PYTHONPATH from which ``import aiakq`` imports the package of ``checkout``.

    A checkout has ``kernels/`` next to ``aiakq/``; the folder links it to ``aiakq/kernels``.
    """
    _ensure_native(checkout)
    front = _temporary(stack)
    package = front / "aiakq"
    package.mkdir()
    for entry in (checkout / "aiakq").iterdir():
        if entry.name not in ("__pycache__", "kernels"):
            (package / entry.name).symlink_to(entry)
    (package / "kernels").symlink_to(checkout / "kernels")
    return front


def _ensure_native(checkout: Path) -> None:
    """Build the native kernels of ``checkout`` if it has none, or copy this installation's if the sources are equal."""
    if (checkout / _NATIVE).exists() or not (checkout / _NATIVE_SOURCES[0]).is_dir():
        return
    ours = Path(aiakq.__file__).resolve().parent.parent
    if (ours / _NATIVE).exists() and all(_same_contents(ours / name, checkout / name) for name in _NATIVE_SOURCES):
        shutil.copy2(ours / _NATIVE, checkout / _NATIVE)
        return
    built = subprocess.run(
        [sys.executable, "-P", str(checkout / "kernels/cpu/build.py")], capture_output=True, text=True, check=False
    )
    if not (checkout / _NATIVE).exists():
        reason = (built.stderr or built.stdout).strip().splitlines()[-1:]
        raise error("side_failed", side=checkout, reason=f"its kernels cannot be built: {' '.join(reason)}")


def _same_contents(first: Path, second: Path) -> bool:
    """Whether two files, or two folders of files, have the same contents."""
    if not first.is_dir():
        return first.is_file() and second.is_file() and filecmp.cmp(first, second, shallow=False)
    names = sorted(path.name for path in first.iterdir())
    return names == sorted(path.name for path in second.iterdir()) and all(
        _same_contents(first / name, second / name) for name in names
    )


def _commit_of(revision: str) -> str | None:
    """Return the hash of the commit ``revision`` in the current folder's repository, or None."""
    result = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    return result.stdout.decode().strip() if result is not None and result.returncode == 0 else None


def _extract(name: str, commit: str, stack: contextlib.ExitStack) -> Path:
    """Extract the files of ``commit`` into a temporary folder and return it."""
    folder = _temporary(stack)
    top = _git("rev-parse", "--show-toplevel")
    assert top is not None
    archive = folder / "files.tar"
    result = _git("-C", top.stdout.decode().strip(), "archive", "--format=tar", f"--output={archive}", commit)
    if result is None or result.returncode:
        raise error("side_failed", side=name, reason=result.stderr.decode().strip() if result else "git cannot be run")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    archive.unlink()
    if not (folder / "aiakq" / "__init__.py").exists():
        raise error(
            "usage", reason=f"The commit {commit[:12]} contains no aiakq/.", hint="Run it in a checkout of aiakq."
        )
    return folder


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes] | None:
    """Run git. Returns None if it cannot be started."""
    try:
        return subprocess.run(["git", *arguments], capture_output=True, check=False)
    except OSError:
        return None
