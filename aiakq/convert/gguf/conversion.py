"""Writes the model of a checkpoint as a GGUF file, reads it back as a server would, and compares every tensor.

One tensor of the file is in memory at a time. The file appears under its name when all of it is proved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

import aiakq
from aiakq.arguments.convert import ConvertArguments
from aiakq.convert.gguf.file_types import (
    FILE_TYPES,
    FileType,
    MixtureModel,
    commonest,
    file_type,
    fitting,
    is_blocks,
    kinds_for,
    stays_float,
)
from aiakq.convert.gguf.metadata import check_keys, factor_tensors, model_keys, window_note
from aiakq.convert.gguf.output_files import OutputFiles, checked_name
from aiakq.convert.gguf.output_files import checked_output as checked_output
from aiakq.convert.gguf.proof import check_file
from aiakq.convert.gguf.source import GGUFSource
from aiakq.convert.gguf.vocabulary import vocabulary_keys
from aiakq.convert.report import ConversionReport
from aiakq.convert.tensors import check_tensors
from aiakq.errors import error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.gguf.writing import WrittenTensor, file_size
from aiakq.formats.model_folder import some_of
from aiakq.runtime.config.model import ModelConfig

OnProgress = Callable[[str, int, int, str], None]


def convert_to_gguf(arguments: ConvertArguments, progress: OnProgress = lambda *_: None) -> ConversionReport:
    """Write ``arguments.input`` as the GGUF file ``arguments.output`` and return the report.

    Raises ``gguf_not_written`` for what such files do not hold, ``conversion_inexact``, ``bad_option``,
    ``not_as_written``, and what reading and writing raise. After a failure no file is left behind.
    """
    started = time.monotonic()
    for option, value in (("--bits", arguments.bits), ("--group-size", arguments.group_size)):
        if value is not None:
            raise error("bad_option", option=option, value=value, expected="left out", hint="--gguf-type says both.")
    wanted = None if arguments.gguf_type.strip().lower() == "auto" else file_type(arguments.gguf_type)
    checked_name(arguments.output)
    checkpoint = Checkpoint.fetch(arguments.input, arguments.revision)
    try:
        output = checked_output(arguments.output, arguments.overwrite, checkpoint)
        check_tensors(checkpoint, checkpoint)
        source = GGUFSource(checkpoint, ModelConfig.from_hf(checkpoint.config), arguments.lossy)
        return GGUFConversion(arguments, source, wanted, output, progress).run(started)
    finally:
        checkpoint.close()


class GGUFConversion:
    """One conversion. Its steps are methods, in execution order."""

    def __init__(
        self,
        arguments: ConvertArguments,
        source: GGUFSource,
        wanted: FileType | None,
        output: Path,
        progress: OnProgress,
    ) -> None:
        self.source, self.output, self.progress = source, output, progress
        self.limit = arguments.max_shard_size
        model, checkpoint = source.model, source.checkpoint
        self.kinds = self._kinds(wanted)
        matrices = [self.kinds[name] for name, tensor in source.tensors.items() if len(tensor.shape) > 1]
        self.type = wanted or commonest(matrices)
        self.factors = factor_tensors(model)
        self.keys, notes = self._metadata()
        shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
        shapes |= {name: tuple(tensor.shape) for name, tensor in self.factors.items()}
        self.config = check_keys(self.model_keys, model, shapes, lambda name: self.factors[name])
        spec = checkpoint.spec
        self.report = ConversionReport(
            input=arguments.input,
            output=str(output),
            source_format="floats" if spec is None else spec.format,
            source_scheme=str(checkpoint.config.get("dtype") or "floats") if spec is None else spec.describe(),
            method="none" if spec is None else spec.method,
            to="gguf",
            scheme=self.type.name,
            notes=[note for note in (*notes, window_note(model)) if note],
            version=aiakq.__version__,
        )

    def _kinds(self, wanted: FileType | None) -> dict[str, str]:
        """Return the kind of every tensor of the file: those of the type, or what the checkpoint has."""
        source = self.source
        shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
        kinds = kinds_for(wanted or FILE_TYPES["F32"], shapes, MixtureModel.of(source.architecture, source.model))
        for name, tensor in source.tensors.items():
            own = {source.own_kind(part.name) for part in tensor.parts}
            packed = any(part.name in source.linears for part in tensor.parts)
            if wanted is None and (kept := source.stored_kind(name)) is not None:
                kinds[name] = kept
            elif stays_float(name, tensor.shape):
                continue
            elif wanted is None:
                chosen = own.pop() if len(own) == 1 else "F32"
                whole = tensor.is_rows or not is_blocks(chosen)
                kinds[name] = fitting(chosen, tensor.shape[-1]) if whole else "F32"
            elif packed and own == {wanted.kind}:
                kinds[name] = wanted.kind  # exact, where llama-quantize would take more bits
        return kinds

    def _metadata(self) -> tuple[dict[str, object], list[str]]:
        """Return all keys of the file, and notes on those of the tokenizer. Raises ``gguf_not_written``."""
        source = self.source
        self.model_keys = model_keys(source.model)
        tokenizer, notes = vocabulary_keys(source.checkpoint, source.model.vocab_size)
        architecture = {"general.architecture": source.architecture}
        general = {**source.general(), "general.file_type": self.type.number}
        general["general.quantized_by"] = f"aiakq {aiakq.__version__}"
        if any(map(is_blocks, self.kinds.values())):
            general["general.quantization_version"] = 2
        return {**architecture, **general, **self.model_keys, **tokenizer}, notes

    def run(self, started: float) -> ConversionReport:
        source, report = self.source, self.report
        with OutputFiles(self.output, self.limit) as files:
            first = files.write(self.keys, self._tensors())
            report.layers += check_file(first, source, self.kinds, self.config, self.progress)
            if changed := source.checkpoint.changed_files():
                raise error("source_changed", path=str(source.checkpoint.named_path), files=some_of(changed))
            report.bytes_before = source.checkpoint.nbytes
            if freed := source.num_freed:
                report.notes.append(
                    f"The source rounds the activations of {freed} layers as its scheme says; programs that read the "
                    "file round them in their own way, or not at all."
                )
            report.output, report.bytes_after = str(files.publish()), files.nbytes
        report.record_cost(started)
        return report

    def size(self, kinds: Mapping[str, str]) -> int:
        """Return the bytes of the file if its tensors have these kinds."""
        self.kinds = dict(kinds)
        return file_size(self.keys, self._tensors())

    def _tensors(self) -> dict[str, WrittenTensor]:
        """Return the tensors to write, whose contents are made when their turn comes."""
        source = self.source
        count = len(source.tensors)

        def contents(name: str, number: int) -> Tensor:
            self.progress("write", number, count, name)
            return source.contents(name, self.kinds[name])

        made = {
            name: WrittenTensor("F32", tuple(tensor.shape), lambda tensor=tensor: tensor.view(torch.uint8))  # type: ignore[misc]
            for name, tensor in self.factors.items()
        }
        for number, (name, tensor) in enumerate(source.tensors.items()):
            blocks = lambda name=name, number=number: contents(name, number)  # noqa: E731
            made[name] = WrittenTensor(self.kinds[name], tensor.shape, blocks)
        return made
