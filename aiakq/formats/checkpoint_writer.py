"""CheckpointWriter: writes tensors step by step, then joins them into shards with an index and a manifest.

The tensors of a step go into their own file, which is synced, and a note beside it marks it as complete. Finally the
files are joined into shards, which therefore do not depend on interruptions. The folder becomes the output by one
rename (output_folder.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType

import safetensors
from torch import Tensor

import aiakq
from aiakq.errors import error
from aiakq.formats.model_folder import INDEX, MANIFEST, MAX_MODULE_BYTES, read_file
from aiakq.formats.output_folder import OutputFolder, sync_folder
from aiakq.formats.safetensors_file import write_file
from aiakq.formats.steps import STEP_PREFIX, CommittedStep, LazyTensors, whole_steps, write_synced

#: Largest size of a shard unless another one is asked for.
_MAX_SHARD_BYTES = 5_000_000_000
_SCRATCH = "scratch"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_FILE_NAME = re.compile(rf"({_NAME}/)?{_NAME}")


class CheckpointWriter:
    """Writes one checkpoint folder; a context manager that leaves nothing behind unless ``publish`` was reached.

    Use: ``with CheckpointWriter(output, inputs=[source]) as writer: writer.add(...); ...; writer.publish()``.
    ``commit`` writes what was added since the last commit, so that memory holds one step at a time. With a
    ``fingerprint`` of the work and ``resume``, steps committed by an earlier run with the same fingerprint are reused
    (``steps``), and are kept again if this run fails. ``beside`` names a safetensors file for tensors that are
    not the model's (``add_beside``); it is written even if there are none. ``file_name`` returns what the checkpoint
    calls a tensor that was added; until then, in ``read`` and ``replace``, it has the name with which it was added.
    """

    def __init__(
        self,
        output: str | Path,
        inputs: Iterable[str | Path] = (),
        overwrite: bool = False,
        expected_bytes: int = 0,
        max_shard_bytes: int | None = None,
        fingerprint: str = "",
        resume: bool = False,
        beside: str | None = None,
        file_name: Callable[[str], str] = str,
    ) -> None:
        self._output = OutputFolder(output, inputs, overwrite)
        self.expected_bytes = expected_bytes
        self.max_shard_bytes = max_shard_bytes or _MAX_SHARD_BYTES
        self.fingerprint = fingerprint
        self.resume = resume and bool(fingerprint)
        #: The committed steps, in order; those of an earlier run come first.
        self.steps: list[CommittedStep] = []
        self._pending: dict[str, Tensor] = {}
        self._beside = beside
        self._file_name = file_name
        self._pending_beside: dict[str, Tensor] = {}
        self._shards: list[tuple[Path, list[str]]] = []
        self._names: set[str] = set()
        self._files: dict[str, dict[str, object]] = {}

    # --- the context ----------------------------------------------------------------------------------------------

    def __enter__(self) -> CheckpointWriter:
        """Take the lock, remove leftovers, check space. Raises ``output_locked``, ``no_space``, ``output_failed``."""
        try:
            with self._output.failures():
                self._output.claim(self._adopt)
                free = shutil.disk_usage(self.output.parent).free
                # Steps and the shards made from them exist on disk at the same time for a while.
                needed = int(2.02 * self.expected_bytes) - self.total_bytes
                if free < needed:
                    raise error(
                        "no_space", path=str(self.output), needed=_gigabytes(needed), available=_gigabytes(free)
                    )
                self.scratch.mkdir(parents=True, exist_ok=True)
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    # --- content --------------------------------------------------------------------------------------------------

    @property
    def output(self) -> Path:
        """The path where the checkpoint will be published."""
        return self._output.path

    @property
    def folder(self) -> Path:
        """The folder being written; readable as a checkpoint after ``seal``."""
        return self._output.partial

    @property
    def scratch(self) -> Path:
        """A folder for temporary files that are removed with this writer."""
        return self.folder / _SCRATCH

    @property
    def total_bytes(self) -> int:
        """Total bytes of all committed tensors."""
        return sum(size for _, size in self._places().values())

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one tensor; it must not be modified until the next commit."""
        assert name not in self._names, f"tensor {name} was added twice"
        self._names.add(name)
        self._pending[name] = tensor

    def replace(self, name: str, tensor: Tensor) -> None:
        """Replace a committed tensor by one of the same shape and dtype, with the next commit."""
        assert name in self._names and name not in self._pending, f"there is no committed tensor {name}"
        self._pending[name] = tensor

    def add_beside(self, name: str, tensor: Tensor) -> None:
        """Add a tensor of the file beside the weights; it must not be modified until the next commit."""
        assert self._beside is not None and name not in self._names, f"tensor {name} was added twice, or has no file"
        self._names.add(name)
        self._pending_beside[name] = tensor

    def commit(self, name: str, note: Mapping[str, object] | None = None) -> CommittedStep:
        """Write what was added since the last commit to disk as one step. ``note`` holds JSON values."""
        pending, self._pending = self._pending, {}
        beside, self._pending_beside = self._pending_beside, {}
        file = self.folder / f"{STEP_PREFIX}{len(self.steps):05d}.safetensors"
        with self._output.failures():
            size, digest = write_file(file, pending | beside)
            sizes = tuple(tensor.numel() * tensor.element_size() for tensor in pending.values())
            step = CommittedStep(name, file, tuple(pending), sizes, dict(note or {}), tuple(beside))
            entry = {
                "fingerprint": self.fingerprint,
                "name": name,
                "size": size,
                "sha256": digest,
                "tensors": dict(zip(step.tensors, sizes, strict=True)),
                "beside": step.beside,
                "note": step.note,
            }
            # The note completes the step, so it must appear atomically.
            draft = file.with_suffix(".tmp")
            write_synced(draft, json.dumps(entry).encode())
            os.rename(draft, file.with_suffix(".json"))
            sync_folder(self.folder)
        self.steps.append(step)
        return step

    def read(self, step: CommittedStep) -> dict[str, Tensor]:
        """Return the tensors of a committed step, memory-mapped."""
        with self._output.failures(), safetensors.safe_open(step.file, framework="pt", device="cpu") as handle:
            return {name: handle.get_tensor(name) for name in step.tensors}

    def copy_file(self, folder: Path, name: str) -> None:
        """Copy the file ``name`` of a folder, possibly in a subfolder, byte for byte, following links."""
        with self._output.failures():
            self._write_bytes(name, read_file(folder, name, limit=MAX_MODULE_BYTES if "/" in name else None))

    def add_text(self, name: str, text: str) -> None:
        """Write a text file, replacing an earlier one of that name."""
        with self._output.failures():
            self._write_bytes(name, text.encode())

    def add_json(self, name: str, value: object) -> None:
        """Write ``value`` as an indented JSON file, replacing an earlier one of that name."""
        self.add_text(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def seal(self) -> Path:
        """Join the steps into shards, write the index and the manifest; the folder can now be opened as a checkpoint.

        Files may still be added (such as a report of measurements on it); ``publish`` then updates the manifest.
        """
        with self._output.failures():
            if self._pending:
                self.commit("rest")
            if not self._shards:
                self._write_shards()
                self._write_beside()
            self._write_manifest()
        return self.folder

    def publish(self) -> Path:
        """Publish the folder as the output atomically, and return its path. Raises ``output_failed``."""
        self.seal()
        with self._output.failures():
            self._verify()
            kept = {MANIFEST, *(name.partition("/")[0] for name in self._files)}
            for path in list(self.folder.iterdir()):
                if path.name not in kept:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            self._output.publish()
        return self.output

    # --- internals ------------------------------------------------------------------------------------------------

    def _adopt(self, folder: Path) -> bool:
        """Reuse the steps that an earlier run of the same work left in ``folder``, if there are any."""
        if not self.resume or self.steps:
            return False
        self.steps = list(whole_steps(folder, self.fingerprint))
        if not self.steps:
            return False
        keep = {path for step in self.steps for path in (step.file, step.file.with_suffix(".json"))}
        for path in list(folder.iterdir()):
            if path not in keep:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._names = {name for step in self.steps for name in (*step.tensors, *step.beside)}
        return True

    def _write_bytes(self, name: str, data: bytes) -> None:
        assert _FILE_NAME.fullmatch(name), f"{name!r} is no plain file name"
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        # An outdated manifest must not remain beside the changed file.
        (self.folder / MANIFEST).unlink(missing_ok=True)
        write_synced(path, data)
        if name != MANIFEST:
            self._files[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def _write_shards(self) -> None:
        """Join the files of the steps, in order, into files of at most ``max_shard_bytes`` (or one tensor)."""
        plan: list[dict[str, tuple[Path, str]]] = [{}]
        filled = 0
        for name, (file, size) in self._places().items():
            if plan[-1] and filled + size > self.max_shard_bytes:
                plan.append({})
                filled = 0
            plan[-1][self._file_name(name)] = file, name
            filled += size
        for number, sources in enumerate(plan):
            path = self.folder / f"shard-{number:05d}"
            size, digest = write_file(path, LazyTensors(sources))
            self._shards.append((path, list(sources)))
            self._files[path.name] = {"size": size, "sha256": digest}
        self._name_shards()

    def _places(self) -> dict[str, tuple[Path, int]]:
        """Return the file and the bytes of every tensor, in the order of their first commits."""
        places: dict[str, tuple[Path, int]] = {}
        for step in self.steps:
            places |= {name: (step.file, size) for name, size in zip(step.tensors, step.sizes, strict=True)}
        return places

    def _write_beside(self) -> None:
        """Join the tensors that go beside the weights, in one file."""
        if self._beside is None:
            return
        path = self.folder / self._beside
        path.parent.mkdir(exist_ok=True)
        tensors = {self._file_name(name): (step.file, name) for step in self.steps for name in step.beside}
        size, digest = write_file(path, LazyTensors(tensors))
        self._files[self._beside] = {"size": size, "sha256": digest}

    def _name_shards(self) -> None:
        """Give the shards their final names, which contain their number, and write the index."""
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
        """Read every file back, to detect data corruption on disk now instead of when serving."""
        for name, entry in self._files.items():
            with open(self.folder / name, "rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            if digest != entry["sha256"]:
                raise error("output_failed", path=str(self.output), reason=f"{name} does not read back as written")

    def _release(self) -> None:
        self._pending, self._pending_beside = {}, {}
        keep = self.resume and bool(self.steps)
        if keep:
            shutil.rmtree(self.scratch, ignore_errors=True)
        self._output.release(keep)


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"
