"""The method ``mtp``: the target's own layer for multi-token prediction. See ``draft_model`` beside it.

A checkpoint may have several such layers, one for each draft token; the first is used for all, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from aiakq.arguments.engine import EngineArguments
from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.config.quantization import checked_spec
from aiakq.runtime.executor.cpu_program import Bounds
from aiakq.runtime.executor.runner import Runner
from aiakq.runtime.loader.opening import open_weights
from aiakq.runtime.models.decoder import Decoder
from aiakq.runtime.models.interface import Model
from aiakq.runtime.speculation.draft_config import with_draft
from aiakq.runtime.speculation.head_proposer import HeadProposer, new_head_proposer
from aiakq.runtime.speculation.mtp.checks import check_target
from aiakq.runtime.speculation.mtp.head import MtpHead, build_head
from aiakq.runtime.speculation.mtp.layout import layout_of, with_layer


def configure(config: EngineConfig, args: EngineArguments) -> EngineConfig:
    """With the layer of the target's own checkpoint.

    Raises ``model_malformed``, ``quantization_mismatch``, ``tensor_inventory`` and ``unsupported``.
    """
    checked_spec(config.load.path, config.model.raw, args.quantization)
    draft = replace(config, model=with_layer(config.model))
    check_target(draft)
    return with_draft(config, draft, "mtp")


def load(config: EngineConfig, target: Model, load_model: Callable[[EngineConfig], Model]) -> MtpHead:
    """The head; ``target`` returns its last hidden states from now on. Raises ``not_finite``."""
    draft = config.draft
    assert draft is not None and isinstance(target, Decoder) and target.norm is not None
    weights = open_weights(config)
    layout = layout_of(weights, config.model.num_layers)
    assert layout is not None
    head = build_head(draft.model, layout, weights, _shared(config, target))
    head.target_norm = None if layout.before_norm else target.norm
    target.return_hidden_states((config.model.num_layers,))
    return head


def new_proposer(config: EngineConfig, runner: Runner, target: Model, bounds: Bounds) -> HeadProposer:
    """The proposer that runs it."""
    return new_head_proposer(config, runner, target, bounds)


def _shared(config: EngineConfig, target: Decoder) -> tuple[EmbeddingLayer, LinearLayer] | None:
    """The embedding and the output layer of ``target``; None if each rank has a part of them, or adapters change them.
    They are then read a second time.
    """
    if config.parallel.tensor_parallel_size > 1 or target.adapters is not None:
        return None
    assert target.embedding is not None and target.head is not None
    return target.embedding, target.head
