"""The model being quantized: its transformers class without weights, filled one decoder block at a time.

Only the embedding side and one block are in memory. Everything computes in float32, from weights that were first
cast to the dtype the output stores them in, so that calibration sees the model that will be served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from aiakq.errors import error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.kernels.reference import dequantize
from aiakq.kernels.types import QWeight
from aiakq.quantizers.activations import Activations, Call, HiddenStates
from aiakq.quantizers.groups import block_linears
from aiakq.quantizers.rounding import round_activations
from aiakq.quantizers.tensor_parallel import LinearShape, pad

#: Last parts of the names of linears whose outputs are summed over GPUs, so that tensor parallelism cuts their inputs.
_ROW_PARALLEL = ("o_proj", "out_proj", "down_proj", "fc2", "dense_4h_to_h", "dense", "c_proj", "wo", "w2")


class _Captured(Exception):
    pass


class SourceModel:
    """A transformers model whose blocks are loaded and dropped one by one.

    ``storage`` is the dtype of everything the output does not quantize, or None to keep each tensor's own. ``widths``
    are the MLP widths to pad with zeros: key of config.json -> (the source's, the output's).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        storage: torch.dtype | None,
        device: torch.device,
        trust_remote_code: bool = False,
        widths: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.storage = storage
        self.device = device
        self.widths = dict(widths or {})
        self.model = _skeleton(checkpoint, trust_remote_code, self.widths)
        self.config = self.model.config.get_text_config()
        self.blocks_name, self.blocks = _find_blocks(self.model)
        self._quantized = set(checkpoint.quantized_linears())
        # transformers keeps embeddings outside the blocks under names of its own; only blocks must map one to one.
        self._source_names = {name: self._source_name(name) for name, _ in self.model.named_parameters()}
        self._source_names |= {name: self._source_name(name) for name, _ in self.model.named_buffers()}
        self._module_names = {source: name for name, source in self._source_names.items() if source is not None}

    def _source_name(self, name: str) -> str | None:
        """The checkpoint's name of a tensor; some older files lack the outermost module's prefix."""
        base = self.model.base_model_prefix + "."
        for candidate in (name, name.removeprefix(base), base + name):
            if candidate in self.checkpoint.inventory:
                return candidate
        return None

    def block_prefix(self, index: int) -> str:
        """The module path of a block, like ``model.layers.3``."""
        return f"{self.blocks_name}.{index}"

    def source_name(self, name: str) -> str:
        """The checkpoint's name of a parameter. Raises ``tensor_mismatch`` if it has none."""
        found = self._source_names.get(name)
        if found is None:
            raise error("tensor_mismatch", path=str(self.checkpoint.path), reason=f"tensor {name} is missing")
        return found

    def module_name(self, source: str) -> str:
        """The model's name of a checkpoint's tensor; its own name where the model has none for it."""
        return self._module_names.get(source, source)

    def tensor(self, source: str, shape: torch.Size | None = None) -> Tensor:
        """A tensor of the checkpoint, by its name there, padded to the ``shape`` the model has for it."""
        tensor = self.checkpoint.tensor(source)
        if not self.widths:
            return tensor
        if shape is None:
            own = dict(self.model.named_parameters()).get(self.module_name(source))
            shape = tensor.shape if own is None else own.shape
        return pad(tensor, shape, self.widths, source)

    def linear_shapes(self) -> list[LinearShape]:
        """Every linear inside the blocks, which is what will be quantized."""
        shapes = []
        for index, block in enumerate(self.blocks):
            for name, linear in block_linears(block).items():
                row = name.rpartition(".")[2] in _ROW_PARALLEL
                full = f"{self.block_prefix(index)}.{name}"
                shapes.append(LinearShape(full, linear.out_features, linear.in_features, row))
        return shapes

    def other_linears(self) -> list[str]:
        """Module paths of the linears outside the blocks, which stay as they are."""
        inside = self.blocks_name + "."
        return [
            name
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear) and not name.startswith(inside)
        ]

    def unquantized_share(self) -> float:
        """The part of the blocks' parameters that is not in linears, between 0 and 1 (fused experts, mostly)."""
        total = sum(parameter.numel() for parameter in self.blocks.parameters())
        inside = sum(linear.weight.numel() for block in self.blocks for linear in block_linears(block).values())
        return 1 - inside / max(total, 1)

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
        """Fill a linear that the checkpoint holds in integers with the weight they stand for; False if it does not."""
        if not isinstance(module, nn.Linear) or name not in self._quantized:
            return False
        take_weight(module, self.checkpoint.read_linear(name), self.device)
        return True

    def _read(self, name: str, shape: torch.Size) -> Tensor:
        source = self.source_name(name)
        tensor = self.tensor(source, shape)
        if tensor.shape != shape:
            reason = f"tensor {source} has shape {list(tensor.shape)}, its config says {list(shape)}"
            raise error("tensor_mismatch", path=str(self.checkpoint.path), reason=reason)
        return cast(tensor, source, self.storage).to(self.device, torch.float32, copy=True)

    def drop(self, module: nn.Module) -> None:
        """Free the weights of ``module`` again."""
        for child in module.modules():
            for name, parameter in child.named_parameters(recurse=False):
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                child._parameters[name] = nn.Parameter(empty, requires_grad=False)

    # --- the way into the blocks ----------------------------------------------------------------------------------

    def capture(
        self,
        batches: Sequence[Tensor],
        progress: Callable[[int], None],
        hidden: HiddenStates | None = None,
    ) -> Activations:
        """Run everything before the first block, and note with which arguments each block is called.

        batches: token ids, each [B, T] int64. ``progress`` is told how many batches are done. What reaches the first
        block is appended to ``hidden``.
        """
        inside = self.blocks_name + "."
        base = "" if self.model.base_model is self.model else self.model.base_model_prefix
        outside = [
            (name, module)
            for name, module in self.model.base_model.named_modules(prefix=base)
            if not name.startswith(inside)
        ]
        for name, module in outside:
            self.load(module, name, recurse=False)
        self.load(self.blocks[0], self.block_prefix(0))
        hidden = HiddenStates() if hidden is None else hidden
        calls: dict[tuple[int, ...], list[Call]] = {}
        with _recording(self.blocks) as record, torch.inference_mode():
            for number, ids in enumerate(batches):
                record.clear()
                with suppress(_Captured):
                    self.model.base_model(input_ids=ids.to(self.device), use_cache=False)
                assert len(record) == len(self.blocks), f"{len(record)} of {len(self.blocks)} blocks were called"
                hidden.append(record[0].args[0].to("cpu"))
                shape = tuple(ids.shape)
                if shape not in calls:
                    calls[shape] = [Call(call.args[1:], call.kwargs) for call in record]
                progress(number + 1)
        for _, module in outside:
            self.drop(module)
        return Activations(hidden, calls, self.device)


