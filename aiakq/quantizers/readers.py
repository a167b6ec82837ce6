"""Determines which programs can load the output, before any work."""

from __future__ import annotations

from aiakq import formats
from aiakq.errors import error
from aiakq.quantizers.model.source import SourceModel
from aiakq.quantizers.source_inventory import is_native
from aiakq.runtime.hf.transformers_fallback import unservable
from aiakq.spec import QuantSpec


def reader_notes(model: SourceModel, spec: QuantSpec, trust_remote_code: bool) -> list[str]:
    """Return notes for the user on this model in this format. Raises ``unsupported`` if no program could run it."""
    notes = []
    share = model.unquantized_share()
    if share > 0.1:
        notes.append(f"{share:.0%} of the blocks' weights are not in linear layers and stay as they are.")
    readers = formats.reader_notes(spec, bool(model.experts.fused))
    architecture = type(model.model).__name__
    reason = None if is_native(model) else unservable(model.model.config, trust_remote_code)
    if reason is None and model.has_own_linears:
        own = f"transformers has a class of its own for the linear layers of {architecture}, which it does not quantize"
        return [*notes, f"{own}: load the output in aiakq or vLLM."]
    if reason is None:
        return notes + readers
    if model.experts.fused and readers or model.has_own_linears or not model.has_attention:
        what = f"Quantizing {architecture}, which neither aiakq ({reason}) nor transformers would run afterwards,"
        raise error("unsupported", what=what, hint="Use another model, or the unquantized one in transformers.")
    return [*notes, f"aiakq cannot serve this model: {reason}. Load the output in transformers or vLLM."]
