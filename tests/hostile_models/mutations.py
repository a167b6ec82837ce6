"""Mutations of model files, drawn from a seeded generator: JSON values, safetensors headers, tensors, GGUF metadata.

A folder is name -> bytes. ``mutated`` returns the changed folder, a sentence that says what was changed, and its kind:

    structure  what describes data no longer fits it: the file must be refused, or hold what it held before
    config     a setting of config.json or params.json
    data       bytes of tensors, which may be other values and must not be NaN unnoticed
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Mapping
from typing import Any

from gguf_parts import Parts

Folder = dict[str, bytes]
Header = dict[str, Any]

NUMBERS = [0, 1, -1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 64, 128, 2**31 - 1, 2**31, 2**32, 2**63, -(2**63), 2**64, 10**30]
FLOATS = [0.0, -0.0, 0.5, 1.5, -1.0, 1e-300, 1e308, float("nan"), float("inf"), float("-inf")]
WORDS = [
    "", "\n", "x" * 300, "../../etc/passwd", "int", "float", "group", "channel", "token", "tensor", "block", "static",
    "dynamic", "gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors", "modelopt", "e4m3", "nf4", "fp4", "affine",
    "Linear", "lm_head", "re:.*", "re:(a+)+$", "*", "float16", "bfloat16", "float8_e4m3fn", "LlamaForCausalLM", "llama",
]  # fmt: skip
VALUES: list[Any] = [None, True, False, *NUMBERS, *FLOATS, *WORDS, [], {}, [[]], [None], [1, 2, 3], {"a": {}}, [{}]]
DTYPES = ["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I16", "F16", "BF16", "I32", "F32", "I64", "F64", "X"]
_WIDTHS = {**dict.fromkeys(DTYPES[:6], 1), "I16": 2, "F16": 2, "BF16": 2, "I32": 4, "F32": 4, "I64": 8, "F64": 8}
#: Dtypes that formats allow for the same tensor: no other part of a file says which one is right.
_ALIKE = ({"F16", "BF16"}, {"F8_E4M3", "F8_E5M2"})
SIZES: list[Any] = [0, 1, -1, 2, 3, 2**31, 2**48, 2**63, -(2**63), 1.0, True, None, "8", [8]]
#: Kinds of mutations that change what describes data, and not what it says.
STRUCTURE, CONFIG, DATA = "structure", "config", "data"


def mutated(folder: Mapping[str, bytes], rng: random.Random) -> tuple[Folder, str, str]:
    """Return a folder with one or two mutations, what they are, and the weakest of their kinds."""
    changed, said, kinds = dict(folder), [], set()
    for _ in range(1 if rng.random() < 0.7 else 2):
        name = rng.choice([file for file in changed if not file.startswith("tokenizer")])
        mutate = _gguf if name.endswith(".gguf") else _weights if name.endswith(".safetensors") else _json
        what, kind = mutate(changed, name, rng)
        said.append(what)
        kinds.add(kind)
    weakest = next(kind for kind in (DATA, CONFIG, STRUCTURE) if kind in kinds)
    return changed, "; ".join(said), weakest


# --- JSON ------------------------------------------------------------------------------------------------------------


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(*at, key) for key, _ in inside] + [path for key, each in inside for path in _places(each, (*at, key))]


def _json(folder: Folder, name: str, rng: random.Random) -> tuple[str, str]:
    """Change one place of a JSON file: dropped, doubled under another name, or another value; or cut its text."""
    try:
        content = json.loads(folder[name])
    except ValueError:  # the first mutation cut it
        return "nothing else", STRUCTURE
    places = _places(content)
    about = [place for place in places if "quant" in str(place[0])]
    *way, last = rng.choice(about if about and rng.random() < 0.7 else places or [("x",)])
    if rng.random() < 0.03:
        text = folder[name]
        folder[name] = text[: rng.randrange(len(text))]
        return f"{name} cut after {len(folder[name])} bytes", STRUCTURE
    target = content
    for key in way:
        target = target[key]
    shown = f"{name} {'.'.join(map(str, (*way, last)))}"
    if isinstance(target, dict) and rng.random() < 0.2:
        value = target.pop(last, None)
        if rng.random() < 0.3:
            target[f"{last}_"] = value
        shown += " dropped"
    else:
        target[last] = value = rng.choice(VALUES)
        shown += f" = {value!r:.40}"
    folder[name] = json.dumps(content).encode()
    return shown, CONFIG


# --- safetensors -----------------------------------------------------------------------------------------------------


def split(content: bytes) -> tuple[Header, bytes]:
    """Return the header and the data of a safetensors file."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header: Header, data: bytes, length: int | None = None) -> bytes:
    """Return a safetensors file; ``length`` is what it claims as the length of its header."""
    raw = json.dumps(header).encode()
    return ((len(raw) if length is None else length) % 2**64).to_bytes(8, "little") + raw + data


