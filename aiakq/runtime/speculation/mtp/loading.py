"""The method ``mtp``: the target's own layer for multi-token prediction. See ``draft_model`` beside it.

A checkpoint may have several such layers, one for each draft token; the first is used for all, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from aiakq.arguments.engine import EngineArguments
from aiakq.errors import AiakqError, error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.inventory import compare, refusal
from aiakq.formats.model_folder import ROTATION_KEY
from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.config.quantization import checked_spec
from aiakq.runtime.executor.cpu_program import Bounds
from aiakq.runtime.executor.runner import Runner
from aiakq.runtime.loader.opening import open_weights
from aiakq.runtime.loader.required import RequiredWeights
from aiakq.runtime.models import is_native
from aiakq.runtime.models.decoder import Decoder
from aiakq.runtime.models.interface import Model
from aiakq.runtime.speculation.draft_config import with_draft
from aiakq.runtime.speculation.head_proposer import HeadProposer, new_head_proposer
from aiakq.runtime.speculation.mtp.head import MtpHead, build_head
from aiakq.runtime.speculation.mtp.layout import layout_of, with_layer

_LEAVE_OUT = "Leave out the options of speculative decoding, or use the method ngram or suffix."


def configure(config: EngineConfig, args: EngineArguments) -> EngineConfig:
    """With the layer of the target's own checkpoint.

    Raises ``model_malformed``, ``quantization_mismatch``, ``tensor_inventory`` and ``unsupported``.
    """
    checked_spec(config.load.path, config.model.raw, args.quantization)
    if not is_native(config.model.architecture) or config.load.model_impl == "transformers":
        raise _unsupported("for a model that runs through transformers")
    own = config.model.raw.get("aiakq")
    if isinstance(own, dict) and ROTATION_KEY in own:
        raise _unsupported("for a rotated model, whose hidden states its layer was not trained for,")
    if config.load.load_format == "dummy":
        raise _unsupported("with --load-format dummy")
    draft = replace(config, model=with_layer(config.model))
    load = config.load
    checkpoint = Checkpoint.open(load.path, load.weights, load.ignore_patterns, config.model.raw)
    _check_tensors(draft, checkpoint)
    return with_draft(config, draft, "mtp")


def load(config: EngineConfig, target: Model, load_model: Callable[[EngineConfig], Model]) -> MtpHead:
    """The head; ``target`` returns its last hidden states from now on. Raises ``not_finite``."""
    draft = config.draft
    assert draft is not None and isinstance(target, Decoder) and target.norm is not None
    weights = open_weights(config)
    layout = layout_of(weights, config.model.num_layers)
    assert layout is not None
    head = build_head(draft.model, layout, weights, _shared(config, target))
    head.target_norm = target.norm
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


def _check_tensors(draft: EngineConfig, checkpoint: Checkpoint) -> None:
    """Raise ``unsupported`` for a checkpoint without the layer, ``tensor_inventory`` for tensors that the layer lacks
    or has no place for, and ``model_malformed``.
    """
    weights = RequiredWeights(checkpoint, limit=4 * len(checkpoint.inventory) + 1000)
    layout = layout_of(weights, draft.model.num_layers - 1)
    if layout is None:
        raise _unsupported(f"for {draft.load.path}, which has none,")
    try:
        build_head(draft.model, layout, weights, None)
    except AiakqError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as problem:
        reason = f"{type(problem).__name__}: {problem}"  # a value of the config that cannot be computed with
        raise error("model_malformed", file="config.json", reason=reason[:200]) from problem
    required = weights.required
    required.is_model, required.optional = False, ()
    own = [
        each for each in compare(checkpoint, required) if each.kind != "extra" or each.name.startswith(layout.inside)
    ]
    problem_found = refusal(str(draft.load.path), own)
    if problem_found is not None:
        raise problem_found


def _unsupported(why: str) -> AiakqError:
    return error(
        "unsupported", what=f"Speculative decoding with layers for multi-token prediction {why}", hint=_LEAVE_OUT
    )
