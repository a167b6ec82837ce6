"""Logits of whole texts from a loaded model, for perplexity and KL divergence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from aiakq.kernels.recurrent_types import StateContext
from aiakq.kernels.types import AttentionContext
from aiakq.runtime.build.model_loader import load_model
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.models.interface import Model, ModelInput, whole_logits


@dataclass
class ScoringModel:
    """A model for evaluation: computes logits of whole windows with the runtime's own kernels and paged cache."""

    model: Model
    config: EngineConfig

    @torch.inference_mode()
    def logits(self, ids: Tensor) -> Tensor:
        """ids [B, T] int64 -> logits [B, T, V] float32; every row is a separate sequence."""
        B, T = ids.shape
        P = self.config.cache.block_size
        per_sequence = -(-T // P)
        device = self.config.device.device
        caches = self.model.new_caches(1 + B * per_sequence, P)
        table = torch.arange(1, 1 + B * per_sequence, dtype=torch.int32, device=device).view(B, per_sequence)
        positions = torch.arange(T, device=device).repeat(B)
        slots = (table.long().repeat_interleave(P, dim=1) * P)[:, :T] + (torch.arange(T, device=device) % P)
        padding = -(B * T) % self.model.row_multiple
        context = AttentionContext(
            query_start=torch.arange(0, B * T + 1, T, dtype=torch.int32, device=device),
            kv_len=torch.full((B,), T, dtype=torch.int32, device=device),
            slots=pad(slots.flatten(), (0, padding)),
            page_table=table,
            num_decodes=0,
            query_start_list=list(range(0, B * T + 1, T)),
            kv_len_list=[T] * B,
            states=StateContext([0] * B, [[] for _ in range(B)]),
        )
        step = ModelInput(
            pad(ids.to(device).flatten(), (0, padding)),
            pad(positions, (0, padding)),
            context,
            torch.arange(B * T, device=device),
        )
        return whole_logits(self.model.forward(step, caches)).view(B, T, -1)


def load_for_scoring(
    path: str | Path,
    dtype: str = "float32",
    device: str = "auto",
    tokenizer: str | None = None,
    kv_cache_dtype: str = "auto",
) -> ScoringModel:
    """Load a checkpoint, quantized or not, to compute the logits of whole texts (perplexity, KL).

    ``tokenizer`` is a folder or hub name; the model's own if None. Windows pass through a cache of ``kv_cache_dtype``,
    as requests do: attention reads what it rounded. The weights are read into memory: a file that is truncated while it
    is mapped would end the process.
    """
    settings = {"model": str(path), "dtype": dtype, "device": device, "tokenizer": tokenizer}
    settings["kv_cache_dtype"] = kv_cache_dtype
    config = EngineConfig.from_args({**settings, "cpu_math": "exact", "task": "generate"})
    config = replace(config, load=replace(config.load, mapped=False))
    model, _ = load_model(config)
    return ScoringModel(model, config)
