"""Prepared: the source model, quantization specs and calibration samples of a run."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import aiakq
from aiakq import formats
from aiakq.errors import error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.model_folder import (
    FOLDED_SCALES,
    FOLDED_SCALES_KEY,
    ROTATION_KEY,
    SOURCE_KEY,
    VERBATIM_FILES,
    has_scaled_inputs,
    module_files,
    some_of,
    template_files,
    vocabulary_files,
)
from aiakq.quantizers.block.decoder_block import BlockPlan
from aiakq.quantizers.calibration.samples import Samples
from aiakq.quantizers.model.groups import Heads
from aiakq.quantizers.model.outer_layers import head_name
from aiakq.quantizers.model.shapes import LinearShape
from aiakq.quantizers.model.source import SourceModel
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.planning.tensor_parallel import TensorParallelPlan
from aiakq.quantizers.recipe import Recipe
from aiakq.spec import QuantSpec

DTYPE_WORDS = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
#: What the source says about itself that is true of the output, too.
_KEPT = (SOURCE_KEY, ROTATION_KEY)
#: Options that affect how the work is done but not the result.
_WITHOUT_EFFECT = (
    "output",
    "recipe",
    "overwrite",
    "resume",
    "activation_memory",
    "evaluate",
    "eval_text",
    "device",
    "workers",
    "distributed_executor_backend",
)


@dataclass(frozen=True)
class Prepared:
    """The source, its target spec, and its calibration data.

    storage            dtype of everything that the output does not quantize.
    spec               how linears are stored, according to the options alone.
    head               name of the output layer if it is quantized, else None; ``head_weights`` is its size.
    activation_budget  bytes of hidden states held in memory.
    remarks            sentences for the report on the source.
    """

    options: QuantizeOptions
    recipe: Recipe
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
    tokenizer: object
    samples: Samples | None
    max_positions: int | None
    activation_budget: float
    warnings: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    def plan(self, spec: QuantSpec) -> BlockPlan:
        """Return the settings shared by all blocks, with linears stored as in ``spec``."""
        return block_plan(spec, self.storage, self.model)

    def expected_bytes(self, spec: QuantSpec) -> int:
        """Return the size of the output, slightly overestimated: codes, scales and zero points, and other tensors."""
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
        everything += self.untied_weights
        return int(total + max(everything - inside, 0) * max(self.storage.itemsize, 2))

    def fingerprint(self, spec: QuantSpec) -> str:
        """Return a key that is equal for runs with the same bytes: same source, options, calibration, and versions."""
        options = {key: str(value) for key, value in asdict(self.options).items() if key not in _WITHOUT_EFFECT}
        files = []
        for name in sorted({info.file for info in self.checkpoint.inventory.values()}):
            status = (self.checkpoint.weights_folder / name).stat()
            files.append([name, status.st_size, status.st_mtime_ns])
        document = {
            "versions": [aiakq.__version__, torch.__version__],
            "options": options,
            "recipe": str(self.recipe),
            "spec": str(spec),
            "config": self.checkpoint.config,
            "files": files,
            "adapter": None if self.model.adapter is None else self.model.adapter.digest,
            "rotation": None if self.model.rotation is None else self.model.rotation.digest,
            "samples": None if self.samples is None else self.samples.digest,
        }
        return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def file_beside(self) -> str | None:
        """Return the name of the file beside the weights that records folded scales, if the recipe folds any."""
        return FOLDED_SCALES if self.recipe.folds else None

    # --- files of the output other than blocks ---------------------------------------------------------------------

    @property
    def tied(self) -> bool:
        """Whether the output layer is tied to the embedding; one that is stored and differs from it is not."""
        tied = bool(self.checkpoint.config.get("tie_word_embeddings")) and not self.model.separate_head
        return tied and not self.model.untied_head

    @property
    def untied_weights(self) -> int:
        """Return the number of weights of an output layer that ``--rotate`` separated from the embedding; else 0."""
        return self.model.model.get_output_embeddings().weight.numel() if self.model.untied_head else 0

    @property
    def folded_scales(self) -> str | None:
        """The file for folded scales beside the weights, if the recipe folds any."""
        return FOLDED_SCALES if self.recipe.folds else None

    def not_copied(self) -> set[str]:
        """Return tensors outside the blocks that are not copied to the output unchanged."""
        name = head_name(self.model)
        return {f"{name}.weight"} if name and (self.head or self.tied) and len(self.checkpoint.inventory) > 1 else set()

    def documents(self, spec: QuantSpec) -> dict[str, object]:
        """Return the JSON files of the output, by name."""
        config = dict(self.checkpoint.config)
        quantization = formats.load(spec.format).to_config(spec)
        word = DTYPE_WORDS[self.storage]
        config["dtype"] = word
        parts = [config]
        if self.model.decoder and "text_config" in config:
            parts.append(config["text_config"])
            config["text_config"] = parts[1] = dict(parts[1])
        for part in parts:
            # torch_dtype is read by transformers before 4.56.
            part |= {key: word for key in ("dtype", "torch_dtype") if key in part}
            if self.head is not None or self.model.separate_head or self.model.untied_head:
                part["tie_word_embeddings"] = False
        config["quantization_config"] = quantization
        self.cut.write_widths(config)
        scaled_before, before = has_scaled_inputs(config), config.get("aiakq")
        kept = {key: before[key] for key in _KEPT if key in before} if isinstance(before, dict) else {}
        config["aiakq"] = {"version": aiakq.__version__, "method": self.options.method, **kept, **self.cut.record()}
        if self.recipe.folds and not scaled_before:  # or the file would not say everything
            config["aiakq"][FOLDED_SCALES_KEY] = FOLDED_SCALES
        if self.model.rotation is not None:
            config["aiakq"][ROTATION_KEY] = self.model.rotation.kind
        if (adapter := self.model.adapter) is not None:
            config["aiakq"]["lora"] = {"name": adapter.name, "digest": adapter.digest}
        return {"config.json": config, **formats.config_files(spec)}

    def check_unchanged(self) -> None:
        """Raise ``source_changed`` if the source changed during the run, so that the output must not be published."""
        changed = self.checkpoint.changed_files()
        if changed:
            raise error("source_changed", path=str(self.source), files=some_of(changed))
        if self.model.adapter is not None:
            self.model.adapter.check_unchanged()

    def verbatim_files(self) -> list[str]:
        """Return files of the source that are copied to the output unchanged."""
        names = [name for name in VERBATIM_FILES if (self.source / name).is_file()]
        names += module_files(self.source) + template_files(self.source)
        names += [name for name in vocabulary_files(self.source) if name not in names]
        code = sorted(path.name for path in self.source.glob("*.py")) if self.options.trust_remote_code else []
        return names + code


def block_plan(spec: QuantSpec, storage: torch.dtype, model: SourceModel) -> BlockPlan:
    """Return the settings shared by all blocks of ``model``; ``storage`` is the dtype of what is not quantized."""
    return BlockPlan(spec, storage, formats.load(spec.format).scale_dtype(spec, storage), Heads.of(model.config))


def remember_files(checkpoint: Checkpoint) -> None:
    """Record which files the output will copy, before any is read, for ``Prepared.check_unchanged``."""
    checkpoint.remember(
        [
            *VERBATIM_FILES,
            *module_files(checkpoint.path),
            *template_files(checkpoint.path),
            *vocabulary_files(checkpoint.path),
            *(path.name for path in checkpoint.path.glob("*.py")),
        ]
    )
