"""Loads a checkpoint through transformers, and reports tensors that did not fit."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aiakq import formats
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.inventory import FLOATS, Difference, refusal
from aiakq.formats.model_folder import INDEX, some_of
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.hf.quiet import without_load_report
from aiakq.runtime.hf.tensor_names import TensorNames, text_mapping

logger = logging.getLogger("aiakq.runtime")


@dataclass(frozen=True)
class MissedTensors:
    """Parameters that are missing in the checkpoint at ``path``, or have another shape there."""

    path: str
    differences: Sequence[Difference] = ()

    def check(self, replaced: Collection[str]) -> None:
        """Raise ``tensor_inventory`` for any parameter that was not ``replaced`` since."""
        if problem := refusal(self.path, [each for each in self.differences if each.name not in replaced]):
            raise problem


def load_checkpoint(
    hf_config: object, config: EngineConfig, options: dict[str, object]
) -> tuple[object, MissedTensors, frozenset[str]]:
    """Load the model through transformers; the last are the tensors that are not part of the language model."""
    checkpoint = Checkpoint.open(config.load.path, config.load.weights, config.load.ignore_patterns, config.model.raw)
    _ = checkpoint.spec  # names formats that aiakq does not read
    with without_load_report():
        hf, info = _load(hf_config, config, checkpoint, options)
    if unused := _unused(info, checkpoint):
        reason = "tensors of the checkpoint that transformers' model does not use"
        logger.warning("%s: %d %s: %s", config.load.path, len(unused), reason, some_of(unused))
    missed = MissedTensors(str(config.load.path), [*_differences(hf, info), *_integers(hf, checkpoint)])
    return hf, missed, checkpoint.beside_text


def _integers(hf: Any, checkpoint: Checkpoint) -> list[Difference]:
    """Return the float parameters for which the checkpoint holds integers; quantized layers are replaced later."""
    names, state = TensorNames.of(hf, checkpoint), hf.state_dict()
    differences = []
    for stored, info in checkpoint.inventory.items():
        name = None if info.dtype in FLOATS else names.own(stored)
        if name is not None and state[name].is_floating_point():
            found = f"{info.dtype} {list(info.shape)} without a scale"
            differences.append(Difference(name, found, str(list(state[name].shape))))
    return differences


def _unused(info: Mapping[str, Any], checkpoint: Checkpoint) -> list[str]:
    """Return the tensors of the language model that transformers did not load, but those of quantized layers, which are
    replaced later."""
    quantized = formats.all_suffixes() if checkpoint.spec is not None else ()
    left = set(info["unexpected_keys"]) - checkpoint.beside_text
    return sorted(name for name in left if formats.split_name(name)[1] not in quantized)


def _load(
    hf_config: Any, config: EngineConfig, checkpoint: Checkpoint, options: dict[str, object]
) -> tuple[object, dict[str, object]]:
    """Return the model and transformers' loading info.

    aiakq reads files with names that transformers does not know, and those that may not be mapped.
    """
    from transformers import AutoModelForCausalLM

    for remark in checkpoint.remarks:
        logger.warning("%s: %s", config.load.path, remark)
    common = {"config": hf_config, "output_loading_info": True, "ignore_mismatched_sizes": True, **options}
    family: Any = AutoModelForCausalLM._model_mapping.get(type(hf_config), None)
    if family is not None and (mapping := text_mapping(checkpoint, family.base_model_prefix)):
        common["key_mapping"] = mapping
    files = {info.file for info in checkpoint.inventory.values()}
    is_usual = files == {"model.safetensors"} or (
        (config.load.path / INDEX).exists() and all(file.endswith(".safetensors") for file in files)
    )
    if is_usual and config.load.mapped and not config.load.ignore_patterns:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            config.load.path, local_files_only=True, use_safetensors=True, **common
        )
        model, info = loaded
        return model, info
    with torch.device("meta"):
        family = type(AutoModelForCausalLM.from_config(hf_config, **options))
    common.pop("trust_remote_code")
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.inventory}
    model, info = family.from_pretrained(None, state_dict=tensors, **common)
    return model, info


def _differences(hf: Any, info: Mapping[str, Any]) -> list[Difference]:
    """Return the parameters that are missing in the checkpoint, or have another shape there."""
    shapes = {name: tuple(parameter.shape) for name, parameter in hf.state_dict().items()}
    differences = [Difference(name, "-", str(list(shapes.get(name, ())))) for name in sorted(info["missing_keys"])]
    for name, stored, expected in sorted(info["mismatched_keys"]):
        differences.append(Difference(name, str(list(stored)), str(list(expected))))
    return differences
