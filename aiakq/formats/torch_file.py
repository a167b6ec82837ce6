"""``pytorch_model.bin`` files, read as plain tensors only (``weights_only``).

Such a file is a zip archive of a pickle and the tensors' bytes. torch's ``weights_only`` unpickler only builds tensors
and plain containers, here without their bytes, which are read later like those of safetensors files: a file truncated
in the meantime raises an error. Whatever torch refuses, aiakq refuses too. aiakq never writes this format.
"""

from __future__ import annotations

import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from aiakq.errors import AiakqError, error, first_line
from aiakq.formats.safetensors_file import DTYPE_NAMES, TensorInfo, open_weights, unread_dtype

#: Limits of the parsed part: names and shapes. The largest real models stay below 20 MB and 200 000 entries.
_MAX_PICKLE_BYTES = 64 << 20
_MAX_ENTRIES = 500_000
#: Bytes of a local header in a zip archive; its last two numbers are the lengths of the name and of the extra field.
_LOCAL_HEADER = 30
#: Keys under which training scripts store the weights.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")


def read_torch_file(path: Path, file: str) -> dict[str, TensorInfo]:
    """Return the tensors of one file by name, without their bytes; ``file`` is its name in messages.

    Raises ``pickle_refused`` for anything except plain tensors under names, ``model_malformed`` for a damaged file.
    """

    def bad(reason: str) -> AiakqError:
        return error("model_malformed", file=file, reason=reason)

    with open_weights(path, bad) as stream:
        records = _records(stream, path, file, bad)
        stream.seek(0)
        try:
            with warnings.catch_warnings():  # about pickle protocols, which do not concern the user
                warnings.simplefilter("ignore")
                # On the meta device, torch reads the pickle only and notes where the bytes of each storage start.
                content = torch.load(stream, map_location="meta", weights_only=True)
        except pickle.UnpicklingError:
            raise _refused(path, f"{file} holds more than plain tensors") from None
        except (
            RuntimeError,
            ValueError,
            TypeError,
            KeyError,
            IndexError,
            AttributeError,
            EOFError,
            OSError,
        ) as problem:
            raise bad(first_line(problem)) from None
    return {
        name: _described(name, tensor, records, path, file) for name, tensor in _tensors(content, path, file).items()
    }


def _refused(path: Path, reason: str) -> AiakqError:
    return error("pickle_refused", path=str(path.parent), reason=reason)


def _records(stream: BinaryIO, path: Path, file: str, bad: Callable[[str], AiakqError]) -> dict[int, int]:
    """Return where the bytes of every record start -> their number.

    Rejects anything except a zip archive of uncompressed records before torch reads it.
    """
    if not stream.read(8).startswith(b"PK\x03\x04"):
        raise _refused(path, f"{file} is not a zip archive, as torch writes them since version 1.6")
    try:
        with zipfile.ZipFile(stream) as archive:
            entries = archive.infolist()
            for entry in entries[:_MAX_ENTRIES]:
                if entry.filename.endswith("byteorder") and archive.read(entry) != b"little":
                    raise bad("it was written on a machine with another byte order")
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, RuntimeError) as problem:
        raise bad(f"it is no whole zip archive ({problem})") from None
    if len(entries) > _MAX_ENTRIES:
        raise bad(f"it has {len(entries)} entries")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise bad("its records are compressed, which torch never does")
        if entry.filename.endswith(".pkl") and entry.file_size > _MAX_PICKLE_BYTES:
            raise bad(f"{entry.filename} has {entry.file_size} bytes")
    return dict(_span(stream, entry, bad) for entry in entries)


def _span(stream: BinaryIO, entry: zipfile.ZipInfo, bad: Callable[[str], AiakqError]) -> tuple[int, int]:
    """Return where the bytes of a record start, and their number."""
    header = os.pread(stream.fileno(), _LOCAL_HEADER, entry.header_offset)
    if len(header) < _LOCAL_HEADER:
        raise bad("it is cut off")
    name, extra = struct.unpack("<HH", header[-4:])
    return entry.header_offset + _LOCAL_HEADER + name + extra, entry.file_size


def _described(name: str, tensor: Tensor, records: Mapping[int, int], path: Path, file: str) -> TensorInfo:
    """Return the header of a tensor on the meta device, whose bytes must be inside one of the ``records``."""
    storage = tensor.untyped_storage()
    start, size = getattr(storage, "_checkpoint_offset", None), tensor.element_size()
    if start is None:
        raise _refused(path, f"{name} in {file} has no data")
    last = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    beyond = tensor.numel() and (last + 1) * size > min(storage.nbytes(), records.get(start, 0))
    if beyond or tensor.numel() * size > storage.nbytes():
        raise _refused(path, f"{name} in {file} has a shape beyond its data")
    strides = None if tensor.is_contiguous() else tensor.stride()
    offset = start + tensor.storage_offset() * size
    return TensorInfo(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), file, offset, strides)


def _tensors(content: object, path: Path, file: str) -> dict[str, Tensor]:
    """Return the dictionary of tensors in ``content``, which may be nested one level deep."""
    if isinstance(content, dict):
        for name in _WRAPPERS:
            if isinstance(content.get(name), dict):
                content = content[name]
                break
    if not isinstance(content, dict) or not content:
        raise _refused(path, f"{file} is no dictionary of tensors")
    tensors: dict[str, Tensor] = {}
    for name, value in content.items():
        if not isinstance(name, str) or not name.isprintable() or ".." in name or "/" in name:
            raise _refused(path, f"{file} holds something with the name {name!r:.80}")
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise _refused(path, f"{name} in {file} is a {type(value).__name__}, not a tensor")
        if value.layout != torch.strided or value.is_quantized:
            raise _refused(path, f"{name} in {file} is not a dense tensor")
        if value.dtype not in DTYPE_NAMES:
            raise unread_dtype(name, file, value.dtype)
        tensors[name] = value.detach()
    return tensors
