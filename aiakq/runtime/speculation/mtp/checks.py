"""Checks that a target has a layer for multi-token prediction that aiakq computes, before any weight is read."""

from __future__ import annotations

from aiakq.errors import AiakqError, error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.inventory import compare, refusal
from aiakq.formats.model_folder import ROTATION_KEY
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.loader.required import RequiredWeights
from aiakq.runtime.models import is_native
from aiakq.runtime.speculation.mtp.head import build_head
from aiakq.runtime.speculation.mtp.layout import layout_of


def check_target(draft: EngineConfig) -> None:
    """Raise ``unsupported`` if the target of ``draft``, whose config has the layer behind its own, has none or cannot
    use it, and as ``_check_tensors``.
    """
    load = draft.load
    if not is_native(draft.model.architecture) or load.model_impl == "transformers":
        raise _unsupported("for a model that runs through transformers")
    own = draft.model.raw.get("aiakq")
    if isinstance(own, dict) and ROTATION_KEY in own:
        raise _unsupported("for a rotated model, whose hidden states its layer was not trained for,")
    if draft.model.raw.get("index_topk") is not None:
        raise _unsupported("for a model whose attention selects positions by an index")
    if load.load_format == "dummy":
        raise _unsupported("with --load-format dummy")
    _check_tensors(draft, Checkpoint.open(load.path, load.weights, load.ignore_patterns, draft.model.raw))


def _check_tensors(draft: EngineConfig, checkpoint: Checkpoint) -> None:
    """Raise ``unsupported`` for a checkpoint without the layer, ``tensor_inventory`` for tensors that the layer lacks
    or has no place for, and ``model_malformed``.
    """
    weights = RequiredWeights(checkpoint, limit=4 * len(checkpoint.inventory) + 1000)
    layout = layout_of(weights, draft.model.num_layers - 1)
    if layout is None:
        raise _unsupported(f"for {draft.load.path}, which has none,")
    if draft.model.raw.get("mtp_use_dedicated_embeddings") and not weights.has(f"{layout.embedding}.weight"):
        raise _unsupported(f"whose own embeddings (mtp_use_dedicated_embeddings) are not {layout.embedding}.weight")
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
    what = f"Speculative decoding with layers for multi-token prediction {why}"
    hint = "Leave out the options of speculative decoding, or use the method ngram or suffix."
    return error("unsupported", what=what, hint=hint)
