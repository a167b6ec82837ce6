"""Prepares a run: validates everything that can be validated before the first weight is read."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import torch

import aiakq
from aiakq.arguments.quantize import DTYPES
from aiakq.errors import AiakqError, error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.output_folder import check_output
from aiakq.quantizers.calibration.samples import Samples, load_image_samples, load_samples, load_tokenizer
from aiakq.quantizers.model.outer_layers import head_name
from aiakq.quantizers.model.source import SourceModel
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.planning.layers import fit_head, fused_scheme_warnings, plan_layers
from aiakq.quantizers.planning.tensor_parallel import plan_tensor_parallel
from aiakq.quantizers.prepared import Prepared, remember_files
from aiakq.quantizers.readers import reader_notes
from aiakq.quantizers.source_inventory import (
    check_checkpoint,
    check_decoder,
    check_encoder,
    check_lora,
    check_source,
    dequantized_source,
    is_native,
    longest_text,
)
from aiakq.runtime.device_memory import free_memory

#: Round-to-nearest needs no calibration; this many tokens measure the error of a layer to within 5 %.
_TOKENS_WITHOUT_CALIBRATION = 2048
_TORCH_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def prepare(options: QuantizeOptions) -> Prepared:
    """Inspect the source and determine all settings. Raises for everything that cannot work."""
    checkpoint = Checkpoint.fetch(options.input, options.revision)
    source = checkpoint.path
    remember_files(checkpoint)
    check_output(options.output, [source], options.overwrite)
    check_checkpoint(checkpoint)
    check_encoder(options, checkpoint)
    check_lora(options, checkpoint)
    device, *others = _devices(options)
    storage = _storage(options, checkpoint)
    checkpoint, remarks = dequantized_source(checkpoint, storage)
    model = SourceModel(checkpoint, storage, device, options.trust_remote_code, others=tuple(others))
    check_decoder(options, model)
    model.merge(options.lora)
    config = model.config
    head = head_name(model)
    names = [shape.name for shape in model.linear_shapes()]
    spec = plan_layers(options, options.spec(aiakq.__version__, model.other_linears(), model.places()), names, head)
    cut = plan_tensor_parallel(options, config.to_dict(), model.linear_shapes(), spec, gathered=is_native(model))
    if cut.widths:
        model = SourceModel(checkpoint, storage, device, options.trust_remote_code, cut.widths, tuple(others))
        model.merge(options.lora)
    spec = cut.fit(spec)
    quantized_head = head if options.lm_head is not None else None
    if quantized_head is not None:
        spec = fit_head(spec, quantized_head, model.model.get_output_embeddings().in_features)
    tokenizer = load_tokenizer(source, options.trust_remote_code)
    warnings = [*options.warnings, *check_source(model)]
    samples = _samples(options, checkpoint, tokenizer, config, warnings)
    model.features = None if samples is None or samples.images is None else samples.images.features
    warnings += [*reader_notes(model, spec, options.trust_remote_code), *fused_scheme_warnings(spec, names)]
    budget = options.activation_memory
    return Prepared(
        options=options,
        recipe=options.resolved_recipe.for_model(config.model_type),
        source=source,
        checkpoint=checkpoint,
        device=device,
        storage=storage,
        model=model,
        shapes=model.linear_shapes(),
        spec=spec,
        cut=cut,
        head=quantized_head,
        head_weights=model.model.get_output_embeddings().weight.numel() if quantized_head else 0,
        tokenizer=tokenizer,
        samples=samples,
        max_positions=longest_text(config),
        activation_budget=free_memory(torch.device("cpu")) / 4 if budget is None else budget * 1e9,
        warnings=tuple(warnings),
        remarks=tuple(remarks),
    )


def _devices(options: QuantizeOptions) -> list[torch.device]:
    """Return the devices to compute on, the first of which holds the model.

    Raises ``device``, and ``option_conflict`` for workers that do not compute on one CPU.
    """
    if options.device == "auto":
        devices = [torch.device("cuda" if torch.cuda.is_available() else "cpu")]
    else:
        devices = [_device(name.strip()) for name in options.device.split(",")]
    if options.workers > 1 and (len(devices) > 1 or devices[0].type != "cpu"):
        raise error(
            "option_conflict",
            option="--workers",
            other=f"--device {options.device}",
            reason="workers share the processors of a machine",
            hint="Use --device cpu; several GPUs share the calibration without workers: --device cuda:0,cuda:1.",
        )
    return devices


def _device(name: str) -> torch.device:
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise error("device", device=name, reason="torch finds no NVIDIA GPU", hint="Use --device cpu.")
    match = re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", name)
    if match is None:
        raise error("device", device=name, reason="aiakq does not support this device", hint="Use auto, cpu or cuda.")
    if match[1] and int(match[1][1:]) >= torch.cuda.device_count():
        reason = f"torch finds {torch.cuda.device_count()} GPUs, counted from 0"
        raise error("device", device=name, reason=reason, hint="Use --device cuda.")
    return torch.device(name)


def _storage(options: QuantizeOptions, checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype of what is not quantized: the requested one, else that of most weights."""
    if options.dtype is not None:
        return _TORCH_DTYPES[DTYPES[options.dtype]]
    sizes: dict[str, int] = {}
    packed = {name for prefix in checkpoint.quantized_linears() for name in checkpoint.linear_tensors(prefix).values()}
    left_out = packed | checkpoint.beside_text
    for info in (info for name, info in checkpoint.inventory.items() if name not in left_out):
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    commonest = max((name for name in sizes if name in _TORCH_DTYPES), key=sizes.__getitem__, default=None)
    if commonest is None:
        dtypes = ", ".join(sorted(sizes))
        raise error(
            "tensor_mismatch",
            path=str(checkpoint.path),
            reason=f"its weights are {dtypes}, and -t does not set the dtype to store them in",
        )
    return _TORCH_DTYPES[commonest]


def _samples(
    options: QuantizeOptions, checkpoint: Checkpoint, tokenizer: object, config: Any, warnings: list[str]
) -> Samples | None:
    """Return calibration samples; None if they would only serve for measurement and are not available."""
    positions = longest_text(config)
    vocab_size, pad_token_id = config.vocab_size, getattr(config, "pad_token_id", None)
    if positions is not None and positions < options.seqlen:
        warnings.append(f"Calibration samples have {positions} tokens: the model has no more positions.")
        options = replace(options, seqlen=positions)
    images = None
    if options.calibration_images is not None:
        images = load_image_samples(options, checkpoint, vocab_size, max(1, options.samples // 2))
        options = replace(options, samples=max(1, options.samples - len(images.samples)))
    try:
        samples = load_samples(options, tokenizer, vocab_size, pad_token_id)
    except AiakqError as problem:
        asked = options.token_ids is not None or options.calibration is not None
        asked = asked or images is not None
        if options.resolved_recipe.needs_inputs or options.tune or asked:
            raise
        warnings.append(f"The error of the layers was not measured: {problem.message}")
        return None
    if images is not None:
        samples = samples.with_images(images)
    if not options.resolved_recipe.needs_inputs and not options.tune:
        before = itertools.accumulate((len(sample) for sample in samples.samples), initial=0)
        del samples.samples[sum(tokens < _TOKENS_WITHOUT_CALIBRATION for tokens in before) :]
        samples.warnings.clear()
    warnings += samples.warnings
    return samples
