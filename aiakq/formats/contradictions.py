"""Which layers are quantized according to the config, and are not, or the reverse: the tensors count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from aiakq.formats.model_folder import some_of
from aiakq.patterns import is_plain
from aiakq.spec import QuantSpec

if TYPE_CHECKING:
    from aiakq.formats.checkpoint import Checkpoint

#: What a QuantSpec ignores if the config says nothing.
_DEFAULT = QuantSpec.__dataclass_fields__["ignore"].default


def contradictions(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield remarks about layers whose tensors are not what the config says. Raises what ``Checkpoint.spec`` raises."""
    spec, linears = checkpoint.spec, checkpoint.quantized_linears()
    if spec is None:
        return
    coded = [name for name in linears if spec.for_layer(name) is None]
    if spec.ignore == _DEFAULT:
        coded = [name for name in coded if name.rpartition(".")[2] not in spec.ignore]
    if coded:
        yield f"the config says that {some_of(coded)} is not quantized, but the tensors are, and count"
    unpacked = [
        name
        for name, layer in spec.layers
        if layer is not None and is_plain(name) and spec.for_layer(name) and checkpoint.locate_linear(name) is None
    ]
    plain = [name for name in unpacked if checkpoint.locate(f"{name}.weight") is not None]
    if plain:
        yield f"the config says that {some_of(plain)} is quantized, but the tensors are not, and count"
    missing = [name for name in unpacked if name not in plain and not any(True for _ in checkpoint.names(f"{name}."))]
    if missing:
        yield f"the config says how {some_of(missing)} is quantized, which has no tensors"
