"""Runs any other decoder-only architecture through its transformers class, with paged attention.

transformers allows replacing a model's attention by name. We register one attention function per loaded model, which
writes the step's keys and values into the pages of its layer and attends over them; the rest of the model is unchanged.
Models whose attention cannot be replaced, or that keep other state between tokens, are refused.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from aiakq.errors import AiakqError, first_line
from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.attention import PagedAttention
from aiakq.kernels.ops.linear import ROW_MULTIPLE
from aiakq.kernels.types import AttentionContext, AttentionSpec
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.device_memory import is_out_of_memory
from aiakq.runtime.hf import attention_probe
from aiakq.runtime.hf.quantized_modules import QuantizedModule, replace_quantized
from aiakq.runtime.hf.transformers_checkpoint import MissedTensors, load_checkpoint
from aiakq.runtime.hf.transformers_config import has_class, read_transformers_config, rope_refusal, unsupported
from aiakq.runtime.inspect.description import describe_linear_layers, describe_model_part, describe_operations
from aiakq.runtime.layers.attention import LayerCache
from aiakq.runtime.loader.opening import open_weights, operations
from aiakq.runtime.models.interface import Model, ModelInput

#: Prefix of the names of our attention functions in transformers' registry, followed by a number.
_PREFIX = "aiakq_paged_"
_numbers = itertools.count()
_NOT_REPLACEABLE = "transformers offers no way to replace its attention"

#: Arguments of attention functions that have no effect on the result in evaluation mode.
_WITHOUT_EFFECT = frozenset(
    {"position_ids", "position_embeddings", "cache_position", "use_cache", "dropout", "output_attentions"}
    | {"output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep", "is_causal"}
)


#: Values of ``layer_types`` that paged attention supports.
_PAGED_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})


class _UnsupportedAttentionError(Exception):
    """A model needs a feature of its attention that paged attention does not support; the message names it."""


@dataclass
class _Trace:
    """Attention calls of a model in one forward pass.

    specs  layer -> parameters of its attention.
    masks  mask functions from which transformers would have created masks.
    """

    specs: dict[int, AttentionSpec] = field(default_factory=dict)
    masks: list[attention_probe.MaskFunction] = field(default_factory=list)


class _AttentionFunction:
    """The attention function of one loaded model; ``bind`` sets the locations of the step's tokens in the KV cache."""

    def __init__(self, ops: Ops, chunk_sizes: Sequence[int | None]) -> None:
        """chunk_sizes: AttentionSpec.chunk_size of each layer, which transformers expresses only in its mask."""
        self._ops = ops
        self._chunk_sizes = chunk_sizes
        self._bound: dict[int, PagedAttention] = {}
        self._caches: list[LayerCache] = []
        self._context: AttentionContext | None = None
        self._called: set[int] = set()
        self._trace: _Trace | None = None

    def prepare(self, specs: Mapping[int, AttentionSpec]) -> None:
        """Select the implementation of attention for each layer of the model."""
        self._bound = {number: self._ops.attention(spec) for number, spec in specs.items()}

    def bind(self, caches: list[LayerCache], context: AttentionContext | None) -> None:
        self._caches, self._context = caches, context
        self._called.clear()

    def trace(self, hf: Any, device: torch.device) -> _Trace:
        """Record the attention calls of ``hf``, which return zeros meanwhile. Raises _UnsupportedAttentionError."""
        self._trace = new_trace = _Trace()
        self._called.clear()
        try:
            # Given a mask, transformers does not try to detect packed sequences.
            ids = torch.arange(8, device=device).unsqueeze(0) % hf.get_input_embeddings().num_embeddings
            with torch.inference_mode():
                hf(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        finally:
            self._trace = None
        return new_trace

    def mask(self, *args: object, **kwargs: Any) -> None:
        """Implement transformers' mask interface: no mask is created, since paged attention masks by position."""
        if self._trace is not None and kwargs.get("mask_function") is not None:
            self._trace.masks.append(kwargs["mask_function"])

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        """query [1, H, T, D], key [1, Hkv, T, D] and value [1, Hkv, T, value_dim] -> [1, T, H, value_dim].

        softcap  see AttentionSpec.
        s_aux    [H], the sinks of AttentionSpec.
        Raises _UnsupportedAttentionError.
        """
        number = int(module.layer_idx)  # type: ignore[arg-type]
        _check_call(attention_mask, kwargs)
        if number in self._called:
            raise _UnsupportedAttentionError(f"layer {number} calls attention twice")
        self._called.add(number)
        if self._trace is not None:
            self._trace.specs[number] = AttentionSpec(
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=query.shape[3],
                scale=scaling if scaling is not None else query.shape[3] ** -0.5,
                sliding_window=sliding_window,
                value_dim=value.shape[3],
                chunk_size=self._chunk_sizes[number] if number < len(self._chunk_sizes) else None,
                softcap=softcap or 0.0,
                sinks=None if s_aux is None else s_aux.detach().clone(),
            )
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
        assert self._context is not None, "the model was called outside a step"
        cache = self._caches[number]
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        layer = self._bound[number]
        layer.write(k, v, cache, self._context.slots)
        return layer.attend(q.contiguous(), cache, self._context).unsqueeze(0), None


def _check_call(mask: Tensor | None, arguments: dict[str, object]) -> None:
    """Raise _UnsupportedAttentionError for arguments that paged attention does not support."""
    unsupported = [name for name, value in arguments.items() if value is not None and name not in _WITHOUT_EFFECT]
    if unsupported:
        raise _UnsupportedAttentionError(
            f"its attention uses {min(unsupported)}, which paged attention does not support"
        )
    if mask is not None:
        raise _UnsupportedAttentionError("it creates its own attention mask")


def _chunk_sizes(hf_config: Any) -> list[int | None]:
    """Return the chunk size of each layer with chunked attention; None for other layers."""
    kinds = getattr(hf_config.get_text_config(), "layer_types", None) or []
    return [_chunk_size(hf_config) if kind == "chunked_attention" else None for kind in kinds]


def _chunk_size(hf_config: Any) -> int | None:
    size = getattr(hf_config.get_text_config(), "attention_chunk_size", None)
    return size if isinstance(size, int) and size > 0 else None


class TransformersModel(Model):
    """A transformers causal language model behind the interface decoder.Model."""

    def __init__(self, hf: Any, attention: _AttentionFunction, trace: _Trace, ops: Ops, config: EngineConfig) -> None:
        """Raise _UnsupportedAttentionError. The KV cache is sized by the traced attention calls, not by the config."""
        if not trace.specs:
            raise _UnsupportedAttentionError("none of its layers calls the attention that transformers lets us replace")
        self.hf, self.ops = hf, ops
        head = hf.get_output_embeddings()
        self._vocab_size = head.out_features if isinstance(head, QuantizedModule) else head.weight.shape[0]
        attention.prepare(trace.specs)
        # Layers without attention also have an entry in the list of caches.
        none = AttentionSpec(1, 1, 1, 1.0)
        self._specs = [trace.specs.get(number, none) for number in range(max(trace.specs) + 1)]
        self.sampler = ops.sampler()
        self.row_multiple, self.short_start = ROW_MULTIPLE, 0
        self.adapters = None
        self._attention = attention

    def state_bytes(self) -> int:
        """Return 0: models with states other than keys and values are refused."""
        return 0

    def mixture_elements(self) -> int:
        """Return 0: experts of transformers compute the rows of one after the other."""
        return 0

    def new_caches(self, pages: int, page_size: int, state_rows: int = 1) -> list[LayerCache]:
        """See Model.new_caches."""
        return [self.ops.new_cache(spec, pages, page_size) for spec in self._specs]

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """See Model.kv_bytes_per_token."""
        return sum(spec.cache_bytes(dtype) for spec in self._specs)

    @property
    def vocab_size(self) -> int:
        """See ``Model``."""
        return self._vocab_size

    def forward(self, step: ModelInput, caches: list[LayerCache]) -> Tensor:
        """Return logits [R, V] float32; see Model.forward."""
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
        logits: Tensor = out.logits[0]
        return logits.float()


def load_transformers_model(config: EngineConfig) -> tuple[Model, dict[str, str]]:
    """Load the model of ``config`` through transformers; return it and rows of the start-up table.

    Raises ``model_unsupported`` if its attention cannot be replaced, ``remote_code`` if it needs its own Python code.
    """
    from transformers import AutoModelForCausalLM

    name = f"{_PREFIX}{next(_numbers)}"
    weights = None
    if config.spec is not None and config.load.load_format != "dummy":
        weights = open_weights(config)
    ops = operations(config) if weights is None else weights.ops
    with _one_sentence(config):
        hf_config = read_transformers_config(config)
    if reason := _config_refusal(hf_config) or rope_refusal(config.model):
        raise unsupported(config, reason)
    attention = _AttentionFunction(ops, _chunk_sizes(hf_config))
    _register(name, attention)
    hf_config._attn_implementation = name
    if hasattr(hf_config, "quantization_config"):
        # transformers would use another library for the quantized layers; they are replaced with aiakq's.
        del hf_config.quantization_config
    beside_text: frozenset[str] = frozenset()
    options: dict[str, object] = {
        "dtype": config.device.dtype,
        "attn_implementation": name,
        "trust_remote_code": config.load.trust_remote_code,
    }
    with _one_sentence(config):
        if config.load.load_format == "dummy":
            torch.manual_seed(config.load.seed)
            hf: Any = AutoModelForCausalLM.from_config(hf_config, **options)
            missed = MissedTensors(str(config.load.path))
        else:
            hf, missed, beside_text = load_checkpoint(hf_config, config, options)
    if not _attention_replaceable(hf):
        raise unsupported(config, _NOT_REPLACEABLE)
    linear_layers = f"{sum(isinstance(m, nn.Linear) for m in hf.modules())} x w16: torch"
    replaced: set[str] = set()
    if weights is not None:
        replaced = replace_quantized(hf, weights)
        linear_layers = describe_linear_layers(ops)
    missed.check(replaced)
    with _one_sentence(config):
        hf = hf.to(config.device.device).eval()
        trace = attention.trace(hf, config.device.device)
        model = TransformersModel(hf, attention, trace, ops, config)
        _check_attention(model, trace, config)
    facts = describe_operations(ops) | {"linear layers": f"{linear_layers} (inside transformers)"}
    if beside_text:
        facts["model part"] = describe_model_part(beside_text, None)
    return model, facts


def refusal(config: EngineConfig) -> str | None:
    """Return why the model of ``config`` cannot run through transformers, as far as known without weights, or None."""
    try:
        with _one_sentence(config):
            hf_config = read_transformers_config(config)
    except AiakqError as problem:
        return str(problem.fields.get("reason") or problem)
    return unservable(hf_config, config.load.trust_remote_code)


def unservable(hf_config: Any, trust_remote_code: bool) -> str | None:
    """Return why a model with this config cannot run, as far as known without its weights; None if it may run."""
    from transformers import AutoModelForCausalLM

    if reason := _config_refusal(hf_config):
        return reason
    name = f"{_PREFIX}{next(_numbers)}"
    attention = _AttentionFunction(Ops(torch.device("cpu"), torch.float32), _chunk_sizes(hf_config))
    _register(name, attention)
    config = copy.deepcopy(hf_config)
    try:
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(config, attn_implementation=name, trust_remote_code=trust_remote_code)
    except Exception as problem:  # the class can be built with its own attention
        return f"{_NOT_REPLACEABLE} ({type(problem).__name__})"
    if not _attention_replaceable(hf):
        return _NOT_REPLACEABLE
    try:
        trace = attention.trace(hf.eval(), torch.device("meta"))
    except _UnsupportedAttentionError as problem:
        return str(problem)
    except Exception:  # some models do not run on the meta device: those that route tokens to experts
        return None
    layers = hf_config.get_text_config().num_hidden_layers
    return None if len(trace.specs) >= layers else f"only {len(trace.specs)} of its {layers} layers have attention"


def _config_refusal(hf_config: Any) -> str | None:
    """Return why its layers cannot run: some keep a state other than keys and values, or there is no class for them;
    else None."""
    if not has_class(hf_config):
        return f"transformers has no causal language model of the type {hf_config.model_type}"
    others = set(getattr(hf_config.get_text_config(), "layer_types", None) or ()) - _PAGED_LAYERS
    return f"it has layers of the type {min(others)}" if others else None


def _register(name: str, attention: _AttentionFunction) -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, attention.mask)


