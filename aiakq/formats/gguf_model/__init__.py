"""What a GGUF file means: the config, tensors and tokenizer that its model has in a Hugging Face checkpoint.

A GGUF file holds a model under the names of llama.cpp, with settings as typed keys. ``config_of`` translates these into
config.json, ``tensor_names`` the names of tensors, with what the converter changed about them, and tokenizer.py the
vocabulary. A family is one entry in the tables of dense.py, early.py and sparse.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from aiakq.errors import error
from aiakq.formats.gguf_model.dense import DENSE
from aiakq.formats.gguf_model.early import EARLY
from aiakq.formats.gguf_model.family import GGUFFamily, GGUFModel, Shapes, Table, common_config
from aiakq.formats.gguf_model.keys import Metadata, unsupported
from aiakq.formats.gguf_model.rules import Plain, Stored, TensorRule
from aiakq.formats.gguf_model.sources import TensorSource
from aiakq.formats.gguf_model.sparse import SPARSE

FAMILIES: Mapping[str, GGUFFamily] = {**DENSE, **EARLY, **SPARSE}
#: Tensors whose values are in the config.
_IN_CONFIG = frozenset({"rope_freqs", "rope_factors_long", "rope_factors_short"})
_NAME = re.compile(
    r"(?:blk\.(?P<layer>[0-9]{1,5})\.)?(?P<module>[a-z0-9_]+(?:\.(?P<expert>[0-9]{1,5}))?)(?:\.(?P<suffix>[a-z_]+))?"
)


def family_of(keys: Metadata) -> GGUFFamily:
    """Return the family of a file. Raises ``gguf_unsupported`` for an unknown one, or a file of another kind."""
    kind = keys.values.get("general.type", "model")
    if kind != "model":
        raise unsupported(f"{keys.file} holds no model: its general.type is {kind!r:.40}")
    family = FAMILIES.get(keys.architecture)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise unsupported(f"the GGUF architecture {keys.architecture!r} (known ones: {known})")
    return family


def config_of(keys: Metadata, shapes: Shapes, read: Callable[[str], Tensor]) -> dict[str, Any]:
    """Return what config.json of the model would say.

    keys    metadata of the file; those of the model are counted as read.
    shapes  tensor of the file -> shape, as torch orders it.
    read    returns a tensor of the file as floats; called for factors of rotary embedding only.

    Raises ``model_malformed``, and ``gguf_unsupported`` for a family or a setting that cannot be computed exactly, or
    a key that is unknown.
    """
    family, model = family_of(keys), GGUFModel(keys, shapes, read)
    config = common_config(family, model)
    config |= family.settings(model, config)
    keys.check_all_read()
    return {family.sizes.get(name, name): value for name, value in config.items() if value is not None}


def tensor_names(config: Mapping[str, Any], keys: Metadata, shapes: Shapes) -> dict[str, TensorSource]:
    """Return name in the Hugging Face checkpoint -> where and how the file stores the tensor.

    Raises ``gguf_unsupported`` for a tensor of the file that the family does not have, by name, and
    ``model_malformed`` for one with another shape.
    """
    family = family_of(keys)
    layers = next(config[name] for name in ("num_hidden_layers", "n_layer", "n_layers") if name in config)
    # Layers after those of the model, which predict more than one token.
    unread = range(layers, layers + keys.integer("nextn_predict_layers", 0, low=0))
    found: dict[str, TensorSource] = {}
    for name in shapes:
        match = _NAME.fullmatch(name)
        module = match["module"] if match else name
        layer = int(match["layer"]) if match and match["layer"] else None
        if module in _IN_CONFIG or layer in unread:
            continue
        rule = _rule(family, match) if match and (layer is None or layer < layers) else None
        if rule is None or match is None:
            raise unsupported(
                f"{keys.file} has the tensor {name[:80]!r}, which aiakq's {family.model_type} models lack"
            )
        prefix = family.layers.replace("{layer}", match["layer"]) if match["layer"] else ""
        stored = Stored(name, match["suffix"] or "weight", config, shapes)
        try:
            for target, source in rule.sources(stored):
                source.shape(shapes)
                found[(prefix + target).replace("{expert}", match["expert"] or "")] = source
        except (KeyError, IndexError, ValueError, RuntimeError, ArithmeticError) as problem:
            reason = f"tensor {name[:80]} has the shape {list(shapes[name])}, which does not fit its metadata"
            raise error("model_malformed", file=keys.file, reason=reason) from problem
    return found


def _rule(family: GGUFFamily, match: re.Match[str]) -> TensorRule | None:
    """Return the rule for a tensor of the file."""
    table: Table = family.block if match["layer"] else family.outer
    module = match["module"]
    if match["expert"]:
        module = module.removesuffix(match["expert"]) + "{expert}"
    rule = table.get(module)
    return Plain(rule) if isinstance(rule, str) else rule
