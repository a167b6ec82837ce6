"""The kind of blocks of every tensor of a new file: the types that llama-quantize offers, and its rules for each.

Facts from llama-quant.cpp and convert_hf_to_gguf.py: vectors, norms and routers are F32; the output layer, or a tied
embedding, has more bits; so have values, down projections and outputs of attention in some layers of the mixtures.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aiakq.errors import error
from aiakq.formats.gguf.encoding import ENCODERS
from aiakq.formats.gguf.kinds import KINDS, NUMBERS
from aiakq.formats.gguf_model.family import Shapes
from aiakq.runtime.config.model import ModelConfig


@dataclass(frozen=True)
class FileType:
    """A type of files.

    name    as in names of files: Q4_K_M.
    number  ``general.file_type``.
    kind    kind of most tensors.
    """

    name: str
    number: int
    kind: str


FILE_TYPES: Mapping[str, FileType] = {
    name: FileType(name, number, re.sub("(?<=_K)_[SML]$", "", name))
    for name, number in {
        **{"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9},
        **{"Q2_K": 10, "Q2_K_S": 21, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "IQ4_NL": 25, "IQ4_XS": 30},
        **{"Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18},
    }.items()
}
#: Other words for them, which llama-quantize takes, too.
_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "FP16": "F16", "FP32": "F32"}
#: Kinds with blocks of 256 -> the kind of rows that are no multiple of that.
_NARROWER = {
    **{"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"},
    "IQ4_XS": "IQ4_NL",
}
#: Tensors that stay F32 in every file, besides vectors.
_FLOATS = re.compile(r".*_norm\.weight|.*\.ffn_gate_inp(_shexp)?\.weight|position_embd\.weight|.*(?<!\.weight)")
_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.weight")
_VALUES = frozenset({"attn_v", "attn_qkv", "attn_kv_b"})
#: Types whose outputs of attention have blocks of their own, and those for which they are Q5_K in models of 8 experts.
_OUTPUTS = {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}
_OUTPUTS_OF_8 = frozenset({"Q2_K", "Q3_K_S", "Q3_K_M", "IQ4_NL", "Q4_K_S", "Q4_K_M", "IQ4_XS"})


@dataclass(frozen=True)
class MixtureModel:
    """What the rules depend on.

    architecture  ``general.architecture``.
    experts       number of experts; 0 for dense models.
    sharing       query heads that share a head of keys and values.
    """

    architecture: str
    experts: int = 0
    sharing: int = 1

    @classmethod
    def of(cls, architecture: str, model: ModelConfig) -> MixtureModel:
        """Return that of a file for ``model``."""
        experts = int(model.raw.get("num_local_experts") or model.raw.get("num_experts") or 0)
        return cls(architecture, experts, model.num_heads // max(1, model.num_kv_heads))


def known_type(word: str) -> FileType | None:
    """Return the type that a user calls ``word``, if it is one."""
    name = word.strip().upper()
    return FILE_TYPES.get(_ALIASES.get(name, name))


def file_type(word: str) -> FileType:
    """Return the type that a user calls ``word``. Raises ``bad_option``."""
    found = known_type(word)
    if found is None:
        known = ", ".join(("auto", *(each.lower() for each in FILE_TYPES)))
        raise error("bad_option", option="--gguf-type", value=word, expected=f"one of {known}", hint="")
    return found


def stays_float(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of a file is F32 whatever the type of the file."""
    return len(shape) < 2 or _FLOATS.fullmatch(name) is not None


def kinds_for(kind: FileType, shapes: Shapes, model: MixtureModel) -> dict[str, str]:
    """Return the kind of every tensor of a file, whose tensors have these shapes."""
    values = [name for name in shapes if _module(name) in _VALUES]
    downs = [name for name in shapes if (_module(name) or "").startswith("ffn_down") and len(shapes[name]) > 1]
    found = {}
    for name, shape in shapes.items():
        if stays_float(name, shape):
            found[name] = "F32"
            continue
        chosen = kind.kind
        if chosen in ENCODERS:
            chosen = _mixed(kind, name, model, values, downs)
            if name == "output.weight" or (name == "token_embd.weight" and "output.weight" not in shapes):
                larger = model.architecture != "falcon" and shape[-1] % KINDS[NUMBERS[kind.kind]].values == 0
                chosen = "Q6_K" if larger and kind.kind != "Q8_0" else "Q8_0"
        found[name] = fitting(chosen, shape[-1])
    return found


