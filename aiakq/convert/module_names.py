"""What transformers calls the linears of a multimodal checkpoint, whose configs list them by those names."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from aiakq.formats.dequantized import config_without_quantization
from aiakq.formats.gptq import PLACES_NOTE
from aiakq.runtime.config.text_part import has_text_part
from aiakq.spec import QuantSpec

_BLOCKS = re.compile(r"(.*?\.layers)\.[0-9]+\.")


def module_names(config: Mapping[str, object], linears: Collection[str]) -> dict[str, str]:
    """Return name in files -> name in transformers of ``linears`` of the multimodal model with this config.json.

    Empty for other models, and for those that transformers does not build.
    """
    import transformers
    from accelerate import init_empty_weights

    from aiakq.runtime.hf.tensor_names import TensorNames

    if not has_text_part(config) or config.get("model_type") not in transformers.CONFIG_MAPPING:
        return {}
    family: Any = transformers.AutoModelForMultimodalLM
    try:
        outer = transformers.CONFIG_MAPPING[str(config["model_type"])].from_dict(config_without_quantization(config))
        with init_empty_weights():
            names = TensorNames(family.from_config(outer))
    except Exception:  # classes of configs and models may raise anything; then transformers does not read the output
        return {}
    found = {name: names.own(f"{name}.weight") for name in linears}
    return {name: own.removesuffix(".weight") for name, own in found.items() if own is not None}


def with_module_names(spec: QuantSpec, names: Mapping[str, str], quantized: Collection[str]) -> QuantSpec:
    """Return ``spec``, which lists linears by their names in files, with the names in transformers besides.

    quantized  the linears that are.
    """
    ignore = (*spec.ignore, *(names[name] for name in spec.ignore if names.get(name, name) != name))
    layers = (*spec.layers, *((names[name], layer) for name, layer in spec.layers if names.get(name, name) != name))
    blocks = {found[1] for name in quantized if name in names and (found := _BLOCKS.match(names[name])) is not None}
    places = {PLACES_NOTE: {"block_name_to_quantize": blocks.pop()}} if len(blocks) == 1 else {}
    return replace(spec, ignore=ignore, layers=layers, notes={**spec.notes, **places})
