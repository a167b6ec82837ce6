"""The rows of ``make quality``: every way of quantizing by aiakq and other tools, in kinds that are comparable.

The example model and the second architecture have the full grid of other tools; the other models have AutoRound's
defaults and the best settings of GPTQModel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from aiakq.arguments.quantize import QuantizeArguments

Models = tuple[str, ...]
#: Models given by the user are of this name here.
REAL = "real"
ALL: Models = ("books", "qwen2", "outliers", "moe", "chat", REAL)
FULL: Models = ("books", "qwen2")
#: Models on which 8-bit activations are measured.
EIGHT: Models = ("books", "qwen2", "outliers", REAL)
#: Models on which mixed widths are measured: those of one shape, so that a mix of llama.cpp has one size.
MIXED: Models = ("books", "outliers")


@dataclass(frozen=True)
class Row:
    """One way of quantizing.

    kind     rows of one kind have the same bits, groups and symmetry.
    tool     whose; ``aiakq`` is ours, the others name a virtual environment and a script ``peer_<tool>.py``.
    request  for that script, in addition to the model, the output folder and the calibration ids.
    models   the models it is measured on.
    """

    kind: str
    tool: str
    name: str
    request: dict[str, Any] = field(default_factory=dict)
    models: Models = ALL

    @property
    def slug(self) -> str:
        """A name for files."""
        words = f"{self.kind} {self.tool} {self.name}"
        return "-".join("".join(c if c.isalnum() else " " for c in words.lower()).split())


def ours(kind: str, name: str, method: str, plain: bool = False, models: Models = ALL, **options: Any) -> Row:
    return Row(kind, "aiakq", name, {"options": {"method": method, **options}, "plain": plain}, models)


def gptqmodel(kind: str, name: str, models: Models = FULL, norm_steps: int = 0, **config: Any) -> Row:
    return Row(kind, "gptqmodel", name, {"config": config, "norm_steps": norm_steps}, models)


def autoawq(kind: str, name: str, models: Models = FULL, **config: Any) -> Row:
    return Row(kind, "autoawq", name, {"config": config}, models)


def llmcompressor(kind: str, name: str, *recipe: tuple[str, dict[str, Any]], models: Models = FULL) -> Row:
    return Row(kind, "llmcompressor", name, {"recipe": [list(step) for step in recipe]}, models)


def autoround(kind: str, name: str, layout: str, models: Models = FULL, **config: Any) -> Row:
    return Row(kind, "autoround", name, {"config": config, "format": layout}, models)


def llamacpp(kind: str, mix: str, models: Models = MIXED) -> Row:
    return Row(kind, "llamacpp", f"{mix}, importance matrix", {"kind": mix}, models)


#: llm-compressor's smoothing, with the strength that aiakq uses for a Llama.
SMOOTH = ("smoothquant", {"smoothing_strength": 0.8})
#: Its rotations that are folded into the weights.
SPIN = ("spinquant", {"rotations": ["R1", "R2"]})

W8A16 = "8-bit weights, one scale per row"
W8A16G = "8-bit weights, groups of 128, symmetric"
W8A8 = "8-bit weights and activations"
#: Scored with 8-bit keys and values.
W8KV8 = "8-bit weights and KV cache"


#: Settings of gptq by name, each on top of its defaults; those of options that this version does not have are left out.
GPTQ_SETTINGS: dict[str, dict[str, Any]] = {
    "gptq, own targets": {"targets": "own"},
    "gptq, token weights": {"importance": "gradient"},
    "gptq, feedback along rows": {"importance": "gradient-rows"},
    "gptq, Hadamard rotation": {"rotate": "hadamard"},
    "gptq, learned rotation": {"rotate": "learned"},
    "gptq, tuned": {"tune": "96steps"},
    "gptq, token weights, tuned": {"importance": "gradient", "tune": "96steps"},
}
#: llama.cpp's mixes of kinds, and their bits per weight of the linears of a Llama of six blocks.
MIXES = {"Q4_K_M": 4.70, "Q3_K_M": 3.85, "Q2_K": 2.93}
#: The largest width that an option is for.
MAX_BITS = {"tune": 3}
OPTIONS = {option.name for option in fields(QuantizeArguments)}


def kind_of(bits: int, symmetric: bool) -> str:
    """The kind of integer weights in groups: of 128, of 64 with 2 bits."""
    return f"{bits}-bit weights, groups of {group_of(bits)}, {'symmetric' if symmetric else 'zero points'}"


def group_of(bits: int) -> int:
    return 64 if bits == 2 else 128


def linears(**arguments: Any) -> dict[str, Any]:
    """Arguments of a modifier of llm-compressor that quantizes all linears but the output layer and routers."""
    return {"targets": ["Linear"], "ignore": ["lm_head", "re:.*mlp.gate$"], **arguments}


def grouped(bits: int, symmetric: bool, **more: Any) -> dict[str, Any]:
    """The same for integer weights in groups."""
    grid = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group_of(bits)}
    groups = {"weights": {"targets": ["Linear"], "weights": {**grid, **more}}}
    return {"config_groups": groups, "ignore": linears()["ignore"]}


def eight_bits() -> Iterator[Row]:
    yield ours(W8A16, "weight_only_int8", "weight_only_int8", models=EIGHT)
    yield ours(W8A16G, "weight_only_int8, groups of 128", "weight_only_int8", group_size=128, models=FULL)
    # Its preset of that name has groups of 128.
    yield llmcompressor(W8A16G, "rounding W8A16", ("rounding", linears(scheme="W8A16")))
    yield ours(W8A16G, "gptq, 8 bits", "gptq", bits=8, models=FULL)
    yield gptqmodel(W8A16G, "defaults", bits=8, group_size=128)
    yield autoround(W8A16G, "W8A16", "auto_gptq", scheme="W8A16")
    yield ours(W8A8, "RTN", "smooth_quant", plain=True, models=EIGHT)
    yield ours(W8A8, "smooth_quant", "smooth_quant", models=EIGHT)
    yield ours(W8A8, "smooth_quant, searched strength", "smooth_quant", smooth_alpha="auto", models=EIGHT)
    yield ours(W8A8, "smooth_quant, GPTQ after it", "smooth_quant", gptq=True, models=EIGHT)
    if "rotate" in OPTIONS:
        yield ours(W8A8, "smooth_quant, Hadamard rotation", "smooth_quant", rotate="hadamard", models=EIGHT)
        yield ours(W8A8, "smooth_quant, learned rotation", "smooth_quant", rotate="learned", models=EIGHT)
    yield llmcompressor(W8A8, "rounding W8A8", ("rounding", linears(scheme="W8A8")), models=EIGHT)
    yield llmcompressor(W8A8, "SmoothQuant 0.8", SMOOTH, ("rounding", linears(scheme="W8A8")), models=EIGHT)
    yield llmcompressor(W8A8, "SmoothQuant 0.8 and GPTQ", SMOOTH, ("gptq", linears(scheme="W8A8")))
    yield llmcompressor(W8A8, "SpinQuant R1, R2 and GPTQ", SPIN, ("gptq", linears(scheme="W8A8")), models=EIGHT)
    yield autoround(W8A8, "INT8", "llm_compressor", scheme="INT8")


def caches() -> Iterator[Row]:
    """8-bit weights with an 8-bit KV cache, in which outliers of keys and values are rounded too."""
    settings = {"": {}, ", Hadamard rotation": {"rotate": "hadamard"}, ", learned rotation": {"rotate": "learned"}}
    for name, more in settings.items():
        if more.keys() <= OPTIONS:
            row = ours(W8KV8, f"weight_only_int8{name}", "weight_only_int8", models=MIXED, **more)
            row.request["kv_cache_dtype"] = "int8"
            yield row


def our_rows(bits: int, symmetric: bool) -> Iterator[Row]:
    kind, grid = kind_of(bits, symmetric), {"bits": bits, "group_size": group_of(bits), "symmetric": symmetric}
    zero_points = bits == 4 and not symmetric
    yield ours(kind, "RTN", "awq", plain=True) if zero_points else ours(kind, "RTN", "gptq", plain=True, **grid)
    yield ours(kind, "gptq", "gptq", **grid)
    if zero_points:
        yield ours(kind, "awq", "awq", targets="own")
        yield ours(kind, "awq, original targets", "awq", targets="original")
    for name, more in GPTQ_SETTINGS.items():
        if more.keys() <= OPTIONS and all(bits <= MAX_BITS.get(option, bits) for option in more):
            yield ours(kind, name, "gptq", **grid, **more)
    if "targets" not in OPTIONS:
        yield ours(kind, "gptq, GPTAQ", "gptq", gptaq=True, models=FULL, **grid)
    if bits == 4 and symmetric:
        yield ours(kind, "gptq, act-order none", "gptq", act_order="none", models=FULL, **grid)
        yield ours(kind, "gptq, act-order static", "gptq", act_order="static", models=FULL, **grid)
        yield ours(kind, "gptq, scales of awq first", "gptq", awq_scaling=True, models=FULL, **grid)


def gptqmodel_rows(bits: int, symmetric: bool) -> Iterator[Row]:
    """Its options one by one, and the best of them together. Its rotations need its own runtime."""
    kind, grid = kind_of(bits, symmetric), {"bits": bits, "group_size": group_of(bits), "sym": symmetric}
    if not symmetric:
        grid["format"] = "gptq_v2"
    yield gptqmodel(kind, "defaults (group-aware order)", **grid)
    yield gptqmodel(kind, "mse 2.4", models=ALL, mse=2.4, **grid)
    if not symmetric:
        return
    free = {"act_group_aware": False}
    yield gptqmodel(kind, "mse 2.4, norms tuned", norm_steps=400, mse=2.4, **grid)
    yield gptqmodel(kind, "mse 2.4, FOEM", mse=2.4, foem={"alpha": 0.25, "beta": 0.2}, **grid)
    if bits == 4:
        yield gptqmodel(kind, "no order", **free, **grid)
        yield gptqmodel(kind, "desc_act", desc_act=True, **free, **grid)
        yield gptqmodel(
            kind, "desc_act, static groups, mse 2.4", desc_act=True, static_groups=True, mse=2.4, **free, **grid
        )
        yield gptqmodel(kind, "GPTAQ", gptaq={"alpha": 0.25}, **grid)
        yield gptqmodel(kind, "FOEM", foem={"alpha": 0.25, "beta": 0.2}, **grid)


def llmcompressor_rows(bits: int, symmetric: bool) -> Iterator[Row]:
    kind = kind_of(bits, symmetric)
    yield llmcompressor(kind, "GPTQ", ("gptq", grouped(bits, symmetric)))
    if symmetric:
        yield llmcompressor(kind, "GPTQ, observer mse", ("gptq", grouped(bits, symmetric, observer="mse")))
        yield llmcompressor(kind, "SpinQuant R1, R2 and GPTQ", SPIN, ("gptq", grouped(bits, symmetric)))
    elif bits == 4:
        yield llmcompressor(kind, "AWQ", ("awq", {"duo_scaling": "both"}), ("rounding", grouped(bits, symmetric)))


def autoround_rows(bits: int, symmetric: bool) -> Iterator[Row]:
    """Its recipes light, default and best, on the samples that all tools get; its own best takes 512 samples."""
    kind, layout = kind_of(bits, symmetric), "auto_gptq" if symmetric or bits != 4 else "auto_awq"
    grid: dict[str, Any] = {"scheme": f"W{bits}A16", "group_size": group_of(bits), "sym": symmetric}
    yield autoround(kind, "50 iterations (light)", layout, iters=50, lr=5e-3, **grid)
    yield autoround(kind, "200 iterations (defaults)", layout, models=ALL, **grid)
    yield autoround(kind, "1000 iterations (best)", layout, iters=1000, **grid)
    if bits == 2:
        yield autoround(kind, "200 iterations, enable_alg_ext", layout, models=ALL, enable_alg_ext=True, **grid)


def mixed_rows() -> Iterator[Row]:
    """Widths that a tool chooses for every layer, all of one size."""
    options = ["W2A16G64", "W2A16", "W3A16", "W4A16", "W8A16"]
    for mix, bits in MIXES.items():
        kind = f"mixed widths, {bits:.2f} bits per weight"
        yield ours(kind, "gptq, --target-bpw", "gptq", target_bpw=bits, models=MIXED)
        yield llamacpp(kind, mix)
        scheme = {"mixed": {"avg_bits": bits, "options": options}}
        request = {"config": {}, "format": "auto_round", **scheme}
        yield Row(kind, "autoround", "AutoScheme, 200 iterations", request, MIXED)


def all_rows() -> Iterator[Row]:
    yield from eight_bits()
    yield from caches()
    for bits in (4, 3, 2):
        for symmetric in (True, False):
            yield from our_rows(bits, symmetric)
            yield from gptqmodel_rows(bits, symmetric)
            yield from llmcompressor_rows(bits, symmetric)
            if bits == 4 and not symmetric:
                yield autoawq(
                    kind_of(bits, symmetric), "defaults", zero_point=True, q_group_size=128, w_bit=4, version="GEMM"
                )
            yield from autoround_rows(bits, symmetric)
    yield from mixed_rows()


ROWS: list[Row] = list(all_rows())
