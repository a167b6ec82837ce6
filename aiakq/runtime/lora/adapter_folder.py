"""AdapterFolder: a LoRA adapter as PEFT saves it, checked by its headers before any tensor is read.

Nothing in the folder is executed, pickles are not opened, links out of it are refused, and no memory is allocated for
a tensor before its shape and rank are checked.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from aiakq.errors import AiakqError, error
from aiakq.formats.model_folder import open_file, read_file, real_path
from aiakq.formats.safetensors_file import TensorInfo, parse_header, read_header, read_tensor
from aiakq.runtime.lora.adapter_config import CONFIG as CONFIG
from aiakq.runtime.lora.adapter_config import MAX_CONFIG_BYTES, AdapterConfig, parse_config

WEIGHTS = "adapter_model.safetensors"
_MAX_SHOWN_PATH = 256
#: Suffix of a tensor name -> the part of a module's adapter that it is.
_PARTS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_B.bias": "bias",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",  # PEFT before 0.12
}
_NAME = re.compile(rf"base_model\.model\.(.+)\.({'|'.join(map(re.escape, _PARTS))})")
_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class AdaptedModule:
    """An adapted linear layer [N, K] and the names of its tensors.

    scale      factor of B(Ax).
    a, b       names of the tensors A [rank, K] and B [N, rank].
    bias       name of the bias of B [N], or None.
    magnitude  name of DoRA's magnitude [N], or None.
    """

    n: int
    k: int
    rank: int
    scale: float
    a: str
    b: str
    bias: str | None = None
    magnitude: str | None = None


@dataclass(frozen=True)
class LoraWeights:
    """The tensors of one adapted linear layer: y = W x + scale * (b (a x) + bias), each row times magnitude over its
    norm with DoRA.

    a [rank, K], b [N, rank], bias [N] or None, magnitude [N] or None, in the dtype of the file.
    """

    scale: float
    a: Tensor
    b: Tensor
    bias: Tensor | None = None
    magnitude: Tensor | None = None


class AdapterFolder:
    """An adapter whose config and headers were checked.

    modules  its linear layers by module name.
    nbytes   size of all tensors in the file.
    """

    def __init__(self, path: Path, config: AdapterConfig, raw_config: bytes, tensors: dict[str, TensorInfo]) -> None:
        self.path, self.config = path, config
        self._raw_config, self._tensors = raw_config, tensors
        self.modules = dict(_modules(str(path), config, tensors))
        self.nbytes = sum(info.nbytes for info in tensors.values())

    @property
    def max_rank(self) -> int:
        """Return the largest rank of a module."""
        return max(module.rank for module in self.modules.values())

    def digest(self, seconds: float = math.inf) -> str:
        """Return the hash of config and weights that identifies the adapter: 32 hexadecimal digits.

        Raises ``adapter_malformed`` if reading the file takes longer than ``seconds``.
        """
        digest, until = self._new_digest(), time.monotonic() + seconds
        with open_file(self.path, WEIGHTS) as stream:
            for chunk in iter(lambda: stream.read(1 << 20), b""):
                digest.update(chunk)
                if time.monotonic() > until:
                    reason = f"{WEIGHTS} cannot be read within {seconds:.0f} s"
                    raise error("adapter_malformed", adapter=self.path, reason=reason)
        return digest.hexdigest()

    def read(self) -> tuple[str, dict[str, LoraWeights]]:
        """Return the digest of what was read, and the weights by module.

        Raises ``adapter_malformed`` for values that are not finite, ``adapter_changed`` for other tensors than those
        that were checked, ``model_malformed`` for a file that was truncated since it was opened.
        """
        digest = self._new_digest()
        read: dict[str, Tensor] = {}
        with open_file(self.path, WEIGHTS) as stream:
            # Tensors are read as the bytes that are hashed say: the file may be another one than at ``open_adapter``.
            header, tensors = parse_header(stream, WEIGHTS)
            if tensors != self._tensors:
                raise error("adapter_changed", adapter=self.path)
            digest.update(header)
            for name, info in sorted(tensors.items(), key=lambda item: item[1].offset):
                tensor = read_tensor(stream, info)
                if tensor.numel():
                    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
                if not torch.isfinite(tensor).all():
                    raise error("adapter_malformed", adapter=self.path, reason=f"{name} has values that are not finite")
                read[name] = tensor
        return digest.hexdigest(), {
            name: LoraWeights(
                module.scale,
                read[module.a],
                read[module.b],
                None if module.bias is None else read[module.bias],
                None if module.magnitude is None else read[module.magnitude],
            )
            for name, module in self.modules.items()
        }

    def _new_digest(self) -> hashlib.blake2b:
        digest = hashlib.blake2b(digest_size=16, person=b"aiakq lora")
        digest.update(len(self._raw_config).to_bytes(8, "little"))
        digest.update(self._raw_config)
        return digest


def open_adapter(path: str | Path, root: str | Path | None = None, max_rank: int | None = None) -> AdapterFolder:
    """Open the adapter in a folder, which must be inside ``root`` if that is given; reads config and headers only.

    Raises ``adapter_missing``, ``adapter_outside_root``, ``path_outside_model``, ``adapter_malformed``,
    ``adapter_unsupported``, ``adapter_rank``, ``model_malformed``.
    """
    folder = _resolved(path, root)
    if not os.path.lexists(folder / CONFIG):
        raise error("adapter_missing", path=path)
    raw = read_file(folder, CONFIG, limit=MAX_CONFIG_BYTES)
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise error("adapter_malformed", adapter=path, reason=f"{CONFIG} is not a JSON object")
    config = parse_config(values, str(path))
    if not os.path.lexists(folder / WEIGHTS):
        pickled = os.path.lexists(folder / "adapter_model.bin")
        reason = f"it has no {WEIGHTS}" + (", and adapter_model.bin is a pickle, which could run code" * pickled)
        raise error("adapter_malformed", adapter=path, reason=reason)
    adapter = AdapterFolder(folder, config, raw, read_header(real_path(folder, WEIGHTS), WEIGHTS))
    if max_rank is not None and adapter.max_rank > max_rank:
        raise error("adapter_rank", adapter=path, rank=adapter.max_rank, limit=max_rank)
    return adapter


def _resolved(path: str | Path, root: str | Path | None) -> Path:
    """Return the real path of the folder. Raises ``adapter_missing``, ``adapter_outside_root``."""
    shown = str(path)[:_MAX_SHOWN_PATH]
    try:
        folder = Path(os.path.realpath(path))
    except (OSError, ValueError):  # a loop of links, a zero byte
        raise error("adapter_missing", path=repr(shown)) from None
    if root is not None and not folder.is_relative_to(os.path.realpath(root)):
        raise error("adapter_outside_root", path=shown, root=root)
    if not os.path.isdir(folder):  # also for names that are too long
        raise error("adapter_missing", path=shown)
    return folder


def _modules(
    adapter: str, config: AdapterConfig, tensors: dict[str, TensorInfo]
) -> Iterator[tuple[str, AdaptedModule]]:
    """Yield the modules that the tensor names determine. Raises ``adapter_malformed``, ``adapter_unsupported``."""

    def bad(reason: str) -> AiakqError:
        return error("adapter_malformed", adapter=adapter, reason=reason)

    parts: dict[str, dict[str, str]] = {}
    for name, info in tensors.items():
        found = _NAME.fullmatch(name)
        if found is None:
            raise _unknown(adapter, name)
        if info.dtype not in _DTYPES:
            raise bad(f"{name} is {info.dtype}, not one of {', '.join(_DTYPES)}")
        part = parts.setdefault(found[1], {})
        if _PARTS[found[2]] in part:
            raise bad(f"{found[1]} has a {found[2]} twice")
        part[_PARTS[found[2]]] = name
    if not parts:
        raise bad("it has no tensors")
    for module, part in parts.items():
        if "a" not in part or "b" not in part:
            raise bad(f"{module} has no {'lora_B' if 'a' in part else 'lora_A'}")
        for kind, expected in (("bias", config.lora_bias), ("magnitude", config.dora)):
            if (kind in part) != expected:
                field = "lora_bias" if kind == "bias" else "use_dora"
                raise bad(f"{module} has {'no' if expected else 'a'} {kind}, but {field} is {str(expected).lower()}")
        yield module, _module(bad, config, module, part, {kind: tensors[name].shape for kind, name in part.items()})


def _module(
    bad: Callable[[str], AiakqError],
    config: AdapterConfig,
    module: str,
    part: dict[str, str],
    shapes: dict[str, tuple[int, ...]],
) -> AdaptedModule:
    """Return a module whose tensors have these shapes. Raises the error that ``bad`` returns if they do not match."""
    a, b = shapes["a"], shapes["b"]
    if len(a) != 2 or len(b) != 2 or 0 in a + b:
        raise bad(f"{module} has lora_A {list(a)} and lora_B {list(b)}, which are not matrices (a shard of ZeRO-3?)")
    rank, k = a
    n = b[0]
    if b[1] != rank or rank != config.rank_of(module):
        raise bad(f"{module} has lora_A {list(a)} and lora_B {list(b)}, but its rank is {config.rank_of(module)}")
    for kind in ("bias", "magnitude"):
        if shapes.get(kind, (n,)) != (n,):
            raise bad(f"the {kind} of {module} is {list(shapes[kind])}, not [{n}]")
    scale = config.scale(module, rank)
    return AdaptedModule(n, k, rank, scale, part["a"], part["b"], part.get("bias"), part.get("magnitude"))


def _unknown(adapter: str, name: str) -> AiakqError:
    """Return the error for a tensor that does not belong to the adapter of a linear layer."""
    if "lora_embedding_" in name:
        return error("adapter_unsupported", adapter=adapter, field=name, reason="it adapts an embedding")
    if name.startswith("base_model.model.") and ".lora_" not in name:
        return error("adapter_unsupported", adapter=adapter, field=name, reason="it replaces a layer of the base model")
    return error("adapter_malformed", adapter=adapter, reason=f"the tensor {name} is not one of PEFT's LoRA")
