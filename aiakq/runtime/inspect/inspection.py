"""``aiakq inspect``: layers, missing tensors and kernels of a checkpoint, from its headers alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from aiakq.errors import AiakqError, error
from aiakq.formats import quantization_config
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.contradictions import contradictions
from aiakq.formats.inventory import Difference
from aiakq.formats.model_folder import MANIFEST, read_json
from aiakq.formats.safetensors_file import DTYPE_BYTES, DTYPE_NAMES, TensorInfo
from aiakq.kernels.ops import Ops, PlannedOps
from aiakq.kernels.types import DenseProblem
from aiakq.runtime.loader.stored_problem import stored_problem, stored_scheme
from aiakq.spec import QuantSpec

if TYPE_CHECKING:
    from aiakq.runtime.config.engine import EngineConfig

_EMBEDDING = re.compile(r"embed|\bwte\b|\bwpe\b")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Layer:
    """A module with tensors, or a group of equal modules.

    name            module name; in a collapsed list with the layer numbers in braces.
    kind            linear, embedding, or other (norms, positions).
    scheme          the arithmetic, such as w4a16; w16 or w32 if it is not quantized.
    group_size      number of inputs per scale; None without groups.
    nbytes          bytes of all its tensors on disk.
    implementation  implementation that would run it; None if it is not a linear layer, or not used (towers beside the
                    decoder of a multimodal model).
    passed_over     better implementations, and why they cannot be used.
    count           number of equal layers in a collapsed row; the other numbers are those of one layer.
    """

    name: str
    kind: str
    scheme: str
    n: int
    k: int
    group_size: int | None
    nbytes: int
    implementation: str | None = None
    passed_over: tuple[tuple[str, str], ...] = ()
    count: int = 1

    @property
    def parameters(self) -> int:
        return self.n * self.k


@dataclass(frozen=True)
class Operation:
    """An operation other than a linear layer, its implementation, and why better ones cannot be used."""

    name: str
    implementation: str
    passed_over: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Inspection:
    """Description of a checkpoint, made from its headers.

    writer        the tool that wrote it, if it is recorded.
    support       how aiakq would run it: native, through transformers, or not.
    dtype, dtype_reason, device   the activation dtype and device for which implementations were selected.
    operations    operations of the model other than linear layers; empty if its config is not supported.
    differences   tensors that are missing, unexpected or of another shape than the config implies; None for an
                  architecture without a native model.
    kv_bytes_per_token  bytes per token in the KV cache over all layers; None like ``differences``.
    left_out      tensors that aiakq does not use, see ``formats.left_out``.
    stored_head   see ModelConfig.
    remarks       see Checkpoint.
    """

    path: str
    architecture: str
    support: str
    writer: str | None
    spec: QuantSpec | None
    context: int | None
    tied_embeddings: bool
    files: int
    device: str
    dtype: str
    dtype_reason: str
    layers: tuple[Layer, ...]
    operations: tuple[Operation, ...] = ()
    differences: tuple[Difference, ...] | None = None
    kv_bytes_per_token: int | None = None
    left_out: tuple[str, ...] = ()
    stored_head: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    def bits_per_weight(self, quantized_only: bool = False) -> float | None:
        """Return the bits on disk per parameter, including scales and zero points."""
        chosen = [layer for layer in self.layers if not quantized_only or _is_quantized(layer)]
        parameters = sum(layer.parameters for layer in chosen)
        return 8 * sum(layer.nbytes for layer in chosen) / parameters if parameters else None

    def document(self) -> dict[str, object]:
        """Return the inspection as JSON values, with layers not collapsed."""
        spec = self.spec
        return {
            "schema_version": 1,
            "kind": "inspect",
            "path": self.path,
            "architecture": self.architecture,
            "support": self.support,
            "writer": self.writer,
            "context": self.context,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "tied_embeddings": self.tied_embeddings,
            "files": self.files,
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "bits_per_weight": self.bits_per_weight(),
            "bits_per_quantized_weight": self.bits_per_weight(quantized_only=True),
            "device": self.device,
            "dtype": self.dtype,
            "dtype_reason": self.dtype_reason,
            "quantization": None
            if spec is None
            else {
                "method": spec.method,
                "scheme": spec.scheme,
                "format": spec.format,
                "bits": spec.bits,
                "group_size": spec.group_size,
                "symmetric": spec.symmetric,
                "activation_bits": spec.activation_bits,
                "desc_act": spec.desc_act,
                "ignore": list(spec.ignore),
                "mixed": spec.mixed,
                "layers": {name: None if layer is None else asdict(layer) for name, layer in spec.layers},
            },
            "stored_head": self.stored_head or None,
            "remarks": list(self.remarks),
            "left_out": list(self.left_out),
            "inventory": None if self.differences is None else [_difference_document(d) for d in self.differences],
            "layers": [_layer_document(layer) for layer in self.layers],
            "operations": {
                each.name: {"implementation": each.implementation, "passed_over": dict(each.passed_over)}
                for each in self.operations
            },
        }


def _layer_document(layer: Layer) -> dict[str, object]:
    return {
        "name": layer.name,
        "kind": layer.kind,
        "scheme": layer.scheme,
        "n": layer.n,
        "k": layer.k,
        "group_size": layer.group_size,
        "bytes": layer.nbytes,
        "implementation": layer.implementation,
        "passed_over": dict(layer.passed_over),
    }


def _difference_document(difference: Difference) -> dict[str, str]:
    return {"kind": difference.kind, **vars(difference)}


def _is_quantized(layer: Layer) -> bool:
    return layer.scheme not in ("w16", "w32")


def inspect_checkpoint(
    model: str,
    revision: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    refusal: Callable[[EngineConfig], str | None] = lambda _: None,
) -> Inspection:
    """Describe the checkpoint ``model`` (a folder, or a hub name that is fetched), for ``device`` and ``dtype``.

    refusal  returns why a model without a native implementation cannot run through transformers, or None; see
             ``refusal`` of aiakq/runtime/hf/transformers_fallback.py.

    Tensors that differ from what the config implies are reported, not raised. Raises ``model_*`` and
    ``format_unsupported`` for files that cannot be read, ``tensor_mismatch`` for shapes that contradict the format, and
    ``device``.
    """
    from aiakq.formats.model_folder import first_architecture
    from aiakq.runtime.inspect.description import plan, support

    checkpoint = Checkpoint.fetch(model, revision)
    target = _target(checkpoint, device, dtype)
    linears = set(checkpoint.quantized_linears())
    if linears and checkpoint.spec is None:
        raise error("format_unsupported", reason="config.json has no quantization_config, but the weights are packed")
    checkpoint.remarks += contradictions(checkpoint)
    # Compares all shapes, which some formats do not repeat.
    config = None if target.config is None else target.config.model
    planned = plan(checkpoint, target.ops, config)
    unused = {*checkpoint.beside_text, *planned.left_out}
    layers = _layers(checkpoint, linears, unused, target)
    layers.sort(key=lambda layer: _natural(layer.name))
    text = checkpoint.config.get("text_config")
    context = checkpoint.config.get("max_position_embeddings")
    if context is None and isinstance(text, dict):
        context = text.get("max_position_embeddings")
    architecture = first_architecture(checkpoint.config)
    head = "" if config is None else config.stored_head
    return Inspection(
        path=str(checkpoint.named_path),
        architecture=architecture,
        support=support(architecture if config is None else config.architecture, target.refusal(refusal)),
        writer=_writer(checkpoint),
        spec=checkpoint.spec,
        context=context if isinstance(context, int) else None,
        tied_embeddings=bool(checkpoint.config.get("tie_word_embeddings")) and not head,
        stored_head=head,
        remarks=tuple(checkpoint.remarks),
        files=len({info.file for info in checkpoint.inventory.values()}),
        device=target.ops.device_type,
        dtype=str(target.ops.dtype).removeprefix("torch."),
        dtype_reason=target.dtype_reason,
        layers=tuple(layers),
        operations=tuple(Operation(name, each.name, each.passed_over) for name, each in planned.selected),
        differences=planned.differences,
        kv_bytes_per_token=planned.kv_bytes_per_token,
        left_out=tuple(sorted(unused)),
    )


@dataclass(frozen=True)
class _Target:
    """The device, operations and config that the model would run with; ``config`` is None if it is not supported."""

    ops: PlannedOps
    dtype_reason: str
    config: EngineConfig | None = None

    def refusal(self, of: Callable[[EngineConfig], str | None]) -> Callable[[], str | None]:
        """Return ``of`` for the config; without one, nothing is known."""
        return lambda: None if self.config is None else of(self.config)


def _target(checkpoint: Checkpoint, device: str, dtype: str) -> _Target:
    """Return the target. A model with an unsupported config is described for the device without it."""
    import torch

    from aiakq.runtime.config.device import pick_dtype
    from aiakq.runtime.config.engine import EngineConfig
    from aiakq.runtime.loader.opening import open_weights

    try:
        config = EngineConfig.from_args({"model": str(checkpoint.path), "device": device, "dtype": dtype})
        return _Target(PlannedOps(open_weights(config).ops), config.device.dtype_reason, config)
    except AiakqError as problem:
        if problem.id not in ("model_malformed", "architecture_unsupported", "unsupported"):
            raise
    plain = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
    picked, reason = pick_dtype(dtype, checkpoint.config, plain)
    return _Target(PlannedOps(Ops(plain, picked)), reason)


def _modules(inventory: Mapping[str, TensorInfo], linears: set[str]) -> dict[str, dict[str, TensorInfo]]:
    """Return the tensors by module name and by the suffix that follows it."""
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in inventory.items():
        module, _, suffix = name.rpartition(".")
        # Some tensors have no module of their own, or are nested below the linear that they belong to.
        while module and module not in linears and any(module.startswith(owner + ".") for owner in linears):
            module, _, inner = module.rpartition(".")
            suffix = f"{inner}.{suffix}"
        modules.setdefault(module or name, {})[suffix] = info
    return modules


def _layers(checkpoint: Checkpoint, linears: set[str], unused: set[str], target: _Target) -> list[Layer]:
    """Return the modules of a checkpoint with the packed ``linears``; nothing runs those with ``unused`` tensors."""
    layers = [
        _quantized(checkpoint, module, infos, target) if module in linears else _plain(module, infos, target)
        for module, infos in _modules(checkpoint.inventory, linears).items()
    ]
    idle = {name.rpartition(".")[0] or name for name in unused}
    return [replace(layer, implementation=None, passed_over=()) if layer.name in idle else layer for layer in layers]


def _quantized(checkpoint: Checkpoint, name: str, infos: Mapping[str, TensorInfo], target: _Target) -> Layer:
    dimensions, group_size = checkpoint.dimensions(name)
    problem = stored_problem(checkpoint, name, target.ops)
    selection, _ = target.ops.select("linear", problem)
    nbytes = sum(info.nbytes for info in infos.values())
    if (reason := checkpoint.decoded(name)) is not None:
        floats = DenseProblem(dimensions.n, dimensions.k, target.ops.dtype, target.ops.dtype, target.ops.device_type)
        selection, _ = target.ops.select("dense", floats)
        selection = replace(selection, passed_over=(("codes", f"decoded at load: {reason}"), *selection.passed_over))
    return Layer(
        name,
        "linear",
        stored_scheme(checkpoint, name),
        dimensions.n,
        dimensions.k,
        group_size,
        nbytes,
        selection.name,
        selection.passed_over,
    )


def _plain(name: str, infos: Mapping[str, TensorInfo], target: _Target) -> Layer:
    """Return a module without quantized weights; a tensor that is not a matrix counts as a single row."""
    nbytes = sum(info.nbytes for info in infos.values())
    matrix = max(infos.values(), key=lambda info: (len(info.shape), info.nbytes))
    scheme = "w32" if DTYPE_BYTES[matrix.dtype] == 4 else "w16"
    if len(matrix.shape) == 2:
        n, k = matrix.shape
        if _EMBEDDING.search(name):
            return Layer(name, "embedding", scheme, n, k, None, nbytes)
        stored = next((dtype for dtype, known in DTYPE_NAMES.items() if known == matrix.dtype), None)
        if stored is None:
            return Layer(name, "linear", scheme, n, k, None, nbytes)
        problem = DenseProblem(n, k, stored, target.ops.dtype, target.ops.device_type)
        selection, _ = target.ops.select("dense", problem)
        return Layer(name, "linear", scheme, n, k, None, nbytes, selection.name, selection.passed_over)
    elements = sum(info.nbytes // DTYPE_BYTES[info.dtype] for info in infos.values())
    return Layer(name, "other", scheme, 1, elements, None, nbytes)


def _natural(name: str) -> tuple[bool, list[tuple[int, str]]]:
    """Sort key: embedding and layers in numeric order, the output layer last."""
    parts = re.split(r"(\d+)", name)
    return name.startswith("lm_head"), [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _writer(checkpoint: Checkpoint) -> str | None:
    """Return the tool that wrote a checkpoint, if it is recorded."""
    try:
        if (checkpoint.path / MANIFEST).exists():
            return f"aiakq {read_json(checkpoint.path / MANIFEST, MANIFEST).get('aiakq', '')}".strip()
    except AiakqError:
        pass
    writer = quantization_config.writer(quantization_config.stored_config(checkpoint.config) or {})
    if writer is not None:
        return writer
    version = checkpoint.config.get("transformers_version")
    return f"transformers {version}" if version else None


def collapse(layers: Iterable[Layer]) -> list[Layer]:
    """Merge layers that differ only in the numbers in their names. All norms become one row."""
    groups: dict[object, list[Layer]] = {}
    others: list[Layer] = []
    for layer in layers:
        if layer.kind == "other":
            others.append(layer)
            continue
        groups.setdefault((_NUMBER.sub("#", layer.name), replace(layer, name="")), []).append(layer)
    rows = [replace(members[0], name=_joined(members), count=len(members)) for members in groups.values()]
    if others:
        total = Layer(
            "norms and other small tensors",
            "other",
            others[0].scheme,
            1,
            sum(layer.k for layer in others),
            None,
            sum(layer.nbytes for layer in others),
        )
        rows.append(total)
    return rows


def collapse_differences(differences: Iterable[Difference]) -> list[tuple[Difference, int]]:
    """Merge differences with equal shapes that differ only in the numbers in their names; return their counts too."""
    groups: dict[object, list[Difference]] = {}
    for each in differences:
        groups.setdefault((_NUMBER.sub("#", each.name), each.found, each.expected), []).append(each)
    return [(replace(members[0], name=_joined(members)), len(members)) for members in groups.values()]


def _joined(members: Sequence[Layer | Difference]) -> str:
    """Return the common name of equal layers, with differing numbers as ranges: model.layers.{0-5}.mlp."""
    if len(members) == 1:
        return members[0].name
    numbers = [[int(digits) for digits in _NUMBER.findall(member.name)] for member in members]
    pieces = _NUMBER.split(members[0].name)
    name = pieces[0]
    for position, piece in enumerate(pieces[1:]):
        values = sorted({each[position] for each in numbers})
        name += (str(values[0]) if len(values) == 1 else "{" + _ranges(values) + "}") + piece
    return name


def _ranges(values: list[int]) -> str:
    """Format numbers as ranges: 0,1,2,5 as 0-2,5."""
    spans: list[list[int]] = []
    for value in values:
        if spans and value == spans[-1][1] + 1:
            spans[-1][1] = value
        else:
            spans.append([value, value])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
