"""WordWeight: a quantized weight in the 32-bit words of a checkpoint, unpacked only where that is needed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from aiakq.kernels.packing import unpack
from aiakq.kernels.types import QWeight

#: Bits of codes that do not straddle words.
WORD_BITS = (2, 4, 8)


class WordWeight(QWeight):
    """A QWeight of integers in the natural order of the inputs. Codes are unpacked when they are first asked for.

    words  [N, ceil(K * b / 32)] int32: the codes of an output, packed along the inputs (packing.py), contiguous or the
           transpose of a contiguous tensor.
    """

    def __init__(
        self,
        words: Tensor,
        bits: int,
        k: int,
        scales: Tensor,
        zeros: Tensor | None = None,
        bias: Tensor | None = None,
        group_size: int = 0,
    ) -> None:
        """``scales``, ``zeros``, ``bias`` and ``group_size`` as in QWeight; ``bits`` is one of WORD_BITS."""
        assert bits in WORD_BITS, bits
        self.words, self._k = words, k
        self.scheme, self.group_size = f"w{bits}a16", group_size or k
        self.scales, self.zeros, self.bias = scales, zeros, bias

    # mypy takes it for a property that cannot be set, unlike the field.
    @cached_property
    def codes(self) -> Tensor:  # type: ignore[override]
        """[N, K]; see QWeight."""
        return unpack(self.words, self.bits, count=self._k)

    @cached_property
    def unpacked(self) -> QWeight:
        """The same weight as an ordinary QWeight."""
        return QWeight(self.scheme, self.codes, self.scales, self.zeros, bias=self.bias, group_size=self.group_size)

    @property
    def n(self) -> int:
        return len(self.words)

    @property
    def k(self) -> int:
        return self._k

    def with_bias(self, bias: Tensor | None) -> WordWeight:
        """See QWeight: bias [N]."""
        return self._of(self.words, self.scales, self.zeros, bias)

    def to(self, device: torch.device) -> QWeight:
        """See QWeight. Other devices than the CPU get codes."""
        return self if device.type == "cpu" else self.unpacked.to(device)

    def with_rows(self, rows: Tensor) -> WordWeight:
        """See QWeight: rows [M] int64."""
        zeros, bias = (None if values is None else values[rows] for values in (self.zeros, self.bias))
        return self._of(self.words[rows], self.scales[rows], zeros, bias)

    def with_inputs(self, first: int, end: int) -> QWeight:
        """See QWeight."""
        return self.unpacked.with_inputs(first, end)

    def followed_by(self, others: Sequence[QWeight]) -> WordWeight | None:
        """Return the weight with the rows of others [N_i, K] after its own, which have the same scheme; None if one of
        them is not in words of the same order.
        """
        weights = [self, *(each for each in others if isinstance(each, WordWeight))]
        transposed = self.words.stride(0) == 1
        if len(weights) <= len(others) or any((each.words.stride(0) == 1) != transposed for each in weights):
            return None
        parts = [each.words.T if transposed else each.words for each in weights]
        words = torch.cat(parts, dim=1).T if transposed else torch.cat(parts)
        zeros = [each.zeros for each in weights if each.zeros is not None]
        bias = [each.bias for each in weights if each.bias is not None]
        scales = torch.cat([each.scales for each in weights])
        return self._of(words, scales, torch.cat(zeros) if zeros else None, torch.cat(bias) if bias else None)

    def _of(self, words: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None) -> WordWeight:
        return WordWeight(words, self.bits, self._k, scales, zeros, bias, self.group_size)