@contextlib.contextmanager
def _one_sentence(config: EngineConfig) -> Iterator[None]:
    """Turn any exception of transformers' or the model's code into ``model_unsupported`` with one sentence."""
    try:
        yield
    except AiakqError:
        raise
    except _UnsupportedAttentionError as problem:
        raise unsupported(config, str(problem)) from None
    except Exception as problem:
        if is_out_of_memory(problem):
            raise
        first = first_line(problem)[:200]
        if isinstance(problem, KeyError) and _PREFIX in first:  # the model looks up attention in its own table
            raise unsupported(config, _NOT_REPLACEABLE) from None
        raise unsupported(config, f"transformers raises {type(problem).__name__}: {first}") from None


def _check_attention(model: TransformersModel, trace: _Trace, config: EngineConfig) -> None:
    """Raise ``model_unsupported`` if the model gives other results with paged attention."""
    specs, chunk = trace.specs.values(), _chunk_size(model.hf.config) or 0
    if not all(attention_probe.is_mask_of(mask, specs, chunk) for mask in trace.masks):
        raise unsupported(config, "its attention mask is neither causal nor a sliding window")
    rounds = config.spec is not None and config.spec.activation_bits is not None
    comparison = attention_probe.compare(model, model.hf, config.device.device, rounds)
    if not comparison.is_same:
        reason = (
            f"with paged attention its log-probabilities differ from transformers' by {comparison.measured:.2g} nats"
        )
        raise unsupported(config, reason)


def _attention_replaceable(hf: Any) -> bool:
    """Whether the class takes the attention of every layer from the registry."""
    supported = getattr(hf, "_supports_attention_backend", False)
    layers = [module for module in hf.modules() if hasattr(module, "layer_idx")]
    return bool(supported and layers)
