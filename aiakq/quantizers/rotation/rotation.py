"""Rotation: a change of basis of the residual stream and of the attention heads, folded into a model's weights.

With an orthogonal R, a stream ``x R`` gives every root-mean-square norm a rotated output as well. So layers that write
the stream get ``R^T W``, layers that read it ``W diag(g) R``, where g is the gain of the norm, which becomes 1
(Ashkboos et al. 2024, arXiv:2404.00456). A LayerNorm also subtracts the mean, which an R that keeps the vector of ones
does not change. ValueHeads of a head are rotated by another matrix, and the columns of the attention output with them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from aiakq.quantizers.rotation.orthogonal import Orthogonal, orthogonal_of


@dataclass(frozen=True)
class ValueHeads:
    """The rows of a linear that compute values, and the linear that reads the heads.

    part    as in SmoothMapping.
    count   number of value heads.
    target  name of the attention output.
    """

    target: str
    count: int
    part: tuple[int, int, int] | None

    def rows(self, n: int) -> Tensor:
        """Return the indices of the rows of values among N, [count, D] int64."""
        every = torch.arange(n)
        if self.part is not None:
            parts, first, length = self.part
            every = every.view(parts, -1)[:, first : first + length].flatten()
        return every.view(self.count, -1)


@dataclass(frozen=True)
class Structure:
    """What reads and writes the residual stream, by full name of the module.

    norms        norm of the stream -> whether it multiplies by one plus its weight.
    kept_norms   norms whose gain is the same for all channels and stays where it is.
    readers      linear or router -> the norm before it.
    writers      linears whose output is added to the stream.
    embeddings   embeddings that are added to it.
    values       linear that computes values -> its heads.
    layer_norms  whether a norm subtracts the mean.
    embedding    name of the input embedding.
    untied       name of the output layer if it shared the embedding's weight and no longer can, else "".
    """

    norms: dict[str, bool] = field(default_factory=dict)
    kept_norms: list[str] = field(default_factory=list)
    readers: dict[str, str] = field(default_factory=dict)
    writers: list[str] = field(default_factory=list)
    embeddings: list[str] = field(default_factory=list)
    values: dict[str, ValueHeads] = field(default_factory=dict)
    layer_norms: bool = False
    embedding: str = ""
    untied: str = ""


class Rotation:
    """Rotates the parameters of a model, one at a time.

    kind       hadamard or learned.
    stream     rotation of the residual stream.
    heads      linear that computes values -> for each of its heads what its rows and what the columns that read it are
               multiplied by, [2, count, D, D] float32: R / s and R s for channels scaled by s.
    quantized  linears whose rotated weights stay float32, because their codes are stored instead of them; None: nothing
               is rounded to the dtype of the output.
    """

    def __init__(
        self,
        kind: str,
        structure: Structure,
        stream: Orthogonal,
        heads: dict[str, Tensor],
        quantized: frozenset[str] | None = None,
    ) -> None:
        self.kind = kind
        self.structure = structure
        self.stream = stream
        self.heads = heads
        self.quantized = quantized
        self._writers = frozenset(structure.writers)
        self._embeddings = frozenset(structure.embeddings)
        self._outputs = {values.target: name for name, values in structure.values.items()}

    def changes(self, name: str) -> bool:
        """Whether the parameter ``name`` is rotated or folded."""
        module, _, _ = name.rpartition(".")
        known = self.structure
        return (
            module in known.norms
            or module in known.readers
            or module in self._writers
            or module in self._embeddings
            or module in known.values
        )

    def apply(self, name: str, value: Tensor, read: Callable[[str], Tensor]) -> Tensor:
        """Return the rotated parameter ``name``, whose ``value`` [N, K] or [N] is float32.

        ``read`` returns the original value of another parameter.
        """
        module, _, kind = name.rpartition(".")
        if module in self.structure.norms:
            return self._norm(module, kind, value, read)
        if kind == "weight":
            value = self._columns(module, value, read)
            if module in self._writers:
                value = self.stream.apply(value.T.contiguous()).T.contiguous()
        elif kind == "bias" and module in self._writers:
            value = self.stream.apply(value)
        values = self.structure.values.get(module)
        if values is not None and module in self.heads and kind in ("weight", "bias"):
            value = rotate_rows(value, self.heads[module][0], values)
        return value

    def _columns(self, module: str, weight: Tensor, read: Callable[[str], Tensor]) -> Tensor:
        """Return a weight [N, K] for rotated inputs."""
        norm = self.structure.readers.get(module)
        if norm is not None:
            gain = self._gain(norm, read)
            weight = self.stream.apply(weight if gain is None else weight * gain.to(weight.device))
        elif module in self._embeddings:
            weight = self.stream.apply(weight)
        source = self._outputs.get(module)
        if source in self.heads:
            weight = rotate_columns(weight, self.heads[source][1])
        return weight

    def _gain(self, norm: str, read: Callable[[str], Tensor]) -> Tensor | None:
        """Return the gain [K] that is folded into the layers after a norm; None: nothing is folded."""
        if not norm or norm in self.structure.kept_norms:
            return None
        return read(f"{norm}.weight") + float(self.structure.norms[norm])

    def _norm(self, module: str, kind: str, value: Tensor, read: Callable[[str], Tensor]) -> Tensor:
        """Return the weight or bias of a norm whose gain was folded into the layers after it."""
        gain = self._gain(module, read)
        if kind == "bias":
            return self.stream.apply(value if gain is None else value / gain.to(value.device))
        if gain is None or kind != "weight":
            return value
        return torch.zeros_like(value) if self.structure.norms[module] else torch.ones_like(value)

    # --- between processes ----------------------------------------------------------------------------------------

    def tensors(self) -> list[Tensor]:
        """Return all matrices: those of the heads in the order of their names, then those of the stream."""
        return [*(self.heads[name] for name in sorted(self.heads)), *self.stream.tensors()]

    def document(self) -> dict[str, Any]:
        """Return everything except ``tensors`` as JSON values."""
        return {
            "kind": self.kind,
            "structure": asdict(self.structure),
            "heads": sorted(self.heads),
            "quantized": sorted(self.quantized or ()),
        }

    @property
    def digest(self) -> str:
        """A checksum of the matrices."""
        checksum = hashlib.sha256()
        for tensor in self.tensors():
            checksum.update(tensor.cpu().contiguous().numpy().tobytes())
        return checksum.hexdigest()


def rotation_of(document: dict[str, Any], tensors: Sequence[Tensor]) -> Rotation:
    """Return the rotation of ``Rotation.document`` and ``Rotation.tensors``."""
    entries = dict(document["structure"])
    entries["values"] = {
        name: ValueHeads(each["target"], each["count"], None if each["part"] is None else tuple(each["part"]))
        for name, each in entries["values"].items()
    }
    names = document["heads"]
    return Rotation(
        document["kind"],
        Structure(**entries),
        orthogonal_of(tensors[len(names) :]),
        dict(zip(names, tensors, strict=False)),
        frozenset(document["quantized"]),
    )


def rotate_columns(weight: Tensor, matrices: Tensor) -> Tensor:
    """Rotate the columns of an attention output [N, K] by ``matrices`` [count, D, D] of the value heads."""
    matrices = matrices.to(weight.device, torch.float64)
    heads = weight.double().view(len(weight), len(matrices), -1, matrices.shape[1])
    return torch.einsum("nhgd,hde->nhge", heads, matrices).float().reshape(weight.shape)


def rotate_rows(value: Tensor, matrices: Tensor, values: ValueHeads) -> Tensor:
    """Rotate the values' rows of a weight [N, K] or bias [N] by ``matrices`` [count, D, D]."""
    rows = values.rows(len(value)).to(value.device)
    heads = value[rows].double()
    heads = heads.unsqueeze(-1) if value.dim() == 1 else heads
    turned = torch.einsum("hdk,hde->hek", heads, matrices.to(value.device, torch.float64)).float()
    value = value.clone()
    value[rows] = turned.squeeze(-1) if value.dim() == 1 else turned
    return value
