"""Any other decoder-only architecture, through its transformers class with attention bound to our paged cache.

transformers lets a model's attention be replaced by name. We register one function per loaded model, which writes the
step's keys and values into the pages of its layer and attends over them; everything else of the model runs as it is.
Models whose attention cannot be replaced, or that keep other state between tokens, are refused.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from aiakq.errors import error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.inventory import Difference, refusal
from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.attention import PagedAttention
from aiakq.kernels.ops.linear import ROW_MULTIPLE, LinearLayer
from aiakq.kernels.types import AttentionContext, AttentionSpec
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.layers.attention import LayerCache
from aiakq.runtime.loader.description import describe_linear_layers, describe_operations
from aiakq.runtime.loader.weights import CheckpointWeights, open_weights, operations
from aiakq.runtime.models import FAMILIES
from aiakq.runtime.models.decoder import Model, ModelInput

_numbers = itertools.count()


class _AttentionFunction:
    """The attention function of one loaded model; ``bind`` says where the current step's tokens are in the cache."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._bound: dict[tuple, PagedAttention] = {}
        self._caches: list[LayerCache] = []
        self._context: AttentionContext | None = None

    def layer(self, heads: int, kv_heads: int, head_dim: int, scale: float, window: int | None) -> PagedAttention:
        """Paged attention with these numbers, which transformers tells at the first call only."""
        key = (heads, kv_heads, head_dim, scale, window)
        if key not in self._bound:
            self._bound[key] = self._ops.attention(AttentionSpec(heads, kv_heads, head_dim, scale, window))
        return self._bound[key]

    def bind(self, caches: list[LayerCache], context: AttentionContext | None) -> None:
        self._caches, self._context = caches, context

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D]."""
        assert self._context is not None, "the model was called outside a step"
        cache = self._caches[int(module.layer_idx)]  # type: ignore[arg-type]
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        scale = scaling if scaling is not None else q.shape[-1] ** -0.5
        layer = self.layer(q.shape[1], k.shape[1], q.shape[2], scale, sliding_window)
        layer.write(k, v, cache, self._context.slots)
        return layer.attend(q.contiguous(), cache, self._context).unsqueeze(0), None


class TransformersModel:
    """A transformers causal language model behind the interface decoder.Model."""

    def __init__(self, hf: Any, attention: _AttentionFunction, ops: Ops, config: EngineConfig) -> None:
        text = config.model
        self.hf, self.ops = hf, ops
        head = hf.get_output_embeddings()
        self.vocab_size = head.out_features if isinstance(head, _QuantizedModule) else head.weight.shape[0]
        self.kv_shape = (text.num_layers, text.num_kv_heads, text.head_dim)
        self.row_multiple = ROW_MULTIPLE
        self._attention = attention
        self._spec = AttentionSpec(text.num_heads, text.num_kv_heads, text.head_dim, text.head_dim**-0.5)

    def new_caches(self, pages: int, page_size: int) -> list[LayerCache]:
        """See Model.new_caches."""
        return [self.ops.new_cache(self._spec, pages, page_size) for _ in range(self.kv_shape[0])]

    def forward(self, step: ModelInput, caches: list[LayerCache]) -> Tensor:
        """See Model.forward."""
        self._attention.bind(caches, step.context)
        try:
            out = self.hf(
                input_ids=step.token_ids.unsqueeze(0),
                position_ids=step.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=step.logit_rows,
            )
        finally:
            self._attention.bind([], None)
        return out.logits[0].float()


class _QuantizedModule(nn.Module):
    """A quantized layer in the place of an nn.Linear."""

    def __init__(self, linear: LinearLayer, out_features: int) -> None:
        super().__init__()
        self.linear = linear
        self.out_features = out_features

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        return self.linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def load_transformers_model(config: EngineConfig) -> tuple[Model, dict[str, str]]:
    """Load the architecture of ``config`` through transformers; returns it and rows of the start-up table.

    Raises ``model_unsupported`` when its attention cannot be replaced, ``remote_code`` when it needs its own Python.
    """
    from transformers import AutoModelForCausalLM

    name = f"aiakq_paged_{next(_numbers)}"
    weights = None
    if config.spec is not None and config.load.load_format != "dummy":
        weights = open_weights(config)
    ops = operations(config) if weights is None else weights.ops
    attention = _AttentionFunction(ops)
    _register(name, attention)
    hf_config = _hf_config(config)
    hf_config._attn_implementation = name
    if hasattr(hf_config, "quantization_config"):
        # transformers would hand the quantized layers to another library; we put our own in their place.
        del hf_config.quantization_config
    options: dict[str, Any] = {
        "dtype": config.device.dtype,
        "attn_implementation": name,
        "trust_remote_code": config.load.trust_remote_code,
    }
    try:
        if config.load.load_format == "dummy":
            torch.manual_seed(config.load.seed)
            hf: Any = AutoModelForCausalLM.from_config(hf_config, **options)
            differences: list[Difference] = []
        else:
            with _without_load_report():
                loaded = _load(hf_config, config, options)
            hf, differences = loaded[0], _differences(*loaded)
    except ValueError as failure:
        raise _unsupported(config, str(failure).strip().splitlines()[0]) from None
    if not _attention_replaceable(hf):
        raise _unsupported(config, "transformers offers no way to replace its attention")
    linear_layers = f"{sum(isinstance(m, nn.Linear) for m in hf.modules())} x w16: torch"
    if weights is not None:
        replaced = _replace_quantized(hf, weights)
        linear_layers = describe_linear_layers(ops)
        differences = [each for each in differences if each.name not in replaced]
    if problem := refusal(str(config.load.path), differences):
        raise problem
    model = TransformersModel(hf.to(config.device.device).eval(), attention, ops, config)
    text = config.model
    attention.layer(text.num_heads, text.num_kv_heads, text.head_dim, text.head_dim**-0.5, None)
    ops.sampling()
    return model, describe_operations(ops) | {"linear layers": f"{linear_layers} (inside transformers)"}


def _hf_config(config: EngineConfig) -> Any:
    """The configuration as transformers' class of it, from what aiakq made of config.json (see overrides.py)."""
    from transformers import CONFIG_MAPPING, AutoConfig

    raw = dict(config.model.raw)
    if "auto_map" in raw and not config.load.trust_remote_code:
        raise error("remote_code", path=config.load.path)
    try:
        if "auto_map" in raw:
            family: Any = type(AutoConfig.from_pretrained(config.load.path, trust_remote_code=True))
        else:
            family = CONFIG_MAPPING[str(raw.get("model_type"))]
        return family.from_dict(raw)
    except KeyError:
        raise _unsupported(config, f"transformers does not know the model type {raw.get('model_type')!r}") from None
    except ValueError as failure:
        raise _unsupported(config, str(failure).splitlines()[0]) from None


