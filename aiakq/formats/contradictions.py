"""Which layers are quantized according to the config, and are not, or the reverse: the tensors count."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from aiakq.formats.model_folder import some_of
from aiakq.patterns import is_plain
from aiakq.spec import QuantSpec

#: What a QuantSpec ignores if the config says nothing.
_DEFAULT = QuantSpec.__dataclass_fields__["ignore"].default


def contradictions(spec: QuantSpec, linears: Sequence[str], names: Collection[str]) -> Iterator[str]:
    """Yield remarks about layers whose tensors are not what the config of ``spec`` says.

    linears  the packed linears of the checkpoint; names: those of all its tensors.
    """
    packed = set(linears)
    coded = [name for name in linears if spec.for_layer(name) is None]
    if spec.ignore == _DEFAULT:
        coded = [name for name in coded if name.rpartition(".")[2] not in spec.ignore]
    if coded:
        yield f"the config says that {some_of(coded)} is not quantized, but the tensors are, and count"
    plain = [
        name
        for name, layer in spec.layers
        if layer is not None and is_plain(name) and name not in packed and f"{name}.weight" in names
    ]
    if plain:
        yield f"the config says that {some_of(plain)} is quantized, but the tensors are not, and count"
