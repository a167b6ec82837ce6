"""The two sides of ``bench ab``: checkouts, git revisions, wheels, interpreters, models, and their settings."""

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
from typing import Any

import aiakq
from aiakq.arguments.argument import Argument, checked_value, value_of_text
from aiakq.arguments.engine import ENGINE_ARGUMENTS
from aiakq.arguments.server import ARGUMENTS
from aiakq.errors import error
from aiakq.records import finite

#: What the native kernels are built from, in a checkout; and what is built.
_NATIVE_SOURCES, _NATIVE = ("kernels/cpu/src", "kernels/cpu/build.py"), "kernels/cpu/_native.so"
#: The variable that names another native library.
_LIBRARY = "AIAKQ_CPU_LIBRARY"


@dataclass(frozen=True)
class Side:
    """One side.

    name         base or new.
    label        what it is, for people.
    interpreter  the Python that runs it.
    path         a folder put in front of what is installed there; None: what is installed.
    engine       keywords of LLM.
    """

    name: str
    label: str
    interpreter: str
    path: Path | None
    engine: Mapping[str, Any]

    def environment(self, library: Path | None = None) -> dict[str, str]:
        """The variables of its process. ``library`` is read in place of its own native library."""
        own = dict(os.environ) if self.path is None else {**os.environ, "PYTHONPATH": str(self.path)}
        return own if library is None else {**own, _LIBRARY: str(library)}

    @cached_property
    def library(self) -> Path | None:
        """Its native library; None if it has none, or a variable names one."""
        if _LIBRARY in os.environ:
            return None
        code = "from aiakq.kernels.cpu import build; print(build.TARGET)"
        found = subprocess.run(
            [self.interpreter, "-P", "-c", code], capture_output=True, text=True, env=self.environment(), check=False
        )
        file = Path(found.stdout.strip() or os.devnull)
        return file if file.is_file() else None


def fresh_libraries(sides: Sequence[Side], folder: Path) -> list[Path | None]:
    """Copies of the native libraries of ``sides`` in ``folder``; sides whose libraries are equal share one.

    Two equal files differ in speed by a percent or more, for as long as the system has them in memory: it depends on
    where there. With a new copy for each round that is noise, and not taken for a difference between the sides.
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
    engine: Mapping[str, Any],
    stack: contextlib.ExitStack,
    serve: bool = False,
) -> Side:
    """The side that ``word`` names; None is this installation. What it needs on disk lasts as long as ``stack``.

    settings  engine arguments of this side only, as ``key=value``; with ``serve`` also the server's.
    Raises ``usage`` if there is no such thing, ``bad_option``, ``side_failed`` if its kernels cannot be built.
    """
    own = {**engine, **_parsed(name, settings, ARGUMENTS if serve else ENGINE_ARGUMENTS)}
    label = f"{name}: {word or 'this installation'}" + "".join(f", {setting}" for setting in settings)
    interpreter, front = sys.executable, None
    path = None if word is None else Path(word).expanduser()
    if word is None or path is None:
        pass
    elif path.suffix == ".whl" and path.is_file():
        front = _temporary(stack)
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(front)
    elif path.is_file() and os.access(path, os.X_OK):
        interpreter = str(path.absolute())  # not resolved: a virtual environment is found by the link's place
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
                reason=f"--{name} {word} is no checkout, wheel, interpreter, environment, model or git revision.",
                hint=f"Examples: --{name} HEAD~1, --{name} ../other-checkout, --{name} dist/aiakq-0.1.0.whl",
            )
        label += f" ({commit[:12]})"
        front = _linked(_extract(name, commit, stack), stack)
    if not own.get("model"):
        raise error("usage", reason="No model is given.", hint="Example: aiakq bench ab MODEL --base HEAD~1")
    return Side(name, label, interpreter, front, finite(own))


def _parsed(name: str, settings: Sequence[str], known: Sequence[Argument]) -> dict[str, Any]:
    """``key=value`` as arguments. Raises ``usage`` and ``bad_option``."""
    rows = {row.key: row for row in known}
    found = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        row = rows.get(key.strip().lstrip("-").replace("-", "_"))
        if row is None or not equals:
            raise error(
                "usage",
                reason=f"--{name}-set {setting} is not an engine argument and its value.",
                hint=f"Example: --{name}-set max_num_seqs=8; docs/arguments.md lists them.",
            )
        found[row.name] = checked_value(row, value_of_text(row, text, f"--{name}-set {key}"))
    return found


def _temporary(stack: contextlib.ExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aiakq-ab-")))


def _linked(checkout: Path, stack: contextlib.ExitStack) -> Path:
    """A folder that, in front of the import path, makes ``aiakq`` that of ``checkout``, whose kernels lie beside it."""
    _need_native(checkout)
    front = _temporary(stack)
    package = front / "aiakq"
    package.mkdir()
    for entry in (checkout / "aiakq").iterdir():
        if entry.name not in ("__pycache__", "kernels"):
            (package / entry.name).symlink_to(entry)
    (package / "kernels").symlink_to(checkout / "kernels")
    return front


def _need_native(checkout: Path) -> None:
    """Build the native kernels of ``checkout`` unless they are there; those of equal sources are copied."""
    if (checkout / _NATIVE).exists() or not (checkout / _NATIVE_SOURCES[0]).is_dir():
        return
    ours = Path(aiakq.__file__).resolve().parent.parent
    if (ours / _NATIVE).exists() and all(_same(ours / name, checkout / name) for name in _NATIVE_SOURCES):
        shutil.copy2(ours / _NATIVE, checkout / _NATIVE)
        return
    built = subprocess.run(
        [sys.executable, "-P", str(checkout / "kernels/cpu/build.py")], capture_output=True, text=True, check=False
    )
    if not (checkout / _NATIVE).exists():
        reason = (built.stderr or built.stdout).strip().splitlines()[-1:]
        raise error("side_failed", side=checkout, reason=f"its kernels cannot be built: {' '.join(reason)}")


def _same(one: Path, other: Path) -> bool:
    """Whether two files, or two folders of files, have the same contents."""
    if not one.is_dir():
        return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)
    names = sorted(path.name for path in one.iterdir())
    return names == sorted(path.name for path in other.iterdir()) and all(
        _same(one / name, other / name) for name in names
    )


def _commit_of(revision: str) -> str | None:
    """The commit that ``revision`` names in the repository of the current folder."""
    found = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    return found.stdout.decode().strip() if found is not None and found.returncode == 0 else None


def _extract(name: str, commit: str, stack: contextlib.ExitStack) -> Path:
    """The files of ``commit`` in a temporary folder."""
    folder = _temporary(stack)
    top = _git("rev-parse", "--show-toplevel")
    assert top is not None
    archive = folder / "files.tar"
    made = _git("-C", top.stdout.decode().strip(), "archive", "--format=tar", f"--output={archive}", commit)
    if made is None or made.returncode:
        raise error("side_failed", side=name, reason=made.stderr.decode().strip() if made else "git is not there")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    archive.unlink()
    if not (folder / "aiakq" / "__init__.py").exists():
        raise error(
            "usage", reason=f"The commit {commit[:12]} holds no aiakq/.", hint="Start it in a checkout of aiakq."
        )
    return folder


def _git(*words: str) -> subprocess.CompletedProcess[bytes] | None:
    try:
        return subprocess.run(["git", *words], capture_output=True, check=False)
    except OSError:
        return None
