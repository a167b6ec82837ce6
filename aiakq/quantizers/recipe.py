"""Recipe: the transforms and the rounder that quantize a block.

A transform or rounder is a frozen dataclass: its fields are its parameters, its class attributes declare what it needs
and provides, and ``refusal`` rejects invalid combinations. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Self

from aiakq import quantizers
from aiakq.arguments.quantize import QUANTIZE_ARGUMENTS
from aiakq.constraints import Constraint, constraint_of, declare
from aiakq.errors import error
from aiakq.formats import FALLBACK
from aiakq.registry import Registry
from aiakq.spec import Float8, LayerSpec

ANY_BITS = (8, 4, 3, 2)


@dataclass(frozen=True)
class Component:
    """A transform or rounder by name, with the parameters that differ from its defaults."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def with_parameters(self, **parameters: object) -> Component:
        return Component(self.name, {**self.parameters, **parameters})


@dataclass(frozen=True)
class Method:
    """A named recipe: its components, and its default scheme and format.

    summary          one sentence for the model card.
    bits, symmetric     supported values; the first is the default.
    activation_bits     8 or 4 if activations are rounded by default, else None.
    activation_choices  values of ``--activation-bits``, with 16 for activations that are not rounded; empty: only the
                        default.
    float8, table, scale_type  those of LayerSpec, of weights that are floats.
    blocks              kind of most blocks, of a method that writes GGUF files.
    """

    summary: str
    rounder: Component
    bits: tuple[int, ...]
    transforms: tuple[Component, ...] = ()
    group_size: int = -1
    symmetric: tuple[bool, ...] = (True, False)
    activation_bits: int | None = None
    format: str = FALLBACK
    activation_choices: tuple[int, ...] = ()
    float8: Float8 | None = None
    table: str | None = None
    scale_type: str | None = None
    blocks: str | None = None

    @property
    def is_float(self) -> bool:
        """Whether weights are stored as floats."""
        return self.float8 is not None or self.table is not None

    def with_components(self, transforms: tuple[Component, ...] | None, rounder: Component | None) -> Method:
        """Return the method with other transforms or another rounder; None keeps its own."""
        transforms = self.transforms if transforms is None else transforms
        return replace(self, transforms=transforms, rounder=self.rounder if rounder is None else rounder)


class ParameterError(ValueError):
    """Raised when a parameter of a component has an invalid value; ``expected`` completes "which is not"."""

    def __init__(self, parameter: str, value: object, expected: str, hint: str = "") -> None:
        super().__init__(f"{parameter} is {value!r}, which is not {expected}")
        self.parameter, self.value, self.expected, self.hint = parameter, value, expected, hint


def like_option(default: object, option: str) -> Any:
    """Declare a parameter of a component with the limits of an option of ``aiakq quantize``."""
    row = next(row for row in QUANTIZE_ARGUMENTS if row.name == option)
    limits = ("automatic", "choices", "low", "high", "above", "expected", "hint")
    return declare(default, **{name: getattr(row, name) for name in limits})


def check_parameters(component: type[_Part], parameters: Mapping[str, object]) -> None:
    """Raise ParameterError for a value that its field of ``component``, a dataclass, does not allow."""
    declared = {item.name: constraint_of(item, Constraint) for item in fields(component)}  # type: ignore[arg-type]
    for parameter, value in parameters.items():
        refused = declared[parameter].refusal(value) if parameter in declared else None
        if refused is not None:
            raise ParameterError(parameter, value, refused.expected, declared[parameter].hint or "")