@contextmanager
def _recording(blocks: nn.ModuleList) -> Iterator[list[Call]]:
    """While open, each call of a block is noted and its hidden states are passed on; the last block ends the pass.

    Only the first block runs, once, to show whether blocks return a tensor or a tuple; it must be loaded.
    """
    record: list[Call] = []
    returns_tuple: list[bool] = []

    def stand_in(block: nn.Module) -> Callable[..., Any]:
        real = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not args:
                args = (kwargs.pop("hidden_states"),)
            record.append(Call(args, kwargs))
            if not returns_tuple:
                returns_tuple.append(isinstance(real(*args, **kwargs), tuple))
            if block is blocks[-1]:
                raise _Captured
            return (args[0],) if returns_tuple[0] else args[0]

        return forward

    for block in blocks:
        block.forward = stand_in(block)
    try:
        yield record
    finally:
        for block in blocks:
            del block.forward


def take_weight(linear: nn.Linear, weight: QWeight, device: torch.device) -> None:
    """Make ``linear`` compute in float32 what ``weight`` stands for, its inputs rounded if the scheme rounds them."""
    linear.weight = nn.Parameter(dequantize(weight).to(device), requires_grad=False)
    if weight.bias is not None:
        linear.bias = nn.Parameter(weight.bias.to(device, torch.float32), requires_grad=False)
    if weight.scheme == "w8a8":
        scale = weight.input_scale
        linear.register_forward_pre_hook(lambda module, args: (round_activations(args[0], scale), *args[1:]))


def cast(tensor: Tensor, name: str, dtype: torch.dtype | None) -> Tensor:
    """``tensor`` in ``dtype`` if it is a float and a dtype is given. Raises ``not_finite`` naming it.

    Overflow shows as infinity: bfloat16 reaches far beyond float16.
    """
    if not tensor.is_floating_point():
        return tensor
    result = tensor if dtype is None else tensor.to(dtype)
    if not bool(torch.isfinite(result).all()):
        if bool(torch.isfinite(tensor).all()):
            largest = float(tensor.abs().max())
            raise error("not_finite", what=f"{name} (up to {largest:.3g}) as {dtype}", hint="Use -t bf16.")
        raise error("not_finite", what=name, hint="The source checkpoint is damaged; fetch it again.")
    return result


def _skeleton(checkpoint: Checkpoint, trust_remote_code: bool, widths: Mapping[str, tuple[int, int]]) -> Any:
    """The model's class with meta weights and real buffers, its MLPs as wide as ``widths`` says."""
    import transformers
    from accelerate import init_empty_weights

    config_json = checkpoint.config
    known = config_json.get("model_type") in transformers.CONFIG_MAPPING
    if not known and not trust_remote_code:
        if config_json.get("auto_map"):
            raise error("remote_code", path=str(checkpoint.path))
        raise error(
            "model_unsupported",
            architecture=config_json.get("model_type"),
            reason="transformers does not know it",
            known="llama, mistral, qwen2, qwen3, opt",
        )
    try:
        config = transformers.AutoConfig.from_pretrained(
            checkpoint.path, trust_remote_code=trust_remote_code, local_files_only=True
        )
        for key, (_, new) in widths.items():
            setattr(config.get_text_config(), key, new)
        with init_empty_weights(include_buffers=False):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=trust_remote_code
            )
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as problem:
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
        raise error(
            "model_unsupported",
            architecture=(config_json.get("architectures") or [config_json.get("model_type")])[0],
            reason=f"transformers cannot build it: {reason}",
            known="llama, mistral, qwen2, qwen3, opt",
        ) from problem
    return model.eval()


def _find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The decoder blocks: the longest list of equal modules that hold linears."""
    best: tuple[str, nn.ModuleList] | None = None
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        if len({type(child) for child in module}) != 1 or not block_linears(module[0]):
            continue
        if best is None or len(module) > len(best[1]):
            best = (name, module)
    if best is None:
        raise error(
            "model_unsupported",
            architecture=type(model).__name__,
            reason="no decoder blocks with linear layers were found in it",
            known="llama, mistral, qwen2, qwen3, opt",
        )
    return best
