"""Converts a quantized checkpoint: reads every linear, writes it in another format, and compares what it reads back.

One linear and the tensors of an unfinished step are in memory at a time; the output appears atomically at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import aiakq
from aiakq import formats
from aiakq.arguments.convert import ConvertArguments
from aiakq.convert import plan as plans
from aiakq.convert.files import CONVERSION_FILE, card, config_json, copied_files
from aiakq.convert.gguf.conversion import convert_to_gguf
from aiakq.convert.layers import LayerConverter, ToFloats, ToFormat
from aiakq.convert.report import ConversionReport
from aiakq.convert.tensors import biases_without_place, check_tensors, without_bias
from aiakq.errors import error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.checkpoint_writer import CheckpointWriter
from aiakq.formats.model_folder import some_of
from aiakq.formats.output_folder import check_output
from aiakq.spec import QuantSpec

#: Bytes of tensors that are held until they are written to disk.
_STEP = 256 << 20

OnProgress = Callable[[str, int, int, str], None]


def convert_checkpoint(arguments: ConvertArguments, progress: OnProgress = lambda *_: None) -> ConversionReport:
    """Convert ``arguments.input`` into the folder ``arguments.output`` and return the report.

    Everything that headers show is refused before a weight is read. After any failure nothing is left behind. Raises
    ``not_quantized``, ``conversion_inexact``, ``bad_option``, and what reading and writing raise.
    """
    if arguments.to.strip().lower() == "gguf":
        return convert_to_gguf(arguments, progress)
    if arguments.gguf_type != "auto":
        option, hint = "--gguf-type", "It says how a GGUF file is quantized: add --to gguf."
        raise error(
            "bad_option", option=option, value=arguments.gguf_type, expected="used without --to gguf", hint=hint
        )
    started = time.monotonic()
    to = _checked_target(arguments.to)
    checkpoint = Checkpoint.fetch(arguments.input, arguments.revision)
    checkpoint.remember(copied_files(checkpoint))
    check_output(arguments.output, [checkpoint.path], arguments.overwrite)
    if checkpoint.spec is None or not checkpoint.quantized_linears():
        raise error("not_quantized", path=str(checkpoint.path))
    try:
        return _Conversion(arguments, to, checkpoint, progress).run(started)
    finally:
        checkpoint.close()


def _checked_target(to: str) -> str | torch.dtype:
    name = to.strip().lower().replace("compressed_tensors", "compressed-tensors")
    if name in plans.DTYPES:
        return plans.DTYPES[name]
    if name not in formats.FORMATS:
        known = ", ".join((*formats.FORMATS, "fp16", "bf16", "fp32"))
        raise error("bad_option", option="--to", value=to, expected=f"one of {known}", hint="")
    return name


class _Conversion:
    """One conversion. Its steps are methods, in execution order."""

    def __init__(
        self, arguments: ConvertArguments, to: str | torch.dtype, checkpoint: Checkpoint, progress: OnProgress
    ) -> None:
        assert checkpoint.spec is not None
        self.arguments, self.checkpoint, self.progress = arguments, checkpoint, progress
        self.source: QuantSpec = checkpoint.spec
        check_tensors(checkpoint, checkpoint)
        self.stray_biases = biases_without_place(checkpoint)
        self.linears = {linear.name: linear for linear in plans.linears_of(checkpoint)}
        self.left_out = plans.unquantized(checkpoint, self.linears)
        self.modules = plans.modules_of(checkpoint, [*self.linears, *self.left_out])
        self.has_perm = False
        self.dtype = to if isinstance(to, torch.dtype) else None
        self.plan = None if isinstance(to, torch.dtype) else self._planned(to)
        word = str(to).removeprefix("torch.")
        self.report = ConversionReport(
            input=arguments.input,
            output=arguments.output,
            source_format=self.source.format,
            source_scheme=self.source.describe(),
            method=self.source.method,
            to=word,
            scheme=word,
            notes=[] if self.plan is None else self.plan.notes,
            version=aiakq.__version__,
        )

    def _planned(self, to: str) -> plans.ConversionPlan:
        arguments = self.arguments
        plan = plans.plan(
            list(self.linears.values()), to, self.source, arguments.bits, arguments.group_size, arguments.lossy
        )
        self._output_spec(plan)
        return plan

    def _output_spec(self, plan: plans.ConversionPlan) -> QuantSpec:
        """Return the spec of the output; raise ``conversion_inexact`` if its config cannot say it."""
        spec = plan.spec(self.left_out, self.has_perm, self.modules)
        plans.check_config(formats.load(spec.format).to_config(spec), plan, self.left_out)
        return spec

    def run(self, started: float) -> ConversionReport:
        checkpoint, report = self.checkpoint, self.report
        with CheckpointWriter(
            self.arguments.output,
            [checkpoint.path],
            self.arguments.overwrite,
            self._expected_bytes(),
            self.arguments.max_shard_bytes,
        ) as writer:
            self._write_tensors(writer)
            self._write_files(writer)
            self._check_output(writer)
            report.output = str(writer.output)
            report.bytes_before = checkpoint.nbytes
            report.bytes_after = writer.total_bytes
            report.record_cost(started)
            writer.add_text("README.md", card(report, checkpoint.path))
            writer.add_json(CONVERSION_FILE, report.document())
            if changed := checkpoint.changed_files():
                raise error("source_changed", path=str(checkpoint.path), files=some_of(changed))
            writer.publish()
        return report

    def _expected_bytes(self) -> int:
        """Return the size of the output, slightly overestimated."""
        packed = self._packed()
        total = sum(2 * info.nbytes for name, info in self.checkpoint.inventory.items() if name not in packed)
        for linear in self.linears.values():
            if self.plan is None:
                total += linear.n * linear.k * (self.dtype or torch.float32).itemsize
                continue
            layer = self.plan.layers[linear.name]
            groups = 1 if layer.group_size == -1 else -(-linear.k // layer.group_size)
            total += linear.n * (linear.k * layer.bits // 8 + 8 * groups) + 4 * linear.k
        return total

    def _packed(self) -> dict[str, str]:
        """Return the tensors of all linears -> the linear, by full name."""
        return {name: prefix for prefix in self.linears for name in self.checkpoint.linear_tensors(prefix).values()}

    def _write_tensors(self, writer: CheckpointWriter) -> None:
        """Write all tensors, in the order in which the source stores them."""
        pending = 0
        for name, tensors in self._tensors():
            for each, tensor in tensors.items():
                writer.add(each, tensor)
                pending += tensor.numel() * tensor.element_size()
            if pending > _STEP:
                writer.commit(name)
                self.checkpoint.close()
                pending = 0
            if name in self.linears:
                self.progress("convert", len(self.report.layers), len(self.linears), name)
        writer.commit("rest")

    def _tensors(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield the tensors of every linear and every other tensor, by full name."""
        checkpoint, packed, done = self.checkpoint, self._packed(), set()
        stored, converter = checkpoint.inventory, self._converter()
        for name in sorted(stored, key=lambda name: (stored[name].file, stored[name].offset)):
            prefix = packed.get(name)
            if prefix is None:
                yield name, {name: converter.plain(name, checkpoint.checked_tensor(name))}
            elif prefix not in done:
                done.add(prefix)
                weight = checkpoint.read_linear(prefix)
                if prefix in self.stray_biases:
                    weight = without_bias(weight, prefix, checkpoint)
                self.has_perm = self.has_perm or getattr(weight, "perm", None) is not None
                tensors, entry = converter.convert(prefix, weight)
                self.report.layers.append(entry)
                yield prefix, {f"{prefix}.{suffix}": tensor for suffix, tensor in tensors.items()}

    def _converter(self) -> LayerConverter:
        before = {
            linear.name: plans.spec_of(self.source.format, linear.layer, self.source).describe()
            for linear in self.linears.values()
        }
        if self.plan is not None:
            return ToFormat(self.plan, before, self.arguments.lossy)
        assert self.dtype is not None
        return ToFloats(self.dtype, before, self.checkpoint.config)

    def _write_files(self, writer: CheckpointWriter) -> None:
        """Write the config and copy the other files; complete the report."""
        to: QuantSpec | torch.dtype | None = self.dtype
        report = self.report
        if self.plan is not None:
            to = self._output_spec(self.plan)
            report.scheme = to.describe()
            for name, document in formats.config_files(to).items():
                writer.add_json(name, document)
        assert to is not None
        writer.add_json("config.json", config_json(self.checkpoint, to))
        for name in copied_files(self.checkpoint):
            writer.copy_file(self.checkpoint.path, name)
        freed = sum("activations" in layer.change for layer in report.layers)
        if freed:
            report.notes.append(
                f"The source rounds the activations of {freed} layers and {report.to} does not: outputs "
                "differ by that rounding."
            )
        if self.dtype is not None and report.worst is not None:
            report.notes.append(
                f"Dequantized weights were rounded to {report.to}; --to fp32 would store each of them exactly."
            )

    def _check_output(self, writer: CheckpointWriter) -> None:
        """Open the output as a reader does. Raises ``not_as_written`` for a linear that would be read in another way,
        and ``tensor_inventory``."""
        written = Checkpoint.open(writer.seal())
        try:
            wanted = {} if self.plan is None else self.plan.layers
            for name in sorted(set(written.quantized_linears()) ^ wanted.keys()):
                raise error("not_as_written", layer=name)
            for name, layer in wanted.items():
                if written.linear_spec(name).layer != layer:
                    raise error("not_as_written", layer=name)
            check_tensors(self.checkpoint, written)
        finally:
            written.close()