class _Part:
    """Common base of transforms and rounders."""

    name: ClassVar[str]
    #: Whether it uses calibration inputs.
    needs_inputs: ClassVar[bool] = True
    #: Whether it also uses the unquantized model (``DecoderBlock.original``).
    needs_original: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_parameters(type(self), vars(self))

    @property
    def weighs_tokens(self) -> bool:
        """Whether statistics weight tokens by the gradients of the model (``BlockInputs.weights``)."""
        return False

    @property
    def weighs_rows(self) -> bool:
        """Whether outputs count by the gradients of the model (``BlockInputs.rows``)."""
        return False

    def refusal(self, recipe: Recipe, scheme: LayerSpec) -> str | None:
        """Return why it cannot be part of ``recipe`` for this scheme, or None."""
        return None

    def require(self, satisfied: bool, parameter: str, expected: str, hint: str = "") -> None:
        """Raise ParameterError unless ``satisfied``."""
        if not satisfied:
            raise ParameterError(parameter, getattr(self, parameter), expected, hint)

    def for_model(self, model_type: str) -> Self:
        """Return itself with the defaults of a model family filled in."""
        return self

    def document(self) -> dict[str, Any]:
        """Return its name and all parameters as JSON values."""
        return {"name": self.name, **asdict(self)}  # type: ignore[call-overload]


class Transform(_Part):
    """Changes a block before it is rounded, without changing the function that the block computes."""

    #: Whether it folds scales; then ``DecoderBlock.mappings`` holds the smooth mappings.
    folds: ClassVar[bool] = False
    #: Whether it is applied to one part of a block at a time, which bounds the memory for its statistics.
    by_parts: ClassVar[bool] = False
    #: Whether it stores static activation scales of every linear in ``DecoderBlock.input_scales``.
    stores_input_scales: ClassVar[bool] = False

    @property
    def clips(self) -> bool:
        """Whether it sets the clipping magnitude of every group in ``DecoderBlock.clip``."""
        return False

    def apply(self, block: Any, part: Any) -> None:
        """Transform the linears of ``part`` (a BlockPart) of ``block`` (a DecoderBlock), which is modified."""
        raise NotImplementedError

    def guard(self, block: Any) -> Callable[[], str | None] | None:
        """Called before ``block`` is modified. The returned function is called after rounding and returns why the block
        should be rounded without any transform instead, or None."""
        return None


class Rounder(_Part):
    """Converts the weights of a block to integer codes, and submits every linear with ``DecoderBlock.finish``."""

    #: The supported bit widths; the first is the default of a recipe without a method.
    bits: ClassVar[tuple[int, ...]] = ANY_BITS
    #: Whether it respects the clipping in ``DecoderBlock.clip``.
    takes_clip: ClassVar[bool] = False
    #: Whether it may round each part of a block before the next one is transformed.
    by_parts: ClassVar[bool] = False
    #: Whether a block can be restored and rounded again.
    restartable: ClassVar[bool] = False
    #: Tokens per input of the widest linear on which the hidden states of the unquantized model are computed, if it is
    #: used and the calibration has as many; 0: all.
    original_tokens: int = 16

    def round(self, block: Any, part: Any) -> None:
        """Round the linears of ``part`` (a BlockPart) of ``block`` (a DecoderBlock), which is modified."""
        raise NotImplementedError


