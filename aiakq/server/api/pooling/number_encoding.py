"""How the numbers of embeddings are returned: as JSON, as base64, or as bytes, in one of several number formats."""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from aiakq.errors import error
from aiakq.runtime.protocol.pooling_params import Pooled

#: Number, position, shape and number format of a vector.
Place = dict[str, object]
EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]
EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "little", "big"]

#: Number of values of rows, and of vectors, to encode before yielding to other tasks.
_NUMBERS_PER_YIELD, _VECTORS_PER_YIELD = 1 << 14, 8
#: Maximum size in bytes of the header with the positions of the vectors, since many programs limit headers.
MAX_HEADER_BYTES = 16 << 10


@dataclass(frozen=True)
class NumberEncoding:
    """``format`` float, base64, bytes, or bytes_only; ``dtype`` and ``endianness`` are those of all but float."""

    format: EncodingFormat = "float"
    dtype: EmbedDtype = "float32"
    endianness: Endianness = "native"

    def check(self) -> None:
        """Raise ``unsupported_parameter`` for number formats of 8 bits."""
        if self.dtype.startswith("fp8"):
            reason = "vectors are returned in float32, float16 or bfloat16"
            raise error("unsupported_parameter", param="embed_dtype", reason=reason)

    def encode(self, data: bytes) -> bytes:
        """Return float32 values in native byte order in the encoding's number format and byte order."""
        swaps = self.endianness not in ("native", sys.byteorder)
        if self.dtype == "float32" and not swaps:
            return data
        import numpy as np

        values = np.frombuffer(data, np.float32)
        if self.dtype == "float16":
            with np.errstate(over="ignore"):
                values = values.astype(np.float16)
        elif self.dtype == "bfloat16":
            bits = values.view(np.uint32)
            # Round to the nearest value, and to the even one of two; NaN is not rounded to infinity.
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            values = np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)
        return values.byteswap().tobytes() if swaps else values.tobytes()

    def body(self, vectors: Sequence[bytes], shapes: Sequence[tuple[int, ...]]) -> tuple[bytes, list[Place]]:
        """Return all vectors one after the other, and the position and the shape of each."""
        parts: list[bytes] = []
        items: list[Place] = []
        start = 0
        for index, (data, shape) in enumerate(zip(vectors, shapes, strict=True)):
            parts.append(self.encode(data))
            end = start + len(parts[-1])
            place: Place = {"index": index, "embed_dtype": self.dtype, "endianness": self.endianness}
            items.append(place | {"start": start, "end": end, "shape": list(shape)})
            start = end
        return b"".join(parts), items


def metadata_header(metadata: dict[str, object]) -> str:
    """Return the header ``metadata`` of a response of bytes. Raises ``unsupported_parameter`` if it is too long."""
    text = msgspec.json.encode(metadata).decode("ascii", "backslashreplace")
    if len(text) > MAX_HEADER_BYTES:
        reason = "the header with the positions of so many vectors would be too long; use bytes_only or base64"
        raise error("unsupported_parameter", param="encoding_format", reason=reason)
    return text


async def encoded(prompts: Sequence[Pooled], encoding: NumberEncoding, one_row: bool) -> list[Any]:
    """Encode each result as JSON: a list of numbers, a list of rows, or base64 of the values."""
    values: list[object] = []
    for pooled in prompts:
        if encoding.format == "base64":
            values.append(base64.b64encode(encoding.encode(pooled.data)).decode())
        elif one_row:
            values.append(msgspec.Raw(msgspec.json.encode(pooled.vector())))
        else:
            rows, parts = pooled.rows(), []
            at_a_time = max(1, _NUMBERS_PER_YIELD // pooled.width)
            for start in range(0, len(rows), at_a_time):
                await asyncio.sleep(0)
                parts.append(msgspec.json.encode(rows[start : start + at_a_time])[1:-1])
            values.append(msgspec.Raw(b"[" + b",".join(parts) + b"]"))
        if len(values) % _VECTORS_PER_YIELD == 0:
            await asyncio.sleep(0)
    return values
