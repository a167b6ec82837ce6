"""From a checkpoint folder to a model: ours where there is one for the architecture, else through transformers."""

from __future__ import annotations

from collections.abc import Collection

from aiakq.errors import error
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.loader.description import describe_operations
from aiakq.runtime.loader.weights import CheckpointWeights, weights_for
from aiakq.runtime.models import ARCHITECTURES, FAMILIES
from aiakq.runtime.models.decoder import Model


def load_model(config: EngineConfig) -> tuple[Model, dict[str, str]]:
    """Build the model of ``config``; returns it and rows of the start-up table: what its operations run in.

    Raises AiakqError: model_unsupported, tensor_inventory, tensor_mismatch, not_finite, model_*.
    """
    architecture = config.model.architecture
    native = architecture in ARCHITECTURES
    if not native and config.load.model_impl == "aiakq":
        raise error(
            "model_unsupported",
            architecture=architecture,
            reason="aiakq has no model of its own for it",
            known=FAMILIES,
        )
    if not native or config.load.model_impl == "transformers":
        from aiakq.runtime.loader.transformers_fallback import load_transformers_model

        return load_transformers_model(config)
    weights = weights_for(config)
    model = ARCHITECTURES.load(architecture).build(config.model, weights)
    facts = describe_operations(weights.ops)
    facts["linear layers"] = "; ".join([facts["linear layers"], *weights.remarks])
    if isinstance(weights, CheckpointWeights) and weights.checkpoint.beside_text:
        facts["model part"] = _text_part_only(weights.checkpoint.beside_text)
    return model, facts


def _text_part_only(left_out: Collection[str]) -> str:
    """What the start-up table says of a multimodal checkpoint."""
    parts = sorted({name.removeprefix("model.").partition(".")[0] for name in left_out})
    return f"text only: {len(left_out)} tensors of {', '.join(parts)} are left out"
