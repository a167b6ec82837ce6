"""QuantizeOptions: the options of ``aiakq quantize``, checked, and the recipe they lead to.

Options that no model could satisfy are refused here, by the transforms and rounders they lead to; those that one model
cannot satisfy are refused by planning/tensor_parallel.py, before the calibration. Importing this module imports nothing
outside the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from aiakq.errors import error
from aiakq.quantizers import METHODS
from aiakq.quantizers.recipe import SCALE_SEARCHES, Component, Method, Recipe, load_rounder, load_transform
from aiakq.spec import QuantSpec, canonical_method

#: Spellings of -t, and the safetensors dtype each means.
DTYPES = {
    "fp16": "F16",
    "float16": "F16",
    "half": "F16",
    "bf16": "BF16",
    "bfloat16": "BF16",
    "fp32": "F32",
    "float32": "F32",
}
FORMATS = ("gptq", "gptq_v2", "awq", "compressed-tensors")
ACTIVATION_SCALES = ("token", "tensor")


@dataclass(frozen=True)
class QuantizeOptions:
    """Everything ``aiakq quantize`` can be told; None means the method's or the model's own choice.

    input, output   a folder or hub name; a folder.
    dtype           of everything not quantized; the source's if None.
    smooth_alpha    0 .. 1, smooth_quant only; ``auto`` searches it for every place where scales are folded.
    token_ids       a file of calibration token ids; replaces ``calibration``.
    calibration     a text file, or the name of a data set on the hub; the bundled text if None.
    samples, seqlen how many calibration sequences, of how many tokens.
    act_order       gptq: ``static`` processes inputs by importance, ``group`` (if None) inside and between groups;
                    neither leaves a trace in the file.
    damp            gptq: part of the mean diagonal added to the Hessian.
    scale_search    ``minmax`` takes whole ranges, ``mse`` also smaller ones, by the error they leave; the method's own
                    choice if None.
    sweeps          gptq: how often all columns are gone over again once they are rounded; 0 as published, 2 if None.
    gptaq           gptq: also make up for what the layers before have changed in the inputs (GPTAQ).
    awq_scaling     gptq: fold the scales of awq first.
    gptq            smooth_quant: round the weights as gptq does.
    activation_scales   smooth_quant: ``token`` computes one per token when serving, ``tensor`` stores one per layer.
    eval_text       a text file for perplexity before and after; the bundled held-out text if None.
    layer           overrides like ``model.layers.0.*=bits:8,group:64``; see layers.py.
    skip            globs of linears that stay as they are.
    lm_head         bits of the output layer, which stays as it is if None.
    format          the layout on disk; one that every reader knows, if None.
    target_bpw      choose bits and groups per layer, for at most so many bits per weight on average.
    max_kl          choose them for at most so much divergence from the original, in nats per token.
    resume          continue the work of an earlier, interrupted run with the same options, and keep what a failure
                    leaves.
    activation_memory   gigabytes of hidden states held in memory; more goes to disk. A quarter of what is free if None.
    """

    input: str
    output: str
    method: str
    tp: int = 1
    dtype: str | None = None
    smooth_alpha: float | str | None = None
    token_ids: str | Path | None = None
    multi_query_mode: bool = False
    bits: int | None = None
    group_size: int | None = None
    calibration: str | Path | None = None
    samples: int = 128
    seqlen: int = 512
    seed: int = 0
    device: str = "auto"
    overwrite: bool = False
    act_order: str | None = None
    damp: float | None = None
    symmetric: bool | None = None
    evaluate: bool = True
    eval_text: str | Path | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    layer: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    lm_head: int | None = None
    format: str | None = None
    target_bpw: float | None = None
    max_kl: float | None = None
    resume: bool = False
    activation_memory: float | None = None
    scale_search: str | None = None
    sweeps: int | None = None
    gptaq: bool = False
    awq_scaling: bool = False
    gptq: bool = False
    activation_scales: str = "token"

    def __post_init__(self) -> None:
        """Raises ``bad_option`` and ``option_conflict``."""
        object.__setattr__(self, "method", _known_method(self.method))
        object.__setattr__(self, "smooth_alpha", _alpha(self.smooth_alpha))
        self._check_values()
        self._check_pairs()
        self.resolved_recipe.check(self.spec("").layer)

    def _check_values(self) -> None:
        def need(fine: bool, option: str, value: Any, expected: str, hint: str = "") -> None:
            if not fine:
                raise error("bad_option", option=option, value=value, expected=expected, hint=hint)

        need(1 <= self.tp <= 1024, "-tp", self.tp, "a number of GPUs", "Without it nothing is cut.")
        need(self.dtype is None or self.dtype in DTYPES, "-t", self.dtype, "fp16 or bf16")
        bits = self.preset.bits
        need(
            self.bits is None or self.bits in bits,
            "--bits",
            self.bits,
            f"one of {', '.join(map(str, sorted(bits)))}, which {self.method} offers",
        )
        size = self.group_size
        need(size is None or size == -1 or size > 0, "--group-size", size, "a positive number, or -1 for whole rows")
        need(self.samples >= 1, "--samples", self.samples, "at least 1")
        need(self.seqlen >= 2, "--seqlen", self.seqlen, "at least 2")
        need(0 <= self.seed < 2**63, "--seed", self.seed, "between 0 and 2^63")
        searches, scales = ", ".join(SCALE_SEARCHES), ", ".join(ACTIVATION_SCALES)
        need(self.scale_search in (None, *SCALE_SEARCHES), "--scale-search", self.scale_search, f"one of {searches}")
        need(
            self.activation_scales in ACTIVATION_SCALES,
            "--activation-scales",
            self.activation_scales,
            f"one of {scales}",
        )
        need(self.lm_head in (None, 4, 8), "--lm-head", self.lm_head, "4 or 8 bits", "Without it the head stays.")
        need(self.format in (None, *FORMATS), "--format", self.format, "one of " + ", ".join(FORMATS))
        bpw, kl, memory = self.target_bpw, self.max_kl, self.activation_memory
        need(bpw is None or 2.0 < bpw <= 8.5, "--target-bpw", bpw, "above 2 and at most 8.5", "4.5 is usual.")
        need(kl is None or kl > 0, "--max-kl", kl, "above 0", "0.01 nats per token is little, 0.05 can be noticed.")
        need(memory is None or memory >= 0, "--activation-memory", memory, "a number of gigabytes")

    def _check_pairs(self) -> None:
        method, preset = f"-quant_type {self.method}", self.preset
        chosen = self.target_bpw is not None or self.max_kl is not None
        if self.activation_scales != "token" and not preset.activation_bits:
            _conflict(
                "--activation-scales", method, "its activations are not quantized", "Use -quant_type smooth_quant."
            )
        if preset.activation_bits and self.group_size not in (None, -1):
            _conflict("--group-size", method, "its kernels take one scale per row", "Leave --group-size away.")
        if self.symmetric is not None and self.symmetric not in preset.symmetric:
            _conflict("--asymmetric", method, "its format is symmetric", "Leave it away, or use awq or gptq.")
        if self.token_ids is not None and self.calibration is not None:
            _conflict("-token", "--calibration", "both say what to calibrate on", "Give one of them.")
        if self.target_bpw is not None and self.max_kl is not None:
            _conflict("--target-bpw", "--max-kl", "both choose the bits", "Give one of them.")
        if chosen and len(preset.bits) == 1:
            _conflict("--target-bpw, --max-kl", method, "it has one width", "Use -quant_type gptq or awq.")
        if chosen and (self.bits or self.group_size or self.layer):
            _conflict(
                "--target-bpw, --max-kl", "--bits, --group-size, --layer", "all choose the bits", "Give one kind."
            )
        if self.max_kl is not None and not self.evaluate:
            _conflict("--max-kl", "--no-eval", "the divergence is measured there", "Leave --no-eval away.")

    # --- what the options lead to -------------------------------------------------------------------------------------

    @cached_property
    def preset(self) -> Method:
        """The method the options start from."""
        found: Method = METHODS.load(self.method)
        return found

    @cached_property
    def resolved_recipe(self) -> Recipe:
        """The method's recipe, changed by the options that are about it. Raises ``bad_option``, ``option_conflict``."""
        transforms, rounder = _with_components(self, list(self.preset.transforms), self.preset.rounder)
        return _with_parameters(self, transforms, rounder)

    def spec(self, version: str, ignore: Iterable[str] = ("lm_head",)) -> QuantSpec:
        """The QuantSpec these options lead to; ``ignore`` names the linears that are left alone."""
        preset = self.preset
        bits = self.bits or preset.bits[0]
        # Zero points gain nothing at 8 bits, and fewer programs read them there.
        symmetric = (preset.symmetric[0] or bits == 8) if self.symmetric is None else self.symmetric
        return QuantSpec(
            method=self.method,
            # Version 1 cannot say a zero point of 0 that every reader understands.
            format="gptq_v2" if preset.format == "gptq" and not symmetric else preset.format,
            bits=bits,
            group_size=self.group_size or preset.group_size,
            symmetric=symmetric,
            activation_bits=preset.activation_bits,
            static_input=self.activation_scales == "tensor",
            ignore=tuple(ignore),
            notes={"version": version},
        )