def _load(hf_config: Any, config: EngineConfig, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The model and what transformers says of the loading. It reads safetensors itself; others aiakq reads for it."""
    from transformers import AutoModelForCausalLM

    checkpoint = Checkpoint.open(
        config.load.path, config.load.load_format, config.load.ignore_patterns, config.model.raw
    )
    common = {"config": hf_config, "output_loading_info": True, "ignore_mismatched_sizes": True, **options}
    own = all(info.file.endswith(".safetensors") for info in checkpoint.inventory.values())
    if own and not config.load.ignore_patterns:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            config.load.path, local_files_only=True, use_safetensors=True, **common
        )
        return loaded
    with torch.device("meta"):
        family = type(AutoModelForCausalLM.from_config(hf_config, **options))
    common.pop("trust_remote_code")
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.inventory}
    return family.from_pretrained(None, state_dict=tensors, **common)


def _differences(hf: Any, info: Mapping[str, Any]) -> list[Difference]:
    """What transformers missed in the checkpoint, and what had another shape."""
    shapes = {name: tuple(parameter.shape) for name, parameter in hf.state_dict().items()}
    found = [Difference(name, "-", str(list(shapes.get(name, ())))) for name in sorted(info["missing_keys"])]
    for name, stored, expected in sorted(info["mismatched_keys"]):
        found.append(Difference(name, str(list(stored)), str(list(expected))))
    return found


@contextlib.contextmanager
def _without_load_report() -> Iterator[None]:
    """Keep transformers from listing quantized tensors as missing and unexpected: we judge that ourselves."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _register(name: str, attention: _AttentionFunction) -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, attention)
    # Paged attention masks by position itself: no mask is made.
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)


def _attention_replaceable(hf: Any) -> bool:
    """Whether the class takes its attention from the registry, for every layer."""
    supported = getattr(hf, "_supports_attention_backend", False)
    layers = [module for module in hf.modules() if hasattr(module, "layer_idx")]
    return bool(supported and layers)


def _unsupported(config: EngineConfig, reason: str) -> Exception:
    reason = reason.rstrip(".")
    return error("model_unsupported", architecture=config.model.architecture, reason=reason, known=FAMILIES)


def _replace_quantized(hf: Any, weights: CheckpointWeights) -> set[str]:
    """Replace the linear layers that the checkpoint holds quantized. Returns the names of the tensors replaced."""
    left = set(weights.checkpoint.quantized_linears())
    prefix = f"{hf.base_model_prefix}."
    replaced = set()
    for name, module in list(hf.named_modules()):
        stored = name if name in left else name.removeprefix(prefix)
        if stored in left and isinstance(module, nn.Linear):
            linear = weights.linear(stored, module.out_features, module.in_features, bias=module.bias is not None)
            hf.set_submodule(name, _QuantizedModule(linear, module.out_features))
            left.remove(stored)
            replaced |= {f"{name}.weight", f"{name}.bias"}
    if left:
        reason = f"there is no place for the quantized layer {min(left)}"
        raise error("tensor_mismatch", path=weights.checkpoint.path, reason=reason)
    return replaced
