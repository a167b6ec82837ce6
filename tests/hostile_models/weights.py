"""Hostile weights: safetensors headers, index files, tensors that do not fit, torch's pickles, links and devices."""

from __future__ import annotations

import json
import os
import pickle
import socket
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from base import Change, base_tensors, change, family, put
from safetensors.torch import save_file

F = "model.safetensors"
INDEX = "model.safetensors.index.json"


def container(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def entry(start: Any, end: Any, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def whole(edit: Any) -> Change:
    """The base file with an edited header (and, if ``edit`` returns bytes, other data)."""

    def make(folder: Path) -> None:
        content = (folder / F).read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        data = edit(header)
        put(folder, F, container(header, content[8 + length :] if data is None else data))

    return make


HEADER_CHANGES: dict[str, dict[str, Any]] = {
    "negative size": {"shape": [-1, 64]},
    "true as a size": {"shape": [True, 64]},
    "size 64.0": {"shape": [64.0, 64]},
    "size 2^62": {"shape": [0, 2**62]},
    "size 2^80": {"shape": [2**80, 64]},
    "no shape": {"shape": None},
    "a thousand dimensions": {"shape": [1] * 1000 + [64, 64]},
    "transposed": {"shape": [128, 32]},
    "dtype F5": {"dtype": "F5"},
    "dtype 7": {"dtype": 7},
    "dtype F64": {"dtype": "F64"},
    "half the data": {"data_offsets": [0, 8]},
    "offsets backwards": {"data_offsets": [64, 0]},
    "negative offsets": {"data_offsets": [-16384, 0]},
    "offsets beyond the file": {"data_offsets": [2**40, 2**40 + 16384]},
    "three offsets": {"data_offsets": [0, 1, 2]},
}


@family("safetensors headers", "inspect", "load", "quantize")
def headers() -> Iterator[tuple[str, Change]]:
    q = "model.layers.0.self_attn.q_proj.weight"
    raw: dict[str, bytes] = {
        "empty": b"",
        "three bytes": b"\1\2\3",
        "git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "HTML": b"<!DOCTYPE html><html></html>",
        "pickle": pickle.dumps({"a": 1}),
        "zip": b"PK\x03\x04" + b"\0" * 60,
        "length 2^63": container({}, length=2**63),
        "length 2^64-1": container({}, length=2**64 - 1),
        "length 0": container(b""),
        "length beyond the end": container({"a": entry(0, 4)}, b"\0" * 4, length=4000),
        "17 MiB of spaces": container(b"{" + b" " * (17 << 20) + b"}"),
        "16 MiB of brackets": container(b"[" * ((16 << 20) - 1)),
        "1 M brackets": container(b'{"a":' + b"[" * 1_000_000),
        "1 M braces": container(b'{"a":' * 1_000_000),
        "a million empty objects": container(b"{" + b",".join(b'"%06d":{}' % n for n in range(1_000_000)) + b"}"),
        "200,000 empty tensors": container(
            json.dumps({f"{n}": entry(0, 0, [0], "U8") for n in range(200_000)}).encode()
        ),
        "5000 digits": container(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}'),
        "a list": container([1]),
        "null": container(b"null"),
        "NaN": container(b"NaN"),
        "invalid UTF-8": container(b'{"\xff": 1}'),
        "UTF-16": container("{}".encode("utf-16")),
        "no tensor": container({"__metadata__": {}}),
        "the same name twice": container(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{}}', b"\0" * 4),
        "lone surrogate": container(b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"\0" * 4),
    }
    for name, content in raw.items():
        yield name, lambda folder, content=content: put(folder, F, content)
    for name in ("../../x", "/etc/passwd", "a\0b", "a\nb", "\x1b[2Jx", "a/b", "", " ", "x" * 100_000):
        bad = container({name: entry(0, 4)}, b"\0" * 4)
        yield f"name {name!r:.20}", lambda folder, bad=bad: put(folder, F, bad)
    for name, values in HEADER_CHANGES.items():
        yield name, whole(lambda header, values=values: header[q].update(values))
    yield "same bytes as another tensor", whole(lambda header: header[q].update(header["model.norm.weight"]))
    yield "a hole", whole(lambda header: header.pop(q) and None)
    yield "metadata of 8 MiB", whole(lambda header: header.update(__metadata__={"x": "y" * (8 << 20)}))
    yield "metadata is a number", whole(lambda header: header.update(__metadata__=3))
    yield "no data", whole(lambda header: b"")
    yield "trailing data", whole(lambda header: b"\0" * 10_000_000)


def index(weight_map: Any) -> Change:
    return lambda folder: put(folder, INDEX, {"weight_map": weight_map})


@family("index files", "inspect", "load", "quantize")
def indexes() -> Iterator[tuple[str, Change]]:
    for content in ("", "[]", "{", "null", "{}", "[" * 100_000, '{"weight_map": []}', '{"weight_map": {"a": 1}}'):
        yield f"content {content[:20]!r}", lambda folder, content=content: put(folder, INDEX, content)
    names = ["../model.safetensors", "/etc/passwd", "/dev/zero", "sub/x.safetensors", "..", ".", "", "x.bin", "a\0b"]
    names += ["a\nb.safetensors", "\ud800.safetensors", "x" * 5000 + ".safetensors", "..\\x.safetensors", "config.json"]
    for name in [*names, "missing.safetensors", "-rf.safetensors", "$(id).safetensors", "file:///etc/x.safetensors"]:
        yield f"file {name!r:.30}", index({"model.norm.weight": name})
    yield "a tensor that is not there", index({"nothing": F})
    yield "10,000 files", index({f"t{n}": f"{n}.safetensors" for n in range(10_000)})
    yield "300,000 tensors", index({f"t{n}": F for n in range(300_000)})
    yield "65 MiB", lambda folder: put(folder, INDEX, b" " * (65 << 20))


@family("tensors", "inspect", "load", "quantize")
def tensors() -> Iterator[tuple[str, Change]]:
    q, norm, embed = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "model.embed_tokens.weight"

    def saved(edit: Any) -> Change:
        def make(folder: Path) -> None:
            found = base_tensors()
            edit(found)
            (folder / F).unlink()
            save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / F)

        return make

    for name in (q, norm, embed):
        for value in (float("nan"), float("inf"), -3e38, 1e-45):
            yield f"{value} in {name}", saved(lambda found, name=name, value=value: found[name].fill_(value))
        yield f"{name} missing", saved(lambda found, name=name: found.pop(name))
        yield f"{name} turned", saved(lambda found, name=name: found.update({name: found[name].unsqueeze(0).mT}))
        yield f"{name} empty", saved(lambda found, name=name: found.update({name: found[name][:0]}))
        for dtype in (torch.int64, torch.bool, torch.float8_e4m3fn, torch.uint8):
            yield f"{name} as {dtype}", saved(lambda found, n=name, d=dtype: found.update({n: found[n].to(d)}))
    yield "a tensor too many", saved(lambda found: found.update({"model.backdoor.weight": torch.ones(3)}))


class Runs:
    """A pickle that calls something when it is opened."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@family("torch files", "inspect", "load", "quantize")
def torch_files() -> Iterator[tuple[str, Change]]:
    def instead(content: Any, file: str = "pytorch_model.bin") -> Change:
        def make(folder: Path) -> None:
            (folder / F).unlink()
            if isinstance(content, bytes):
                put(folder, file, content)
            else:
                torch.save(content(folder), folder / file)

        return make

    canary = Runs(exec, "open('CANARY', 'w')")
    yield "exec beside tensors", instead(lambda _: base_tensors() | {"x": canary})
    yield "exec alone", instead(lambda _: canary)
    yield "os.system", instead(lambda _: {"x": Runs(os.system, "touch CANARY")})
    yield "open for writing", instead(lambda _: {"x": Runs(open, "CANARY", "w")})
    yield "getattr", instead(lambda _: {"x": Runs(getattr, torch.Tensor, "numpy")})
    yield "torch.load of another file", instead(lambda _: {"x": Runs(torch.load, "/etc/passwd")})
    yield "legacy pickle", instead(pickle.dumps({"x": 1}))
    yield "legacy exec", instead(pickle.dumps(canary))
    yield "empty", instead(b"")
    yield "zip without a pickle", instead(b"PK\x05\x06" + b"\0" * 18)
    yield "half a zip", instead(b"PK\x03\x04" + b"\0" * 100)
    yield "a list", instead(lambda _: [torch.ones(2)])
    yield "a number", instead(lambda _: {"a": 7})
    yield "a nested module", instead(lambda _: {"model": {"model": base_tensors()}})
    yield "sparse", instead(lambda _: {"a": torch.eye(3).to_sparse()})
    yield "sparse CSR", instead(lambda _: {"a": torch.eye(3).to_sparse_csr()})
    yield "quantized", instead(lambda _: {"a": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)})
    yield "meta", instead(lambda _: {"a": torch.ones(4, device="meta")})
    yield "complex", instead(lambda _: {"a": torch.ones(4, dtype=torch.complex64)})
    yield "huge by strides of 0", instead(lambda _: {"a": torch.ones(1).expand(2**40)})
    yield "name ../x", instead(lambda _: {"../x": torch.ones(1)})
    yield "a whole module", instead(lambda _: torch.nn.Linear(2, 2))
    yield "the .pt ending", instead(lambda _: base_tensors(), "model.pt")
    yield "the .ckpt ending", instead(lambda _: base_tensors(), "model.ckpt")
    yield "plain tensors", instead(lambda _: base_tensors())
    yield "an index of pickles elsewhere", _torch_index
    yield "a deflated bomb", _bomb


def _torch_index(folder: Path) -> None:
    (folder / F).unlink()
    put(folder, "pytorch_model.bin.index.json", {"weight_map": {"a": "../secret.bin"}})


def _bomb(folder: Path) -> None:
    (folder / F).unlink()
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\0" * (64 << 20))


def _put_fifo(path: Path) -> None:
    os.mkfifo(path)


def _put_folder(path: Path) -> None:
    path.mkdir()


def _put_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


def _put_unreadable(path: Path) -> None:
    path.symlink_to("/proc/self/mem")


@family("links and devices", "inspect", "load", "quantize")
def places() -> Iterator[tuple[str, Change]]:
    kinds: dict[str, Any] = {
        "a pipe": _put_fifo,
        "a folder": _put_folder,
        "a socket": _put_socket,
        "/proc/self/mem": _put_unreadable,
        **{
            f"a link to {target}": lambda path, target=target: path.symlink_to(target)
            for target in ("/dev/zero", "/dev/stdin", "/proc/self/environ", "../secret.bin", "nowhere", ".")
        },
    }
    files = ("config.json", F, "tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE", INDEX)
    for file in files:
        for name, make in kinds.items():

            def place(folder: Path, file: str = file, make: Any = make) -> None:
                (folder / file).unlink(missing_ok=True)
                make(folder / file)

            yield f"{name} as {file}", place
    yield "a template folder elsewhere", lambda folder: (folder / "additional_chat_templates").symlink_to("/etc")
    yield (
        "a tokenizer_file elsewhere",
        lambda folder: change(folder, "tokenizer_config.json", tokenizer_file=str(folder.parent / "secret.bin")),
    )
