"""From a checkpoint to a quantized checkpoint: load, calibrate, quantize block by block, write, measure, publish.

The source is never modified and never wholly in memory; the output appears in one step at the end (formats/publish.py).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import aiakq
from aiakq import formats, quantizers
from aiakq.errors import AiakqError, error
from aiakq.formats.checkpoint import Checkpoint, resolve_model
from aiakq.formats.publish import VERBATIM_FILES, CheckpointWriter, check_output
from aiakq.quantizers.activations import Activations, batched
from aiakq.quantizers.calibration import Samples, load_samples, load_tokenizer, read_documents, tokenize
from aiakq.quantizers.groups import Heads, smoothing_pairs, trace_groups
from aiakq.quantizers.options import DTYPES, QuantizeOptions
from aiakq.quantizers.passes import capture
from aiakq.quantizers.report import LayerError, QuantizeReport
from aiakq.quantizers.source_model import SourceModel, cast
from aiakq.quantizers.tensor_parallel import plan_tensor_parallel
from aiakq.quantizers.work import BlockWork, Original, Plan
from aiakq.runtime.evaluate import Scorer, perplexity, windows

REPORT_FILE = "aiakq_report.json"
#: Perplexity before and after: windows of this many tokens, at most this many of them.
EVALUATION_WINDOW = 512
EVALUATION_WINDOWS = 64
#: Plain rounding needs no calibration; this many samples measure its error.
_SAMPLES_WITHOUT_CALIBRATION = 16
#: Tokens in one calibration batch.
_BATCH_TOKENS = 4096
_TORCH_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_DTYPE_WORDS = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


@dataclass(frozen=True)
class Progress:
    """``done`` of ``total`` steps of ``stage`` are finished; ``detail`` names the present one."""

    stage: str
    done: int
    total: int
    detail: str = ""


OnProgress = Callable[[Progress], None]
LoadScorer = Callable[[Path], Scorer]


def quantize_checkpoint(
    options: QuantizeOptions, progress: OnProgress | None = None, load_scorer: LoadScorer | None = None
) -> QuantizeReport:
    """Quantize ``options.input`` into the folder ``options.output`` and return the report.

    Everything that can be refused is refused before the calibration starts; after any failure, or Ctrl-C, nothing is
    left behind. ``load_scorer`` loads a folder for perplexity; the runtime's own loader by default.
    """
    return _Run(options, progress or (lambda _: None), load_scorer).run()


class _Run:
    """One quantization. The steps are methods in the order they happen."""

    def __init__(self, options: QuantizeOptions, progress: OnProgress, load_scorer: LoadScorer | None) -> None:
        self.started = time.monotonic()
        self.options = options
        self.progress = progress
        self.load_scorer = load_scorer
        self.warnings: list[str] = []
        self.errors: list[LayerError] = []
        self.quantized_bytes = 0
        self.quantized_weights = 0
        self.dropped = 0

    def run(self) -> QuantizeReport:
        options = self.options
        self.progress(Progress("load", 0, 1, options.input))
        self.source = resolve_model(options.input, options.revision)
        check_output(options.output, [self.source], options.overwrite)
        self.checkpoint = Checkpoint.open(self.source)
        self._refuse_quantized()
        self.device = _device(options.device)
        self.storage = self._storage()
        self.model = SourceModel(self.checkpoint, self.storage, self.device, options.trust_remote_code)
        shapes = self.model.linear_shapes()
        self.cut = plan_tensor_parallel(options, self.model.config.to_dict(), shapes)
        if self.cut.widths:
            self.model = SourceModel(
                self.checkpoint, self.storage, self.device, options.trust_remote_code, self.cut.widths
            )
        self.plan = self._plan()
        self.tokenizer = load_tokenizer(self.source, options.trust_remote_code)
        samples = self._samples()
        self._warn_about_the_model()
        self.progress(Progress("load", 1, 1))
        with CheckpointWriter(
            options.output,
            inputs=[self.source],
            overwrite=options.overwrite,
            expected_bytes=self._expected_bytes([shape.name for shape in shapes]),
        ) as writer:
            self._quantize_blocks(writer, samples)
            self._copy_the_rest(writer)
            report = self._report(writer, samples)
            if options.evaluate:
                self._evaluate(writer.seal(), report)
            report.seconds = round(time.monotonic() - self.started, 2)
            writer.add_json(REPORT_FILE, report.document())
            self.progress(Progress("publish", 0, 1, options.output))
            writer.publish()
        self.progress(Progress("publish", 1, 1, options.output))
        return report

    # --- before the work ------------------------------------------------------------------------------------------

    def _refuse_quantized(self) -> None:
        spec = self.checkpoint.spec
        if spec is not None:
            raise error("already_quantized", path=str(self.source), found=f"{spec.method}, {spec.describe()}")
        if self.checkpoint.quantized_linears():
            raise error("already_quantized", path=str(self.source), found="its weights are integers")

    def _storage(self) -> torch.dtype:
        """The dtype of what is not quantized: the one asked for, else the one most weights have."""
        if self.options.dtype is not None:
            return _TORCH_DTYPES[DTYPES[self.options.dtype]]
        sizes: dict[str, int] = {}
        for info in self.checkpoint.inventory.values():
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
        most = max((name for name in sizes if name in _TORCH_DTYPES), key=sizes.__getitem__, default=None)
        if most is None:
            raise error("tensor_mismatch", path=str(self.source), reason=f"its weights are {', '.join(sorted(sizes))}")
        return _TORCH_DTYPES[most]

    def _plan(self) -> Plan:
        options, config = self.options, self.model.config
        spec = options.spec(aiakq.__version__, self.model.other_linears())
        spec = replace(spec, group_size=self.cut.group_size)
        if spec.format in ("gptq", "gptq_v2", "awq"):
            scales = torch.float16
        else:
            scales = torch.float32 if spec.activation_bits else self.storage
        pairs = smoothing_pairs(config, options.method) if options.method in ("awq", "smooth_quant") else ()
        return Plan(options, spec, self.storage, scales, Heads.of(config), pairs, options.alpha(config.model_type))

    def _samples(self) -> Samples | None:
        """Calibration samples; None where they only serve to measure and there are none."""
        options = self.options
        limit = getattr(self.model.config, "max_position_embeddings", None) or options.seqlen
        if limit < options.seqlen:
            self.warnings.append(f"Calibration samples have {limit} tokens: the model has no more positions.")
            options = replace(options, seqlen=limit)
        try:
            samples = load_samples(options, self.tokenizer, self.model.config.vocab_size)
        except AiakqError as problem:
            asked = options.token_ids is not None or options.calibration is not None
            if options.method != "weight_only_int8" or asked:
                raise
            self.warnings.append(f"The error of the layers was not measured: {problem.message}")
            return None
        if options.method == "weight_only_int8":
            del samples.samples[_SAMPLES_WITHOUT_CALIBRATION:]
            samples.warnings.clear()
        self.warnings += samples.warnings
        return samples

    def _warn_about_the_model(self) -> None:
        share = self.model.unquantized_share()
        if share > 0.1:
            self.warnings.append(f"{share:.0%} of the blocks' weights are not in linear layers and stay as they are.")
        if self.plan.spec.format == "gptq_v2":
            self.warnings.append(
                "Asymmetric GPTQ is written as gptq_v2, which aiakq and transformers read and vLLM refuses; "
                "for vLLM use -quant_type awq."
            )

    def _expected_bytes(self, linears: list[str]) -> int:
        """The size of the output, slightly too large: codes, scales and zero points, and the rest as stored."""
        inside = {self.model.source_name(f"{name}.weight") for name in linears}
        spec = self.plan.spec
        per_weight = spec.bits / 8 + (0 if spec.group_size == -1 else 4 / spec.group_size) + 0.02
        total = 0.0
        for name, info in self.checkpoint.inventory.items():
            total += math.prod(info.shape) * (per_weight if name in inside else max(self.storage.itemsize, 2))
        return int(total)

    # --- the work -------------------------------------------------------------------------------------------------

    def _quantize_blocks(self, writer: CheckpointWriter, samples: Samples | None) -> None:
        method = quantizers.load(self.options.method)
        self.done: set[str] = set()
        inputs = self._capture(samples)
        beside = inputs.copy() if self.plan.needs_original else None
        count = len(self.model.blocks)
        for index, block in enumerate(self.model.blocks):
            prefix = self.model.block_prefix(index)
            self.progress(Progress("quantize", index, count, prefix))
            self.model.load(block, prefix)
            groups = self._trace(block, index, inputs) if len(inputs.hidden) else []
            original = None if beside is None else Original(copy.deepcopy(block), beside)
            work = BlockWork(block, index, prefix, self.plan, groups, inputs, self.warnings, original)
            with torch.no_grad():
                method.quantize_block(work)
                work.advance()
                if original is not None:
                    original.inputs.advance(original.block, index)
            self._write_block(writer, work)
            self.model.drop(block)
        self.progress(Progress("quantize", count, count))

    def _trace(self, block: nn.Module, index: int, inputs: Activations) -> list[tuple[str, ...]]:
        return trace_groups(block, lambda: inputs.run(block, index, 0))

    def _capture(self, samples: Samples | None) -> Activations:
        if samples is None:
            return Activations([], {}, self.device)
        longest = max(len(sample) for sample in samples.samples)
        batches = batched(samples.samples, max(1, _BATCH_TOKENS // longest))
        total = len(batches)
        return capture(self.model, batches, lambda done: self.progress(Progress("calibrate", done, total)))

    def _write_block(self, writer: CheckpointWriter, work: BlockWork) -> None:
        """Add what the block became to the output, and note its errors."""
        module = formats.load(self.plan.spec.format)
        for name, weight in work.finished.items():
            full = f"{work.prefix}.{name}"
            source = self.model.source_name(f"{full}.weight").removesuffix(".weight")
            for suffix, tensor in module.write(weight, work.spec(name), self.storage).items():
                writer.add(f"{full}.{suffix}", cast(tensor, f"{full}.{suffix}", None))
                if suffix != "bias":
                    self.quantized_bytes += tensor.numel() * tensor.element_size()
            self.quantized_weights += weight.n * weight.k
            self.done.update((f"{source}.weight", f"{source}.bias"))
        for name, tensor in work.changed.items():
            full = f"{work.prefix}.{name}"
            writer.add(full, cast(tensor.cpu(), full, self.storage).clone())
            self.done.add(self.model.source_name(full))
        self.errors += [LayerError(f"{work.prefix}.{name}", value) for name, value in work.errors.items()]
        self.dropped = max(self.dropped, work.dropped)

    def _copy_the_rest(self, writer: CheckpointWriter) -> None:
        """Every tensor that was not quantized or folded, in the output's dtype; config and tokenizer files.

        Names become those of the transformers model, which every loader knows; some older files lack a prefix.
        """
        config = dict(self.checkpoint.config)
        tied = bool(config.get("tie_word_embeddings"))
        for name in self.checkpoint.inventory:
            if name in self.done or (tied and name == "lm_head.weight" and len(self.checkpoint.inventory) > 1):
                continue
            writer.add(self.model.module_name(name), cast(self.model.tensor(name), name, self.storage))
        quantization = self.plan.spec.to_config()
        word = _DTYPE_WORDS[self.storage]
        config["dtype"] = word
        if "torch_dtype" in config:  # what transformers before 4.56 reads
            config["torch_dtype"] = word
        config["quantization_config"] = quantization
        self.cut.write_widths(config)
        config["aiakq"] = {"version": aiakq.__version__, "method": self.options.method, **self.cut.record()}
        if self.options.method == "gptq":  # where AutoGPTQ and tools of its time look
            writer.add_json("quantize_config.json", quantization)
        for file in VERBATIM_FILES:
            if (self.source / file).is_file():
                writer.copy_file(self.source / file)
        if self.options.trust_remote_code:
            for path in sorted(self.source.glob("*.py")):
                writer.copy_file(path)
        writer.add_json("config.json", config)

    # --- after the work -------------------------------------------------------------------------------------------

    def _report(self, writer: CheckpointWriter, samples: Samples | None) -> QuantizeReport:
        spec = self.plan.spec
        if self.dropped:
            self.warnings.append(f"{self.dropped} calibration tokens were left out: their activations were not finite.")
        return QuantizeReport(
            input=self.options.input,
            output=str(writer.output),
            method=self.options.method,
            scheme=spec.describe(),
            format=spec.format,
            group_size=spec.group_size,
            symmetric=spec.symmetric,
            dtype=_DTYPE_WORDS[self.storage],
            tp=self.options.tp,
            bits_per_weight=round(self.quantized_bytes * 8 / self.quantized_weights, 4),
            bytes_before=sum(info.nbytes for info in self.checkpoint.inventory.values()),
            bytes_after=writer.total_bytes,
            layers=self.errors,
            calibration=None if samples is None else samples.source,
            calibration_sha256=None if samples is None else samples.digest,
            tokens=0 if samples is None else samples.tokens,
            dropped_tokens=self.dropped,
            smooth_alpha=self.plan.alpha if self.options.method == "smooth_quant" else None,
            seed=self.options.seed,
            version=aiakq.__version__,
            warnings=self.warnings,
        )

    def _evaluate(self, folder: Path, report: QuantizeReport) -> None:
        """Perplexity of the source and of the folder before it is published. A failure costs the figures only."""
        try:
            ids, name = self._evaluation_ids()
            for title, path in (("before", self.source), ("after", folder)):
                scorer = self._scorer(path)

                def on_window(done: int, total: int, title: str = title) -> None:
                    self.progress(Progress(f"evaluate {title}", done, total))

                result = perplexity(scorer, ids, on_window)
                setattr(report, f"perplexity_{title}", result.value)
                report.evaluation_tokens = result.tokens
                del scorer
            report.evaluation_text = name
        except AiakqError as problem:
            self.warnings.append(f"Perplexity was not measured: {problem}")

    def _scorer(self, folder: Path) -> Scorer:
        if self.load_scorer is not None:
            return self.load_scorer(folder)
        from aiakq.runtime.scoring import load_for_scoring

        return load_for_scoring(folder, dtype="float32", device=self.device.type)

    def _evaluation_ids(self) -> tuple[Tensor, str]:
        """Windows of the text to evaluate on, and its name."""
        if self.tokenizer is None:
            raise error("evaluation_text", reason="the model folder has no tokenizer")
        if self.options.eval_text is not None:
            path = Path(self.options.eval_text)
            documents, name = read_documents(path), path.name
        else:
            import aiakq.data

            documents, name = [aiakq.data.text("heldout")], "the bundled held-out text"
        ids = [token for document in tokenize(documents, self.tokenizer) for token in document]
        limit = getattr(self.model.config, "max_position_embeddings", None) or EVALUATION_WINDOW
        return windows(ids, min(EVALUATION_WINDOW, limit), EVALUATION_WINDOWS), name


def _device(name: str) -> torch.device:
    """The device to compute on. Raises ``device``."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise error("device", device=name, reason="torch finds no NVIDIA GPU", hint="Use --device cpu.")
    try:
        return torch.device(name)
    except RuntimeError:
        raise error("device", device=name, reason="torch knows no such device", hint="Use auto, cpu or cuda.") from None
