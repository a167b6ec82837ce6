"""Everything that is settled before the first weight is touched, so that what can be refused is refused at once."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import aiakq
from aiakq import formats
from aiakq.arguments.quantize import DTYPES
from aiakq.errors import AiakqError, error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.output_folder import VERBATIM_FILES, check_output
from aiakq.quantizers.block import Plan
from aiakq.quantizers.calibration.samples import Samples, load_samples, load_tokenizer
from aiakq.quantizers.model.groups import Heads
from aiakq.quantizers.model.passes import head_name
from aiakq.quantizers.model.source import SourceModel
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.planning.layers import fit_head, fused_apart, plan_layers
from aiakq.quantizers.planning.tensor_parallel import LinearShape, TensorParallelPlan, plan_tensor_parallel
from aiakq.runtime.device_memory import free_memory
from aiakq.spec import QuantSpec

#: Plain rounding needs no calibration; so many tokens measure its error, to 5 % of the error of a layer.
_TOKENS_WITHOUT_CALIBRATION = 2048
_TORCH_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
DTYPE_WORDS = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
#: Options that change how the work is done, but not what comes out.
_WITHOUT_EFFECT = ("output", "overwrite", "resume", "activation_memory", "evaluate", "eval_text", "device")


@dataclass(frozen=True)
class Prepared:
    """The source, what it will be stored as, and what it is calibrated on.

    storage            dtype of everything the output does not quantize.
    spec               how linears are stored, by the options alone.
    head               the output layer's name if it is quantized, else None; ``head_weights`` its size.
    activation_budget  bytes of hidden states held in memory.
    """

    options: QuantizeOptions
    source: Path
    checkpoint: Checkpoint
    device: torch.device
    storage: torch.dtype
    model: SourceModel
    shapes: list[LinearShape]
    spec: QuantSpec
    cut: TensorParallelPlan
    head: str | None
    head_weights: int
    tokenizer: Any
    samples: Samples | None
    max_positions: int | None
    activation_budget: float
    warnings: tuple[str, ...]

    def plan(self, spec: QuantSpec) -> Plan:
        """What every block is told, for linears stored as ``spec`` says."""
        options, config = self.options, self.model.config
        scales = formats.load(spec.format).scale_dtype(spec, self.storage)
        return Plan(options, spec, self.storage, scales, Heads.of(config), alpha=options.alpha(config.model_type))

    def expected_bytes(self, spec: QuantSpec) -> int:
        """The size of the output, slightly too large: codes, scales and zero points, and the rest as stored."""
        total = 0.0
        inside = 0
        for shape in self.shapes:
            own = spec.for_layer(shape.name)
            inside += shape.n * shape.k
            if own is None:
                total += shape.n * shape.k * max(self.storage.itemsize, 2)
            else:
                group = shape.k if own.group_size == -1 else own.group_size
                total += shape.n * shape.k * (own.bits / 8 + 5 / group + 0.02)
        everything = sum(math.prod(info.shape) for info in self.checkpoint.inventory.values())
        return int(total + max(everything - inside, 0) * max(self.storage.itemsize, 2))

    def fingerprint(self, spec: QuantSpec) -> str:
        """Equal for runs that give the same bytes: same source, options, calibration data, and versions."""
        options = {key: str(value) for key, value in asdict(self.options).items() if key not in _WITHOUT_EFFECT}
        files = []
        for name in sorted({info.file for info in self.checkpoint.inventory.values()}):
            status = (self.source / name).stat()
            files.append([name, status.st_size, status.st_mtime_ns])
        said = {
            "versions": [aiakq.__version__, torch.__version__],
            "options": options,
            "spec": str(spec),
            "config": self.checkpoint.config,
            "files": files,
            "samples": None if self.samples is None else self.samples.digest,
        }
        return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()

    # --- the output's files besides the blocks ---------------------------------------------------------------------

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding."""
        return bool(self.checkpoint.config.get("tie_word_embeddings"))

    def not_copied(self) -> set[str]:
        """Tensors outside the blocks that the output does not hold as they are."""
        name = head_name(self.model)
        return {f"{name}.weight"} if name and (self.head or self.tied) and len(self.checkpoint.inventory) > 1 else set()

    def documents(self, spec: QuantSpec) -> dict[str, Any]:
        """The JSON files of the output, by name."""
        config = dict(self.checkpoint.config)
        quantization = formats.load(spec.format).to_config(spec)
        word = DTYPE_WORDS[self.storage]
        config["dtype"] = word
        if "torch_dtype" in config:  # what transformers before 4.56 reads
            config["torch_dtype"] = word
        if self.head is not None:
            config["tie_word_embeddings"] = False
        config["quantization_config"] = quantization
        self.cut.write_widths(config)
        config["aiakq"] = {"version": aiakq.__version__, "method": self.options.method, **self.cut.record()}
        return {"config.json": config, **formats.config_files(spec)}

    def verbatim_files(self) -> list[Path]:
        """Files of the source that belong to the output as they are."""
        found = [self.source / name for name in VERBATIM_FILES if (self.source / name).is_file()]
        return found + (sorted(self.source.glob("*.py")) if self.options.trust_remote_code else [])