@dataclass(frozen=True)
class Recipe:
    """Transforms in the order of application, then one rounder."""

    transforms: tuple[Transform, ...]
    rounder: Rounder

    @property
    def parts(self) -> tuple[_Part, ...]:
        return (*self.transforms, self.rounder)

    @property
    def needs_inputs(self) -> bool:
        return any(part.needs_inputs for part in self.parts)

    @property
    def needs_original(self) -> bool:
        return any(part.needs_original for part in self.parts)

    @property
    def weighs_tokens(self) -> bool:
        return any(part.weighs_tokens for part in self.parts)

    @property
    def weighs_rows(self) -> bool:
        return any(part.weighs_rows for part in self.parts)

    @property
    def folds(self) -> bool:
        return any(transform.folds for transform in self.transforms)

    @property
    def clips(self) -> bool:
        return any(transform.clips for transform in self.transforms)

    def transform(self, name: str) -> Transform | None:
        """Return the transform ``name``, if it is in the recipe."""
        return next((transform for transform in self.transforms if transform.name == name), None)

    def check(self, scheme: LayerSpec) -> None:
        """Raise ``option_conflict`` if a component cannot be combined with the others or with this scheme."""
        others = f"the recipe of {' and '.join(part.name for part in self.parts)} at {_described(scheme)}"
        for part in self.parts:
            reason = part.refusal(self, scheme)
            if reason is not None:
                raise error("option_conflict", option=part.name, other=others, reason=reason, hint=_HINT)
        if sum(transform.folds for transform in self.transforms) > 1:
            reason = "the second transform would fold scales where the first one did"
            raise error("option_conflict", option=self.transforms[-1].name, other=others, reason=reason, hint=_HINT)
        if scheme.static_input and not any(transform.stores_input_scales for transform in self.transforms):
            raise error(
                "option_conflict",
                option="--activation-scales tensor",
                other=others,
                reason="no transform in it stores activation scales",
                hint="Add the transform smooth_quant, for floats input_scales, or leave it away.",
            )

    def for_model(self, model_type: str) -> Recipe:
        """Return the recipe with the defaults of a model family filled in."""
        return Recipe(
            tuple(transform.for_model(model_type) for transform in self.transforms), self.rounder.for_model(model_type)
        )

    def document(self) -> dict[str, object]:
        """Return all components with all parameters as JSON values."""
        return {"transforms": [part.document() for part in self.transforms], "rounder": self.rounder.document()}


_HINT = "docs/quantize.md lists what goes together."


def _described(scheme: LayerSpec) -> str:
    activations = f" and {scheme.activation_bits}-bit activations" if scheme.activation_bits else ""
    return f"{scheme.bits} bits{activations}"


def load_transform(component: Component, labels: Mapping[str, str] | None = None) -> Transform:
    """Return the transform that ``component`` names. Raises ``bad_option``; see ``_load``."""
    transform: Transform = _load(quantizers.TRANSFORMS, "transform", component, labels or {})
    return transform


def load_rounder(component: Component, labels: Mapping[str, str] | None = None) -> Rounder:
    """Return the rounder that ``component`` names. Raises ``bad_option``; see ``_load``."""
    rounder: Rounder = _load(quantizers.ROUNDERS, "rounder", component, labels or {})
    return rounder


def recipe_of(document: Mapping[str, Any]) -> Recipe:
    """Return the recipe that ``Recipe.document`` describes."""

    def component(entry: Mapping[str, Any]) -> Component:
        return Component(entry["name"], {key: value for key, value in entry.items() if key != "name"})

    transforms = tuple(load_transform(component(entry)) for entry in document["transforms"])
    return Recipe(transforms, load_rounder(component(document["rounder"])))


def _load(registry: Registry[Any], kind: str, component: Component, labels: Mapping[str, str]) -> Any:
    """Instantiate ``component``. ``labels``: the names of parameters in errors, and under "" that of the component."""

    def bad(parameter: str, value: object, expected: str, hint: str = "") -> Exception:
        label = labels.get(parameter) or (f"{component.name}.{parameter}" if parameter else f"The {kind}")
        return error("bad_option", option=label, value=value, expected=expected, hint=hint)

    if component.name not in registry:
        raise bad("", component.name, "one of " + ", ".join(registry))
    cls = registry.load(component.name)
    known = {item.name for item in fields(cls)}
    parameters = dict(component.parameters)
    for parameter in parameters:
        if parameter not in known:
            offered = ", ".join(sorted(known)) or "none"
            raise bad(parameter, parameters[parameter], f"a parameter of {component.name}", f"It has: {offered}.")
    try:
        check_parameters(cls, parameters)
        return cls(**parameters)
    except ParameterError as problem:
        raise bad(problem.parameter, problem.value, problem.expected, problem.hint) from None
