"""safetensors files: headers read without data, and writes that are flushed to disk.

Layout: 8 bytes of header length (little-endian), a JSON header ``name -> {dtype, shape, data_offsets}``, the data.
Reading trusts nothing. ``read_tensor`` does not memory-map: a file truncated in the meantime raises an error, where a
mapping would kill the process by a signal, and later writes to the file do not change weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import torch
from torch import Tensor

from aiakq.errors import AiakqError, error
from aiakq.formats.model_folder import open_regular, read_error
from aiakq.system.files import IS_LFS_POINTER, LFS_POINTER

#: Bytes per element of every dtype a checkpoint may hold.
DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
#: Dtypes of safetensors that no weight of a supported model has.
_OTHER_DTYPES = ("C64", "F4", "F6_E2M3", "F6_E3M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.float64: "F64",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()} | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    # Scales of blocks: torch has this dtype from 2.7 on.
    "F8_E8M0": getattr(torch, "float8_e8m0fnu", torch.uint8),
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
}
#: dtype -> its name, of all that are written; the first name of a dtype counts.
_WRITTEN = {dtype: name for name, dtype in reversed(DTYPES.items())}
#: Maximum size of a header: the largest real ones stay below 5 MiB, and parsing takes 50 times the size in memory.
MAX_HEADER_BYTES = 16 << 20
#: Bytes that a thread reads at least.
_SMALLEST_PART = 1 << 20
#: Maximum number of tensors per file. The largest real models have 250 000 in more than fifty files.
MAX_TENSORS = 100_000


@dataclass(frozen=True)
class TensorInfo:
    """The header entry of one tensor; ``file`` is the name of the shard inside the folder.

    offset    position of its first byte in the file.
    strides   strides in elements, for a tensor of torch's files that is not contiguous; else None.
    metadata  the texts that the file holds beside its tensors, by name.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int = field(default=0, compare=False)
    strides: tuple[int, ...] | None = field(default=None, compare=False)
    metadata: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def open_weights(path: Path, bad: Callable[[str], AiakqError]) -> BinaryIO:
    """Open a weight file for reading. Raises ``bad(reason)`` if it is not a regular file or only a Git LFS pointer."""
    stream = open_regular(path, bad)
    if stream.read(len(LFS_POINTER)) == LFS_POINTER:
        stream.close()
        raise bad(IS_LFS_POINTER)
    stream.seek(0)
    return stream


def read_header(path: Path, file: str) -> dict[str, TensorInfo]:
    """Return every tensor of one file, from its header; ``file`` is its name in messages and in the result.

    Raises ``model_malformed`` for anything that is not a complete, well-formed safetensors file, and ``unsupported``
    for a dtype that is not read.
    """
    with open_weights(path, lambda reason: error("model_malformed", file=file, reason=reason)) as stream:
        return parse_header(stream, file)[1]


def parse_header(stream: BinaryIO, file: str) -> tuple[bytes, dict[str, TensorInfo]]:
    """Return the bytes before the first tensor and what they say, from the beginning of a file. See ``read_header``."""

    def bad(reason: str) -> AiakqError:
        return error("model_malformed", file=file, reason=reason)

    size = os.fstat(stream.fileno()).st_size
    prefix = stream.read(8)
    if len(prefix) < 8:
        raise bad("it is shorter than a header")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise bad(f"its header claims {length} bytes")
    if length + 8 > size:
        raise bad("it is cut off inside the header")
    raw = stream.read(length)
    # Every tensor is an object: counting braces is fast, while parsing a million of them takes seconds.
    if raw.count(b"{") > MAX_TENSORS + 2:
        raise bad(f"it claims more than {MAX_TENSORS} tensors")
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as problem:
        raise bad(f"its header is not JSON ({problem})") from None
    if not isinstance(header, dict):
        raise bad("its header is not a JSON object")
    metadata = _texts(header.pop("__metadata__", None))
    infos: dict[str, TensorInfo] = {}
    spans: list[tuple[int, int]] = []
    for name, entry in header.items():
        if not name.isprintable() or ".." in name or "/" in name:
            raise bad(f"it holds a tensor with the name {name!r}")
        if isinstance(entry, dict) and entry.get("dtype") in _OTHER_DTYPES:
            raise unread_dtype(name, file, entry["dtype"])
        dtype, shape = _entry(name, entry, bad)
        start, end = entry["data_offsets"]
        infos[name] = TensorInfo(dtype, shape, file, 8 + length + start, metadata=metadata)
        if end - start != infos[name].nbytes:
            raise bad(f"tensor {name} has {end - start} bytes, its shape needs {infos[name].nbytes}")
        spans.append((start, end))
    position = 0
    for start, end in sorted(spans):
        if start != position:
            raise bad("its tensors overlap or leave holes")
        position = end
    missing = 8 + length + position - size
    if missing:
        raise bad(f"it is cut off, {missing} bytes are missing" if missing > 0 else f"it has {-missing} bytes too many")
    return prefix + raw, infos


