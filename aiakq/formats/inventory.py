"""Tensor inventory: the tensors that a model's config implies, compared with those in the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from aiakq import formats
from aiakq.errors import AiakqError, error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.headers import BIAS, WEIGHT
from aiakq.formats.left_out import beside_model, is_cache_scale, is_computed
from aiakq.formats.unread_formats import ACTIVATION_FACTORS

#: Maximum number of rows of the table in an error.
MAX_ROWS = 20
#: Dtypes of floats that need no scale.
FLOATS = ("F16", "BF16", "F32", "F64")


@dataclass
class RequiredTensors:
    """The tensors that a model needs.

    tensors   name -> shape of all tensors outside linear layers.
    integers  those of ``tensors`` that hold integers; all others hold floats.
    linears   module name -> (N, K, whether it has a bias).
    optional  tensors that may be absent: the output layer, which may be tied to the embedding.
    unused    prefixes of ignored names.
    beside    prefixes of names that are left out: layers that predict further tokens (DeepSeek-V3).
    is_model  whether they are a model, beside which there may be other modules, not a part such as a draft head.
    """

    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)
    integers: set[str] = field(default_factory=set)
    linears: dict[str, tuple[int, int, bool]] = field(default_factory=dict)
    optional: tuple[str, ...] = ("lm_head.weight",)
    unused: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    is_model: bool = True


@dataclass(frozen=True)
class Difference:
    """A tensor that is missing, extra, misshapen or of another dtype.

    found, expected  shapes as text, "-" for none; ``found`` starts with the dtype if that is wrong.
    """

    name: str
    found: str
    expected: str

    @property
    def kind(self) -> str:
        """missing, extra, dtype or shape."""
        if "-" in (self.found, self.expected):
            return "missing" if self.found == "-" else "extra"
        return "shape" if self.found.startswith("[") else "dtype"


def compare(checkpoint: Checkpoint, required: RequiredTensors) -> list[Difference]:
    """Return every tensor that is missing, extra or has another shape; from headers alone.

    Names may have any spelling that ``Checkpoint.locate`` knows; tensors of a multimodal checkpoint outside its text
    model are not compared. Raises ``format_unsupported``.
    """
    return _Comparison(checkpoint, required).run()


def comparison(checkpoint: Checkpoint, required: RequiredTensors) -> tuple[list[Difference], set[str]]:
    """Return what ``compare`` returns, and the tensors that are left out: scales of KV caches, heads for training."""
    made = _Comparison(checkpoint, required)
    return made.run(), made.left_out


def refusal(path: str, differences: Sequence[Difference], unread: str = "") -> AiakqError | None:
    """Return all differences as one ``tensor_inventory`` error with a table, or None.

    unread  a remark about files that may hold what is missing.
    """
    if not differences:
        return None
    counts = {
        kind: sum(difference.kind == kind for difference in differences)
        for kind in ("missing", "shape", "dtype", "extra")
    }
    words = {
        "missing": "missing",
        "shape": "of another shape",
        "dtype": "of another dtype",
        "extra": "without a place in the model",
    }
    summary = ", ".join(f"{count} {words[kind]}" for kind, count in counts.items() if count)
    plural = "tensor" if len(differences) == 1 else "tensors"
    return error(
        "tensor_inventory",
        path=path,
        counts=f"{len(differences)} {plural} ({summary}){f'; {unread}' if unread and counts['missing'] else ''}",
        table=table(differences),
    )


def table(differences: Sequence[Difference], rows: int = MAX_ROWS) -> str:
    """Format name, found and expected as columns: at most ``rows`` rows, then the number of the rest."""
    lines = [("tensor", "found", "expected")]
    lines += [(difference.name, difference.found, difference.expected) for difference in differences[:rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(2)]
    text = [f"  {line[0]:<{widths[0]}}  {line[1]:<{widths[1]}}  {line[2]}".rstrip() for line in lines]
    if len(differences) > rows:
        text.append(f"  and {len(differences) - rows} more")
    return "\n".join(text)


class _Comparison:
    def __init__(self, checkpoint: Checkpoint, required: RequiredTensors) -> None:
        self.checkpoint = checkpoint
        self.required = required
        self.inventory = checkpoint.inventory
        self.quantized = set(checkpoint.quantized_linears())
        self.used: set[str] = set()
        self.left_out: set[str] = set()
        self.found: list[Difference] = []

    def run(self) -> list[Difference]:
        for name, shape in self.required.tensors.items():
            self._tensor(name, shape, integers=name in self.required.integers)
        for name, (n, k, bias) in self.required.linears.items():
            self._linear(name, n, k, bias)
        others = [name for name in self.inventory if not self._has_place(name)]
        if self.required.is_model:
            self.left_out = beside_model(others, {*self.required.tensors, *self.required.linears, *self.used})
        self.left_out |= {name for name in others if is_cache_scale(name) or name.startswith(self.required.beside)}
        for name in others:
            if name not in self.left_out:
                self.found.append(Difference(name, _shape(self.inventory[name].shape), "-"))
        return self.found

    def _has_place(self, name: str) -> bool:
        return (
            name in self.used
            or is_computed(name, self.inventory[name].shape)
            or name.endswith((ACTIVATION_FACTORS, *self.required.optional))
            or name in self.checkpoint.beside_text
            or name.startswith(self.required.unused)
        )

    def _tensor(self, name: str, shape: Sequence[int], integers: bool = False) -> None:
        module = name.removesuffix(f".{WEIGHT}")
        if len(shape) == 2 and self.checkpoint.spec is not None and self.checkpoint.locate_linear(module) is not None:
            self._linear(module, shape[0], shape[1], bias=False)  # a quantized embedding
            return
        source = self.checkpoint.locate(name)
        if source is None:
            self.found.append(Difference(name, "-", _shape(shape)))
            return
        self.used.add(source)
        info = self.inventory[source]
        if (info.dtype in FLOATS) == integers:
            without = "" if integers else " without a scale"
            self.found.append(Difference(source, f"{info.dtype} {_shape(info.shape)}{without}", _shape(shape)))
        elif tuple(info.shape) != tuple(shape):
            self.found.append(Difference(source, _shape(info.shape), _shape(shape)))

    def _linear(self, name: str, n: int, k: int, bias: bool) -> None:
        source = self.checkpoint.locate_linear(name)
        if source is None or self.checkpoint.spec is None:
            spec = None if self.checkpoint.spec is None else self.checkpoint.spec.for_layer(name)
            plain = self.checkpoint.locate(f"{name}.weight")
            if plain is None and spec is not None:
                self.found.append(Difference(name, "-", f"{_shape((n, k))} as {spec.scheme}"))
                return
            self._tensor(f"{name}.weight", (n, k))
            if bias:
                self._tensor(f"{name}.{BIAS}", (n,))
            return
        self.checkpoint.shapes[source] = (n, k)
        spec = self.checkpoint.linear_spec(source)
        names = self.checkpoint.linear_tensors(source)
        headers = self.checkpoint.linear_headers(source)
        self.used.update(names.values())
        expected = dict(formats.load(spec.format).packed_shapes(headers, spec, n, k))
        if bias or BIAS in headers:
            expected[BIAS] = (n,)
        for suffix in formats.unplaced(headers, spec, n, k):
            self.found.append(Difference(names[suffix], _shape(headers[suffix].shape), "-"))
        for suffix, shape in expected.items():
            info = headers.get(suffix)
            if info is None:
                self.found.append(Difference(f"{source}.{suffix}", "-", _shape(shape)))
            elif suffix == BIAS and info.dtype not in FLOATS:
                stored = f"{info.dtype} {_shape(info.shape)} without a scale"
                self.found.append(Difference(f"{source}.{suffix}", stored, _shape(shape)))
            elif tuple(info.shape) != shape:
                self.found.append(Difference(f"{source}.{suffix}", _shape(info.shape), _shape(shape)))


def _shape(shape: Iterable[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"
