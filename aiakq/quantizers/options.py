"""QuantizeOptions: the options of ``aiakq quantize``, validated, and the recipe made from them.

Options that no model could satisfy are refused here, by the transforms and rounders they select; those that one model
cannot satisfy are refused by planning/tensor_parallel.py, before the calibration. Importing this module imports only
the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NoReturn

from aiakq.arguments.argument import checked_value
from aiakq.arguments.quantize import QUANTIZE_ARGUMENTS, QuantizeArguments
from aiakq.errors import AiakqError, error
from aiakq.formats import FORMATS, WITH_ZERO_POINTS
from aiakq.quantizers import METHODS
from aiakq.quantizers.recipe import Component, Method, Recipe, load_rounder, load_transform
from aiakq.quantizers.recipe_file import RecipeFile, read_recipe
from aiakq.spec import Float8, LayerSpec, QuantSpec, canonical_method

#: Parameters of gptq at 2 bits, where the errors to make up for are large: with enough tokens, more of them.
_AT_2_BITS = {"alpha": 0.75, "beta": 0.75, "original_tokens": 48, "enough_tokens": 32}
#: Methods whose weights are floats, and the outputs and inputs of a block that may share a scale in FP8.
_FLOATS = ("fp8", "mxfp4", "nvfp4")
_BLOCK = 128


@dataclass(frozen=True)
class QuantizeOptions(QuantizeArguments):
    """The validated options of ``aiakq quantize``; the fields are those of aiakq/arguments/quantize.py.

    None selects the default of the method or the model. ``recipe`` is a recipe file whose components are used; its
    other options are applied by ``from_recipe``. ``act_order`` is not recorded in the checkpoint. ``resume`` continues
    an earlier, interrupted run with the same options, and keeps partial results after a failure.
    """

    def __post_init__(self) -> None:
        """Raises ``bad_option`` and ``option_conflict``."""
        for row in QUANTIZE_ARGUMENTS:
            object.__setattr__(self, row.name, checked_value(row, getattr(self, row.name)))
        file = self.recipe_file
        own = None if file is None else file.options["method"]
        object.__setattr__(self, "method", self.method if self.method == own else _known_method(self.method))
        if isinstance(self.smooth_alpha, int):
            object.__setattr__(self, "smooth_alpha", float(self.smooth_alpha))
        try:
            self._check_values()
            self._check_pairs()
            self.resolved_recipe.check(self.spec("").layer)
        except AiakqError as problem:
            raise (problem if file is None else file.located(problem, self)) from None

    @classmethod
    def from_recipe(cls, recipe: str | Path, **given: object) -> QuantizeOptions:
        """Return the options of a recipe file; those in ``given``, which name the input and the output, take
        precedence.
        """
        return cls(**{**read_recipe(Path(recipe)).options, **given, "recipe": recipe})

    def _check_values(self) -> None:
        def need(fine: bool, option: str, value: object, expected: str) -> None:
            if not fine:
                raise error("bad_option", option=option, value=value, expected=expected, hint="")

        _ = self.max_shard_bytes
        bits = self.preset.bits
        offered = f"one of {', '.join(map(str, sorted(bits)))}, which {self.method} offers"
        need(self.bits is None or self.bits in bits, "--bits", self.bits, offered)
        size = self.group_size
        need(size is None or size == -1 or size > 0, "--group-size", size, "a positive number, or -1 for whole rows")
        need(self.format in (None, *FORMATS), "--format", self.format, "one of " + ", ".join(FORMATS))

    def _check_pairs(self) -> None:
        method, preset = f"-quant_type {self.method}", self.preset
        self._check_blocks(method)
        chosen = self.target_bpw is not None or self.max_kl is not None
        if self.activation_scales != "token" and (not self.rounded_bits or preset.table is not None):
            reason = (
                "its activations are not quantized" if not self.rounded_bits else "their groups have computed scales"
            )
            _conflict("--activation-scales", method, reason, "Use -quant_type smooth_quant or fp8.")
        widths = preset.activation_choices or (preset.activation_bits or 16,)
        if self.activation_bits is not None and self.activation_bits not in widths:
            reason = f"its activations have {' or '.join(map(str, sorted(widths)))} bits"
            _conflict(
                f"--activation-bits {self.activation_bits}", method, reason, "Use one of these, or another method."
            )
        if preset.is_float:
            self._check_float_groups(method)
        elif preset.activation_bits and self.group_size not in (None, -1):
            _conflict("--group-size", method, "its kernels take one scale per row", "Leave --group-size away.")
        if self.symmetric is not None and self.symmetric not in preset.symmetric:
            _conflict("--asymmetric", method, "its format is symmetric", "Leave it away, or use awq or gptq.")
        if self.tune is not None and (self.rounded_bits or preset.is_float):
            reason = "rounded activations have no gradient" if self.rounded_bits else "it tunes the scales of integers"
            _conflict("--tune", method, reason, "Use -quant_type gptq or awq.")
        if self.max_kl is not None and self.tune is not None and not str(self.tune).endswith("steps"):
            reason = "the published model would be tuned for another number of steps than the measured one"
            _conflict(f"--tune {self.tune}", "--max-kl", reason, "Give a number of steps, like --tune 96steps.")
        if self.token_ids is not None and self.calibration is not None:
            _conflict("-token", "--calibration", "both say what to calibrate on", "Give one of them.")
        if self.calibration_column is not None and self.calibration is None:
            _conflict(
                "--calibration-column", "no --calibration", "it is a column of that data", "Give --calibration DATA."
            )
        if self.calibration_images is not None and self.tune is not None:
            reason = "the whole model is tuned on texts"
            _conflict("--calibration-images", "--tune", reason, "Leave one of them away.")
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

    def _check_blocks(self, method: str) -> None:
        """Raise ``option_conflict`` for options that do not go together with the blocks of GGUF files."""
        if self.preset.blocks is None:
            if self.gguf_type is not None:
                _conflict("--gguf-type", method, "it writes no GGUF file", "Use -quant_type gguf.")
            return
        given = {
            "--bits": self.bits,
            "--group-size": self.group_size,
            "--asymmetric, --symmetric": self.symmetric,
            "--layer": self.layer or None,
            "--skip": self.skip or None,
            "--lm-head": self.lm_head,
            "--format": self.format,
            "--target-bpw": self.target_bpw,
            "--max-kl": self.max_kl,
        }
        for option, value in given.items():
            if value is not None:
                _conflict(option, method, "the type of the file says what each tensor is", "Use --gguf-type.")
        others = {
            "-tp": (self.tp > 1, "llama.cpp cuts rows itself"),
            "--tune": (self.tune is not None, "scales of blocks are small integers"),
            "--awq-scaling": (self.awq_scaling, "its search rounds to groups of integers"),
            "--scale-search minmax": (self.scale_search == "minmax", "scales of blocks are searched"),
        }
        for option, (conflicts, reason) in others.items():
            if conflicts:
                _conflict(option, method, reason, "Leave it away.")

    def _check_float_groups(self, method: str) -> None:
        sizes = (-1, _BLOCK) if self.preset.float8 is not None else (self.preset.group_size,)
        if self.group_size is not None and self.group_size not in sizes:
            reason = "its format has one scale " + (
                f"per row, or per block of {_BLOCK} x {_BLOCK}" if len(sizes) > 1 else f"per {sizes[0]} inputs"
            )
            _conflict(f"--group-size {self.group_size}", method, reason, "Leave it away.")
        if self.group_size == _BLOCK and self.activation_scales == "tensor":
            reason = "blocks of weights have scales of activations for every 128 inputs"
            _conflict(f"--group-size {_BLOCK}", "--activation-scales tensor", reason, "Leave one of them away.")

    def check_writes_folder(self) -> None:
        """Raise ``option_conflict`` for a method whose output is a file."""
        if self.preset.blocks is not None:
            hint = "Use aiakq.convert.gguf.quantization.quantize_to_gguf, as the command does."
            _conflict(f"-quant_type {self.method}", "a folder", "it writes a file", hint)

    # --- derived settings ---------------------------------------------------------------------------------------------

    @cached_property
    def recipe_file(self) -> RecipeFile | None:
        """Return the parsed file ``recipe``. Raises ``bad_option``."""
        return None if self.recipe is None else read_recipe(Path(self.recipe))

    @cached_property
    def preset(self) -> Method:
        """Return the base method, with the components of the recipe file if it is for the same method."""
        if self.recipe_file is not None and self.recipe_file.options["method"] == self.method:
            return self.recipe_file.preset
        method: Method = METHODS.load(self.method)
        return method

    @cached_property
    def resolved_recipe(self) -> Recipe:
        """Return the method's recipe with the options applied. Raises ``bad_option``, ``option_conflict``."""
        transforms, rounder = _with_components(self, list(self.preset.transforms), self.preset.rounder)
        if self.gptq is False and rounder.name in ("gptq", "gptaq"):
            reason = "gptq is how it rounds"
            _conflict(
                "--no-gptq", f"-quant_type {self.method}", reason, "Leave it away, or use weight_only_int8 or awq."
            )
        return _with_parameters(self, transforms, rounder)

    @property
    def rounded_bits(self) -> int | None:
        """Return the bits that activations are rounded to, or None."""
        bits = self.activation_bits or self.preset.activation_bits
        return None if bits == 16 else bits

    @property
    def calibrated(self) -> bool:
        """Whether a method of floats rounds with GPTQ: if it is asked for, else if calibration data is given."""
        return (self.calibration or self.token_ids) is not None if self.gptq is None else self.gptq

    @property
    def float_layers(self) -> dict[str, LayerSpec]:
        """Return what ``--layer`` may choose for single layers of a method of floats, by name; empty for others."""
        if not self.preset.is_float:
            return {}
        named: dict[str, LayerSpec] = {}
        for name in _FLOATS:
            other: Method = METHODS.load(name)
            widths = sorted(width for width in other.activation_choices if width < 16)
            named[name] = LayerSpec(
                bits=other.bits[0],
                group_size=other.group_size,
                activation_bits=widths[0] if self.rounded_bits else None,
                static_input=bool(self.rounded_bits) and other.scale_type == "e4m3",
                float8=other.float8,
                table=other.table,
                scale_type=other.scale_type,
            )
        return named | {self.method: self.spec("").layer}

    @property
    def warnings(self) -> list[str]:
        """Sentences about options without an effect, which scripts pass to every method."""
        smooths = "smooth_quant" in [transform.name for transform in self.preset.transforms]
        given = (
            (
                self.smooth_alpha is not None and not smooths,
                f"-sq has no effect with -quant_type {self.method}: only smooth_quant smooths.",
            ),
            (self.eval_text is not None and not self.evaluate, "--eval-text has no effect with --no-eval."),
            (
                self.revision is not None and Path(self.input).is_dir(),
                "--revision has no effect: the input is a folder.",
            ),
            (
                self.distributed_executor_backend is not None and self.workers == 1,
                "--distributed-executor-backend has no effect without --workers.",
            ),
        )
        return [sentence for is_idle, sentence in given if is_idle]

    def spec(
        self, version: str, ignore: Iterable[str] = ("lm_head",), places: Mapping[str, object] | None = None
    ) -> QuantSpec:
        """Return the QuantSpec for these options; ``ignore`` names the linears that stay unquantized, and ``places`` is
        a note on where the others are."""
        preset = self.preset
        bits = self.bits or preset.bits[0]
        # Zero points have no benefit at 8 bits, and fewer programs can read them there.
        symmetric = (preset.symmetric[0] or bits == 8) if self.symmetric is None else self.symmetric
        return QuantSpec(
            method=self.method,
            format=preset.format if symmetric else WITH_ZERO_POINTS.get(preset.format, preset.format),
            bits=bits,
            group_size=self.group_size or preset.group_size,
            symmetric=symmetric,
            activation_bits=self.rounded_bits,
            static_input=self._has_static_inputs,
            float8=self._float8,
            table=preset.table,
            blocks=preset.blocks,
            scale_type=preset.scale_type,
            ignore=tuple(ignore),
            notes={"version": version, **(places or {})},
        )

    @property
    def _has_static_inputs(self) -> bool:
        return self.activation_scales == "tensor" or (bool(self.rounded_bits) and self.preset.scale_type == "e4m3")

    @property
    def _float8(self) -> Float8 | None:
        """Return how the scales of 8-bit floats are shared: those of llm-compressor's FP8_DYNAMIC, FP8 or FP8_BLOCK."""
        usual = self.preset.float8
        if usual is None or self.group_size in (None, -1):
            return replace(usual, rows=-1) if usual is not None and self.activation_scales == "tensor" else usual
        return Float8(rows=_BLOCK, activation_group=_BLOCK if self.rounded_bits else -1)


