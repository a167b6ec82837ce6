"""Determines which programs can load the output, before any work."""

from __future__ import annotations

from dataclasses import dataclass

from aiakq import formats
from aiakq.errors import error
from aiakq.quantizers.model.source import SourceModel
from aiakq.quantizers.source_inventory import is_native
from aiakq.runtime.hf.transformers_fallback import unservable
from aiakq.spec import QuantSpec

_ROTATED = ("q_proj", "k_proj")
_REARRANGED = (
    "vLLM rearranges the rows of q_proj and k_proj of Llama 4 while it loads them, but packed ones in some releases "
    "only, and computes nonsense in others: --layer '*.q_proj=skip' --layer '*.k_proj=skip' leaves both as they are"
)


@dataclass(frozen=True)
class Gaps:
    """Why transformers, or vLLM, would not compute this model although each reads its format; "" if it does."""

    transformers: str = ""
    vllm: str = ""

    def note(self) -> str:
        """Return a sentence for the user; "" if there are no gaps."""
        if not self.transformers:
            return f"{self.vllm}." if self.vllm else ""
        if self.vllm:
            return f"{self.transformers}; {self.vllm}: load the output in aiakq."
        return f"{self.transformers}: load the output in aiakq or vLLM."


def gaps(model: SourceModel, spec: QuantSpec) -> Gaps:
    """Return what other programs do not read of this model, although they read its format."""
    if spec.format == "gguf":
        return Gaps()
    architecture, kind = type(model.model).__name__, str(model.config.model_type)
    in_transformers = in_vllm = ""
    if spec.format.startswith("awq") and _expects_factors(model):
        in_transformers = (
            f"transformers divides the outputs of the activation functions of {architecture} by factors that AutoAWQ "
            "writes, and takes random ones where there are none"
        )
    elif model.has_own_linears:
        in_transformers = (
            f"transformers has a class of its own for the linear layers of {architecture}, which it does not quantize"
        )
    elif model.experts.fused and not model.experts.transformers_reads:
        in_transformers = (
            f"transformers knows no names for single experts of {architecture}, and fills them with random numbers"
        )
    if model.experts.fused and kind.startswith("granitemoe"):
        in_vllm = f"vLLM knows no names for single experts of {architecture} either"
    rotated = [shape.name for shape in model.linear_shapes() if shape.name.endswith(_ROTATED)]
    if kind == "llama4_text" and any(map(_is_packed, map(spec.for_layer, rotated))):
        in_vllm = _REARRANGED
    return Gaps(in_transformers, in_vllm)


def _expects_factors(model: SourceModel) -> bool:
    """Whether transformers reads ``act.scales`` beside the layers of this model in AWQ files."""
    from transformers.integrations import awq

    names = getattr(awq, "AWQ_SCALES_MAPPINGS", {}).get(model.config.model_type)
    if names is None:
        return False
    return any(
        hasattr(module, names["act"]) and hasattr(module, names["layer_before_act"]) for module in model.model.modules()
    )


def _is_packed(layer: QuantSpec | None) -> bool:
    """Whether a linear is stored otherwise than as a matrix with a scale per row or for all; None: it is as it was."""
    if layer is None:
        return False
    in_rows = layer.float8.rows in (-1, 1) if layer.float8 else layer.scheme == "w8a8"
    return layer.format != "compressed-tensors" or not in_rows


def reader_notes(model: SourceModel, spec: QuantSpec, trust_remote_code: bool) -> list[str]:
    """Return notes for the user on this model in this format. Raises ``unsupported`` if no program could run it."""
    notes = []
    share = model.unquantized_share()
    if share > 0.1:
        notes.append(f"{share:.0%} of the blocks' weights are not in linear layers and stay as they are.")
    # As linears of their own, transformers reads experts like all others.
    experts = bool(model.experts.fused) and (spec.format != "compressed-tensors" or not model.experts.in_linears)
    readers = formats.reader_notes(spec, experts)
    gap = gaps(model, spec)
    reason = None if is_native(model) else unservable(model.model.config, trust_remote_code)
    if reason is None:
        return [*notes, *([] if gap.transformers else readers), *filter(None, [gap.note()])]
    if model.experts.fused and readers or gap.transformers or not model.has_attention:
        architecture = type(model.model).__name__
        what = f"Quantizing {architecture}, which neither aiakq ({reason}) nor transformers would run afterwards,"
        raise error("unsupported", what=what, hint="Use another model, or the unquantized one in transformers.")
    return [*notes, f"aiakq cannot serve this model: {reason}. Load the output in transformers or vLLM."]
