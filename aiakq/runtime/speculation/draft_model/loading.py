"""The method ``draft_model``: a second model, loaded like the first.

A method that needs a model is a module with

    configure(config, args) -> EngineConfig    ``config`` with the model that ``args`` name, see ``with_draft``
    load(config, target, load_model) -> Model  the model, once the target model is loaded; load_model(config) loads one
    new_proposer(config, runner, target, bounds) -> ModelProposer
"""

from __future__ import annotations

from collections.abc import Callable

from aiakq.arguments.engine import EngineArguments
from aiakq.errors import AiakqError, error
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.executor.cpu_program import Bounds
from aiakq.runtime.executor.runner import Runner
from aiakq.runtime.models.interface import Model
from aiakq.runtime.speculation.draft_config import draft_folder, with_draft
from aiakq.runtime.speculation.draft_model.proposer import DraftModel
from aiakq.runtime.speculation.eagle3 import loading as eagle3
from aiakq.runtime.speculation.eagle3.config import is_eagle3, kind_of_head
from aiakq.runtime.speculation.methods import check_supported


def configure(config: EngineConfig, args: EngineArguments) -> EngineConfig:
    """With the draft model of ``args``, or with the EAGLE-3 head if it is one. Raises ``option_conflict`` and what
    ``EngineConfig.from_args`` raises.
    """
    if is_eagle3(draft_folder(args).path):
        return eagle3.configure(config, args)
    draft = EngineConfig.from_args(args)
    if draft.model.vocab_size != config.model.vocab_size:
        reason = f"its vocabulary has {draft.model.vocab_size} tokens, the model {config.model.vocab_size}"
        hint = "Take one of the same family, or this model quantized."
        raise error("option_conflict", option="--speculative-model", other=args.model, reason=reason, hint=hint)
    return with_draft(config, draft, "draft_model")


def load(config: EngineConfig, target: Model, load_model: Callable[[EngineConfig], Model]) -> Model:
    """Raises ``unsupported`` for a head with the config.json of a model, and what ``load_model`` raises."""
    assert config.draft is not None
    try:
        return load_model(config.draft)
    except AiakqError as problem:
        if problem.id == "tensor_inventory":
            _refuse_head(config.draft)
        raise


def _refuse_head(draft: EngineConfig) -> None:
    """Raise ``unsupported`` if the tensors of ``draft`` are those of a head."""
    kind = kind_of_head(draft.load.path)
    if kind == "eagle3":
        hint = "Give --speculative-config with the method eagle3 and this model."
        raise error("unsupported", what="An EAGLE-3 head as a draft model", hint=hint)
    check_supported(str(kind))


def new_proposer(config: EngineConfig, runner: Runner, target: Model, bounds: Bounds) -> DraftModel:
    """The proposer that runs it."""
    draft = config.draft
    assert draft is not None
    return DraftModel(runner, bounds.tokens, min(bounds.length, draft.model.num_positions))