def _known_method(name: str) -> str:
    """Return the method that a user's spelling refers to. Raises ``bad_option`` for anything unknown."""
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


def _conflict(option: str, other: str, reason: str, hint: str) -> NoReturn:
    raise error("option_conflict", option=option, other=other, reason=reason, hint=hint)


# --- options that change the recipe -----------------------------------------------------------------------------------


def _with_components(
    options: QuantizeOptions, transforms: list[Component], rounder: Component
) -> tuple[list[Component], Component]:
    """Return the components after applying ``--gptq``, ``--gptaq`` and ``--awq-scaling``."""
    method = f"-quant_type {options.method}"
    if options.preset.is_float:
        return _float_components(options, transforms, rounder)
    if options.preset.blocks is not None:
        if options.gptq is False and rounder.name == "gptq_blocks":
            calibrated = (options.calibration or options.token_ids) is not None
            rounder = Component("nearest_blocks", {"importance": "inputs" if calibrated else "none"})
        return transforms, rounder.with_parameters(targets="original") if options.gptaq else rounder
    if options.gptq:
        if rounder.name != "rtn" or "smooth_quant" not in [transform.name for transform in transforms]:
            _conflict(
                "--gptq", method, "it says how smooth_quant rounds", "Use -quant_type smooth_quant, or leave it away."
            )
        rounder = Component("gptq", {"targets": "own"})
        if options.gptaq:
            _conflict("--gptaq", "--gptq", "it is an option of gptq", "Use --targets original, which means the same.")
    for given, option in ((options.gptaq, "--gptaq"), (options.awq_scaling, "--awq-scaling")):
        if given and options.gptq or given and rounder.name not in ("gptq", "gptaq"):
            _conflict(option, method, "it is a part of gptq", "Leave it away, or use -quant_type gptq.")
    if rounder.name == "gptq" and options.bits == 8:
        # The error of 8 bits is so small that the original model is not worth its time.
        rounder = Component("gptq", {"targets": "own", **rounder.parameters})
    if rounder.name == "gptq" and options.bits == 2 and not _has_rounder(options):
        rounder = Component("gptq", {**_AT_2_BITS, **rounder.parameters})
    if options.method == "awq" and options.bits != 8 and not _has_rounder(options):
        rounder = rounder.with_parameters(targets="original")
    if options.gptaq:
        if options.targets == "own":
            _conflict("--gptaq", "--targets own", "it means --targets original", "Give one of them.")
        rounder = rounder.with_parameters(targets="original")
    if options.awq_scaling:
        transforms = [Component("awq", {"clip": False}), *transforms]
    return transforms, rounder


