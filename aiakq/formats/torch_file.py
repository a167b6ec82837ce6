"""``pytorch_model.bin`` files, read as plain tensors only (``weights_only``).

Such a file is a zip archive of a pickle and the tensors' bytes. torch's ``weights_only`` unpickler only builds tensors
and plain containers; the bytes are memory-mapped, so opening takes no memory. Whatever it refuses, aiakq refuses too.
aiakq never writes this format.
"""

from __future__ import annotations

import os
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aiakq.errors import AiakqError, error
from aiakq.formats.safetensors_file import DTYPE_NAMES, TensorInfo, open_weights

#: Limits of the parsed part: names and shapes. The largest real models stay below 20 MB and 200 000 entries.
_MAX_PICKLE_BYTES = 64 << 20
_MAX_ENTRIES = 500_000
#: Keys under which training scripts store the weights.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")


def read_torch_file(path: Path, file: str) -> dict[str, Tensor]:
    """Return the tensors of one file by name, memory-mapped; ``file`` is its name in messages.

    Raises ``pickle_refused`` for anything except plain tensors under names, ``model_malformed`` for a damaged file.
    """
    size = _check_container(path, file)
    try:
        with warnings.catch_warnings():  # about pickle protocols, which do not concern the user
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise _refused(path, f"{file} holds more than plain tensors") from None
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, OSError) as problem:
        lines = str(problem).strip().splitlines() or [type(problem).__name__]
        raise error("model_malformed", file=file, reason=lines[0].rstrip(".")) from None
    tensors = _tensors(content, path, file)
    _check_storages(tensors, size, path, file)
    return tensors


def describe(tensors: dict[str, Tensor], file: str) -> dict[str, TensorInfo]:
    """Return name -> the header that ``tensors`` would have in a safetensors file."""
    return {name: TensorInfo(DTYPE_NAMES[each.dtype], tuple(each.shape), file) for name, each in tensors.items()}


def _refused(path: Path, reason: str) -> AiakqError:
    return error("pickle_refused", path=str(path.parent), reason=reason)


def _check_container(path: Path, file: str) -> int:
    """Reject anything except a zip archive of uncompressed records before torch opens it. Returns its size in bytes."""

    def bad(reason: str) -> AiakqError:
        return error("model_malformed", file=file, reason=reason)

    with open_weights(path, bad) as stream:
        size = os.fstat(stream.fileno()).st_size
        if not stream.read(8).startswith(b"PK\x03\x04"):
            raise _refused(path, f"{file} is not a zip archive, as torch writes them since version 1.6")
        try:
            with zipfile.ZipFile(stream) as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as problem:
            raise bad(f"it is no whole zip archive ({problem})") from None
    if len(entries) > _MAX_ENTRIES:
        raise bad(f"it has {len(entries)} entries")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise bad("its records are compressed, which torch never does")
        if entry.filename.endswith(".pkl") and entry.file_size > _MAX_PICKLE_BYTES:
            raise bad(f"{entry.filename} has {entry.file_size} bytes")
    return size


def _tensors(content: Any, path: Path, file: str) -> dict[str, Tensor]:
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
        if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
            raise _refused(path, f"{name} in {file} is not a dense tensor")
        if value.dtype not in DTYPE_NAMES:
            raise error(
                "model_malformed", file=file, reason=f"tensor {name} is {value.dtype}, which aiakq does not read"
            )
        tensors[name] = value.detach()
    return tensors


def _check_storages(tensors: dict[str, Tensor], size: int, path: Path, file: str) -> None:
    """Reject tensors that claim more bytes than the file has. Tensors may share storage, which is counted once."""
    storages: dict[int, int] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if tensor.numel() * tensor.element_size() > storage.nbytes():
            raise _refused(path, f"{name} in {file} has a shape beyond its data")
        storages[storage.data_ptr()] = storage.nbytes()
    if sum(storages.values()) > size:
        raise _refused(path, f"{file} claims more bytes of weights than it has")
