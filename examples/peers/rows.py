"""The rows of ``make quality``: every way of quantizing by aiakq and other tools, in kinds that are comparable."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Models = tuple[str, ...]
DEFAULT: Models = ("books", "outliers")


@dataclass(frozen=True)
class Row:
    """One way of quantizing.

    kind     rows of one kind have the same bits, groups and symmetry.
    tool     whose; ``aiakq`` is ours, the others name a virtual environment and a script ``peer_<tool>.py``.
    request  for that script, in addition to the model, the output folder and the calibration ids.
    models   the models it is measured on; a tool that is too slow for one is left out there.
    """

    kind: str
    tool: str
    name: str
    request: dict[str, Any] = field(default_factory=dict)
    models: Models = DEFAULT

    @property
    def slug(self) -> str:
        """A name for files."""
        words = f"{self.kind} {self.tool} {self.name}"
        return "-".join("".join(c if c.isalnum() else " " for c in words.lower()).split())


def ours(kind: str, name: str, method: str, plain: bool = False, models: Models = DEFAULT, **options: Any) -> Row:
    return Row(kind, "aiakq", name, {"options": {"method": method, **options}, "plain": plain}, models)


def gptqmodel(kind: str, name: str, models: Models = DEFAULT, **config: Any) -> Row:
    return Row(kind, "gptqmodel", name, {"config": {"group_size": 128, **config}}, models)


def autoawq(kind: str, name: str, models: Models = DEFAULT, **config: Any) -> Row:
    return Row(kind, "autoawq", name, {"config": config}, models)


def llmcompressor(kind: str, name: str, *recipe: tuple[str, dict[str, Any]], models: Models = DEFAULT) -> Row:
    everything = {"targets": ["Linear"], "ignore": ["lm_head"]}
    steps = [[step, {**everything, **arguments} if "scheme" in arguments else arguments] for step, arguments in recipe]
    return Row(kind, "llmcompressor", name, {"recipe": steps}, models)


def autoround(kind: str, name: str, layout: str, models: Models = DEFAULT, **config: Any) -> Row:
    return Row(kind, "autoround", name, {"config": config, "format": layout}, models)


#: llm-compressor's smoothing, with the strength that aiakq uses for a Llama.
SMOOTH = ("smoothquant", {"smoothing_strength": 0.8})

W8A16 = "8-bit weights, one scale per row"
W8A16G = "8-bit weights, groups of 128, symmetric"
W8A8 = "8-bit weights and activations"
W4SYM = "4-bit weights, groups of 128, symmetric"
W4ASYM = "4-bit weights, groups of 128, zero points"
W3SYM = "3-bit weights, groups of 128, symmetric"

BOOKS = ("books",)
EVERYWHERE = ("books", "outliers", "books-outliers")

ROWS: list[Row] = [
    ours(W8A16, "weight_only_int8", "weight_only_int8", models=EVERYWHERE),
    ours(W8A16G, "weight_only_int8, groups of 128", "weight_only_int8", group_size=128),
    # Its preset of that name has groups of 128.
    llmcompressor(W8A16G, "rounding W8A16", ("rounding", {"scheme": "W8A16"})),
    ours(W8A16G, "gptq, 8 bits", "gptq", bits=8, models=BOOKS),
    gptqmodel(W8A16G, "defaults", bits=8, models=BOOKS),
    autoround(W8A16G, "W8A16", "auto_gptq", models=BOOKS, scheme="W8A16"),
    ours(W8A8, "RTN", "smooth_quant", plain=True, models=EVERYWHERE),
    ours(W8A8, "smooth_quant", "smooth_quant", models=EVERYWHERE),
    ours(W8A8, "smooth_quant, searched strength", "smooth_quant", smooth_alpha="auto"),
    ours(W8A8, "smooth_quant, GPTQ after it", "smooth_quant", gptq=True),
    llmcompressor(W8A8, "rounding W8A8", ("rounding", {"scheme": "W8A8"})),
    llmcompressor(W8A8, "SmoothQuant 0.8", SMOOTH, ("rounding", {"scheme": "W8A8"}), models=EVERYWHERE),
    llmcompressor(W8A8, "SmoothQuant 0.8 and GPTQ", SMOOTH, ("gptq", {"scheme": "W8A8"})),
    autoround(W8A8, "INT8", "llm_compressor", models=BOOKS, scheme="INT8"),
    ours(W4SYM, "RTN", "gptq", plain=True),
    ours(W4SYM, "gptq", "gptq", models=EVERYWHERE),
    ours(W4SYM, "gptq, act-order none", "gptq", act_order="none", models=BOOKS),
    ours(W4SYM, "gptq, act-order static", "gptq", act_order="static", models=BOOKS),
    ours(W4SYM, "gptq, GPTAQ", "gptq", gptaq=True),
    ours(W4SYM, "gptq, scales of awq first", "gptq", awq_scaling=True),
    ours(W4SYM, "gptq, scales of awq first, GPTAQ", "gptq", awq_scaling=True, gptaq=True),
    gptqmodel(W4SYM, "defaults (group-aware order)", bits=4, models=EVERYWHERE),
    gptqmodel(W4SYM, "no order", bits=4, act_group_aware=False, models=BOOKS),
    gptqmodel(W4SYM, "desc_act", bits=4, desc_act=True, act_group_aware=False, models=BOOKS),
    gptqmodel(W4SYM, "mse 2.4", bits=4, mse=2.4),
    gptqmodel(W4SYM, "GPTAQ", bits=4, gptaq={"alpha": 0.25}, models=BOOKS),
    gptqmodel(W4SYM, "FOEM", bits=4, foem={"alpha": 0.25, "beta": 0.2}, models=BOOKS),
    llmcompressor(W4SYM, "GPTQ", ("gptq", {"scheme": "W4A16"})),
    autoround(W4SYM, "50 iterations", "auto_gptq", scheme="W4A16", iters=50),
    autoround(W4SYM, "200 iterations (defaults)", "auto_gptq", models=BOOKS, scheme="W4A16"),
    ours(W4ASYM, "RTN", "awq", plain=True),
    ours(W4ASYM, "awq", "awq", models=EVERYWHERE),
    ours(W4ASYM, "gptq, asymmetric", "gptq", symmetric=False),
    autoawq(W4ASYM, "defaults", zero_point=True, q_group_size=128, w_bit=4, version="GEMM"),
    llmcompressor(W4ASYM, "AWQ", ("awq", {}), ("rounding", {"scheme": "W4A16_ASYM"})),
    gptqmodel(W4ASYM, "GPTQ, asymmetric", bits=4, sym=False, format="gptq_v2", models=BOOKS),
    autoround(W4ASYM, "50 iterations", "auto_awq", models=BOOKS, scheme="W4A16", sym=False, iters=50),
    ours(W3SYM, "RTN", "gptq", bits=3, plain=True),
    ours(W3SYM, "gptq, 3 bits", "gptq", bits=3),
    ours(W3SYM, "gptq, 3 bits, GPTAQ", "gptq", bits=3, gptaq=True, models=BOOKS),
    gptqmodel(W3SYM, "defaults (group-aware order)", bits=3),
    autoround(W3SYM, "50 iterations", "auto_gptq", models=BOOKS, scheme="W3A16", iters=50),
]
