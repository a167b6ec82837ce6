"""Which linears of a model are rounded to which blocks, before they are (``aiakq quantize -quant_type gguf``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import aiakq
from aiakq.arguments.convert import ConvertArguments
from aiakq.convert.gguf.conversion import GGUFConversion
from aiakq.convert.gguf.file_types import FILE_TYPES, FileType, MixtureModel, kinds_for, known_type
from aiakq.convert.gguf.output_files import checked_name
from aiakq.convert.gguf.source import GGUFSource
from aiakq.errors import error
from aiakq.formats.gguf.block_scales import SEARCHES
from aiakq.formats.gguf.linears import spec_of
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.prepared import Prepared
from aiakq.runtime.config.model import ModelConfig
from aiakq.spec import QuantSpec


def block_type(options: QuantizeOptions) -> FileType:
    """Return the type of the file. Raises ``bad_option`` for one without blocks."""
    word = "q4_k_m" if options.gguf_type is None else options.gguf_type
    found = known_type(word)
    if found is None or found.kind not in SEARCHES:
        known = ", ".join(name.lower() for name, each in FILE_TYPES.items() if each.kind in SEARCHES)
        hint = "aiakq convert MODEL OUT.gguf --to gguf writes the other types, rounded to nearest."
        raise error("bad_option", option="--gguf-type", value=word, expected=f"one of {known}", hint=hint)
    return found


@dataclass
class _OutputSource(GGUFSource):
    """The model as the folder of blocks will hold it: with separate experts."""

    sizes: Mapping[str, tuple[int, ...]] | None = None

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See GGUFSource."""
        assert self.sizes is not None
        found = {}
        for name, shape in self.sizes.items():
            usual = self.usual(name)
            found[usual] = shape[::-1] if name.endswith(".weight") and self._is_transposed(usual) else shape
        return found

    def linear_kinds(self, kinds: Mapping[str, str], linears: Mapping[str, str]) -> dict[str, str | None]:
        """Return linear -> kind, or None if its rows do not stay rows.

        linears  usual name of its weight -> name.
        """
        found: dict[str, str | None] = dict.fromkeys(linears.values())
        for name, tensor in self.tensors.items():
            for part in tensor.parts:
                if part.name in linears and tensor.is_rows and kinds[name] in SEARCHES:
                    found[linears[part.name]] = kinds[name]
        return found


def blocks_folder(options: QuantizeOptions) -> QuantizeOptions:
    """Return the options of the run that writes the folder of blocks, beside the file. Raises ``bad_option``."""
    output = checked_name(options.output, "-o")
    folder = output.parent / f".{output.name}.blocks"
    return replace(options, output=str(folder), evaluate=False, overwrite=True)


def block_spec(prepared: Prepared, wanted: FileType) -> tuple[QuantSpec, int]:
    """Return the kind of blocks of every linear, by the rules of llama-quantize, and the bytes of the file.

    Raises ``gguf_not_written``.
    """
    model, checkpoint = prepared.model, prepared.checkpoint
    sizes: dict[str, tuple[int, ...]] = {}
    held: set[str] = set()
    for shape in prepared.shapes:
        bias = model.model.get_submodule(shape.name).bias is not None
        held |= model.stored_tensors(shape.name, bias)
        sizes[f"{shape.name}.weight"] = (shape.n, shape.k)
        sizes |= {f"{shape.name}.bias": (shape.n,)} if bias else {}
    skipped = prepared.not_copied()
    for name, info in checkpoint.inventory.items():
        if name not in held and name not in skipped and name not in checkpoint.beside_text:
            sizes[name] = tuple(info.shape)
    source = _OutputSource(checkpoint, ModelConfig.from_hf(checkpoint.config), lossy=False, sizes=sizes)
    # What the config and the tokenizer rule out is refused here, not after hours of rounding.
    arguments = ConvertArguments(input=prepared.options.input, output="", to="gguf", gguf_type=wanted.name)
    conversion = GGUFConversion(arguments, source, wanted, Path(), lambda *_: None)
    shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
    kinds = kinds_for(wanted, shapes, MixtureModel.of(source.architecture, source.model))
    linears = {source.usual(f"{shape.name}.weight"): shape.name for shape in prepared.shapes}
    found = source.linear_kinds(kinds, linears)
    if not any(found.values()):
        reason = "its rows do not stay rows in such files, so that blocks cannot be rounded with calibration"
        raise error("gguf_not_written", what=source.model.architecture, reason=reason)
    spec = spec_of(found, "gguf", prepared.spec.ignore, {"version": aiakq.__version__})
    return spec, conversion.size(kinds)
