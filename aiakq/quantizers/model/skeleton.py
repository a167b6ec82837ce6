"""The transformers model of a checkpoint on the meta device, and the decoder blocks in it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from aiakq.errors import error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.model_folder import check_files, first_architecture
from aiakq.quantizers.model.composite import checked_decoder, is_composite
from aiakq.quantizers.model.groups import block_linears
from aiakq.quantizers.model.wide_rows import widen
from aiakq.runtime.config.encoder_families import encoder_of
from aiakq.runtime.config.model import check_config, check_sizes
from aiakq.runtime.config.speech import is_speech
from aiakq.runtime.hf.mimo import register_mimo

_NO_BLOCKS = "no decoder blocks with linear layers were found in it"


def says_tied(config: Mapping[str, object]) -> bool:
    """Whether config.json may tie the output layer to the embedding; some families do so without saying it."""
    inside = checked_decoder(config) if is_composite(config) else config
    return inside.get("tie_word_embeddings") is not False


def skeleton(checkpoint: Checkpoint, trust_remote_code: bool, widths: Mapping[str, tuple[int, int]], tied: bool) -> Any:
    """Create the model's class with meta weights and real buffers, its MLPs padded to ``widths``.

    tied  False if the output layer is not tied to the embedding, whatever the config says.
    """
    import transformers
    from accelerate import init_empty_weights

    check_files(checkpoint.path)
    config_json = checkpoint.config
    composite = is_composite(config_json)
    check_sizes(config_json, len(checkpoint.inventory))
    if is_speech(first_architecture(config_json)):
        raise error("unsupported", what="Quantizing a model that transcribes audio", hint="Serve it as it is.")
    check_config(checked_decoder(config_json) if composite else config_json, len(checkpoint.inventory))
    register_mimo()
    known = str(config_json.get("model_type")) in transformers.CONFIG_MAPPING
    if not known and not trust_remote_code:
        if config_json.get("auto_map"):
            raise error("remote_code", path=str(checkpoint.path))
        raise _unsupported(str(config_json.get("model_type")), "transformers does not know it")
    try:
        config = transformers.AutoConfig.from_pretrained(
            checkpoint.path, trust_remote_code=trust_remote_code, local_files_only=True
        )
        if not tied:
            config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
        for key, (_, new) in widths.items():
            setattr(config.get_text_config(), key, new)
        with init_empty_weights(include_buffers=False):
            family: Any = transformers.AutoModelForMultimodalLM if composite else transformers.AutoModelForCausalLM
            if (encoder := encoder_class(config_json)) is not None:
                family = encoder
            model = family.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    except Exception as problem:
        # Classes of configs and models may raise anything for a wrong value.
        reason = " ".join(str(problem).split()[:40]).rstrip(".") or type(problem).__name__
        architecture = (config_json.get("architectures") or [config_json.get("model_type")])[0]
        raise _unsupported(architecture, f"transformers cannot build it: {reason}") from problem
    if "shared" in (getattr(config, "indexer_types", None) or ()):
        what = f"Running {type(model).__name__} block by block, of which some share the index of another,"
        raise error("unsupported", what=what, hint="Models whose blocks all have an index can be quantized.")
    if config.get_text_config().model_type in ("zamba", "zamba2"):
        what = f"Running {type(model).__name__} block by block, of which some share their weights,"
        raise error(
            "unsupported",
            what=what,
            hint="--quantization int8 of aiakq serve rounds its weights while they are loaded.",
        )
    return model.eval()


def encoder_class(config: Mapping[str, object]) -> Any | None:
    """Return the class in transformers of the encoder of a config.json; None for a decoder."""
    import transformers

    architecture = first_architecture(config)
    if encoder_of(architecture) is None:
        return None
    suffix = next(
        (each for each in ("ForSequenceClassification", "ForMaskedLM", "ForPreTraining") if each in architecture), ""
    )
    return getattr(transformers, f"AutoModel{suffix}")


def find_decoder(model: Any, config: Mapping[str, object]) -> tuple[str, nn.Module]:
    """Return the name of the decoder inside the multimodal model of a config.json, and the module; "" and the model if
    it has nothing else."""
    if not is_composite(config):
        return "", model
    decoder: nn.Module = model.get_decoder()
    decoder = getattr(decoder, "model", decoder)  # some models have a language model with its output layer inside
    return next(name for name, module in model.named_modules() if module is decoder), decoder


def find_blocks(model: nn.Module, prefix: str) -> tuple[str, nn.ModuleList]:
    """Return the name and list of the decoder blocks in ``model``, whose own name is ``prefix``: the longest list of
    equal modules that hold linears. They take one row per token (wide_rows.py)."""
    best: tuple[str, nn.ModuleList] | None = None
    for name, module in model.named_modules(prefix=prefix):
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        if not all(block_linears(child) for child in module):
            continue
        if len({type(child) for child in module}) != 1 and not all(map(_takes_hidden_states, module)):
            continue
        if best is not None and name.startswith(best[0] + "."):  # a list inside a block, like experts
            continue
        if best is None or len(module) > len(best[1]):
            best = (name, module)
    if best is None:
        reason = "its blocks have no linear layers besides routers and experts that share one tensor"
        raise _unsupported(type(model).__name__, reason if _has_experts(model) else _NO_BLOCKS)
    widen(best[1])
    return best


def _has_experts(model: nn.Module) -> bool:
    return any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())


def _takes_hidden_states(module: nn.Module) -> bool:
    return "hidden_states" in inspect.signature(module.forward).parameters


def _unsupported(architecture: str, reason: str) -> Exception:
    hint = "Decoder-only models of transformers can be quantized if all their blocks are in one list."
    return error("unsupported", what=f"Quantizing {architecture} ({reason})", hint=hint)
