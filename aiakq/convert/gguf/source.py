"""The model of a checkpoint as a GGUF file sees it: its tensors under their usual names, floats or packed linears."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from aiakq.convert import plan as plans
from aiakq.convert.gguf.blocks import NO_ROUNDING, own_kind, rows_of_blocks
from aiakq.convert.gguf.metadata import family_for
from aiakq.errors import error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.decoded_weight import DecodedWeight, as_floats
from aiakq.formats.dequantized import is_transposed
from aiakq.formats.gguf.encoding import encode
from aiakq.formats.gguf_model import FAMILIES
from aiakq.formats.gguf_model.written import (
    ExpertPart,
    FileTensor,
    GGUFFamily,
    expert_parts,
    file_of,
    file_tensors,
)
from aiakq.formats.left_out import beside_model, is_cache_scale, is_computed, prediction_layers
from aiakq.formats.model_folder import some_of
from aiakq.formats.separate_head import separate_head
from aiakq.kernels.types import QWeight
from aiakq.runtime.config.model import ModelConfig

#: dtype in headers -> kind of floats; others become F32.
_KINDS = {"F16": "F16", "BF16": "BF16"}
_HEAD = "lm_head."


@dataclass
class GGUFSource:
    """The model of a checkpoint.

    name     name of the model; that of its folder or file if it is empty.
    changes  tensor of the checkpoint, by its usual name -> what was done to its numbers, filled while they are written.
    """

    checkpoint: Checkpoint
    model: ModelConfig
    lossy: bool
    name: str = ""

    def __post_init__(self) -> None:
        self.changes: dict[str, str] = {}
        self._parts: dict[str, ExpertPart] = {}
        self._experts: tuple[str, Tensor] | None = None

    @cached_property
    def architecture(self) -> str:
        """``general.architecture`` of the file. Raises ``gguf_not_written``."""
        return family_for(self.model)

    @property
    def family(self) -> GGUFFamily:
        return FAMILIES[self.architecture]

    @cached_property
    def _root(self) -> str:
        return self.family.layers.partition(".")[0] + "."

    def usual(self, name: str) -> str:
        """Return a name as files of the whole model spell it, see ``Checkpoint.locate``."""
        for prefix in ("model.language_model.", "language_model."):
            if name.startswith(prefix):
                inner = name.removeprefix(prefix)
                name = inner if inner.startswith((self._root, _HEAD)) else self._root + inner
        return name if name.startswith((self._root, _HEAD)) else self._root + name

    @cached_property
    def linears(self) -> dict[str, plans.Linear]:
        """Weight of every packed linear, by its usual name -> what headers say. Raises ``tensor_mismatch``."""
        if self.checkpoint.spec is None:
            return {}
        return {self.usual(f"{each.name}.weight"): each for each in plans.linears_of(self.checkpoint)}

    @cached_property
    def _floats(self) -> dict[str, str]:
        """Tensors of floats, by their usual names -> their names. Biases of packed linears are among them."""
        checkpoint, packed = self.checkpoint, set()
        for each in self.linears.values():
            packed |= {name for suffix, name in checkpoint.linear_tensors(each.name).items() if suffix != "bias"}
        tied = self.model.tie_word_embeddings and not separate_head(checkpoint)
        found = {
            self.usual(name): name
            for name in checkpoint.inventory
            if name not in packed and name not in checkpoint.beside_text and not (tied and name.startswith(_HEAD))
        }
        shapes = {name: tuple(checkpoint.inventory[name].shape) for name in found.values()}
        self._parts = expert_parts(str(self.model.raw.get("model_type")), found, shapes)
        split = {part.stored for part in self._parts.values()}
        whole = {usual: name for usual, name in found.items() if name not in split}
        return whole | {usual: part.stored for usual, part in self._parts.items()}

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor, by its usual name -> its shape in a checkpoint of floats."""
        found = {name: tuple(self.checkpoint.inventory[own].shape) for name, own in self._floats.items()}
        found |= {name: part.shape for name, part in self._parts.items()}
        for name, each in self.linears.items():
            found[name] = (each.k, each.n) if self._is_transposed(name) else (each.n, each.k)
        return found

    def _is_transposed(self, name: str) -> bool:
        return is_transposed(self.model.raw, name.removesuffix(".weight"))

    @cached_property
    def tensors(self) -> dict[str, FileTensor]:
        """The tensors of the file. Raises ``gguf_not_written`` for one of the checkpoint that no file holds."""
        model = self.model
        sizes = {
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
        }
        made = file_tensors(self.family, {**model.raw, **sizes}, self.shapes)
        used = {part.name for tensor in made.values() for part in tensor.parts}
        further = prediction_layers(self.shapes, model.num_layers)
        left = {
            name
            for name, shape in self.shapes.items()
            if name not in used
            and not is_computed(name, shape)
            and not is_cache_scale(name)
            and not any(name.startswith(layer) for layer in further)
        }
        if left := left - beside_model(left, used):
            reason = f"llama.cpp's {self.architecture} models have no place for {some_of(sorted(left))}"
            raise error("gguf_not_written", what=model.architecture, reason=reason)
        return made

    # --- kinds --------------------------------------------------------------------------------------------------------

    def own_kind(self, name: str) -> str:
        """Return the kind of blocks or floats that holds a tensor as it is, judging by its header."""
        linear = self.linears.get(name)
        if linear is None:
            return _KINDS.get(self.checkpoint.inventory[self._floats[name]].dtype, "F32")
        return own_kind(linear.layer, linear.k)

    def stored_kind(self, name: str) -> str | None:
        """Return the kind of a tensor of the file that the source, a file of the same architecture, holds as it is."""
        file = file_of(self.checkpoint.foreign)
        if file is None:
            return None
        found = file.tensors.get(name)
        same = file.metadata.get("general.architecture") == self.architecture
        return found.kind.name if same and found is not None and found.shape == self.tensors[name].shape else None

    # --- contents -----------------------------------------------------------------------------------------------------

    def _weight(self, linear: plans.Linear) -> QWeight | DecodedWeight:
        return self.checkpoint.read_linear(linear.name)

    def dense(self, name: str) -> Tensor:
        """Return a tensor as floats, as a checkpoint of floats stores it; a packed linear in float32."""
        linear = self.linears.get(name)
        if linear is None:
            stored, part = self._floats[name], self._parts.get(name)
            if part is None:
                return self.checkpoint.checked_tensor(stored)
            if self._experts is None or self._experts[0] != stored:  # experts of one tensor are asked for in a row
                self._experts = stored, self.checkpoint.checked_tensor(stored)
            return part.of(self._experts[1])
        values = as_floats(self._weight(linear))
        return values.T.contiguous() if self._is_transposed(name) else values

    def rows(self, name: str, kind: str) -> Tensor:
        """Return a tensor [N, K] as rows of blocks, or of floats, of ``kind``: [N, bytes of a row] uint8.

        Raises ``conversion_inexact`` for a packed linear that the kind cannot hold, and ``not_finite``.
        """
        linear = self.linears.get(name)
        if linear is None:
            return encode(self.dense(name), kind, name)
        if linear.layer.blocks == kind:
            names = self.checkpoint.linear_tensors(linear.name)
            return self.checkpoint.tensor(names.get("weight_blocks") or names["weight"])
        rows, change = rows_of_blocks(self._weight(linear), kind, linear.name, self.lossy)
        if change:
            self.changes[name] = change
        return rows

    def contents(self, name: str, kind: str) -> Tensor:
        """Return the bytes of a tensor of the file, as ``kind``. Raises what ``rows`` raises."""
        tensor = self.tensors[name]
        file = file_of(self.checkpoint.foreign)
        if file is not None and self.stored_kind(name) == kind:
            return file.read(name)
        if tensor.is_rows and len(tensor.shape) > 1:
            return tensor.filled(lambda part: self.rows(part, kind))
        packed = [part.name for part in tensor.parts if part.name in self.linears]
        if packed and kind not in ("F32", "F16", "BF16") and not self.lossy:
            reason = "its rows lie across blocks there"
            hint = "Write floats (--gguf-type bf16), or allow rounding with --lossy."
            raise error(
                "conversion_inexact", layer=packed[0].removesuffix(".weight"), to=kind, reason=reason, hint=hint
            )
        values = tensor.filled(self.dense)
        width = values.shape[-1]
        return encode(values.reshape(-1, width).to(torch.float32), kind, name)

    @property
    def num_freed(self) -> int:
        """Number of linears whose activations are no longer rounded."""
        return sum(NO_ROUNDING in change for change in self.changes.values())

    def general(self) -> dict[str, Any]:
        """Return what describes the model: name and licence."""
        name = self.name or self.checkpoint.named_path.name
        return {"general.type": "model", "general.name": name.removesuffix(".gguf")}