def _weights(folder: Folder, name: str, rng: random.Random) -> tuple[str, str]:
    try:
        header, data = split(folder[name])
    except ValueError:  # the first mutation cut it
        return "nothing else", STRUCTURE
    tensors = [key for key in header if key != "__metadata__"]
    linears = [key for key in tensors if not key.endswith("norm.weight") and "embed" not in key]
    tensor = rng.choice(linears if linears and rng.random() < 0.85 else tensors or ["x"])
    if tensor not in header or not isinstance(header[tensor], dict):
        return "nothing else", STRUCTURE
    try:
        header, data, length, what, kind = rng.choice(_ON_TENSORS)(header, data, tensor, rng)
    except (TypeError, ValueError, KeyError):  # what the first mutation left has no such entry
        return "nothing else", STRUCTURE
    folder[name] = joined(header, data, length)
    return f"{name} {tensor}: {what}", kind


_Changed = tuple[Header, bytes, int | None, str, str]


def _dtype(header: Header, data: bytes, tensor: str, rng: random.Random) -> _Changed:
    """Another dtype, with a shape of as many bytes or not."""
    old = str(header[tensor]["dtype"])
    as_wide = [each for each in DTYPES if each != old and _WIDTHS.get(each) == _WIDTHS.get(old)]
    found = header[tensor]["dtype"] = rng.choice(as_wide if as_wide and rng.random() < 0.8 else DTYPES)
    kind = DATA if {found, old} in _ALIKE else STRUCTURE
    return header, data, None, f"dtype {found}, not {old}", kind