def fitting(kind: str, width: int) -> str:
    """Return the kind for rows of ``width`` values: ``kind``, or one of smaller blocks, or F16."""
    for each in (kind, _NARROWER.get(kind)):
        if each is not None and width % KINDS[NUMBERS[each]].values == 0:
            return each
    return "F16"


def _module(name: str) -> str | None:
    match = _LAYER.fullmatch(name)
    return match[2] if match else None


def _more_bits(index: int, count: int) -> bool:
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2


def _mixed(kind: FileType, name: str, model: MixtureModel, values: list[str], downs: list[str]) -> str:
    """Return the kind of a tensor in a layer, from its place among those of its sort."""
    match = _LAYER.fullmatch(name)
    module, layer = (match[2], int(match[1])) if match else ("", 0)
    if name in values:
        chosen = _value(kind, model, values.index(name), len(values))
        if model.architecture == "llama" and len(values) == 80 and chosen in ("Q3_K", "Q4_K"):
            chosen = "Q5_K"  # of 70 billion parameters
        return "Q8_0" if model.experts == 8 else chosen
    if module == "attn_k" and model.experts == 8:
        return "Q8_0"
    if module == "attn_output":
        return _attention_output(kind, model)
    if name in downs:
        index = layer if model.experts > 1 else downs.index(name)
        return _down(kind, model.architecture, index, len(downs))
    return kind.kind


def _value(kind: FileType, model: MixtureModel, index: int, count: int) -> str:
    shared = model.sharing >= 4
    match kind.name:
        case "Q2_K":
            return "Q4_K" if shared else "Q3_K"
        case "Q2_K_S" if shared:
            return "Q4_K"
        case "Q3_K_M":
            return "Q5_K" if index < 2 else "Q4_K"
        case "Q3_K_L":
            return "Q5_K"
        case "IQ4_NL" | "IQ4_XS" if shared:
            return "Q5_K"
        case "Q4_K_M" | "Q5_K_M" if _more_bits(index, count):
            return "Q6_K"
        case "Q4_K_S" if index < 4:
            return "Q5_K"
    return kind.kind


def _attention_output(kind: FileType, model: MixtureModel) -> str:
    if model.architecture == "falcon":
        return "Q4_K" if kind.name == "Q3_K_L" else kind.kind
    if model.experts == 8:
        return "Q5_K" if kind.name in _OUTPUTS_OF_8 else kind.kind
    return _OUTPUTS.get(kind.name, kind.kind)


def _down(kind: FileType, architecture: str, index: int, count: int) -> str:
    more, falcon, first = _more_bits(index, count), architecture == "falcon", index < count // 8
    match kind.name:
        case "Q2_K":
            return "Q3_K"
        case "Q2_K_S" if first:
            return "Q4_K"
        case "Q3_K_M":
            return "Q5_K" if index < count // 16 else "Q4_K" if more or not falcon else "Q3_K"
        case "Q3_K_L":
            return "Q4_K" if falcon else "Q5_K"
        case "Q4_K_M" if falcon:
            return "Q6_K" if index < count // 16 else "Q5_K" if more else "Q4_K"
        case "Q4_K_M" | "Q5_K_M" if more:
            return "Q6_K"
        case "Q4_K_S" if first and not falcon:
            return "Q5_K"
        case "IQ4_NL" | "IQ4_XS" if first:
            return "Q5_K"
    return kind.kind


def commonest(kinds: Iterable[str]) -> FileType:
    """Return the type that describes a file with matrices of these kinds."""
    counts: dict[str, int] = {}
    for kind in kinds:
        counts[kind] = counts.get(kind, 0) + 1
    most = max(counts, key=lambda kind: counts[kind], default="F32")
    return next((each for each in FILE_TYPES.values() if each.kind == most), FILE_TYPES["F32"])


def is_blocks(kind: str) -> bool:
    """Whether a kind is one of blocks that are written, not of floats."""
    return kind in ENCODERS
