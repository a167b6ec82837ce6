"""The method ``eagle3``: an EAGLE-3 head over hidden states of the target model. See ``draft_model`` beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aiakq.arguments.engine import EngineArguments
from aiakq.errors import AiakqError, error
from aiakq.formats.inventory import RequiredTensors, compare, refusal
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.config.quantization import checked_spec
from aiakq.runtime.executor.cpu_program import Bounds
from aiakq.runtime.executor.runner import Runner
from aiakq.runtime.loader.opening import CheckpointWeights, open_weights
from aiakq.runtime.loader.required import RequiredWeights
from aiakq.runtime.models.decoder import Decoder
from aiakq.runtime.models.interface import Model
from aiakq.runtime.speculation.draft_config import draft_folder, with_draft
from aiakq.runtime.speculation.eagle3.config import (
    Eagle3Config,
    is_eagle3,
    kind_of_head,
    quantized_head,
    unsupported_head,
)
from aiakq.runtime.speculation.eagle3.head import Eagle3Builder, Eagle3Head, shared_embedding
from aiakq.runtime.speculation.head_proposer import HeadProposer, new_head_proposer

#: Parts of the names of tensors of other heads, and the error for them.
_OTHER_HEADS: dict[str, Callable[[], AiakqError]] = {
    "mask_hidden": lambda: unsupported_head("An EAGLE-3 head with parallel drafting (mask_hidden)"),
    "layers.1.": lambda: unsupported_head("An EAGLE-3 head of several layers", "Take a head of one layer."),
    **dict.fromkeys((".qweight", ".weight_packed", ".weight_scale", ".quant_state"), quantized_head),
}


def configure(config: EngineConfig, args: EngineArguments) -> EngineConfig:
    """With the head of ``args``. Raises ``option_conflict``, ``quantization_mismatch`` and ``unsupported``."""
    load = draft_folder(args)
    if not is_eagle3(load.path) and kind_of_head(load.path) != "eagle3":
        raise _conflict(args, "it is not an EAGLE-3 head", "Give a draft model with the method draft_model.")
    checked_spec(load.path, {}, args.quantization)
    head = Eagle3Config.from_folder(load.path)
    reason = ""
    if head.model.vocab_size != config.model.vocab_size:
        reason = f"its vocabulary has {head.model.vocab_size} tokens, the model {config.model.vocab_size}"
    elif head.target_hidden_size != config.model.hidden_size:
        reason = f"it reads hidden states of {head.target_hidden_size}, the model has {config.model.hidden_size}"
    if reason:
        raise _conflict(args, reason, "Take a head that was trained for this model.")
    head.layers_of(config.model.num_layers)
    length = min(config.max_model_len, head.model.context)
    model = replace(head.model, context=length, num_positions=length)
    return with_draft(config, replace(config, model=model, load=load, spec=None, max_model_len=length), "eagle3")


def load(config: EngineConfig, target: Model, load_model: Callable[[EngineConfig], Model]) -> Eagle3Head:
    """The head; ``target`` returns its hidden states from now on.

    Raises ``unsupported``, ``not_finite`` and ``tensor_*``.
    """
    draft = config.draft
    assert draft is not None
    if not isinstance(target, Decoder):
        what, hint = "An EAGLE-3 head for a model that runs through transformers", "Take a draft model."
        raise error("unsupported", what=what, hint=hint)
    if "altup_num_inputs" in config.model.raw:
        what, hint = "An EAGLE-3 head for a model whose tokens have several hidden states", "Take a draft model."
        raise error("unsupported", what=what, hint=hint)
    head = replace(Eagle3Config.from_folder(draft.load.path), model=draft.model)
    weights = open_weights(draft)
    for part, found in _OTHER_HEADS.items():
        if any(part in name for name in weights.checkpoint.inventory):
            raise found()
    problem = refusal(str(draft.load.path), compare(weights.checkpoint, _required(head, weights)))
    if problem is not None:
        raise problem
    weights.checkpoint.check_finite()  # NaN in a head would end all drafting without a word
    builder = Eagle3Builder(head, weights, None)
    if not builder.has_embedding:
        builder = Eagle3Builder(head, weights, shared_embedding(config, draft, target))
    built = builder.build()
    _check_ids(draft, built)
    target.return_hidden_states(head.layers_of(config.model.num_layers))
    return built


def _required(head: Eagle3Config, opened: CheckpointWeights) -> RequiredTensors:
    """The tensors that the head needs. Raises ``model_malformed``."""
    weights: Any = RequiredWeights(opened.checkpoint, limit=1000)
    try:
        Eagle3Builder(head, weights, None).build()
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as problem:
        reason = f"{type(problem).__name__}: {problem}"  # a value of the config that cannot be computed with
        raise error("model_malformed", file="config.json", reason=reason[:200]) from problem
    required: RequiredTensors = weights.required
    required.optional, required.unused = (), ("t2d", "embed_tokens.", "model.embed_tokens.")
    required.is_model = False
    return required


def new_proposer(config: EngineConfig, runner: Runner, target: Model, bounds: Bounds) -> HeadProposer:
    """The proposer that runs it."""
    return new_head_proposer(config, runner, target, bounds)


def _check_ids(draft: EngineConfig, head: Eagle3Head) -> None:
    """Raise ``tensor_mismatch`` if d2t does not name different tokens of the vocabulary."""
    ids = head.target_ids
    if ids is not None and (ids.min() < 0 or ids.max() >= draft.model.vocab_size or len(ids.unique()) < len(ids)):
        reason = f"d2t does not name {len(ids)} of {draft.model.vocab_size} tokens"
        raise error("tensor_mismatch", path=draft.load.path, reason=reason)


def _conflict(args: EngineArguments, reason: str, hint: str) -> AiakqError:
    return error("option_conflict", option="--speculative-model", other=args.model, reason=reason, hint=hint)
