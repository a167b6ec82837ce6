"""Prepares the rotation of a run (``--rotate``): finds what it changes, chooses its matrices, and proves the result.

Two passes over the blocks with one short sequence: the first runs the original model and finds the structure, the
second runs the rotated model, whose hidden states must be the rotated ones and whose logits must be the original's.
Only one block is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from aiakq.errors import AiakqError, error
from aiakq.formats.left_out import is_computed
from aiakq.quantizers.model.activations import Activations
from aiakq.quantizers.model.experts import all_experts
from aiakq.quantizers.model.groups import Heads, structure
from aiakq.quantizers.model.outer_layers import capture, finish, head_name, load_outside
from aiakq.quantizers.model.smooth_mappings import is_norm
from aiakq.quantizers.model.source import SourceModel
from aiakq.quantizers.model.stream import BlockStream, NotRotatable, norm_kind, trace_stream
from aiakq.quantizers.prepared import Prepared
from aiakq.quantizers.progress import OnProgress, StageProgress
from aiakq.quantizers.rotation.learned import learned_rotation
from aiakq.quantizers.rotation.orthogonal import Dense, Orthogonal, random_hadamard
from aiakq.quantizers.rotation.rotation import Rotation, Structure

#: Tokens of the sequence on which the models are compared.
_TOKENS = 64
#: Maximum relative difference of hidden states and logits of the rotated and the original model, in float32.
_TOLERANCE = 1e-3
#: Numbers in the sample of rows from which the rotation of the stream is learned.
_SAMPLE = 1 << 26


@dataclass
class _Original:
    """What the first pass found: the hidden states after every block, and the logits."""

    hidden: list[Tensor] = field(default_factory=list)
    logits: Tensor | None = None


def rotate(prepared: Prepared, progress: OnProgress) -> None:
    """Rotate the source model as ``--rotate`` says. Raises ``unsupported``."""
    options, model = prepared.options, prepared.model
    if options.rotate == "none":
        return
    if (prepared.source / "modules.json").exists():
        what = f"--rotate {options.rotate} with a model of sentence-transformers, whose embeddings it would change,"
        raise error("unsupported", what=what, hint="Leave --rotate away.")
    samples = () if prepared.samples is None else prepared.samples.samples
    quantized = {shape.name for shape in prepared.shapes if prepared.spec.for_layer(shape.name) is not None}
    quantized |= set() if prepared.head is None else {prepared.head}
    model.rotate(prepare_rotation(model, options.rotate, options.seed, samples, frozenset(quantized), progress))


def prepare_rotation(
    model: SourceModel,
    kind: str,
    seed: int,
    samples: Sequence[Tensor],
    quantized: frozenset[str],
    progress: OnProgress,
) -> Rotation:
    """Return the rotation of ``model``, which is left as it was. ``kind`` is hadamard or learned.

    samples    calibration samples [T]; may be empty.
    quantized  linears whose codes are stored.

    Raises ``unsupported`` if the model has no residual stream that can be rotated exactly.
    """
    try:
        return _Preparation(model, kind, seed, samples, progress).run(quantized)
    except NotRotatable as problem:
        model.rotate(None)
        what = f"--rotate {kind} with {type(model.model).__name__}, because {problem},"
        raise error("unsupported", what=what, hint="Leave --rotate away.") from None


class _Preparation:
    def __init__(
        self, model: SourceModel, kind: str, seed: int, samples: Sequence[Tensor], progress: OnProgress
    ) -> None:
        self.model = model
        self.kind = kind
        self.width = int(model.model.get_input_embeddings().weight.shape[1])
        self.generator = torch.Generator().manual_seed(seed)
        self.heads = Heads.of(model.config)
        self.progress = progress
        self.count = len(model.blocks)
        self.ids = _sequence(samples, model.config.vocab_size)
        self.original = _Original()

    def run(self, quantized: frozenset[str]) -> Rotation:
        model = self.model
        model.rotate(None)
        found = self._trace()
        stream = self._stream(found)
        rotation = Rotation(self.kind, found, stream, {})
        model.rotate(rotation)
        rotation.heads = self._head_rotations(rotation)
        self._compare(rotation)
        rotation.quantized = quantized
        return rotation

    # --- structure ------------------------------------------------------------------------------------------------

    def _trace(self) -> Structure:
        """Run the original model, and find what reads and writes its stream."""
        model, found, known = self.model, Structure(), {}
        layer_norms = False
        inputs = self._capture()
        for index, block in enumerate(model.blocks):
            prefix = model.block_prefix(index)
            self.progress(StageProgress("rotate", index, 2 * self.count, prefix))
            model.load(block, prefix)
            key = structure(block)
            if key not in known:
                known[key] = self._trace_block(block, index, inputs)
            _add(found, known[key], prefix)
            layer_norms = layer_norms or known[key].layer_norms
            inputs.advance(block, index)
            self.original.hidden.append(inputs.hidden[0].clone())
            model.drop(block)
            model.checkpoint.close()
        load_outside(model)
        found = self._outer(replace(found, layer_norms=layer_norms))
        self.original.logits = finish(model, self.ids, inputs.hidden[0], inputs.outputs).cpu()
        model.drop(model.model)
        return found

    def _trace_block(self, block: nn.Module, index: int, inputs: Activations) -> BlockStream:
        run = inputs.sample_forward(block, index, _TOKENS)
        if run is None:
            raise NotRotatable(f"its hidden states are not finite in block {index}")
        try:
            with all_experts(block):
                return trace_stream(block, run, self.heads, self.width)
        except NotRotatable as problem:
            raise NotRotatable(f"in {self.model.block_prefix(index)}, {problem}") from None

    def _outer(self, found: Structure) -> Structure:
        """Add the layers outside the blocks, which are loaded."""
        model = self.model
        inside = f"{model.blocks_name}."
        outside = {name: module for name, module in model.model.named_modules() if name and not name.startswith(inside)}
        norms = [name for name, module in outside.items() if is_norm(module) and len(_weight(module)) == self.width]
        if len(norms) != 1:
            listed = f" ({', '.join(norms)})" if norms else ""
            raise NotRotatable(f"it has {len(norms)} norms outside its blocks{listed}, not one after them")
        head = head_name(model)
        if head is None:
            raise NotRotatable("its output layer is not linear")
        self._check_other_tensors()
        norm = norms[0]
        gain, embedding = _weight(outside[norm]), model.model.get_input_embeddings()
        plus_one = self._adds_one(outside[norm])
        kind = norm_kind(outside[norm], plus_one)
        if kind is None:
            raise NotRotatable(f"{norm} is a norm of another kind")
        tied = not model.holds(head)
        even = bool((gain == gain.flatten()[0]).all())
        embeddings = [
            name
            for name, module in outside.items()
            if isinstance(module, nn.Embedding) and module.embedding_dim == self.width
        ]
        own = next(name for name, module in outside.items() if module is embedding)
        return replace(
            found,
            norms={**found.norms, norm: plus_one},
            kept_norms=[norm] if tied and even else [],
            readers=found.readers if tied and even else {**found.readers, head: norm},
            embeddings=embeddings,
            layer_norms=found.layer_norms or kind == "layer",
            embedding=own,
            untied=head if tied and not even else "",
        )

    @staticmethod
    def _adds_one(norm: nn.Module) -> bool:
        """Whether a norm multiplies by one plus its weight."""
        weight = _weight(norm)
        kept = weight.detach().clone()
        x = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.device)
        with torch.inference_mode():
            bias = getattr(norm, "bias", None)
            weight.data.zero_()
            zero = norm(x) - (bias if isinstance(bias, Tensor) else 0.0)
            weight.data.copy_(kept)
        return float(zero.abs().max()) > 0.1

    def _check_other_tensors(self) -> None:
        """Raise ``NotRotatable`` for tensors that other programs may use with the stream, such as those of images."""
        model = self.model
        used = model.used_tensors()
        for name, info in model.checkpoint.inventory.items():
            if name not in used and self.width in info.shape and not is_computed(name, info.shape):
                raise NotRotatable(f"its tensor {name} is outside the text model and may use the same residual stream")

    # --- matrices -------------------------------------------------------------------------------------------------

    def _stream(self, found: Structure) -> Orthogonal:
        """Return the rotation of the stream."""
        start = random_hadamard(self.width, self.generator, found.layer_norms)
        if self.kind == "hadamard":
            return start
        rows = self._sampled_rows(found)
        matrix = start.apply(torch.eye(self.width))
        return Dense(learned_rotation(rows, matrix, found.layer_norms).cpu())

    def _sampled_rows(self, found: Structure) -> Tensor:
        """Return rows [T, H] of the weights that the stream's rotation multiplies, the same share of every linear."""
        model = self.model
        identity = Rotation(self.kind, found, Dense(torch.eye(self.width)), {})
        model.rotate(identity)
        inside = f"{model.blocks_name}."
        names = [name for name in (*found.readers, *found.writers) if name.startswith(inside)]
        shapes = {name: tuple(model.model.get_parameter(f"{name}.weight").shape) for name in names}
        writers = set(found.writers)
        counts = {name: shape[1] if name in writers else shape[0] for name, shape in shapes.items()}
        share = min(1.0, _SAMPLE / (self.width * sum(counts.values())))
        parts = []
        for name, count in counts.items():
            weight = model.value(f"{name}.weight")
            rows = weight.T if name in writers else weight
            chosen = torch.randperm(count, generator=self.generator)[: max(1, int(share * count))].sort().values
            parts.append(rows[chosen.to(rows.device)])
        return torch.cat(parts)

    def _head_rotations(self, rotation: Rotation) -> dict[str, Tensor]:
        """Return for every linear that computes values the matrices of its heads and of the columns that read them,
        [2, count, D, D].

        Before they are rotated, the channels of values and of these columns are scaled to equal norms, because a
        channel that is large in values and small in columns would be spread over all others.
        """
        matrices = {}
        for name, values in sorted(rotation.structure.values.items()):
            weight = self.model.value(f"{name}.weight")
            rows = values.rows(len(weight)).to(weight.device)
            size = rows.shape[1]
            output = self.model.value(f"{values.target}.weight")
            output = output.view(len(output), values.count, -1, size).transpose(0, 1).reshape(values.count, -1, size)
            scales = _balance(weight[rows], output)
            eye = torch.eye(size)
            turns = [random_hadamard(size, self.generator).apply(eye) for _ in range(values.count)]
            if self.kind == "learned":
                own = torch.cat(((weight[rows] / scales[..., None]).transpose(1, 2), output * scales[:, None]), 1)
                turns = [learned_rotation(each, turn).cpu() for each, turn in zip(own, turns, strict=True)]
            scales, turn = scales.cpu()[..., None], torch.stack(turns)
            matrices[name] = torch.stack((turn / scales, turn * scales))
        return matrices

    # --- comparison -----------------------------------------------------------------------------------------------

    def _compare(self, rotation: Rotation) -> None:
        """Run the rotated model and compare it with the original. Raises ``NotRotatable``."""
        model = self.model
        inputs = self._capture()
        for index, block in enumerate(model.blocks):
            prefix = model.block_prefix(index)
            self.progress(StageProgress("rotate", self.count + index, 2 * self.count, prefix))
            model.load(block, prefix)
            inputs.advance(block, index)
            gap = _relative_error(inputs.hidden[0], rotation.stream.apply(self.original.hidden[index]))
            model.drop(block)
            model.checkpoint.close()
            if not gap <= _TOLERANCE:
                raise NotRotatable(f"{prefix} then computes something else (relative difference {gap:.2g})")
        load_outside(model)
        logits = finish(model, self.ids, inputs.hidden[0], inputs.outputs).cpu()
        model.drop(model.model)
        assert self.original.logits is not None
        gap = _relative_error(logits, self.original.logits)
        if not gap <= _TOLERANCE:
            raise NotRotatable(f"its logits would change (relative difference {gap:.2g})")
        self.progress(StageProgress("rotate", 2 * self.count, 2 * self.count))

    def _capture(self) -> Activations:
        try:
            return capture(self.model, [self.ids], lambda _: None)
        except AiakqError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as problem:
            raise NotRotatable(f"it cannot run {_TOKENS} tokens ({problem})") from None


