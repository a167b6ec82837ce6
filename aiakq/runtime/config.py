"""Settled configuration: ModelConfig from config.json, EngineConfig from arguments. Frozen once made.

``ModelConfig.from_hf`` is the one place where the spellings of Hugging Face configs are told apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from aiakq.errors import error
from aiakq.formats.checkpoint import read_json, read_spec, resolve_model
from aiakq.kernels.cpu import library
from aiakq.runtime.args import checked
from aiakq.runtime.capture import Capture
from aiakq.spec import QuantSpec, canonical_method

DTYPES = {
    "half": torch.float16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
    "fp32": torch.float32,
}
#: Of keys and values in the cache.
KV_DTYPES = DTYPES | {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
#: Ten times more than any model has; what is kept per layer must not fill the memory before a weight is looked at.
_MAX_LAYERS = 10_000


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of a decoder-only model, whatever its config.json calls them.

    sliding_windows  per layer: positions a query sees, or None for all.
    rope             the rotary parameters (rope_type, rope_theta, ...); empty for learned positions.
    raw              config.json as read, for what only one family needs.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    activation: str
    tie_word_embeddings: bool
    sliding_windows: tuple[int | None, ...]
    rope: Mapping[str, Any]
    raw: Mapping[str, Any] = field(repr=False)

    @staticmethod
    def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json. Raises ``model_malformed`` for absent or impossible values."""
        try:
            return _model_config(raw)
        except (
            TypeError,
            ValueError,
            KeyError,
            IndexError,
            AttributeError,
            OverflowError,
            ZeroDivisionError,
        ) as problem:
            # Configs come from strangers, and any value may be of any kind.
            reason = f"{type(problem).__name__}: {problem}"
            raise error("model_malformed", file="config.json", reason=reason[:200]) from problem


