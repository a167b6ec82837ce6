"""From a checkpoint folder to a model: ours where there is one for the architecture, else through transformers."""

from __future__ import annotations

from collections.abc import Collection

from aiakq.errors import error
from aiakq.kernels.ops.sharded import Collective, ShardedOps
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.loader.description import describe_operations
from aiakq.runtime.loader.weights import CheckpointWeights, weights_for
from aiakq.runtime.models import ARCHITECTURES, FAMILIES
from aiakq.runtime.models.decoder import Model


def load_model(config: EngineConfig, collective: Collective | None = None) -> tuple[Model, dict[str, str]]:
    """Build the model of ``config``; returns it and rows of the start-up table: what its operations run in.

    collective  of the ranks that share the model; this process then loads its rank's share.
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

        if collective is not None:
            reason = "models that run through transformers are not distributed over ranks"
            raise error("model_unsupported", architecture=architecture, reason=reason, known=FAMILIES)
        return load_transformers_model(config)
    weights = weights_for(config, collective)
    model = ARCHITECTURES.load(architecture).build(config.model, weights)
    if isinstance(weights.ops, ShardedOps):
        weights.ops.finish()
    facts = describe_operations(weights.ops)
    facts["linear layers"] = "; ".join([facts["linear layers"], *weights.remarks])
    if isinstance(weights, CheckpointWeights) and weights.checkpoint.beside_text:
        facts["model part"] = _text_part_only(weights.checkpoint.beside_text)
    return model, facts


def _text_part_only(left_out: Collection[str]) -> str:
    """What the start-up table says of a multimodal checkpoint."""
    parts = sorted({name.removeprefix("model.").partition(".")[0] for name in left_out})
    return f"text only: {len(left_out)} tensors of {', '.join(parts)} are left out"