def _shape(header: Header, data: bytes, tensor: str, rng: random.Random) -> _Changed:
    shape = list(header[tensor]["shape"])
    how = rng.randrange(7)
    if how == 0 and shape:
        shape[rng.randrange(len(shape))] = rng.choice(SIZES)
    elif how == 1:
        shape = shape[::-1]
    elif how == 2:
        count = 1
        for size in shape:
            count *= size if isinstance(size, int) else 1
        shape = [count]
    elif how == 3:
        shape.insert(rng.randrange(len(shape) + 1), 1)
    elif how == 4 and len(shape) == 2 and shape[1] % 2 == 0:
        shape = [shape[0] * 2, shape[1] // 2]
    elif how == 5:
        shape = [2**32, 2**32]
    else:
        shape = rng.choice([[], [0], [-1, -1], [1] * 200, "8", None, {}])  # type: ignore[assignment]
    header[tensor]["shape"] = shape
    return header, data, None, f"shape {shape!r:.60}", STRUCTURE


def _offsets(header: Header, data: bytes, tensor: str, rng: random.Random) -> _Changed:
    start, end = header[tensor]["data_offsets"]
    shift = rng.choice([1, -1, 8, 64, end - start])
    offsets = rng.choice(
        [
            [start + shift, end + shift], [start - shift, end], [end, start], [0, end - start], [-start - 1, end],
            [0, 2**63], [2**63, 2**63 + end - start], [start], [start, end, end], None, [float(start), float(end)],
        ]
    )  # fmt: skip
    header[tensor]["data_offsets"] = offsets
    kind = DATA if offsets in ([0, end - start],) else STRUCTURE
    return header, data, None, f"offsets {offsets}", kind


def _names(header: Header, data: bytes, tensor: str, rng: random.Random) -> _Changed:
    """A tensor that is missing, has another name, or is there under two names with the same bytes."""
    prefix, _, suffix = tensor.rpartition(".")
    others = [key for key in header if key not in (tensor, "__metadata__")]
    how = rng.randrange(4)
    if how == 0:
        entry = header.pop(tensor)
        start, end = entry["data_offsets"]
        for other in others:
            at = header[other]["data_offsets"]
            if isinstance(at, list) and len(at) == 2 and at[0] >= end:
                header[other]["data_offsets"] = [at[0] - end + start, at[1] - end + start]
        return header, data[:start] + data[end:], None, "removed", STRUCTURE
    new = f"{prefix}.{rng.choice(_SUFFIXES)}" if how < 3 else rng.choice([*others, "", "../x", "a\nb", "x" * 5000])
    if how == 1:
        entry = header[tensor]
        start, end = entry["data_offsets"]
        copied = data[start:end]
        header[new] = {**entry, "data_offsets": [len(data), len(data) + len(copied)]}
        return header, data + copied, None, f"copied to {new:.60}", STRUCTURE
    header[new] = header.pop(tensor)
    return header, data, None, f"renamed to {new:.60}", STRUCTURE


def _file(header: Header, data: bytes, tensor: str, rng: random.Random) -> _Changed:
    """A file whose length is not what it claims, or with metadata of other types."""
    how = rng.randrange(4)
    if how == 0:
        data = data[: rng.randrange(len(data) + 1)]
        return header, data, None, f"cut to {len(data)} bytes of data", STRUCTURE
    if how == 1:
        return header, data + bytes(rng.choice([1, 8, 4096])), None, "longer", STRUCTURE
    if how == 2:
        length = rng.choice([0, 1, 7, 2**20, 2**40, 2**63, 2**64 - 1])
        return header, data, length, f"a header of {length} bytes", STRUCTURE
    header["__metadata__"] = rng.choice([None, [], {"format": "tf"}, {"format": 3}, "x", {"a": {"b": 1}}])
    return header, data, None, f"metadata {header['__metadata__']}", STRUCTURE


def _values(header: Header, data: bytes, tensor: str, rng: random.Random) -> _Changed:
    """Some elements, or all, are NaN, infinite, 0, negative or the largest; or random bytes."""
    entry = header[tensor]
    try:
        start, end = entry["data_offsets"]
        formats = {"F16": "<e", "F32": "<f", "F64": "<d", "I32": "<i", "I64": "<q", "I16": "<h", "U8": "<B", "I8": "<b"}
        form, width = formats.get(entry["dtype"]), _WIDTHS.get(entry["dtype"], 0)
        if not width or end <= start or end > len(data) or start < 0:
            return header, data, None, "nothing", STRUCTURE
    except (TypeError, ValueError, KeyError):
        return header, data, None, "nothing", STRUCTURE
    if form is None:
        value = rng.choice([b"\xff", b"\x7f", b"\x00", b"\x80", b"\x7c"]) * width
    elif form in "<e<f<d":
        value = struct.pack(form, rng.choice([float("nan"), float("inf"), float("-inf"), 0.0, -1.0, 60000.0]))
    else:
        size = 8 * width
        low, high = (0, 2**size - 1) if form == "<B" else (-(2 ** (size - 1)), 2 ** (size - 1) - 1)
        value = struct.pack(form, rng.choice([low, high, 0, 1, max(low, -1)]))
    count = (end - start) // width
    content = bytearray(data)
    places = range(count) if rng.random() < 0.2 else [rng.randrange(count) for _ in range(rng.choice([1, 1, 4]))]
    for place in places:
        content[start + place * width : start + (place + 1) * width] = value
    return header, bytes(content), None, f"{len(places)} of {count} elements {value.hex()}", DATA


def _empty(header: Header, data: bytes, tensor: str, rng: random.Random) -> _Changed:
    """A tensor of another size, with the bytes that it needs: cut, doubled or empty."""
    entry = header[tensor]
    shape, (start, end) = entry["shape"], entry["data_offsets"]
    if not (isinstance(shape, list) and shape and all(type(size) is int and size > 0 for size in shape)):
        return header, data, None, "nothing", STRUCTURE
    row = (end - start) // shape[0]
    rows = rng.choice([0, 1, max(1, shape[0] // 2), shape[0] + 1, shape[0] * 2])
    content = (data[start:end] * 2)[: rows * row]
    moved = len(content) - (end - start)
    for other, each in header.items():
        at = each["data_offsets"] if other not in (tensor, "__metadata__") else None
        if isinstance(at, list) and len(at) == 2 and at[0] >= end:
            each["data_offsets"] = [at[0] + moved, at[1] + moved]
    entry["shape"], entry["data_offsets"] = [rows, *shape[1:]], [start, start + len(content)]
    return header, data[:start] + content + data[end:], None, f"{rows} rows instead of {shape[0]}", STRUCTURE


_SUFFIXES = [
    "weight", "bias", "qweight", "qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "weight_packed",
    "weight_zero_point", "weight_global_scale", "input_global_scale", "input_scale", "weight_shape", "weight_g_idx",
    "weight_scale_2", "absmax", "SCB", "W_q", "zero", "biases", "extra", "weight.absmax", "weight._data", "rotation",
]  # fmt: skip
_ON_TENSORS: list[Callable[[Header, bytes, str, random.Random], _Changed]] = [
    _dtype, _shape, _shape, _offsets, _names, _names, _file, _values, _values, _empty,
]  # fmt: skip


# --- GGUF ------------------------------------------------------------------------------------------------------------


def _gguf(folder: Folder, name: str, rng: random.Random) -> tuple[str, str]:
    """Change a key, the entry of a tensor, bytes of the header, or bytes of the data."""
    if rng.random() < 0.1:
        content = bytearray(folder[name])
        for _ in range(rng.choice([1, 2, 8])):
            content[rng.randrange(min(len(content), 4096))] = rng.randrange(256)
        folder[name] = bytes(content)
        return f"{name}: random bytes in the header", DATA
    try:
        parts = Parts.of(folder[name])
        what, kind = parts.mutate(rng)
    except (struct.error, ValueError, IndexError, UnicodeDecodeError, OverflowError, MemoryError):
        return "nothing else", STRUCTURE
    folder[name] = parts.written()
    return f"{name} {what}", kind
