"""Copies what is not quantized: the other tensors of the model, its config and its tokenizer files."""

from __future__ import annotations

from collections.abc import Iterable

from aiakq.formats.checkpoint_writer import CheckpointWriter
from aiakq.formats.steps import CommittedStep
from aiakq.quantizers.lm_head import head_tensors
from aiakq.quantizers.prepared import Prepared
from aiakq.quantizers.writing import written_names
from aiakq.spec import QuantSpec


def copy_tensors(
    writer: CheckpointWriter, prepared: Prepared, spec: QuantSpec, blocks: Iterable[CommittedStep]
) -> None:
    """Commit every tensor that ``blocks`` do not hold, in the output's dtype; the head quantized if requested."""
    done = {name for step in blocks for name in written_names(step)}
    head = head_tensors(prepared, spec)
    for name, tensor in head.items():
        writer.add(name, tensor)
    done |= prepared.not_copied()
    for name, tensor in prepared.model.rest(done):
        writer.add(name, tensor)
    writer.commit("rest", {"head": prepared.head_weights if head else 0})


def copy_files(writer: CheckpointWriter, prepared: Prepared, spec: QuantSpec) -> None:
    """Write the config with its quantization_config, and copy the source's other files."""
    for name, document in prepared.documents(spec).items():
        writer.add_json(name, document)
    for name in prepared.verbatim_files():
        writer.copy_file(prepared.source, name)
