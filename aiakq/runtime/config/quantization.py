"""Check of --quantization: the method that the checkpoint must be quantized with."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiakq.errors import error
from aiakq.formats import quantization_names, records_method
from aiakq.formats.folded_scales import records_scales
from aiakq.formats.gguf.choice import gguf_of
from aiakq.formats.model_folder import ROTATION_KEY, SCALING_METHODS, has_scaled_inputs
from aiakq.formats.quantization_config import container_of, read, read_spec, stored_config
from aiakq.registry import Registry
from aiakq.spec import Float8, QuantSpec, canonical_method

_INT4 = {"awq", "gptq"}
_UNQUANTIZED = "unquantized weights"
#: Names of all methods, including plugins', to distinguish an unknown method from one that does not match.
_METHODS: Registry[object] = Registry(
    "aiakq.methods", dict.fromkeys(("weight_only_int8", "smooth_quant", "awq", "gptq"), "")
)


#: Roundings of 16-bit weights while they are loaded -> what the weights are then.
ROUNDINGS = {
    "int8": QuantSpec("weight_only_int8", "compressed-tensors", bits=8),
    "fp8": QuantSpec("fp8", "compressed-tensors", bits=8, float8=Float8()),
    "int4": QuantSpec("int4", "compressed-tensors", bits=4, group_size=128),
}


def rounding_spec(folder: Path, raw: Mapping[str, object], expected: str | None) -> QuantSpec | None:
    """Return how the weights in ``folder`` are rounded while they are loaded; None if they are not.

    raw       config.json.
    expected  --quantization; its names that mean rounding do so for weights that are not quantized.
    """
    named = None if expected is None else quantization_names.find(expected)
    if named is None or named.rounding is None or stored_config(raw) or container_of(folder, raw):
        return None
    return ROUNDINGS[named.rounding] if read_spec(folder, raw) is None else None


def checked_spec(folder: Path, raw: Mapping[str, object], expected: str | None) -> QuantSpec | None:
    """Return how the weights in ``folder`` are quantized; ``raw`` is config.json, ``expected`` is --quantization.

    Raises ``format_unsupported``, and what ``check_quantization`` raises.
    """
    spec = read_spec(folder, raw)
    container = container_of(folder, raw) or ("" if gguf_of(folder) is None else "gguf")
    check_quantization(expected, spec, raw, container)
    return spec


def check_quantization(expected: str | None, spec: QuantSpec | None, raw: Mapping[str, object], container: str) -> None:
    """Raise ``quantization_mismatch`` if the weights are not quantized as ``expected``.

    expected   a method, or a name of vLLM (aiakq/formats/quantization_names.py).
    container  the checkpoint's ``quant_method``, empty if it has none.
    Raises ``bad_option`` for an unknown name, and ``rounding_at_load`` for one that vLLM rounds 16-bit weights for.
    """
    if expected is None or expected.lower() == "none":
        return
    method, named = canonical_method(expected), quantization_names.find(expected)
    if _is_method(method, spec, stored_config(raw)) or (named is not None and container in named.containers):
        return
    if named is None and method not in _METHODS:
        close = difflib.get_close_matches(method, [*_METHODS, *quantization_names.NAMES], n=1, cutoff=0.7)
        raise error(
            "bad_option",
            option="The quantization method",
            value=expected,
            expected="one of " + ", ".join(_METHODS) + ", nor a name that vLLM has",
            hint=f"Did you mean {close[0]}?" if close else "Leave it out to use the checkpoint's method.",
        )
    if spec is None and not container and named is not None and named.rounding is not None:
        raise error("rounding_at_load", wanted=expected)
    raise error("quantization_mismatch", wanted=expected, found=spec.method if spec else container or _UNQUANTIZED)


def _is_method(method: str, spec: QuantSpec | None, quantization: Any) -> bool:
    """Whether the weights were quantized by ``method``, as far as their format records it."""
    # The method implied by quantization_config is accepted too, since other tools record no more. Some formats do not
    # record the method: awq and gptq then both match 4-bit weights.
    if spec is None:
        return False
    stated = read(quantization).method if quantization else spec.method
    return method in (spec.method, stated) or (not records_method(spec.format) and {stated, method} <= _INT4)


def check_scales(spec: QuantSpec | None, raw: Mapping[str, object]) -> None:
    """Refuse a model whose layers have scaled inputs, unless its config.json ``raw`` says that its files record the
    scales: LoRA adapters of the original model would be applied to other inputs. Raises ``option_conflict``.
    """
    scaled = (spec is not None and spec.method in SCALING_METHODS) or has_scaled_inputs(raw)
    if scaled and not records_scales(raw):
        raise error(
            "option_conflict",
            option="--enable-lora",
            other=f"a model quantized by {spec.method if spec and spec.method in SCALING_METHODS else 'awq'}",
            reason="its layers have scaled inputs, and its files do not say by what",
            hint="Quantize the original model with aiakq quantize, which records it; or merge the adapter: --lora.",
        )


def check_rotation(raw: Mapping[str, object], lora: bool, embeds: bool) -> None:
    """Refuse what a model whose config.json ``raw`` says that its weights were rotated cannot do: run LoRA adapters of
    the original model, and return its hidden states. Raises ``option_conflict``.
    """
    own = raw.get("aiakq")
    if not isinstance(own, dict) or ROTATION_KEY not in own:
        return
    for wanted, option, reason, hint in (
        (lora, "--enable-lora", "adapters of the original model do not fit it", "Merge the adapter: quantize --lora."),
        (embeds, "Embeddings", "its hidden states are not those of the original", "Quantize it without --rotate."),
    ):
        if wanted:
            raise error("option_conflict", option=option, other="a rotated model", reason=reason, hint=hint)
