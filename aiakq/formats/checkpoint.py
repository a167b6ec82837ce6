"""Checkpoint: a model folder, opened and validated from its headers, read tensor by tensor.

Nothing in the folder is executed, no path may leave it, and pickles are read only as plain tensors (torch_file.py), for
models without safetensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import torch
from torch import Tensor

from aiakq import formats
from aiakq.errors import AiakqError, error
from aiakq.formats import quantization_config, text_names, unread_formats
from aiakq.formats.checks import check_activation_factors, derive_group_size, finite, mismatch
from aiakq.formats.foreign_folder import MISTRAL, ForeignTensors, foreign_tensors
from aiakq.formats.headers import Dimensions
from aiakq.formats.hub import resolve_model
from aiakq.formats.model_folder import (
    PARTIAL_MARK,
    check_manifest,
    file_identity,
    link_problem,
    open_regular,
    read_json,
    real_path,
    some_of,
)
from aiakq.formats.rotated_inputs import check_rotated
from aiakq.formats.safetensors_file import TensorInfo, read_tensor
from aiakq.formats.shards import Shards, consolidated_files, describe_unread, shard_files, shard_header, unread_files
from aiakq.kernels.types import QWeight
from aiakq.spec import QuantSpec

#: Maximum number of tensors in all shards; the largest real models stay below 250 000.
_MAX_TENSORS = 500_000
_MAX_CONFIG_KEYS = 10_000
#: Maximum number of open shards.
_MAX_OPEN = 64
#: Rows of a matrix that are checked at once, so that it needs little memory besides its own.
_ROWS_CHECKED = 8192


class Checkpoint:
    """A model folder whose headers were read and validated; tensors are read from their files on access.

    path       the folder.
    config     its config.json.
    inventory  name -> header of every tensor.
    remarks    what the user should know about the files.
    unread     the remark about files of weights that are not read; empty if there are none.
    mapped     whether tensors of safetensors files are memory-mapped: loading is a tenth faster, but truncating a
               shard in the meantime kills the process with SIGBUS.
    foreign    the tensors of what the folder was made from (made_folder.py), in place of shards; else None.
    threads    threads that read a tensor of a file that is not mapped.
    shapes     packed linear -> N and K that the model has, once they are known; tensors of some formats do not tell
               them.
    """

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        self.config = config
        self.inventory: dict[str, TensorInfo] = {}
        self.remarks: list[str] = []
        self.unread = ""
        self.mapped = False
        self.foreign: ForeignTensors | None = None
        self.threads = 1
        self.shapes: dict[str, tuple[int, int]] = {}
        self._mappings: dict[str, Any] = {}
        self._streams: dict[str, BinaryIO] = {}
        self._layouts: dict[str, str] = {}
        self._identities: dict[str, tuple[int, int, int, int] | None] = {}

    @classmethod
    def fetch(cls, name_or_path: str, revision: str | None = None) -> Checkpoint:
        """Open a local folder or a model of the hub. Raises what ``resolve_model`` and ``open`` raise."""
        return cls.open(resolve_model(name_or_path, revision))

    @classmethod
    def open(
        cls,
        path: str | Path,
        weights: str = "auto",
        ignore: Sequence[str] = (),
        config: Mapping[str, object] | None = None,
    ) -> Checkpoint:
        """Read config.json and every shard's header.

        weights  safetensors, pt or mistral read only one kind; auto reads torch's files where there are no safetensors.
        ignore   patterns of weight files to ignore.
        config   replaces config.json.

        Raises ``model_missing``, ``model_incomplete``, ``model_malformed``, ``pickle_refused``, ``path_outside_model``.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise error("model_missing", path=str(path))
        if config is None and not (folder / "config.json").exists():
            missing = f"config.json is {link_problem(folder / 'config.json') or 'missing'}"
            missing = "it is an unfinished write by aiakq" if PARTIAL_MARK in folder.name else missing
            raise error("model_incomplete", path=str(path), missing=missing)
        before = file_identity(folder / "config.json")
        if config is None:
            config = read_json(folder / "config.json", str(folder / "config.json"))
        if len(config) > _MAX_CONFIG_KEYS:  # config classes of transformers are slow for each key
            raise error("model_malformed", file="config.json", reason=f"it has {len(config)} keys")
        if (
            tensors := foreign_tensors(folder, config, lambda source: cls.open(source, MISTRAL, ignore, {}))
        ) is not None:
            return cls._of_foreign(folder, tensors, config)
        consolidated = weights == MISTRAL
        shards = consolidated_files(folder, ignore) if consolidated else shard_files(folder, weights, ignore)
        check_manifest(folder, config)
        checkpoint = cls(folder, dict(config))
        checkpoint._identities["config.json"] = before
        for file, listed in shards.items():
            checkpoint.remember([file])
            checkpoint._add_shard(file, listed, shards)
        if not checkpoint.inventory:
            raise error("model_incomplete", path=str(path), missing="it holds no tensor")
        checkpoint._compare_index(shards)
        if unread := unread_files(folder, shards, ignore):
            checkpoint.unread = describe_unread(unread, shards)
            checkpoint.remarks.append(checkpoint.unread)
        return checkpoint

    @classmethod
    def _of_foreign(cls, folder: Path, tensors: ForeignTensors, config: Mapping[str, Any]) -> Checkpoint:
        """Return the checkpoint in ``folder``, which was made from what holds ``tensors``."""
        checkpoint = cls(folder, dict(config))
        checkpoint.foreign = tensors
        checkpoint.inventory = tensors.inventory
        if remark := tensors.remark():
            checkpoint.remarks.append(remark)
        return checkpoint

    def read_with(self, mapped: bool, threads: int, dtype: torch.dtype) -> None:
        """Set how tensors are read, see ``Checkpoint``, and the dtype of floats that are decoded from blocks."""
        self.mapped, self.threads = mapped, threads
        if self.foreign is not None:
            self.foreign.read_with(mapped, threads, dtype)

    def _add_shard(self, file: str, listed: Collection[str] | None, shards: Shards) -> None:
        """Add the tensors of a shard to the inventory: those that it holds, whatever the index says.

        A tensor may be in several shards with the same values; with others, programs would not agree which one counts.
        """
        for name, info in self._header(file).items():
            known = self.inventory.get(name)
            if known is not None:
                if not self._is_same(known, info):
                    reason = f"tensor {name} is in {known.file}, too, with other values"
                    raise error("model_malformed", file=file, reason=reason)
                if name in (shards[known.file] or ()) or name not in (listed or ()):
                    continue
            self.inventory[name] = info
        if len(self.inventory) > _MAX_TENSORS:
            raise error("model_malformed", file=file, reason=f"the shards hold more than {_MAX_TENSORS} tensors")

    def _is_same(self, one: TensorInfo, other: TensorInfo) -> bool:
        """Whether two tensors are equal bit for bit. Reads both."""
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        values = [read_tensor(self._streams.get(each.file) or self._open(each.file), each) for each in (one, other)]
        return torch.equal(*(value.reshape(-1).view(torch.uint8) for value in values))

    def _compare_index(self, shards: Shards) -> None:
        """Note names under which the index and the shards differ; transformers takes only file names from an index."""
        said = {name: file for file, listed in shards.items() for name in listed or ()}
        if not said:
            if len(shards) > 1:
                self.remarks.append(f"there is no index, and all of its {len(shards)} shards are read")
            return
        held = {name: info.file for name, info in self.inventory.items()}
        wrong = sorted(name for name in said.keys() | held.keys() if said.get(name) != held.get(name))
        if wrong:
            self.remarks.append(
                f"the index of the shards is not exact, and only its file names are used: {some_of(wrong)}"
            )

    @property
    def named_path(self) -> Path:
        """What the user calls the model: what the folder was made from, or the folder."""
        return self.path if self.foreign is None else self.foreign.source

    @property
    def weights_folder(self) -> Path:
        """The folder of the files that the inventory names."""
        return self.path if self.foreign is None else self.foreign.folder

    @cached_property
    def spec(self) -> QuantSpec | None:
        """Return how the checkpoint is quantized, or None. Raises ``format_unsupported``."""
        spec = quantization_config.read_spec(self.path, self.config)
        tensors = {name: self.inventory[name] for name in self.inventory.keys() - self.beside_text}
        unread_formats.check(tensors, self.config, spec)
        if spec is not None and spec.rotated:
            linears = {name.rpartition(".")[0] for name in self.inventory}
            check_rotated(spec, {name: self._headers(name) for name in linears if spec.rotates(name)})
        check_activation_factors(self.inventory, self.tensor)
        return spec

    def tensor(self, name: str) -> Tensor:
        """Read one tensor to the CPU. Raises KeyError for a name outside the inventory.

        Raises ``model_malformed`` if the file has changed since its header was read.
        """
        if self.foreign is not None:
            return self.foreign.read(name)
        info = self.inventory[name]
        if self.mapped and not info.file.endswith(".bin"):
            mapping = self._mappings.get(info.file) or self._map(info.file)
            self._check_unchanged(info.file, self.path / info.file)
            tensor: Tensor = mapping.get_tensor(name)
        else:
            stream = self._streams.get(info.file) or self._open(info.file)
            tensor = read_tensor(stream, info, self.threads)
            self._check_unchanged(info.file, stream.fileno())
        return tensor

    def checked_tensor(self, name: str) -> Tensor:
        """Call ``tensor``; raise ``not_finite`` for a vector of floats with NaN or infinity.

        Vectors cost nothing to check, and what a router's correction selects leaves no trace in the logits. Attention
        sinks of minus infinity are sinks without an effect.
        """
        tensor = self.tensor(name)
        module, _, last = name.rpartition(".")
        if tensor.dim() == 1 and tensor.is_floating_point():
            finite(
                tensor.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=0.0) if last == "sinks" else tensor,
                last,
                module,
            )
        return tensor

    def check_finite(self) -> None:
        """Raise ``not_finite`` for a tensor of floats with NaN or infinity. Reads all of the checkpoint."""
        for name in self.inventory:
            module, _, last = name.rpartition(".")
            tensor = self.tensor(name)
            for rows in tensor.split(_ROWS_CHECKED) if tensor.is_floating_point() and tensor.dim() else (tensor,):
                finite(rows, last, module)

    def _check_unchanged(self, file: str, current: Path | int) -> None:
        if file_identity(current) != self._identities[file]:
            raise error("model_malformed", file=file, reason="it was changed while it was read")

    def _header(self, file: str) -> dict[str, TensorInfo]:
        """Return name -> header of the tensors of one file."""
        return shard_header(real_path(self.path, file), file)

    def _open(self, file: str) -> BinaryIO:
        """Open a file of weights; if too many are open, the one that has been open longest is closed."""

        def bad(reason: str) -> AiakqError:
            return error("model_malformed", file=file, reason=reason)

        if len(self._streams) >= _MAX_OPEN:
            self._streams.pop(next(iter(self._streams))).close()
        stream = self._streams[file] = open_regular(real_path(self.path, file), bad)
        self._check_unchanged(file, stream.fileno())
        return stream

    def _map(self, file: str) -> Any:
        """Return the safetensors package's handle on one file."""
        path = real_path(self.path, file)
        self._open(file).close()
        del self._streams[file]
        try:
            handle = self._mappings[file] = safetensors.safe_open(path, framework="pt", device="cpu")
        except FileNotFoundError:  # raised when out of file descriptors: the file exists
            raise error("open_files") from None
        except (OSError, safetensors.SafetensorError) as problem:
            raise error("model_malformed", file=file, reason=str(problem)) from None
        return handle

    def remember(self, files: Iterable[str]) -> None:
        """Record the identity of files before they are read, for ``changed_files``. ``open`` records shards."""
        for file in files:
            self._identities.setdefault(file, file_identity(self.path / file))

    def changed_files(self) -> list[str]:
        """Return the recorded files that were written, replaced, added or removed since."""
        changed = [file for file, known in self._identities.items() if file_identity(self.path / file) != known]
        return changed + (self.foreign.changed_files() if self.foreign else [])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(info.nbytes for info in self.inventory.values())

    def names(self, prefix: str) -> Iterator[str]:
        """Return the tensors whose name starts with ``prefix``."""
        return (name for name in self.inventory if name.startswith(prefix))

    @cached_property
    def _linears(self) -> list[str]:
        modules: dict[str, dict[str, TensorInfo]] = {}
        for name, info in self.inventory.items():
            prefix, suffix = formats.split_name(name)
            modules.setdefault(prefix, {})[suffix] = info
        return sorted(prefix for prefix, headers in modules.items() if formats.holds_codes(headers))

    def locate(self, name: str) -> str | None:
        """Return the tensor that a model calls ``name``: files may lack the outermost module, have one more, or
        hold the text model inside a multimodal one.
        """
        return next((spelling for spelling in text_names.spellings(name) if spelling in self.inventory), None)

    @cached_property
    def beside_text(self) -> frozenset[str]:
        """Return the tensors of a multimodal checkpoint that are not part of its text model; empty for others."""
        return text_names.beside_text(self.inventory, self.config)

    def locate_linear(self, name: str) -> str | None:
        """Return the packed linear that a model calls ``name``; see ``locate``."""
        return next((spelling for spelling in text_names.spellings(name) if spelling in self._linear_set), None)

    @cached_property
    def _linear_set(self) -> frozenset[str]:
        return frozenset(self._linears)

    def quantized_linears(self) -> list[str]:
        """Return the names of all packed linears, sorted: those with a packed linear's tensors, whatever the config."""
        return list(self._linears)

    def layout(self, prefix: str) -> str:
        """Return the format of the packed linear ``prefix``: the config's, unless its tensors contradict it."""
        assert self.spec is not None, "an unquantized checkpoint has no packed linears"
        format = self._layouts.get(prefix)
        if format is None:
            format = self._layouts[prefix] = formats.layout_of(self._headers(prefix), self.spec.format)
        return format

    def _headers(self, prefix: str) -> dict[str, TensorInfo]:
        """Return suffix -> header of the tensors under ``prefix`` that any format could own."""
        names = {suffix: f"{prefix}.{suffix}" for suffix in formats.all_suffixes()}
        return {suffix: self.inventory[name] for suffix, name in names.items() if name in self.inventory}

    def linear_tensors(self, prefix: str) -> dict[str, str]:
        """Return suffix -> full name of the tensors of the packed linear ``prefix``."""
        suffixes = formats.load(self.layout(prefix)).SUFFIXES
        return {suffix: f"{prefix}.{suffix}" for suffix in self._headers(prefix) if suffix in suffixes}

    def linear_headers(self, prefix: str) -> dict[str, TensorInfo]:
        """Return suffix -> header of the tensors of the packed linear ``prefix``."""
        return {suffix: self.inventory[name] for suffix, name in self.linear_tensors(prefix).items()}

    def dimensions(self, prefix: str) -> tuple[Dimensions, int]:
        """Return the dimensions of the packed linear ``prefix`` and its group size G, from headers alone.

        Raises ``tensor_mismatch`` for headers that do not match its format.
        """
        spec = self.linear_spec(prefix)
        try:
            dimensions: Dimensions = formats.dimensions(
                spec, self.linear_headers(prefix), lambda suffix: self.tensor(f"{prefix}.{suffix}")
            )
        except AiakqError:
            raise
        except (KeyError, ValueError, IndexError, ArithmeticError):
            raise error("tensor_mismatch", path=prefix, reason=f"its tensors are not those of {spec.format}") from None
        return dimensions, derive_group_size(dimensions.k, dimensions.groups, spec.group_size, "scales", prefix)

    def decoded(self, prefix: str) -> str | None:
        """Return why the packed linear ``prefix`` is decoded to floats at load, as far as headers tell, or None.

        Raises what ``dimensions`` raises.
        """
        found, _ = self.dimensions(prefix)
        return formats.decoded(self.linear_headers(prefix), self.linear_spec(prefix), found.n, found.k)

    def linear_spec(self, prefix: str) -> QuantSpec:
        """Return the spec of the packed linear ``prefix``, in the format of its tensors.

        Its tensors take precedence even if the config says that this linear is not quantized. Raises
        ``format_unsupported`` if they do not tell what it is then.
        """
        assert self.spec is not None, "an unquantized checkpoint has no packed linears"
        names = (prefix, *(text_names.other_names(prefix) if self.beside_text else ()))
        spec = self.spec.for_layer(next((name for name in names if self.spec.names(name)), prefix))
        if spec is None:
            if formats.needs_config(self.spec):
                reason = f"layers of several kinds, and a config that leaves out {prefix:.200}, which is quantized"
                raise error("format_unsupported", reason=reason)
            spec = replace(self.spec, layers=())
        spec = replace(spec, format=self.layout(prefix))
        if prefix in self.shapes:
            spec = replace(spec, notes={**spec.notes, "shape": self.shapes[prefix]})
        return formats.described(self.linear_headers(prefix), spec, prefix)

    def read_linear(self, prefix: str, *, packed: bool = False) -> QWeight | formats.DecodedWeight:
        """Read one packed linear with N outputs and K inputs, with its bias [N] if it has one.

        packed  whether it may be a BlockWeight, of which nothing is read yet, or a WordWeight.

        Raises ``tensor_mismatch`` and ``not_finite``, which name the tensor.
        """
        if packed and self.foreign is not None and (blocks := self.foreign.blocks(f"{prefix}.weight")) is not None:
            bias = f"{prefix}.bias"
            return blocks.with_bias(self.checked_tensor(bias)) if bias in self.inventory else blocks
        tensors = {suffix: self.tensor(name) for suffix, name in self.linear_tensors(prefix).items()}
        spec = self.linear_spec(prefix)
        try:
            weight: QWeight | formats.DecodedWeight = formats.load(spec.format).read(tensors, spec, prefix)
            for suffix in formats.unplaced(self.linear_headers(prefix), spec, weight.n, weight.k):
                raise mismatch(prefix, f"{suffix} is there, and the config says that it is not")
        except AiakqError as problem:
            if problem.id == "tensor_mismatch":
                raise error("tensor_mismatch", **{**problem.fields, "path": str(self.path)}) from None
            raise
        return weight.unpacked if isinstance(weight, QWeight) and not packed else weight

    def close(self) -> None:
        """Close the files; tensors that were read remain valid."""
        if self.foreign is not None:
            self.foreign.close()
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._mappings.clear()
