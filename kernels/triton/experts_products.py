"""One product of all experts of a mixture, by kind of weight: packed words, 8-bit integers, e4m3 by e4m3, other
small floats, or floats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from aiakq.kernels.ops.block_floats import round_inputs
from aiakq.kernels.ops.dense import TorchDense
from aiakq.kernels.ops.linear import LinearLayer, RoundedInputs
from aiakq.kernels.triton import linear, linear_floats, linear_fp8, linear_int8
from aiakq.kernels.triton.layouts import QuantizedLayout
from aiakq.kernels.triton.linear import GroupedLinear
from aiakq.kernels.triton.linear_floats import FloatCodesProduct
from aiakq.kernels.triton.linear_fp8 import Fp8Linear
from aiakq.kernels.triton.linear_int8 import Int8Linear
from aiakq.kernels.types import ActivationLayout, ExpertsProblem, LinearInput, PackedActivation, QuantizedActivation

if TYPE_CHECKING:
    from aiakq.kernels.triton.configs import Config


#: Layers whose weights are put together.
_Packed = GroupedLinear | FloatCodesProduct | Fp8Linear | Int8Linear | TorchDense


@dataclass(frozen=True)
class Blocks:
    """Pairs of tokens and experts, sorted by expert; see experts_kernel.py.

    pairs    [blocks, rows] int32, the pairs of each block; ``count`` where there is none.
    experts  [blocks] int32, the expert of each block, counted from this rank's first one; -1: the block is not used.
    count    number of pairs.
    """

    pairs: Tensor
    experts: Tensor
    count: int


class ExpertProduct(Protocol):
    """y[pair] = W[expert of the pair] x[row of the pair] + bias[expert], for the pairs of blocks.

    ``mean`` rows per expert decide the launch.
    """

    n: int

    def rows(self, mean: int) -> int:
        """Return the rows of a block."""

    def input_layout(self, m: int, mean: int) -> ActivationLayout | None:
        """Return the layout that an activation function can write for M rows of input."""

    def __call__(self, x: LinearInput, blocks: Blocks, mean: int, share: int, out: Tensor) -> None:
        """Write the rows of ``out`` [pairs, N] that blocks name; ``share`` pairs have the same row of x [M, K]."""


def product_of(layers: Sequence[LinearLayer], problem: ExpertsProblem) -> ExpertProduct | str:
    """Return the product of ``layers`` [N, K], whose weights then share memory with it; or why there is none, as the
    end of a sentence.
    """
    first = layers[0] if layers else None
    if isinstance(first, GroupedLinear):
        words = [layer for layer in layers if isinstance(layer, GroupedLinear)]
        alike = len(words) == len(layers) and len({(each.k, each.n, each.bits, each.group) for each in words}) == 1
        if any(each.perm is not None for each in words):
            return "their inputs are stored in an order of their own (act-order)"
        return WordsProduct(words) if alike and _biases_alike(words) else "their weights are not alike"
    if isinstance(first, Int8Linear):
        codes = [layer for layer in layers if isinstance(layer, Int8Linear)]
        alike = len(codes) == len(layers) and len({(each.k, each.n) for each in codes}) == 1
        if any(each.input_scale is not None for each in codes):
            return "their activations have stored scales"
        return IntegersProduct(codes) if alike and _biases_alike(codes) else "their weights are not alike"
    if isinstance(first, Fp8Linear):
        fp8 = [layer for layer in layers if isinstance(layer, Fp8Linear)]
        alike = len(fp8) == len(layers) and len({each.kind for each in fp8}) == 1
        if any(each.input_scale is not None for each in fp8):
            return "their activations have stored scales"
        return Fp8Product(fp8) if alike and _biases_alike(fp8) else "their weights are not alike"
    if isinstance(first, FloatCodesProduct):
        floats8 = [layer for layer in layers if isinstance(layer, FloatCodesProduct)]
        alike = len(floats8) == len(layers) and len({each.kind for each in floats8}) == 1
        return CodesProduct(floats8) if alike and _biases_alike(floats8) else "their weights are not alike"
    if isinstance(first, RoundedInputs):
        return _with_rounded_inputs(layers, problem)
    if type(first) is TorchDense:
        floats = [layer for layer in layers if type(layer) is TorchDense]
        alike = len(floats) == len(layers) and len({each.weight.shape for each in floats}) == 1
        if step_of(first.weight.shape[1]) is None:
            return f"{first.weight.shape[1]} inputs are no multiple of 16"
        return FloatsProduct(floats) if alike and _biases_alike(floats) else "their weights are not alike"
    if first is None:
        return "this rank has none"
    return f"no kernel computes their layers ({type(first).__name__}) together"


def _with_rounded_inputs(layers: Sequence[LinearLayer], problem: ExpertsProblem) -> ExpertProduct | str:
    """See ``product_of``: layers that round their inputs before a product."""
    rounded = [layer for layer in layers if isinstance(layer, RoundedInputs)]
    if len(rounded) < len(layers) or len({each.rounding for each in rounded}) > 1:
        return "their activations are not rounded alike"
    if any(each.input_scale is not None for each in rounded):
        return "their activations have stored scales"
    inner = product_of([each.inner for each in rounded], problem)
    return inner if isinstance(inner, str) else RoundedProduct(inner, rounded[0])


def _biases_alike(layers: Sequence[_Packed]) -> bool:
    """Whether all layers have a bias, or none."""
    return len({layer.bias is None for layer in layers}) == 1


def _shared(layers: Sequence[LinearLayer], name: str) -> Tensor:
    """Return the tensors ``name`` of all layers in one, of which theirs are then parts: memory is not taken twice."""
    stacked = torch.stack([getattr(layer, name) for layer in layers])
    for layer, part in zip(layers, stacked, strict=True):
        setattr(layer, name, part)
    return stacked


def _shared_bias(layers: Sequence[_Packed]) -> Tensor | None:
    return None if layers[0].bias is None else _shared(layers, "bias")


class WordsProduct(ExpertProduct):
    """Weights of 2, 3, 4 or 8 bits in the layout of linear_kernel.py."""

    def __init__(self, layers: Sequence[GroupedLinear]) -> None:
        self._layer = layers[0]
        self.n = layers[0].n
        self._words, self._grid, self._factors = (_shared(layers, name) for name in ("words", "grid", "factors"))
        self._bias = _shared_bias(layers)

    def _config(self, mean: int) -> Config:
        return linear.choose(self._layer, mean, dense=False)

    def rows(self, mean: int) -> int:
        """See ExpertProduct."""
        return self._config(mean).bm

    def input_layout(self, m: int, mean: int) -> ActivationLayout | None:
        """See ExpertProduct."""
        return linear.layout_for(self._layer, m, self._config(mean))

    def __call__(self, x: LinearInput, blocks: Blocks, mean: int, share: int, out: Tensor) -> None:
        """See ExpertProduct; x [M, K]."""
        from aiakq.kernels.triton.experts_kernel import experts_words_kernel

        config, layer = self._config(mean), self._layer
        if isinstance(x, Tensor):
            x = x if x.stride(1) == 1 else x.contiguous()
            layout = linear.layout_for(layer, len(x), config)
            x = PackedActivation(x, None) if layout is None else linear.pack_activation(x, layout)
        assert isinstance(x, PackedActivation)
        rows, sums = x.rows, x.rows if x.sums is None else x.sums
        padded = self._grid.shape[2]
        experts_words_kernel[(len(blocks.experts), -(-self.n // config.bn))](
            rows, sums, blocks.pairs, blocks.experts, self._words, self._grid, self._factors,
            out if self._bias is None else self._bias, out, rows.stride(0), sums.stride(0), out.stride(0),
            blocks.count, self.n,
            SHARE=share, N_PADDED=padded, STEPS=layer.steps, GROUP=layer.group, BITS=layer.bits, BKP=layer.plane,
            BN=config.bn, BM=config.bm, STAGES=config.stages, BIAS=self._bias is not None,
            SCALE_FIRST=config.scale_first, JOINED=config.joined, PLAIN=config.plain, num_warps=config.warps,
        )  # fmt: skip


class CodesProduct(ExpertProduct):
    """Weights that are floats of 8 or 4 bits, in the layout of linear_floats_kernel.py."""

    def __init__(self, layers: Sequence[FloatCodesProduct]) -> None:
        self._layer = layers[0]
        self.n = layers[0].n
        self._words, self._scales, self._factors = (_shared(layers, name) for name in ("words", "scales", "factors"))
        self._bias = _shared_bias(layers)

    def _config(self, mean: int) -> Config:
        return linear_floats.choose(self._layer, mean, dense=False)

    def rows(self, mean: int) -> int:
        """See ExpertProduct."""
        return self._config(mean).bm

    def input_layout(self, m: int, mean: int) -> ActivationLayout | None:
        """See ExpertProduct."""
        return None

    def __call__(self, x: LinearInput, blocks: Blocks, mean: int, share: int, out: Tensor) -> None:
        """See ExpertProduct; x [M, K], a Tensor."""
        from aiakq.kernels.triton.experts_kernel import experts_codes_kernel

        assert isinstance(x, Tensor)
        x = x if x.stride(1) == 1 else x.contiguous()
        config, layer = self._config(mean), self._layer
        experts_codes_kernel[(len(blocks.experts), -(-self.n // config.bn))](
            x, blocks.pairs, blocks.experts, self._words, self._scales, self._factors,
            out if self._bias is None else self._bias, out, x.stride(0), out.stride(0), blocks.count, self.n,
            SHARE=share, BN=config.bn, BM=config.bm, STAGES=config.stages, BIAS=self._bias is not None,
            GROUPS=self._scales.shape[1], **linear_floats.constants(layer, config, x.dtype), num_warps=config.warps,
        )  # fmt: skip


class RoundedProduct(ExpertProduct):
    """A product of inputs that are rounded first, each row on its own."""

    def __init__(self, inner: ExpertProduct, layer: RoundedInputs) -> None:
        self._inner, self._rounding, self.n = inner, layer.rounding, inner.n

    def rows(self, mean: int) -> int:
        """See ExpertProduct."""
        return self._inner.rows(mean)

    def input_layout(self, m: int, mean: int) -> ActivationLayout | None:
        """See ExpertProduct."""
        return None

    def __call__(self, x: LinearInput, blocks: Blocks, mean: int, share: int, out: Tensor) -> None:
        """See ExpertProduct; x [M, K], a Tensor."""
        assert isinstance(x, Tensor)
        self._inner(round_inputs(x, None, self._rounding).to(x.dtype), blocks, mean, share, out)


class Fp8Product(ExpertProduct):
    """e4m3 weights and activations, in the layout of linear_fp8_kernel.py."""

    def __init__(self, layers: Sequence[Fp8Linear]) -> None:
        self._layer, self.n = layers[0], layers[0].n
        self._weights, self._scales = (_shared(layers, name) for name in ("weights", "scales"))
        self._bias = _shared_bias(layers)
        self._common = min(layer.common for layer in layers)

    def rows(self, mean: int) -> int:
        """See ExpertProduct."""
        return linear_fp8.choose(self._layer, mean).bm

    def input_layout(self, m: int, mean: int) -> ActivationLayout | None:
        """See ExpertProduct."""
        return self._layer.layout

    def __call__(self, x: LinearInput, blocks: Blocks, mean: int, share: int, out: Tensor) -> None:
        """See ExpertProduct; x [M, K]."""
        from aiakq.kernels.triton.experts_kernel import experts_fp8_kernel

        layer, config = self._layer, linear_fp8.choose(self._layer, mean)
        if not isinstance(x, QuantizedActivation):
            assert isinstance(x, Tensor)
            x = linear_fp8.quantize(x, layer.layout)
        constants = linear_fp8.constants(layer, config) | {"COMMON": self._common >= config.bn}
        experts_fp8_kernel[(len(blocks.experts), -(-self.n // config.bn))](
            x.codes, x.scales, blocks.pairs, blocks.experts, self._weights, self._scales,
            out if self._bias is None else self._bias, out, out.stride(0), blocks.count, len(x.codes), self.n,
            layer.k // layer.step, SHARE=share, GROUPS=self._scales.shape[1], BIAS=self._bias is not None,
            **constants, num_warps=config.warps,
        )  # fmt: skip


class IntegersProduct(ExpertProduct):
    """Weights and activations of 8 bits, with a scale per output and per row."""

    def __init__(self, layers: Sequence[Int8Linear]) -> None:
        self.n, self._k = layers[0].n, layers[0].k
        self._weights, self._scales = (_shared(layers, name) for name in ("weights", "scales"))
        self._bias = _shared_bias(layers)
        self._step = linear_int8.step_of(self._k)

    def _config(self, mean: int) -> Config:
        from aiakq.kernels.triton import configs

        return configs.choose("integers", self._weights.device, 8, self.n, self._k // self._step, mean)

    def rows(self, mean: int) -> int:
        """See ExpertProduct."""
        return self._config(mean).bm

    def input_layout(self, m: int, mean: int) -> ActivationLayout | None:
        """See ExpertProduct."""
        return QuantizedLayout(None)

    def __call__(self, x: LinearInput, blocks: Blocks, mean: int, share: int, out: Tensor) -> None:
        """See ExpertProduct; x [M, K]."""
        from aiakq.kernels.triton.experts_kernel import experts_integers_kernel

        if isinstance(x, Tensor):
            codes, scales = linear_int8.quantize(x if x.stride(1) == 1 else x.contiguous(), None)
        else:
            assert isinstance(x, QuantizedActivation)
            codes, scales = x.codes, x.scales
        config = self._config(mean)
        experts_integers_kernel[(len(blocks.experts), -(-self.n // config.bn))](
            codes, scales, blocks.pairs, blocks.experts, self._weights, self._scales,
            out if self._bias is None else self._bias, out, out.stride(0), blocks.count, self.n,
            self._k // self._step, SHARE=share, N_PADDED=self._weights.shape[1], K=self._k, BN=config.bn,
            BM=config.bm, BK=self._step, STAGES=config.stages, WEIGHTS_LEFT=config.weights_left,
            BIAS=self._bias is not None, num_warps=config.warps,
        )  # fmt: skip


def step_of(k: int) -> int | None:
    """Return the inputs per inner step of a product of floats, the largest number that divides ``k``, or None."""
    return next((step for step in (64, 32, 16) if k % step == 0), None)


class FloatsProduct(ExpertProduct):
    """Weights in the dtype of the activations."""

    def __init__(self, layers: Sequence[TorchDense]) -> None:
        self._weights, self._bias = _shared(layers, "weight"), _shared_bias(layers)
        _, self.n, self._k = self._weights.shape
        step = step_of(self._k)
        assert step is not None
        self._step = step

    def _config(self, mean: int) -> Config:
        from aiakq.kernels.triton import configs

        return configs.choose("floats", self._weights.device, 16, self.n, self._k // self._step, mean)

    def rows(self, mean: int) -> int:
        """See ExpertProduct."""
        return self._config(mean).bm

    def input_layout(self, m: int, mean: int) -> ActivationLayout | None:
        """See ExpertProduct."""
        return None

    def __call__(self, x: LinearInput, blocks: Blocks, mean: int, share: int, out: Tensor) -> None:
        """See ExpertProduct; x [M, K], a Tensor."""
        from aiakq.kernels.triton.experts_kernel import experts_floats_kernel

        assert isinstance(x, Tensor)
        x = x if x.stride(1) == 1 else x.contiguous()
        config = self._config(mean)
        experts_floats_kernel[(len(blocks.experts), -(-self.n // config.bn))](
            x, blocks.pairs, blocks.experts, self._weights, out if self._bias is None else self._bias, out,
            x.stride(0), out.stride(0), blocks.count, self.n, self._k // self._step,
            SHARE=share, K=self._k, BN=config.bn, BM=config.bm, BK=self._step, STAGES=config.stages,
            BIAS=self._bias is not None, num_warps=config.warps,
        )  # fmt: skip