def _model_config(raw: Mapping[str, Any]) -> ModelConfig:
    def number(*names: str, default: int | None = None) -> int:
        for name in names:
            value = raw.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
                    raise error("model_malformed", file="config.json", reason=f"{name} is {value!r:.64}")
                return value
        if default is None:
            raise error("model_malformed", file="config.json", reason=f"{names[0]} is missing")
        return default

    architecture = first_architecture(raw)
    hidden = number("hidden_size", "n_embd", "d_model")
    heads = number("num_attention_heads", "n_head", "num_heads")
    layers = number("num_hidden_layers", "n_layer", "num_layers")
    if layers > _MAX_LAYERS:
        raise error("model_malformed", file="config.json", reason=f"it claims {layers} layers")
    kv_heads = number("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise error(
            "model_malformed",
            file="config.json",
            reason=f"{heads} attention heads cannot share {kv_heads} key-value heads",
        )
    return ModelConfig(
        architecture=architecture,
        vocab_size=number("vocab_size"),
        hidden_size=hidden,
        intermediate_size=number("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=number("head_dim", default=hidden // heads),
        max_position=number("max_position_embeddings", "n_positions", "max_seq_len", default=2048),
        norm_eps=float(raw.get("rms_norm_eps") or raw.get("layer_norm_eps") or 1e-5),
        activation=str(raw.get("hidden_act") or raw.get("activation_function") or "silu"),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", architecture == "OPTForCausalLM")),
        sliding_windows=_sliding_windows(raw, layers),
        rope=_rope(raw),
        raw=raw,
    )


def first_architecture(raw: Mapping[str, Any]) -> str:
    """The class that a config.json names, ``unnamed`` if none. Raises ``model_malformed``."""
    names = raw.get("architectures") or ["unnamed"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise error("model_malformed", file="config.json", reason="architectures is no list of names")
    return names[0]


def _sliding_windows(raw: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Per-layer windows: ``layer_types`` if given, else Qwen's ``use_sliding_window``, else one for all."""
    window = raw.get("sliding_window")
    if not window or raw.get("use_sliding_window") is False:
        return (None,) * layers
    kinds = raw.get("layer_types")
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if "use_sliding_window" in raw:  # Qwen2 and Qwen3: only from max_window_layers on
        first = raw.get("max_window_layers", 0)
        return tuple(window if layer >= first else None for layer in range(layers))
    return (window,) * layers


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters from the transformers 5 form (rope_parameters) or the older rope_theta + rope_scaling."""
    if raw.get("rope_parameters"):
        return dict(raw["rope_parameters"])
    rope = {"rope_theta": raw.get("rope_theta", 10000.0), "rope_type": "default"}
    scaling = raw.get("rope_scaling")
    if scaling:
        rope.update(scaling)
        rope["rope_type"] = scaling.get("rope_type", scaling.get("type", "default"))
    return rope


@dataclass(frozen=True)
class EngineConfig:
    """Everything the engine was asked for, with every choice that needs no loaded model already made.

    dtype_reason  why this dtype was picked, for the start-up table.
    kv_dtype      of keys and values in the cache.
    sampling      default sampling values from generation_config.json.
    """

    model: Path
    tokenizer: Path
    hf: ModelConfig
    spec: QuantSpec | None
    device: torch.device
    dtype: torch.dtype
    dtype_reason: str
    kv_dtype: torch.dtype
    max_model_len: int
    page_size: int
    memory_fraction: float
    num_pages: int | None
    prefix_caching: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool
    max_logprobs: int
    seed: int
    load_format: str
    model_impl: str
    dequantize: str
    cpu_math: str
    capture: Capture
    trust_remote_code: bool
    eos_token_ids: tuple[int, ...]
    sampling: Mapping[str, Any]

    @staticmethod
    def from_args(given: Mapping[str, Any]) -> EngineConfig:
        """Check arguments (see args.py), find the model and settle what depends on its config.

        Raises AiakqError: usage, bad_option, model_*, quantization_mismatch, device.
        """
        args = checked({k: v for k, v in given.items() if v is not None}, server=True)
        if not args["model"]:
            raise error("usage", reason="No model is given.", hint="Name a folder or a hub model with --model.")
        path = resolve_model(args["model"], args["revision"])
        raw = read_config(path, "config.json")
        spec = read_spec(path, raw)
        _check_quantization(args["quantization"], spec)
        hf = ModelConfig.from_hf(raw)
        device = pick_device(args["device"])
        dtype, reason = pick_dtype(args["dtype"], raw, device)
        on_cpu = device.type == "cpu"
        max_model_len = args["max_model_len"] or hf.max_position
        if max_model_len > hf.max_position:
            raise error(
                "bad_option",
                option="--max-model-len",
                value=max_model_len,
                expected=f"at most {hf.max_position}, the model's own limit",
                hint="Positions beyond it were never trained.",
            )
        budget = args["max_num_batched_tokens"] or (2048 if on_cpu else 8192)
        if not args["enable_chunked_prefill"] and budget < max_model_len:
            if args["max_num_batched_tokens"]:
                raise error(
                    "option_conflict",
                    option="--no-enable-chunked-prefill",
                    other=f"--max-num-batched-tokens {budget}",
                    reason=f"a prompt may have {max_model_len} tokens and must then fit into one step",
                    hint=f"Raise it to {max_model_len}, or lower --max-model-len.",
                )
            budget = max_model_len
        generation = read_config(path, "generation_config.json", missing_ok=True)
        return EngineConfig(
            model=path,
            tokenizer=resolve_model(args["tokenizer"], None) if args["tokenizer"] else path,
            hf=hf,
            spec=spec,
            device=device,
            dtype=dtype,
            dtype_reason=reason,
            kv_dtype=_pick_kv_dtype(args["kv_cache_dtype"], dtype, device),
            max_model_len=max_model_len,
            page_size=args["block_size"],
            memory_fraction=args["gpu_memory_utilization"],
            num_pages=args["num_gpu_blocks_override"],
            prefix_caching=args["enable_prefix_caching"],
            max_num_seqs=args["max_num_seqs"] or (128 if on_cpu else 256),
            max_num_batched_tokens=budget,
            chunked_prefill=args["enable_chunked_prefill"],
            max_logprobs=args["max_logprobs"],
            seed=args["seed"],
            load_format=args["load_format"],
            model_impl=args["model_impl"],
            dequantize=args["dequantize"],
            cpu_math=args["cpu_math"],
            capture=Capture.of(args["compilation_config"], args["max_seq_len_to_capture"], args["enforce_eager"]),
            trust_remote_code=args["trust_remote_code"],
            eos_token_ids=_eos_ids(generation, raw),
            sampling=_default_sampling(generation) if args["generation_config"] == "auto" else {},
        )


def read_config(path: Path, name: str, missing_ok: bool = False) -> dict[str, Any]:
    """A JSON file of a model folder. Raises ``model_incomplete`` or ``model_malformed``."""
    if not (path / name).exists():
        if missing_ok:
            return {}
        raise error("model_incomplete", path=path, missing=f"{name} is missing")
    return read_json(path / name, name)


def _check_quantization(wanted: str | None, spec: QuantSpec | None) -> None:
    if wanted is None or wanted.lower() == "none":
        return
    method = canonical_method(wanted)
    found = spec.method if spec else "unquantized weights"
    # compressed-tensors does not record the method, so awq and gptq both mean its 4-bit weights.
    same = found == method or (spec is not None and spec.format == "compressed-tensors" and {found, method} <= _INT4)
    if not same:
        raise error("quantization_mismatch", wanted=wanted, found=found)


_INT4 = {"awq", "gptq"}


def pick_device(name: str) -> torch.device:
    """The device an option names. Raises ``device``."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise error(
            "device",
            device="cuda",
            reason="torch finds no NVIDIA GPU",
            hint="Use --device cpu, or install a CUDA torch.",
        )
    return torch.device("cuda" if name == "cuda" or (name == "auto" and available) else "cpu")


def _cpu_has_bf16() -> bool:
    """Whether this processor multiplies bf16 natively (AVX-512 BF16 or AMX)."""
    checks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, check, lambda: False)() for check in checks)


