"""Mamba and FalconMamba: selective scans instead of attention, and no MLPs (Gu and Dao 2023, arXiv:2312.00752)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from aiakq.kernels.ops.parallel import REPLICATED
from aiakq.kernels.recurrent_types import ConvolutionSpec, SelectiveScanSpec
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.recurrent import SelectiveStateSpace
from aiakq.runtime.models.builder import unsupported
from aiakq.runtime.models.decoder import Decoder, Mixer, Weights
from aiakq.runtime.models.mamba2 import Mamba2Builder
from aiakq.runtime.models.mixture import size


@dataclass(frozen=True)
class SelectiveSizes:
    """Sizes of a family's selective scans, of ``channels`` with states of ``state`` elements each.

    rank              size of the low-rank steps.
    bias              whether the input projection and the output projection have biases.
    convolution_bias  whether the convolution has one.
    """

    channels: int
    state: int
    rank: int
    taps: int
    bias: bool
    convolution_bias: bool

    def build(self, config: ModelConfig, weights: Weights, prefix: str) -> SelectiveStateSpace:
        """Build the layer at ``prefix``, without norms. Raises ``unsupported``."""
        D, C, N, rank = config.hidden_size, self.channels, self.state, self.rank
        if config.activation not in ("silu", "swish"):
            raise unsupported(config, f"its activation function is {config.activation:.64}")
        a_log = weights.tensor(f"{prefix}.A_log", C, N, dtype=torch.float32)
        skip = weights.tensor(f"{prefix}.D", C, dtype=torch.float32)
        step_bias = weights.tensor(f"{prefix}.dt_proj.bias", C, dtype=torch.float32)
        convolution = ConvolutionSpec(
            weights.tensor(f"{prefix}.conv1d.weight", C, 1, self.taps).squeeze(1),
            weights.tensor(f"{prefix}.conv1d.bias", C) if self.convolution_bias else None,
            silu=True,
        )
        return SelectiveStateSpace(
            weights.linear(f"{prefix}.in_proj", 2 * C, D, bias=self.bias),
            convolution,
            weights.linear(f"{prefix}.x_proj", rank + 2 * N, C, role=REPLICATED),
            # No module of its own: transformers multiplies with its weight, past adapters and quantized layers.
            weights.dense(weights.weight(f"{prefix}.dt_proj", C, rank), role=REPLICATED),
            SelectiveScanSpec(a_log, step_bias, skip),
            weights.linear(f"{prefix}.out_proj", D, C, bias=self.bias),
            weights.ops,
        )


class MambaBuilder(Mamba2Builder):
    """Mamba: blocks of a norm and a selective scan."""

    def attention(self, layer: int) -> Mixer:
        """Return the selective scan."""
        return self.sizes().build(self.config, self.weights, self.layer_name(layer, "mixer"))

    def sizes(self) -> SelectiveSizes:
        """Return the sizes of all layers."""
        raw, width = self.config.raw, "intermediate_size"
        return SelectiveSizes(
            channels=size(raw, "expand") * self.config.hidden_size if raw.get(width) is None else size(raw, width),
            state=size(raw, "state_size"),
            rank=step_rank(raw, "time_step_rank"),
            taps=size(raw, "conv_kernel"),
            bias=bool(raw.get("use_bias", False)),
            convolution_bias=bool(raw.get("use_conv_bias", True)),
        )


class FalconMambaBuilder(MambaBuilder):
    """FalconMamba: Mamba with RMS norms without weights of low-rank steps, keys and queries (arXiv:2410.05355)."""

    def attention(self, layer: int) -> Mixer:
        """Return the selective scan with its norms."""
        sizes, epsilon = self.sizes(), float(self.config.raw["mixer_rms_eps"])
        scan = sizes.build(self.config, self.weights, self.layer_name(layer, "mixer"))
        steps, keys = (
            self.ops.rms_norm(torch.ones(width, dtype=self.ops.dtype, device=self.ops.device), epsilon)
            for width in (sizes.rank, sizes.state)
        )
        scan.norms = steps, keys, keys
        return scan


def step_rank(raw: Mapping[str, object], name: str) -> int:
    """Return the size of low-rank steps, which is a sixteenth of the hidden size if ``name`` is ``auto``."""
    return -(-size(raw, "hidden_size") // 16) if raw.get(name) == "auto" else size(raw, name)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """MambaForCausalLM or FalconMambaForCausalLM from ``weights``."""
    builder = FalconMambaBuilder if config.architecture.startswith("FalconMamba") else MambaBuilder
    return builder(config, weights).build()
