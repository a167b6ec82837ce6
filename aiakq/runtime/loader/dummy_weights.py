"""Random weights (``--load-format dummy``), for benchmarks without a checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from aiakq.formats.input_rounding import rounding_of
from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.linear_reference import dequantize
from aiakq.kernels.ops.parallel import Role
from aiakq.kernels.tables import TABLES
from aiakq.kernels.types import InputRounding, QWeight
from aiakq.runtime.config.device import DTYPES
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.loader.binding import LinearBuilder, Part, joined_rows
from aiakq.spec import LayerSpec, QuantSpec


def stored_dtype(config: EngineConfig) -> torch.dtype:
    """The dtype of a checkpoint of ``config``, as config.json says; else that of activations."""
    return DTYPES.get(str(config.model.raw.get("dtype") or config.model.raw.get("torch_dtype")), config.device.dtype)


class DummyWeights(LinearBuilder):
    """Random ``Weights`` with the shapes of the config, quantized if the config says so.

    They depend on the seed, the name and the device only, so that ranks agree.
    """

    def __init__(self, config: EngineConfig, ops: Ops) -> None:
        super().__init__(ops)
        self.remarks: list[str] = []
        self.spec = config.spec
        self.stored = stored_dtype(config)
        # Generated on the device: on a CPU, it would take half a minute for a model of 8 B.
        self._seed = config.load.seed
        self.generator = torch.Generator(config.device.device)
        self._codes = torch.Generator(config.device.device)

    def has(self, name: str) -> bool:
        return False  # families then use their default names

    def has_shape(self, name: str, *shape: int) -> bool:
        return self.has(name)

    def is_packed(self, name: str) -> bool:
        return False

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return [*shape] in ``dtype`` or the activation dtype: ones for norms, otherwise N(0, 1 / shape[-1])."""
        return self._random(name, *shape).to(device=self.ops.device, dtype=dtype or self.ops.dtype)

    def weight(self, name: str, n: int, k: int) -> Tensor:
        """Return [N, K] in the dtype of config.json, or in the activation dtype if the layer is quantized."""
        spec = None if self.spec is None else self.spec.for_layer(name)
        if spec is None:
            return self._random(f"{name}.weight", n, k)
        self._reseed(self._codes, name)
        return dequantize(random_weight(spec, n, k, None, self.ops.device, self._codes), self.ops.dtype)

    def _random(self, name: str, *shape: int) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        self._reseed(self.generator, name)
        return (
            torch.randn(shape, generator=self.generator, device=self.generator.device)
            .mul_(shape[-1] ** -0.5)
            .to(self.stored)
        )

    def _reseed(self, generator: torch.Generator, name: str) -> None:
        generator.manual_seed(self._seed ^ zlib.crc32(name.encode()))

    def _bias(self, name: str, n: int) -> Tensor:
        return self._random(f"{name}.bias", n)

    def _read(self, parts: Sequence[Part], k: int, bias: bool, role: Role, rows: Tensor | None = None) -> LinearLayer:
        """Return random layers; their ``rows`` [N] do not matter."""
        specs = [None if self.spec is None else self.spec.for_layer(name) for name, _ in parts]
        if any(spec != specs[0] for spec in specs):
            return self._separate(parts, k, bias, role)
        biases = [self._random(f"{name}.bias", n) for name, n in parts] if bias else None
        joined = None if biases is None else joined_rows(biases)
        if specs[0] is not None:
            n = sum(n for _, n in parts)
            self._reseed(self._codes, parts[0][0])
            weight = random_weight(specs[0], n, k, joined, self.ops.device, self._codes)
            return self.ops.linear(weight, len(parts), role)
        floats = joined_rows([self._random(f"{name}.weight", n, k) for name, n in parts])
        return self.dense(floats, joined, len(parts), role=role)

    def embedding(
        self, name: str, vocab: int, width: int, *, tied: bool, bias: Tensor | None = None
    ) -> tuple[EmbeddingLayer, LinearLayer | None]:
        """See Weights: bias [V]."""
        return self.embedding_of(self._random(name, vocab, width), tied, bias)


def random_weight(
    spec: QuantSpec | LayerSpec, n: int, k: int, bias: Tensor | None, device: torch.device, generator: torch.Generator
) -> QWeight:
    """Return a weight [N, K] with uniformly random codes, scaled such that outputs are as large as inputs.

    bias  [N] float or None. ``generator`` is on ``device``.
    """
    size = k if spec.group_size == -1 else spec.group_size
    levels, groups = 2**spec.bits, -(-k // size)
    codes = torch.randint(0, levels, (n, k), dtype=torch.uint8, device=device, generator=generator)
    if spec.float8 is not None:
        return _random_floats(spec, codes, bias, size)
    if spec.table is not None:
        return _random_indices(spec, spec.table, codes, bias, size)
    # Codes of 7 bits are held in 8.
    return QWeight(
        scheme=f"w{8 if spec.bits == 7 else spec.bits}a{spec.activation_bits or 16}",
        codes=codes,
        scales=torch.full((n, groups), (12 / k) ** 0.5 / levels, dtype=torch.float16, device=device),
        zeros=None if spec.symmetric else torch.full_like(codes[:, :groups], levels // 2),
        bias=bias,
        group_size=size,
        rounding=InputRounding(elements=spec.activation_type) if spec.activation_type else InputRounding(),
    )


def _random_floats(spec: QuantSpec | LayerSpec, codes: Tensor, bias: Tensor | None, size: int) -> QWeight:
    """Return a weight whose codes [N, K] uint8 become e4m3 of magnitudes below 2, as are those of random bits."""
    n, k = codes.shape
    scales = torch.full((n, -(-k // size)), k**-0.5, device=codes.device)
    static = spec.activation_bits is not None and spec.static_input
    return QWeight(
        scheme="fp8a8" if spec.activation_bits else "fp8a16",
        codes=codes & 0xBF,
        scales=scales,
        bias=bias,
        group_size=size,
        input_scale=torch.tensor(1 / 64, device=codes.device) if static else None,
        code_type=torch.float8_e4m3fn,
        rounding=rounding_of(spec),
    )


def _random_indices(spec: QuantSpec | LayerSpec, table: str, codes: Tensor, bias: Tensor | None, size: int) -> QWeight:
    """Return a weight whose codes [N, K] uint8 are indices of the values ``table``."""
    n, k = codes.shape
    values = torch.tensor(TABLES[table], device=codes.device)
    unit = torch.tensor(1 / 64, device=codes.device) if spec.activation_bits and spec.static_input else None
    activations = spec.activation_bits or 16
    return QWeight(
        scheme=f"lut{spec.bits}a{activations}",
        codes=codes,
        scales=torch.full((n, -(-k // size)), float((k * values.square().mean()) ** -0.5), device=codes.device),
        bias=bias,
        group_size=size,
        input_scale=unit,
        table=values,
        rounding=rounding_of(spec),
    )