def prepare(options: QuantizeOptions) -> Prepared:
    """Look at the source and settle everything. Raises for whatever cannot work."""
    checkpoint = Checkpoint.fetch(options.input, options.revision)
    source = checkpoint.path
    check_output(options.output, [source], options.overwrite)
    _refuse_quantized(checkpoint)
    device, *others = _devices(options.device)
    storage = _storage(options, checkpoint)
    model = SourceModel(checkpoint, storage, device, options.trust_remote_code, others=tuple(others))
    config = model.config
    head = head_name(model)
    names = [shape.name for shape in model.linear_shapes()]
    spec = plan_layers(options, options.spec(aiakq.__version__, model.other_linears()), names, head)
    cut = plan_tensor_parallel(options, config.to_dict(), model.linear_shapes(), spec)
    if cut.widths:
        model = SourceModel(checkpoint, storage, device, options.trust_remote_code, cut.widths, tuple(others))
    spec = cut.fit(spec)
    quantized_head = head if options.lm_head is not None else None
    if quantized_head is not None:
        spec = fit_head(spec, quantized_head, model.model.get_output_embeddings().in_features)
    tokenizer = load_tokenizer(source, options.trust_remote_code)
    warnings: list[str] = []
    positions = getattr(config, "max_position_embeddings", None)
    samples = _samples(options, tokenizer, config.vocab_size, positions, warnings)
    warnings += [*_about(model, spec), *fused_apart(spec, names)]
    budget = options.activation_memory
    return Prepared(
        options=options,
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
        max_positions=positions,
        activation_budget=free_memory(torch.device("cpu")) / 4 if budget is None else budget * 1e9,
        warnings=tuple(warnings),
    )


def _refuse_quantized(checkpoint: Checkpoint) -> None:
    spec = checkpoint.spec
    if spec is not None:
        raise error("already_quantized", path=str(checkpoint.path), found=f"{spec.method}, {spec.describe()}")
    if checkpoint.quantized_linears():
        raise error("already_quantized", path=str(checkpoint.path), found="its weights are integers")


def _devices(names: str) -> list[torch.device]:
    """The devices to compute on, the first of which holds the model. Raises ``device``."""
    if names == "auto":
        return [torch.device("cuda" if torch.cuda.is_available() else "cpu")]
    return [_device(name.strip()) for name in names.split(",")]


def _device(name: str) -> torch.device:
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise error("device", device=name, reason="torch finds no NVIDIA GPU", hint="Use --device cpu.")
    match = re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", name)
    if match is None:
        raise error("device", device=name, reason="aiakq computes on no such device", hint="Use auto, cpu or cuda.")
    if match[1] and int(match[1][1:]) >= torch.cuda.device_count():
        reason = f"torch finds {torch.cuda.device_count()} GPUs, counted from 0"
        raise error("device", device=name, reason=reason, hint="Use --device cuda.")
    return torch.device(name)


def _storage(options: QuantizeOptions, checkpoint: Checkpoint) -> torch.dtype:
    """The dtype of what is not quantized: the one asked for, else the one most weights have."""
    if options.dtype is not None:
        return _TORCH_DTYPES[DTYPES[options.dtype]]
    sizes: dict[str, int] = {}
    for info in checkpoint.inventory.values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    most = max((name for name in sizes if name in _TORCH_DTYPES), key=sizes.__getitem__, default=None)
    if most is None:
        found = ", ".join(sorted(sizes))
        raise error(
            "tensor_mismatch",
            path=str(checkpoint.path),
            reason=f"its weights are {found}, and -t does not say as what to store them",
        )
    return _TORCH_DTYPES[most]


def _samples(
    options: QuantizeOptions, tokenizer: Any, vocab_size: int, positions: int | None, warnings: list[str]
) -> Samples | None:
    """Calibration samples; None where they only serve to measure and there are none."""
    if positions is not None and positions < options.seqlen:
        warnings.append(f"Calibration samples have {positions} tokens: the model has no more positions.")
        options = replace(options, seqlen=positions)
    try:
        samples = load_samples(options, tokenizer, vocab_size)
    except AiakqError as problem:
        asked = options.token_ids is not None or options.calibration is not None
        if options.method != "weight_only_int8" or asked:
            raise
        warnings.append(f"The error of the layers was not measured: {problem.message}")
        return None
    if options.method == "weight_only_int8":
        before = itertools.accumulate((len(sample) for sample in samples.samples), initial=0)
        del samples.samples[sum(tokens < _TOKENS_WITHOUT_CALIBRATION for tokens in before) :]
        samples.warnings.clear()
    warnings += samples.warnings
    return samples


def _about(model: SourceModel, spec: QuantSpec) -> list[str]:
    """What the user should know about this model in this format."""
    notes = []
    share = model.unquantized_share()
    if share > 0.1:
        notes.append(f"{share:.0%} of the blocks' weights are not in linear layers and stay as they are.")
    return notes + formats.reader_notes(spec, bool(model.experts.fused))