def _add(found: Structure, block: BlockStream, prefix: str) -> None:
    """Add the structure of a block at ``prefix`` to that of the model."""

    def full(name: str) -> str:
        return f"{prefix}.{name}" if name else ""

    found.norms.update({full(name): plus_one for name, plus_one in block.norms.items()})
    found.readers.update({full(name): full(norm) for name, norm in block.readers.items()})
    found.writers.extend(map(full, block.writers))
    found.values.update(
        {full(name): replace(values, target=full(values.target)) for name, values in block.values.items()}
    )


def _weight(module: nn.Module) -> Tensor:
    assert isinstance(module.weight, Tensor)
    return module.weight


def _balance(values: Tensor, columns: Tensor) -> Tensor:
    """Return the powers of two [count, D] by which dividing the values [count, D, K] and multiplying the columns
    [count, N, D] gives channels of nearly equal norms."""
    ratio = values.double().norm(dim=2) / columns.double().norm(dim=1)
    usable = torch.isfinite(ratio) & (ratio > 0)
    return torch.where(usable, ratio.log2().div(2).round().exp2(), torch.ones_like(ratio)).float()


def _sequence(samples: Sequence[Tensor], vocab_size: int) -> Tensor:
    """Return token ids [1, T]: the beginning of a sample, or random ones."""
    if samples:
        return max(samples, key=len)[:_TOKENS].unsqueeze(0)
    return torch.randint(vocab_size, (1, _TOKENS), generator=torch.Generator().manual_seed(0))


def _relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.cpu().double() - wanted.cpu().double()).norm() / wanted.double().norm().cpu())
