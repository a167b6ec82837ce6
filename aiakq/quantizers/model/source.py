"""SourceModel: a transformers model on the meta device, whose blocks are loaded one at a time.

Only the embedding side and one block are in memory. Everything is computed in float32 from weights that were first
cast to the dtype in which the output stores them, so that calibration sees the model that will be served.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aiakq.errors import error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.gptq import PLACES_NOTE
from aiakq.formats.padded_widths import pad
from aiakq.formats.separate_head import separate_head
from aiakq.formats.text_names import Renaming, renaming
from aiakq.quantizers.calibration.image_features import ImageFeatures
from aiakq.quantizers.model.experts import unfuse_experts
from aiakq.quantizers.model.groups import block_linears, gates
from aiakq.quantizers.model.merged_adapter import LoraLayers, MergedAdapter, merged_bias, merged_weight
from aiakq.quantizers.model.plain_linears import plain_linears, take_weight
from aiakq.quantizers.model.shapes import LinearShape
from aiakq.quantizers.model.skeleton import find_blocks, find_decoder, says_tied, skeleton
from aiakq.quantizers.rotation.rotation import Rotation, rotation_of
from aiakq.runtime.hf.tensor_names import Joined, TensorNames

#: Last parts of the names of row-parallel linears, whose outputs are reduced over GPUs and whose inputs are sharded.
_ROW_PARALLEL = ("o_proj", "out_proj", "down_proj", "fc2", "dense_4h_to_h", "dense", "c_proj", "wo", "w2")


class SourceModel:
    """A transformers model whose blocks are loaded and dropped one by one.

    ``storage`` is the dtype of everything that the output does not quantize, or None to keep each tensor's own.
    ``widths`` are the MLP widths to pad with zeros: key of config.json -> (width in the source, width in the output).

    adapter  LoRA adapter merged into the weights when they are read, or None.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        storage: torch.dtype | None,
        device: torch.device,
        trust_remote_code: bool = False,
        widths: Mapping[str, tuple[int, int]] | None = None,
        others: tuple[torch.device, ...] = (),
    ) -> None:
        self.checkpoint = checkpoint
        self.storage = storage
        self.device = device
        self.others = others
        self.widths = dict(widths or {})
        #: Name of an output layer that is stored and counts although config.json ties it to the embedding.
        self.separate_head = separate_head(checkpoint) if says_tied(checkpoint.config) else ""
        self.model = skeleton(checkpoint, trust_remote_code, self.widths, tied=not self.separate_head)
        own_linears = _own_linears(self.model)
        #: Weights of linears that the checkpoint stores as [K, N].
        self._transposed = plain_linears(self.model)
        self.config = self.model.config.get_text_config()
        #: Name of the decoder inside a multimodal model, the only part that is loaded and quantized; "" for others.
        self.decoder, text = find_decoder(self.model, checkpoint.config)
        head = self.model.get_output_embeddings()
        heads = (f"{name}." for name, module in self.model.named_modules() if module is head)
        self._text_modules = (f"{self.decoder}.", *heads)
        self.blocks_name, self.blocks = find_blocks(text, self.decoder)
        #: Whether transformers has a custom class for linears that are quantized, which programs do not replace then.
        self.has_own_linears = not own_linears.isdisjoint(shape.name for shape in self.linear_shapes())
        names = TensorNames(self.model)
        self._renamed = _renamed(self.model, checkpoint, names)
        self._joined = _joined(self.model, checkpoint, names)
        named = [(self.block_prefix(index), block) for index, block in enumerate(self.blocks)]
        self.experts = unfuse_experts(named, self.config.model_type)
        # transformers keeps embeddings outside the blocks under names of its own; only blocks must map one to one.
        self._source_names = {name: self._source_name(name) for name, _ in self.model.named_parameters()}
        self._source_names |= {name: self._source_name(name) for name, _ in self.model.named_buffers()}
        split = self.experts.fused
        named_in_file = {name: source for name, source in self._source_names.items() if source and name not in split}
        found = renaming(f"{self.decoder or self.model.base_model_prefix}.", named_in_file)
        #: How the file spells the prefix of a multimodal model's decoder, or of the outermost module (Nemotron-H).
        self.renaming = found if self.decoder or found.stored else Renaming()
        self._quantized = {self.renaming.to_model(name): name for name in checkpoint.quantized_linears()}
        self._module_names: dict[str, list[str]] = {}
        for name, source in self._source_names.items():
            if source is not None:
                self._module_names.setdefault(source, []).append(name)
        for name, module in self.model.named_modules():
            if self.is_beside(name):  # nothing is loaded there, but models look at parameters for their device
                empty = nn.Parameter(torch.empty(0, device=device), requires_grad=False)
                module._parameters = {key: None if each is None else empty for key, each in module._parameters.items()}
        self.adapter: MergedAdapter | None = None
        self._adapted: LoraLayers = {}
        self.rotation: Rotation | None = None
        #: Embeddings of calibration images, for which some ids above the vocabulary stand.
        self.features: ImageFeatures | None = None
        #: Name of an output layer that a rotation separated from the embedding.
        self.untied_head = ""

    def merge(self, folder: str | Path | None) -> None:
        """Merge the LoRA adapter in a folder into weights read from now on, in float32; None: without an adapter.

        Raises what ``open_adapter`` and ``MergedAdapter.layers`` raise.
        """
        if folder is None:
            return
        adapter = MergedAdapter(folder)
        modules: dict[str, tuple[int, int]] = {}
        shared: dict[str, str] = {}
        tied_head: object = self.model.get_output_embeddings() if self.config.tie_word_embeddings else None
        for name, module in self.model.named_modules():
            weight = f"{name}.weight"
            source = self._source_names.get(weight)
            if not isinstance(module, nn.Linear) or weight in self.experts.fused:
                continue
            if module is tied_head:
                modules[name] = (module.out_features, module.in_features)
                shared[name] = "the embedding"
            elif source is not None:
                sizes = self.checkpoint.inventory[source].shape
                n, k = sizes[::-1] if weight in self._transposed else sizes
                modules[name] = (n, k)
        biased = {name for name in modules if self.model.get_submodule(name).bias is not None}
        self._adapted = adapter.layers(modules, self.config.model_type, biased, shared)
        self.adapter = adapter

    def rotate(self, rotation: Rotation | None) -> None:
        """Rotate weights read from now on; None: as the checkpoint has them. An output layer that can no longer share
        the embedding's weight gets its own, which is read from the same tensor."""
        self.rotation = rotation
        head = rotation.structure.untied if rotation is not None else ""
        name = f"{head}.weight"
        if not head or self._source_names.get(name) is not None:
            return
        assert rotation is not None
        module = self.model.get_submodule(head)
        module.weight = nn.Parameter(torch.empty(module.weight.shape, device="meta"), requires_grad=False)
        source = self._source_name(name) or self.source_name(f"{rotation.structure.embedding}.weight")
        self._source_names[name] = source
        self.untied_head = head
        self._module_names.setdefault(source, []).append(name)

    def restore_rotation(self, document: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        """Rotate weights by a rotation of another process (``Rotation.document`` and ``tensors``)."""
        self.rotate(rotation_of(document, tensors))

    def restore_images(self, kind: str, tensors: Sequence[Tensor]) -> None:
        """Set the embeddings of calibration images to those of another process (``ImageFeatures.tensors``)."""
        self.features = ImageFeatures.of_tensors(tensors, int(self.config.vocab_size), kind)

    def _source_name(self, name: str) -> str | None:
        """Return the checkpoint's name of a tensor; some older files lack the outermost module's prefix."""
        base = self.model.base_model_prefix + "."
        spellings = self._spellings(name)
        for spelled in spellings:
            for candidate in (spelled, spelled.removeprefix(base), base + spelled):
                if candidate in self.checkpoint.inventory:
                    return candidate
        return next((self._renamed[spelled] for spelled in spellings if spelled in self._renamed), None)

    def _spellings(self, name: str) -> list[str]:
        """Return the names of a tensor here, in the transformers model, and of the fused tensor it is a part of."""
        part = self.experts.fused.get(name)
        return [name, self.experts.own_name(name), *([] if part is None else [part.tensor])]

    @property
    def has_attention(self) -> bool:
        """Whether any block has queries, keys and values, judging by names."""
        return any("attn" in name or "attention" in name for name, _ in self.blocks.named_modules())

    @property
    def hidden_width(self) -> int:
        """Elements of a token between blocks; see wide_rows.py."""
        return int(self.config.hidden_size) * int(getattr(self.config, "altup_num_inputs", 1))

    def block_prefix(self, index: int) -> str:
        """Return the module path of a block, like ``model.layers.3``."""
        return f"{self.blocks_name}.{index}"

    def source_name(self, name: str) -> str:
        """Return the checkpoint's name of a parameter. Raises ``tensor_mismatch`` if it has none."""
        source = self._source_names.get(name)
        if source is None:
            raise error("tensor_mismatch", path=str(self.checkpoint.path), reason=f"tensor {name} is missing")
        return source

    def rest(self, done: Container[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the checkpoint except ``done`` as it is stored, under a name that every loader knows.

        That is the model's name, or the checkpoint's own if transformers has a rule for it or the model has none. A
        tensor that holds several linears (fused experts) is split into parts, each of which may be in ``done``; it is
        yielded whole if only aiakq knows names for the parts and none is in ``done``.
        """
        shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        shapes |= {name: shapes[name][::-1] for name in self._transposed}
        for source in self.checkpoint.inventory:
            names = self._module_names.get(source, [source])
            fused = any(name in self.experts.fused for name in names)
            whole = fused and not self.experts.transformers_reads and not any(name in done for name in names)
            if whole and not any(map(self._is_rotated, names)):
                yield source, cast(self.checkpoint.tensor(source), source, self.storage)
                continue
            for name in names:
                stored_name = self.stored_name(name)
                if name in done or stored_name in done:
                    continue
                if self.is_beside(name):
                    yield source, self.checkpoint.tensor(source)  # bit for bit
                    continue
                value = self.value(name) if self._is_rotated(name) else self._tensor(name, source, shapes.get(name))
                turned = self._is_rotated(name) and name in self._transposed
                yield stored_name, cast(value.T.contiguous() if turned else value, stored_name, self.storage)

    def used_tensors(self) -> set[str]:
        """Return the checkpoint's names of the tensors that the model reads."""
        return set(self._module_names)

    def stored_name(self, name: str) -> str:
        """Return the output's name of the model's tensor ``name``, before ``renaming``: its own, or the checkpoint's if
        transformers has a rule for that."""
        source = self._source_names.get(name)
        if source is not None and source == self.renaming.to_file(name):
            return name  # it is spelled as in the file when it is written
        ruled = name not in self.experts.fused and self._renamed.get(self.experts.own_name(name)) == source
        return source if ruled and source is not None else name

    def _tensor(self, name: str, source: str, shape: torch.Size | None) -> Tensor:
        """Read the model's tensor ``name`` from the checkpoint's ``source``, padded to the model's ``shape``."""
        tensor = self.checkpoint.tensor(source)
        part = self.experts.fused.get(name)
        if part is not None and tensor.dim() == 3:
            tensor = part.of(tensor)
        module, _, kind = name.rpartition(".")
        lora = self._adapted.get(module)
        if lora is not None and kind == "bias":
            tensor = merged_bias(tensor, lora)
        elif lora is not None and kind == "weight":
            turned = name in self._transposed
            tensor = merged_weight(tensor.T if turned else tensor, lora)
            tensor = tensor.T.contiguous() if turned else tensor
        return tensor if shape is None or not self.widths else pad(tensor, shape, self.widths, source)

    def stored_tensors(self, linear: str, has_bias: bool) -> set[str]:
        """Return the checkpoint's names of the tensors that hold a linear, which it may share with others."""
        if linear in self._quantized:
            return set(self.checkpoint.linear_tensors(self._quantized[linear]).values())
        return {self.source_name(f"{linear}.{last}") for last in ("weight", *(("bias",) if has_bias else ()))}

    def linear_shapes(self) -> list[LinearShape]:
        """Return the shapes of all linears inside the blocks, which will be quantized."""
        shapes = []
        for index, block in enumerate(self.blocks):
            for name, linear in block_linears(block).items():
                row = name.rpartition(".")[2] in _ROW_PARALLEL
                full = f"{self.block_prefix(index)}.{name}"
                shapes.append(LinearShape(full, linear.out_features, linear.in_features, row))
        return shapes

    def other_linears(self) -> list[str]:
        """Return module paths of linears that stay unquantized: those outside the blocks, and gates beside experts."""
        inside = self.blocks_name + "."
        return [
            name
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear) and not name.startswith(inside)
        ] + [f"{self.block_prefix(index)}.{name}" for index, block in enumerate(self.blocks) for name in gates(block)]

    def places(self) -> dict[str, object]:
        """Return the note for GPTQ's config about where linears are quantized; empty if all in the blocks are.

        transformers replaces every linear of the blocks unless it is told, and leaves those it does not find in the
        file at random.
        """
        has_gates = any(map(gates, self.blocks))
        if not self.decoder and not has_gates:
            return {}
        places: dict[str, object] = {"block_name_to_quantize": self.blocks_name}
        if has_gates:
            names = {name for block in self.blocks for name in block_linears(block)}
            places["modules_in_block_to_quantize"] = [sorted(names)]
        return {PLACES_NOTE: places}

    def unquantized_share(self) -> float:
        """Return the fraction of the blocks' parameters that is not in linears (mostly fused experts)."""
        total = sum(parameter.numel() for parameter in self.blocks.parameters())
        inside = sum(linear.weight.numel() for block in self.blocks for linear in block_linears(block).values())
        return 1 - inside / max(total, 1)

    def is_beside(self, name: str) -> bool:
        """Whether the model's module or tensor ``name`` is not of a multimodal model's decoder or output layer."""
        return bool(self.decoder) and not f"{name}.".startswith(self._text_modules)

    # --- weights --------------------------------------------------------------------------------------------------

    def load(self, module: nn.Module, prefix: str, recurse: bool = True) -> None:
        """Fill the parameters and persistent buffers of ``module`` (at ``prefix``) from the checkpoint, as float32.

        Raises ``tensor_mismatch`` for a missing tensor or a wrong shape, ``not_finite`` for NaN or infinity.
        """
        for path, child in module.named_modules() if recurse else [("", module)]:
            if self._load_quantized(child, ".".join(part for part in (prefix, path) if part)):
                continue
            for name, parameter in child.named_parameters(recurse=False):
                full = ".".join(part for part in (prefix, path, name) if part)
                child._parameters[name] = nn.Parameter(self._read(full, parameter.shape), requires_grad=False)
            for name, buffer in child.named_buffers(recurse=False):
                full = ".".join(part for part in (prefix, path, name) if part)
                if self._source_names.get(full) and name not in child._non_persistent_buffers_set:
                    child._buffers[name] = self._read(full, buffer.shape)
                else:
                    child._buffers[name] = buffer.to(self.device)

    def _load_quantized(self, module: nn.Module, name: str) -> bool:
        """Fill a linear that is quantized in the checkpoint with the dequantized weight; False if it is not."""
        if not isinstance(module, nn.Linear) or name not in self._quantized:
            return False
        stored = self._quantized[name]
        self.checkpoint.shapes[stored] = (module.out_features, module.in_features)
        take_weight(module, self.checkpoint.read_linear(stored), self.device)
        return True

    def _is_rotated(self, name: str) -> bool:
        return self.rotation is not None and self.rotation.changes(name)

    def _read(self, name: str, shape: torch.Size) -> Tensor:
        """Return a parameter or buffer in float32, rotated. It is rounded to the dtype of the output afterwards, unless
        codes are stored instead."""
        value = self._read_original(name, shape)
        if self.rotation is None or not self.rotation.changes(name):
            return value
        rotated = self.rotation.apply(name, value, self._original)
        if self.rotation.quantized is None or name.rpartition(".")[0] in self.rotation.quantized:
            return rotated
        return cast(rotated, name, self.storage).float()

    def _original(self, name: str) -> Tensor:
        """Return the parameter ``name`` in float32 without the rotation."""
        return self._read_original(name, self.model.get_parameter(name).shape)

    def _read_original(self, name: str, shape: torch.Size) -> Tensor:
        joined = self._joined.get(name)
        source = self.source_name(name) if joined is None else joined.parts[0]
        if joined is not None:
            tensor = torch.cat([self.checkpoint.tensor(part) for part in joined.parts], joined.dim)
        elif name in self._transposed:
            tensor = self._tensor(name, source, shape[::-1]).T.contiguous()
        else:
            tensor = self._tensor(name, source, shape)
        if tensor.shape != shape:
            reason = f"tensor {source} has shape {list(tensor.shape)}, its config says {list(shape)}"
            raise error("tensor_mismatch", path=str(self.checkpoint.path), reason=reason)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            reason = (
                f"tensor {source} holds {str(tensor.dtype).removeprefix('torch.')}, and nothing says what they mean"
            )
            raise error("tensor_mismatch", path=str(self.checkpoint.path), reason=reason)
        return cast(tensor, source, self.storage).to(self.device, torch.float32, copy=True)

    def holds(self, name: str) -> bool:
        """Whether the checkpoint has a weight for the module ``name``, quantized or not."""
        return name in self._quantized or self._source_names.get(f"{name}.weight") is not None

    def value(self, name: str) -> Tensor:
        """Return the parameter ``name`` in float32, as ``load`` would fill it in."""
        return self._read(name, self.model.get_parameter(name).shape)

    def drop(self, module: nn.Module) -> None:
        """Free the weights of ``module`` again."""
        for child in module.modules():
            for name, parameter in child.named_parameters(recurse=False):
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                child._parameters[name] = nn.Parameter(empty, requires_grad=False)


def cast(tensor: Tensor, name: str, dtype: torch.dtype | None) -> Tensor:
    """Cast ``tensor`` to ``dtype`` if it is a float and a dtype is given. Raises ``not_finite`` naming it.

    Values that overflow, such as large bfloat16 values in float16, become infinite.
    """
    if not tensor.is_floating_point():
        return tensor
    result = tensor if dtype is None else tensor.to(dtype)
    # torch adds no floats of 8 bits.
    values = result.to(torch.float32) if result.element_size() == 1 else result
    # A finite sum proves that all elements are finite; one that is not may be a mere overflow.
    if not bool(torch.isfinite(values.sum())) and not bool(torch.isfinite(values).all()):
        if bool(torch.isfinite(tensor).all()):
            largest = float(tensor.abs().max())
            raise error("not_finite", what=f"{name} (up to {largest:.3g}) as {dtype}", hint="Use -t bf16.")
        raise error("not_finite", what=name, hint="The source checkpoint is damaged; fetch it again.")
    return result


def _own_linears(model: nn.Module) -> set[str]:
    """Return the names of the linears of a model that are of a custom class."""
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return {name for name, module in linears if type(module) is not nn.Linear}


def _joined(model: nn.Module, checkpoint: Checkpoint, names: TensorNames) -> dict[str, Joined]:
    """Return the parameters that the file holds in several tensors, which are copied as they are, by name; not those of
    linears, which would be quantized."""
    found = names.joined(checkpoint.inventory)
    modules = {name: model.get_submodule(name.rpartition(".")[0]) for name in found}
    return {name: joined for name, joined in found.items() if not isinstance(modules[name], nn.Linear)}


def _renamed(model: nn.Module, checkpoint: Checkpoint, names: TensorNames) -> dict[str, str]:
    """Return the names of parameters and buffers, or of their parts, that transformers fills from a tensor whose name
    differs by more than the outermost module's prefix -> that name."""
    base = f"{model.base_model_prefix}."
    source_names = {names.own(source) or names.renamed(source): source for source in checkpoint.inventory}
    return {own: source for own, source in source_names.items() if own.removeprefix(base) != source.removeprefix(base)}