def read_tensor(stream: BinaryIO, info: TensorInfo, threads: int = 1) -> Tensor:
    """Read one tensor into newly allocated CPU memory, in parts by ``threads`` threads.

    Raises ``model_malformed`` if its bytes are missing.
    """
    if info.strides is not None:
        span = 1 + sum((n - 1) * step for n, step in zip(info.shape, info.strides, strict=True))
        flat = read_tensor(stream, TensorInfo(info.dtype, (span,), info.file, info.offset), threads)
        return flat.as_strided(info.shape, info.strides).contiguous()
    tensor = torch.empty(info.shape, dtype=DTYPES[info.dtype])
    data = tensor.reshape(-1).view(torch.uint8).numpy().data if info.nbytes else memoryview(b"")
    size = max(_SMALLEST_PART, -(-info.nbytes // threads))
    starts = range(0, info.nbytes, size)
    if len(starts) > 1:
        with ThreadPoolExecutor(len(starts)) as pool:
            list(pool.map(lambda start: _read_into(stream, data[start : start + size], info, start), starts))
    else:
        _read_into(stream, data, info, 0)
    return tensor


def _read_into(stream: BinaryIO, data: memoryview, info: TensorInfo, start: int) -> None:
    """Fill ``data`` with the bytes of a tensor from ``start`` on."""
    done = 0
    while done < len(data):
        try:
            count = os.preadv(stream.fileno(), [data[done:]], info.offset + start + done)
        except OSError as problem:
            raise read_error(problem, Path(info.file)) from None
        if not count:
            raise error("model_malformed", file=info.file, reason="it was cut off while it was read")
        done += count


def unread_dtype(name: str, file: str, dtype: object) -> AiakqError:
    """Return the error for a tensor of a sound file whose dtype aiakq does not read."""
    hint = "Weights are read as floats of 16, 32 or 64 bits, and as integers that a supported quantization packs."
    return error("unsupported", what=f"The dtype {dtype} of the tensor {name} in {file}", hint=hint)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Convert pairs to a JSON object with unique keys; parsers disagree about which duplicate wins."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result


def _texts(value: object) -> Mapping[str, str]:
    """Return the entries of ``__metadata__`` that are texts, as all are in files of the safetensors package."""
    entries = value if isinstance(value, dict) else {}
    return {name: text for name, text in entries.items() if isinstance(text, str)}


def _sizes(value: object) -> TypeGuard[list[int]]:
    """Whether ``value`` is a list of plain integers that could be sizes in memory (True and 1.0 are not)."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**48 for item in value)


def _entry(name: str, entry: object, bad: Any) -> tuple[str, tuple[int, ...]]:
    """Return the validated dtype and shape of one header entry; its offsets are checked to be two integers."""
    if not isinstance(entry, dict):
        raise bad(f"the entry of tensor {name} is no object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise bad(f"tensor {name} has the dtype {dtype!r}, which aiakq does not read")
    if not (_sizes(shape) and _sizes(offsets) and len(offsets) == 2):
        raise bad(f"tensor {name} has the shape {shape!r} and offsets {offsets!r}")
    return dtype, tuple(shape)


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write one safetensors file, synced to disk, with permissions according to the umask.

    Tensors are ordered by element size, then name, so that the same tensors give the same bytes and stay aligned.
    Returns the size in bytes and the sha256 of the file. Raises OSError.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in order:
        tensor = tensors[name]
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _WRITTEN[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + size],
        }
        position += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    digest = hashlib.sha256()
    with open(path, "xb") as stream:
        for piece in (len(raw).to_bytes(8, "little"), raw):
            digest.update(piece)
            stream.write(piece)
        for name in order:
            tensor = tensors[name].detach().cpu().contiguous()
            if not tensor.numel():
                continue
            data = tensor.reshape(-1).view(torch.uint8).numpy().data
            digest.update(data)
            stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return 8 + len(raw) + position, digest.hexdigest()
