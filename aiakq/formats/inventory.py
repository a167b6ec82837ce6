"""Tensor inventory: what a model's config implies, compared with what a checkpoint holds, before any weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from aiakq.errors import AiakqError, error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.safetensors_file import TensorInfo
from aiakq.kernels.packing import SUPPORTED_BITS, words_for
from aiakq.spec import QuantSpec

#: Rows of the table in an error.
MAX_ROWS = 20
#: Ends of the names of tensors that files carry and models compute again.
COMPUTED = ("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias", "decoder.version", "act.scales")


_FLOATS = ("F16", "BF16", "F32", "F64")


@dataclass
class Wanted:
    """What a model needs.

    tensors   name -> shape of everything that is not a linear layer.
    linears   module name -> (N, K, whether it has a bias).
    optional  tensors that may be there and are not needed: a head that is tied to the embedding.
    """

    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)
    linears: dict[str, tuple[int, int, bool]] = field(default_factory=dict)
    optional: tuple[str, ...] = ("lm_head.weight",)


@dataclass(frozen=True)
class Difference:
    """One tensor that is not as the model needs it. ``found`` and ``expected`` are shapes in words, "-" for none."""

    name: str
    found: str
    expected: str

    @property
    def kind(self) -> str:
        """missing, extra or shape."""
        return "missing" if self.found == "-" else "extra" if self.expected == "-" else "shape"


def compare(checkpoint: Checkpoint, wanted: Wanted) -> list[Difference]:
    """Every tensor that is missing, extra or of another shape; from headers alone.

    Names may lack the outermost ``model.`` in the file, or have one more. Raises ``format_unsupported``.
    """
    return _Comparison(checkpoint, wanted).run()


def refusal(path: str, differences: Sequence[Difference]) -> AiakqError | None:
    """All of it as one ``tensor_inventory`` error with a table; None where there is no difference."""
    if not differences:
        return None
    counts = {kind: sum(each.kind == kind for each in differences) for kind in ("missing", "shape", "extra")}
    words = {"missing": "missing", "shape": "of another shape", "extra": "without a place in the model"}
    said = ", ".join(f"{count} {words[kind]}" for kind, count in counts.items() if count)
    plural = "tensor" if len(differences) == 1 else "tensors"
    return error(
        "tensor_inventory",
        path=path,
        counts=f"{len(differences)} {plural} ({said})",
        table=table(differences),
    )


def table(differences: Sequence[Difference], rows: int = MAX_ROWS) -> str:
    """Name, found and expected in columns: ``rows`` of them, then how many more there are."""
    lines = [("tensor", "found", "expected")]
    lines += [(each.name, each.found, each.expected) for each in differences[:rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(2)]
    text = [f"  {line[0]:<{widths[0]}}  {line[1]:<{widths[1]}}  {line[2]}".rstrip() for line in lines]
    if len(differences) > rows:
        text.append(f"  and {len(differences) - rows} more")
    return "\n".join(text)


class _Comparison:
    def __init__(self, checkpoint: Checkpoint, wanted: Wanted) -> None:
        self.checkpoint = checkpoint
        self.wanted = wanted
        self.inventory = checkpoint.inventory
        self.quantized = set(checkpoint.quantized_linears())
        self.used: set[str] = set()
        self.found: list[Difference] = []

    def run(self) -> list[Difference]:
        for name, shape in self.wanted.tensors.items():
            self._tensor(name, shape)
        for name, (n, k, bias) in self.wanted.linears.items():
            self._linear(name, n, k, bias)
        for name, info in self.inventory.items():
            if name in self.used or name.endswith((*COMPUTED, *self.wanted.optional)):
                continue
            self.found.append(Difference(name, _shape(info.shape), "-"))
        return self.found

    def _tensor(self, name: str, shape: Sequence[int]) -> None:
        source = self.checkpoint.locate(name)
        if source is None:
            self.found.append(Difference(name, "-", _shape(shape)))
            return
        self.used.add(source)
        if tuple(self.inventory[source].shape) != tuple(shape):
            self.found.append(Difference(source, _shape(self.inventory[source].shape), _shape(shape)))

    def _linear(self, name: str, n: int, k: int, bias: bool) -> None:
        source = self.checkpoint.locate_linear(name)
        if source is None or self.checkpoint.spec is None:
            spec = None if self.checkpoint.spec is None else self.checkpoint.spec.for_layer(name)
            plain = self.checkpoint.locate(f"{name}.weight")
            if plain is None and spec is not None:
                self.found.append(Difference(name, "-", f"{_shape((n, k))} as {spec.scheme}"))
                return
            self._tensor(f"{name}.weight", (n, k))
            if plain is not None and self.inventory[plain].dtype not in _FLOATS:
                found = f"{self.inventory[plain].dtype} {_shape(self.inventory[plain].shape)} without a scale"
                self.found.append(Difference(plain, found, _shape((n, k))))
            if bias:
                self._tensor(f"{name}.bias", (n,))
            return
        spec = self.checkpoint.linear_spec(source)
        names = self.checkpoint.linear_tensors(source)
        infos = {suffix: self.inventory[full] for suffix, full in names.items()}
        self.used.update(names.values())
        expected = packed_shapes(infos, spec, n, k)
        if bias:
            expected["bias"] = (n,)
        for suffix, shape in expected.items():
            info = infos.get(suffix)
            if info is None:
                self.found.append(Difference(f"{source}.{suffix}", "-", _shape(shape)))
            elif tuple(info.shape) != shape and not (suffix == "weight_scale" and tuple(info.shape) == (1,)):
                self.found.append(Difference(f"{source}.{suffix}", _shape(info.shape), _shape(shape)))


def packed_shapes(infos: Mapping[str, TensorInfo], spec: QuantSpec, n: int, k: int) -> dict[str, tuple[int, ...]]:
    """suffix -> shape of the tensors that a linear of N x K must have in the layout ``spec.format``.

    Width and number of groups follow the tensors where these make sense, else the config. What may be absent is only
    listed where it is there.
    """
    groups = _groups(infos, spec, k)
    shapes: dict[str, tuple[int, ...]]
    if spec.format in ("gptq", "gptq_v2"):
        bits = _bits(infos, "qweight", spec, k)
        shapes = {"qweight": (k * bits // 32, n), "qzeros": (groups, n * bits // 32), "scales": (groups, n)}
        shapes |= _present(infos, g_idx=(k,))
    elif spec.format == "awq":
        shapes = {"qweight": (k, n // 8), "scales": (groups, n)}
        shapes |= {"qzeros": (groups, n // 8)} if "qzeros" in infos or not spec.symmetric else {}
    elif spec.format in ("awq_gemv", "awq_gemv_fast"):
        from aiakq.formats.awq_gemv import padded_words

        words = padded_words(groups, spec.group_size if spec.group_size > 0 else k)
        if spec.format == "awq_gemv":
            shapes = {"qweight": (n, k // 8), "scales": (n, words * 8)}
            shapes |= {"qzeros": (n, words)} if "qzeros" in infos or not spec.symmetric else {}
        else:
            zeros = "scaled_zeros" if "scaled_zeros" in infos else "qzeros"
            rows = _held(infos, ("scales", zeros), 0, words * 8, lambda rows: rows >= groups)
            shapes = {"qweight": (n // 4, k), "scales": (rows, n), zeros: (rows, n)}
    elif "weight_packed" in infos:
        words = infos["weight_packed"].shape[-1]
        fits = any(words in (words_for(k, bits), -(-k // (32 // bits))) for bits in SUPPORTED_BITS)
        shapes = {"weight_packed": (n, words if fits else words_for(k, spec.bits))}
        shapes |= {"weight_scale": (n, groups), "weight_shape": (2,)} | _present(infos, weight_g_idx=(k,))
        zero = infos.get("weight_zero_point")
        if zero is not None or not spec.symmetric:
            bits = next((b for b in (spec.bits, *SUPPORTED_BITS) if words == words_for(k, b)), 3)
            rows = n if zero is not None and zero.dtype == "I8" else words_for(n, bits)
            if zero is not None and words != words_for(k, bits):  # with gaps, as old versions packed 3 bits
                rows = -(-n // (32 // bits))
            shapes["weight_zero_point"] = (rows, groups)
    else:
        shapes = {"weight": (n, k), "weight_scale": (n, groups)}
        if spec.static_input:
            shapes["input_scale"] = tuple(infos["input_scale"].shape) if "input_scale" in infos else (1,)
    return shapes | _present(infos, bias=(n,))


def _present(infos: Mapping[str, TensorInfo], **shapes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {suffix: shape for suffix, shape in shapes.items() if suffix in infos}


def _bits(infos: Mapping[str, TensorInfo], suffix: str, spec: QuantSpec, k: int) -> int:
    shape = infos[suffix].shape
    bits, rest = divmod(shape[0] * 32, k) if len(shape) == 2 else (0, 1)
    return spec.bits if rest or bits not in SUPPORTED_BITS else bits


def _groups(infos: Mapping[str, TensorInfo], spec: QuantSpec, k: int) -> int:
    """Groups along K: those of the config where a tensor has as many, else those of the scales where they can be."""
    said = 1 if spec.group_size == -1 else -(-k // spec.group_size)
    if spec.format in ("awq_gemv", "awq_gemv_fast"):
        return said
    if spec.format == "compressed-tensors":
        return _held(infos, ("weight_scale", "weight_zero_point"), 1, said, lambda groups: k % groups == 0)
    return _held(infos, ("scales", "qzeros"), 0, said, lambda groups: k % groups == 0)


def _held(
    infos: Mapping[str, TensorInfo], suffixes: Sequence[str], dim: int, said: int, possible: Callable[[int], bool]
) -> int:
    """The size of the tensors ``suffixes`` along ``dim``: ``said`` if one has it, else the first that is possible."""
    sizes = [infos[suffix].shape[dim] for suffix in suffixes if suffix in infos and len(infos[suffix].shape) == 2]
    if said in sizes:
        return said
    return next((size for size in sizes if size > 0 and possible(size)), said)


def _shape(shape: Iterable[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"