def pick_dtype(wanted: str, raw: Mapping[str, Any], device: torch.device) -> tuple[torch.dtype, str]:
    """The arithmetic for what is not quantized, and why."""
    if wanted != "auto":
        return DTYPES[wanted], "asked for"
    stored = DTYPES.get(
        str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."), torch.float32
    )
    if device.type == "cuda":
        if stored == torch.float32:
            return torch.float16, "the checkpoint is float32; 16 bits are twice as fast on a GPU"
        return stored, "the checkpoint's own"
    if library.unavailable() is None:
        return torch.float32, "the native kernels compute in float32; weights stay as they are stored"
    if _cpu_has_bf16() and stored != torch.float32:
        return torch.bfloat16, "this processor multiplies bf16 natively"
    return torch.float32, "fastest and most exact on this processor, which has no bf16 arithmetic"


def _pick_kv_dtype(wanted: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Of keys and values. Raises ``bad_option`` where the GPU does not know it."""
    if wanted.startswith("fp8") and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise error(
            "bad_option",
            option="--kv-cache-dtype",
            value=wanted,
            expected="what this GPU can store",
            hint="GPUs before compute capability 8.9 have no floats of 8 bits: int8 takes as little memory.",
        )
    return KV_DTYPES.get(wanted, dtype)


def _eos_ids(generation: Mapping[str, Any], raw: Mapping[str, Any]) -> tuple[int, ...]:
    value = generation.get("eos_token_id", raw.get("eos_token_id"))
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _default_sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling values of generation_config.json that SamplingParams knows, under its names."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: generation[name] for name in names if generation.get(name) is not None}
