"""AdapterRef: a LoRA adapter that a request names."""

from __future__ import annotations

import msgspec


class AdapterRef(msgspec.Struct, frozen=True):
    """An adapter in a folder.

    key     hash of its contents, which is its identity.
    name    what requests call it.
    nbytes  of its tensors in the file.
    """

    key: str
    name: str
    path: str
    nbytes: int