def _known_method(name: str) -> str:
    """The method a user's spelling means. Raises ``bad_option`` for anything unknown."""
    spelled = canonical_method(name)
    if spelled not in METHODS:
        raise error(
            "bad_option",
            option="The quantization method",
            value=name,
            expected="one of " + ", ".join(METHODS),
            hint="weight_only_int8 is the safest, awq and gptq the smallest, smooth_quant the fastest in batches.",
        )
    return spelled


def _alpha(given: float | str | None) -> float | str | None:
    """-sq as a number where it is one."""
    try:
        return given if given is None else float(given)
    except ValueError:
        return str(given).strip().lower()


def _conflict(option: str, other: str, reason: str, hint: str) -> NoReturn:
    raise error("option_conflict", option=option, other=other, reason=reason, hint=hint)


# --- flags about the recipe -------------------------------------------------------------------------------------------


def _with_components(
    options: QuantizeOptions, transforms: list[Component], rounder: Component
) -> tuple[list[Component], Component]:
    """The components after ``--gptq``, ``--gptaq`` and ``--awq-scaling``."""
    method = f"-quant_type {options.method}"
    if options.gptq:
        if rounder.name != "rtn" or "smooth_quant" not in [transform.name for transform in transforms]:
            _conflict("--gptq", method, "it says how smooth_quant rounds", "Use -quant_type gptq.")
        rounder = Component("gptq")
    for given, option in ((options.gptaq, "--gptaq"), (options.awq_scaling, "--awq-scaling")):
        if given and options.gptq or given and rounder.name not in ("gptq", "gptaq"):
            _conflict(option, method, "it is a part of gptq", "Leave it away, or use -quant_type gptq.")
    if options.gptaq:
        rounder = Component("gptaq", rounder.parameters)
    if options.awq_scaling:
        transforms = [Component("awq", {"clip": False}), *transforms]
    return transforms, rounder