def _has_rounder(options: QuantizeOptions) -> bool:
    """Whether a recipe file names the rounder."""
    return options.recipe_file is not None and options.recipe_file.has_rounder


def _float_components(
    options: QuantizeOptions, transforms: list[Component], rounder: Component
) -> tuple[list[Component], Component]:
    """Return the components of a method of floats."""
    if rounder.name == "rtn" and options.calibrated and not _has_rounder(options):
        rounder = Component("gptq", {"targets": "own"} if options.preset.float8 is not None else {})
    if options.gptaq:
        if rounder.name != "gptq" or options.targets == "own":
            other = "--targets own" if options.targets == "own" else f"-quant_type {options.method} without --gptq"
            _conflict("--gptaq", other, "it means --targets original", "Leave it away.")
        rounder = rounder.with_parameters(targets="original")
    if options.awq_scaling:
        transforms = [Component("awq", {"clip": False}), *transforms]
    stored = options.spec("").static_input or (
        options.rounded_bits and any(text.endswith("=nvfp4") for text in options.layer)
    )
    if stored and "input_scales" not in [transform.name for transform in transforms]:
        transforms = [*transforms, Component("input_scales")]
    return transforms, rounder


def _with_parameters(options: QuantizeOptions, transforms: list[Component], rounder: Component) -> Recipe:
    """Return the recipe of these components, with the parameters set by their own flags."""
    method = f"-quant_type {options.method}"
    for given, option, parameter, reason in (
        (options.act_order, "--act-order", "act_order", "only gptq has an order"),
        (options.sweeps, "--sweeps", "sweeps", "only gptq goes over columns again"),
        (options.damp, "--damp", "damp", "only gptq has a Hessian"),
        (options.targets, "--targets", "targets", "its rounder has no targets"),
        (options.importance, "--importance", "importance", "only gptq weights tokens and rows"),
    ):
        if given is None:
            continue
        if rounder.name in ("gptq", "gptaq", "gptq_blocks") or (rounder.name, parameter) == ("rtn", "targets"):
            rounder = rounder.with_parameters(**{parameter: given})
        elif given not in ("none", "own"):
            other = "round with --gptq" if options.preset.is_float else "use -quant_type gptq"
            if options.preset.is_float and given == "gradient-rows":
                other += " and --importance gradient, which floats have"
            _conflict(option, method, reason, f"Leave it away, or {other}.")
    if options.smooth_alpha is not None:
        transforms = [
            component.with_parameters(alpha=options.smooth_alpha) if component.name == "smooth_quant" else component
            for component in transforms
        ]
    if options.scale_search is not None:
        transforms, rounder = _with_scale_search(options.scale_search, transforms, rounder)
    of_rounder = {name: flag for name, flag in _LABELS.items() if name != "alpha"}
    return Recipe(
        tuple(load_transform(component, _LABELS) for component in transforms), load_rounder(rounder, of_rounder)
    )


def _with_scale_search(
    search: str, transforms: list[Component], rounder: Component
) -> tuple[list[Component], Component]:
    """Apply ``--scale-search``: awq followed by rtn searches the ranges itself, otherwise the rounder does."""
    changed = []
    for component in transforms:
        if component.name == "smooth_quant":
            component = component.with_parameters(scale_search=search)
        elif component.name == "awq" and rounder.name == "rtn":
            component = component.with_parameters(clip=search == "mse")
        changed.append(component)
    clipped = rounder.name == "rtn" and any(component.name == "awq" for component in transforms)
    return changed, rounder if clipped else rounder.with_parameters(scale_search=search)


#: Component parameters that have their own flag -> the flag, for errors.
_LABELS = {
    "act_order": "--act-order",
    "sweeps": "--sweeps",
    "damp": "--damp",
    "targets": "--targets",
    "importance": "--importance",
    "alpha": "-sq",
    "scale_search": "--scale-search",
}
