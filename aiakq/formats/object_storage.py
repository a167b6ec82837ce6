"""Models in object storage: ``s3://bucket/model``, ``gs://``, ``az://`` and the like, fetched through fsspec.

Files are copied into a folder of the cache, several parts at a time, and a file that has not changed since is not
fetched again. Nothing in the storage decides where a file is written: only plain names are taken.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from aiakq.errors import AiakqError, error, first_line
from aiakq.formats.mistral.params import PARAMS
from aiakq.system.files import cache_folder

#: Scheme of a URL -> the package that fsspec needs for it.
SCHEMES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}
#: Parts that are fetched at a time, and their size in bytes.
_THREADS, _PART = 8, 32 << 20
#: A record of what was fetched, in the folder of the model.
_RECORD = ".fetched.json"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][\w.+-]{0,200}")
#: Keys of fsspec's descriptions of a file, one of which changes whenever the file does.
_VERSIONS = ("ETag", "etag", "generation", "version_id", "content_md5", "LastModified", "last_modified", "mtime")


@dataclass(frozen=True)
class _File:
    """A file of the model: its path in the storage, bytes, and what changes whenever the file does."""

    path: str
    size: int
    version: str


def is_url(name: str) -> bool:
    """Whether a model's name is the URL of a folder in object storage."""
    return name.partition("://")[0] in SCHEMES and "://" in name


def fetch(url: str, cache: str | None, patterns: Sequence[str], ignore: Sequence[str]) -> Path:
    """Return a local folder with the files of the folder ``url`` that match ``patterns`` and none of ``ignore``.

    cache  folder for models of object storage; None: that of the user's cache.

    Raises ``model_storage`` if the storage does not deliver them, and ``no_space`` if they do not fit on the disk.
    """
    url = url.rstrip("/")
    root = Path(cache) if cache else cache_folder()
    digest = hashlib.sha256(url.encode()).hexdigest()[:12]
    folder = root / "object-storage" / f"{_slug(url)}-{digest}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(folder), _reported(url):
        storage, path = _storage_of(url)
        wanted = {
            name: file
            for name, file in _listed(storage, path).items()
            if any(fnmatch(name, pattern) for pattern in patterns)
            and not any(fnmatch(name, pattern) for pattern in ignore)
        }
        if not wanted.keys() & {"config.json", PARAMS} and not any(name.endswith(".gguf") for name in wanted):
            raise error("model_storage", name=url, reason="it contains no config.json and no GGUF file")
        _update(storage, folder, wanted)
    return folder


def names(url: str) -> list[str]:
    """Return the names of the files in the folder ``url``. Raises ``model_storage``."""
    with _reported(url):
        storage, path = _storage_of(url.rstrip("/"))
        return sorted(_listed(storage, path))


def _slug(url: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", url.partition("://")[2]).strip("-.")[-60:] or "model"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from fetching the same model."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _reported(url: str) -> Iterator[None]:
    """Turn what the many clients raise (HTTP, credentials, permissions) into ``model_storage`` with its first line."""
    try:
        yield
    except AiakqError:
        raise
    except Exception as problem:
        raise error("model_storage", name=url, reason=first_line(problem)[:200]) from problem


def _storage_of(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it."""
    import fsspec

    try:
        storage, path = fsspec.core.url_to_fs(url)
    except ImportError:
        package = SCHEMES[url.partition("://")[0]]
        raise error(
            "model_storage", name=url, reason=f"the package {package} is missing (pip install {package})"
        ) from None
    return storage, path


def _listed(storage: Any, path: str) -> dict[str, _File]:
    """Return name -> file of a folder's files, without those in folders inside it."""
    found = {}
    for entry in storage.ls(path, detail=True):
        name = str(entry["name"]).rstrip("/").rpartition("/")[2]
        if entry.get("type") == "file" and _PLAIN_NAME.fullmatch(name):
            versions = {key: str(entry[key]) for key in _VERSIONS if entry.get(key) is not None}
            found[name] = _File(str(entry["name"]), int(entry["size"]), json.dumps(versions))
    return found


def _update(storage: Any, folder: Path, wanted: Mapping[str, _File]) -> None:
    """Fetch the files that are missing or have changed, and remove those that the storage no longer has."""
    record = folder / _RECORD
    known: dict[str, Any] = json.loads(record.read_text()) if record.is_file() else {}
    changed = {name: file for name, file in wanted.items() if not _is_current(folder / name, file, known.get(name))}
    missing = sum(file.size for file in changed.values())
    free = shutil.disk_usage(folder).free
    if missing > free:
        needed, available = (f"{count / 1e9:.2f} GB" for count in (missing, free))
        raise error("no_space", path=str(folder), needed=needed, available=available)
    for path in folder.iterdir():
        if path.name not in wanted and path.name not in (_RECORD, ".lock"):
            path.unlink()
    with ThreadPoolExecutor(_THREADS) as pool:
        for name, file in changed.items():
            part = folder / f".{name}.part"
            with part.open("wb") as target:
                target.truncate(file.size)
                fetch_part = functools.partial(_fetch_part, storage, file, target.fileno())
                list(pool.map(fetch_part, range(0, file.size, _PART)))
            os.replace(part, folder / name)
            known[name] = [file.size, file.version]
            record.write_text(json.dumps({name: known[name] for name in wanted if name in known}))


def _is_current(path: Path, file: _File, recorded: object) -> bool:
    """Whether a local file is what the storage has. Files of a storage that knows no versions are fetched again."""
    has_versions = file.version != "{}"
    return (
        has_versions and recorded == [file.size, file.version] and path.is_file() and path.stat().st_size == file.size
    )


def _fetch_part(storage: Any, file: _File, target: int, start: int) -> None:
    end = min(start + _PART, file.size)
    data = storage.cat_file(file.path, start=start, end=end)
    if len(data) != end - start:
        raise OSError(f"{file.path} has changed while it was fetched")
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(target, view[done:], start + done)