def _with_parameters(options: QuantizeOptions, transforms: list[Component], rounder: Component) -> Recipe:
    """The recipe of these components, with the parameters that have flags of their own."""
    method = f"-quant_type {options.method}"
    for given, option, parameter, reason in (
        (options.act_order, "--act-order", "act_order", "only gptq has an order"),
        (options.sweeps, "--sweeps", "sweeps", "only gptq goes over columns again"),
        (options.damp, "--damp", "damp", "only gptq has a Hessian"),
    ):
        if given is None:
            continue
        if rounder.name in ("gptq", "gptaq"):
            rounder = rounder.with_parameters(**{parameter: given})
        elif given != "none":
            _conflict(option, method, reason, "Leave it away, or use -quant_type gptq.")
    if options.smooth_alpha is not None:
        if "smooth_quant" not in [transform.name for transform in transforms]:
            _conflict("-sq", method, "only smooth_quant smooths", "Leave -sq away, or use -quant_type smooth_quant.")
        transforms = [
            each.with_parameters(alpha=options.smooth_alpha) if each.name == "smooth_quant" else each
            for each in transforms
        ]
    if options.scale_search is not None:
        transforms, rounder = _with_scale_search(options.scale_search, transforms, rounder)
    return Recipe(tuple(load_transform(each, _LABELS) for each in transforms), load_rounder(rounder, _LABELS))


def _with_scale_search(
    search: str, transforms: list[Component], rounder: Component
) -> tuple[list[Component], Component]:
    """The components after ``--scale-search``: awq before rtn chooses the ranges itself, else the rounder does."""
    changed = []
    for each in transforms:
        if each.name == "smooth_quant":
            each = each.with_parameters(scale_search=search)
        elif each.name == "awq" and rounder.name == "rtn":
            each = each.with_parameters(clip=search == "mse")
        changed.append(each)
    clipped = rounder.name == "rtn" and any(each.name == "awq" for each in transforms)
    return changed, rounder if clipped else rounder.with_parameters(scale_search=search)


#: Parameters that a flag sets -> the flag, for errors.
_LABELS = {
    "act_order": "--act-order",
    "sweeps": "--sweeps",
    "damp": "--damp",
    "alpha": "-sq",
    "scale_search": "--scale-search",
}
