"""Check of --quantization: the method that the checkpoint must be quantized with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from aiakq.errors import error
from aiakq.formats import records_method
from aiakq.formats.folded_scales import records_scales
from aiakq.formats.model_folder import ROTATION_KEY
from aiakq.formats.quantization_config import read, read_spec, stored_config
from aiakq.registry import Registry
from aiakq.spec import QuantSpec, canonical_method

_INT4 = {"awq", "gptq"}
#: Methods that fold scales into the layers before the quantized ones.
_SCALING = ("awq", "smooth_quant")
#: Names of all methods, including plugins', to distinguish an unknown method from one that does not match.
_METHODS: Registry[object] = Registry(
    "aiakq.methods", dict.fromkeys(("weight_only_int8", "smooth_quant", "awq", "gptq"), "")
)
#: Methods of other tools' files.
_FP8 = ("fp8", "fbgemm_fp8", "modelopt")


def checked_spec(folder: Path, raw: Mapping[str, object], expected: str | None) -> QuantSpec | None:
    """Return how the weights in ``folder`` are quantized; ``raw`` is config.json, ``expected`` is --quantization.

    Raises ``format_unsupported``, and what ``check_quantization`` raises.
    """
    spec = read_spec(folder, raw)
    check_quantization(expected, spec, raw)
    return spec


def check_quantization(expected: str | None, spec: QuantSpec | None, raw: Mapping[str, object]) -> None:
    """Raise ``quantization_mismatch`` if the weights are not quantized as ``expected``.

    Raises ``bad_option`` for an unknown method.
    """
    if expected is None or expected.lower() == "none":
        return
    method = canonical_method(expected)
    stored = spec.method if spec else "unquantized weights"
    # The method implied by quantization_config is accepted too, since other tools record no more. Some formats do not
    # record the method: awq and gptq then both match 4-bit weights.
    quantization = stored_config(raw)
    stated = read(quantization).method if spec and quantization else stored
    same_weights = spec is not None and not records_method(spec.format) and {stated, method} <= _INT4
    if method in (stored, stated) or same_weights:
        return
    if method not in _METHODS and method not in _FP8:
        raise error(
            "bad_option",
            option="The quantization method",
            value=expected,
            expected="one of " + ", ".join(_METHODS),
            hint="weight_only_int8 is the safest, awq and gptq the smallest, smooth_quant the fastest in batches.",
        )
    raise error("quantization_mismatch", wanted=expected, found=stored)


def check_scales(spec: QuantSpec | None, raw: Mapping[str, object]) -> None:
    """Refuse a model whose layers have scaled inputs, unless its config.json ``raw`` says that its files record the
    scales: LoRA adapters of the original model would be applied to other inputs. Raises ``option_conflict``.
    """
    if spec is not None and spec.method in _SCALING and not records_scales(raw):
        raise error(
            "option_conflict",
            option="--enable-lora",
            other=f"a model quantized by {spec.method}",
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
