"""The experts of Llama 4, which checkpoints of floats have in two tensors and GGUF files in one per projection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class ExpertPart:
    """A linear of an expert: columns of a tensor [E, K, N].

    stored  name of the tensor in the checkpoint.
    shape   of the linear, [N, K].
    part    which of the ``count`` equal parts of the N columns it is.
    """

    stored: str
    shape: tuple[int, ...]
    expert: int
    part: int
    count: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return the weight [N, K] in the tensor."""
        return tensor[self.expert].T.chunk(self.count)[self.part].contiguous()


def expert_parts(
    model_type: str, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, ExpertPart]:
    """Return the linears of experts that a checkpoint has in tensors [E, K, N], by their usual names; none of models
    other than Llama 4.

    names   usual name of every tensor -> its name in the checkpoint.
    shapes  the latter -> shape.
    """
    found: dict[str, ExpertPart] = {}
    for name, stored in names.items():
        prefix, inside, last = name.rpartition(".experts.")
        if model_type != "llama4_text" or not inside or last not in _PARTS:
            continue
        count, k, n = shapes[stored]
        parts = _PARTS[last]
        for expert in range(count):
            for number, part in enumerate(parts):
                shape = (n // len(parts), k)
                full = f"{prefix}.experts.{expert}.{part}.weight"
                found[full] = ExpertPart(stored, shape, expert, number, len(parts))
    return found
