"""The headers of a model on the hub, without its weights: files of their size that hold nothing else.

Of every safetensors file only the header is requested. The file that stands for it has the same header and is as long,
but is sparse: it takes no space, and its tensors are zeros.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from aiakq.errors import error, first_line
from aiakq.formats.hub import hub_answers, resolve_model

#: Largest file that may be claimed.
_MOST_BYTES = 1 << 42
#: Largest file of a repository, besides weights, that is copied.
_LARGEST_COPY = 1 << 28


def header_folder(name: str, folder: Path, revision: str | None = None) -> int:
    """Fill ``folder`` with the config, the tokenizer and the headers of the hub model ``name``.

    Returns the bytes of its weights. Raises ``model_hub``, also for a repository without safetensors.
    """
    import huggingface_hub

    if not hub_answers():
        raise error("model_hub", name=name, reason="it does not answer, and headers are not in the cache")
    source = resolve_model(name, revision, weights="none")
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.stat().st_size <= _LARGEST_COPY:
            shutil.copyfile(path, folder / path.name)
    try:
        found = huggingface_hub.HfApi().get_safetensors_metadata(name, revision=revision)
    except Exception as problem:
        raise error("model_hub", name=name, reason=first_line(problem)) from problem
    return sum(_write_header(folder / Path(file).name, each, name) for file, each in found.files_metadata.items())


def _write_header(path: Path, metadata: Any, name: str) -> int:
    """Write a file with this header; return the bytes of its tensors. Raises ``model_hub`` for sizes that lie."""
    header: dict[str, object] = {"__metadata__": dict(metadata.metadata or {})}
    end = 0
    for tensor, info in metadata.tensors.items():
        header[tensor] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": list(info.data_offsets)}
        end = max(end, int(info.data_offsets[1]))
    raw = json.dumps(header).encode()
    if not 0 <= end <= _MOST_BYTES:
        raise error("model_hub", name=name, reason=f"{path.name} claims {end} bytes")
    with open(path, "xb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        stream.truncate(8 + len(raw) + end)
    return end
