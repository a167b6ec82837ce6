"""EngineConfig: the engine's arguments, checked, with every choice made that needs no loaded model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from aiakq.arguments.server import checked
from aiakq.errors import error
from aiakq.formats import records_method
from aiakq.formats.hub import resolve_model
from aiakq.formats.quantization_config import read_spec
from aiakq.runtime.config.compilation import Capture
from aiakq.runtime.config.device import pick_device, pick_dtype, pick_kv_dtype
from aiakq.runtime.config.hf_config import default_sampling, generation_config, model_config, most_new_tokens
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.text.tokenizer import TokenizerSource
from aiakq.spec import QuantSpec, canonical_method


@dataclass(frozen=True)
class EngineConfig:
    """Everything the engine was asked for, with every choice that needs no loaded model already made.

    dtype_reason    why this dtype was picked, for the start-up table.
    kv_dtype        of keys and values in the cache.
    fit_model_len   whether max_model_len is lowered to what fits into memory.
    long_prompt     tokens beyond which a prompt is long; 0: none is. long_chunk: most tokens of such a one in a step.
    sampling        default sampling values from the generation config.
    max_new_tokens  limit of every answer, from there too.
    """

    model: Path
    load_format: str
    ignore_patterns: tuple[str, ...]
    tokenizer: TokenizerSource
    hf: ModelConfig
    spec: QuantSpec | None
    device: torch.device
    dtype: torch.dtype
    dtype_reason: str
    kv_dtype: torch.dtype
    max_model_len: int
    fit_model_len: bool
    page_size: int
    memory_fraction: float
    num_pages: int | None
    prefix_caching: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool
    partial_prefills: int
    long_prefills: int
    long_prompt: int
    long_chunk: int
    by_priority: bool
    delay_factor: float
    async_scheduling: bool
    max_logprobs: int
    seed: int
    model_impl: str
    dequantize: str
    cpu_math: str
    capture: Capture
    trust_remote_code: bool
    eos_token_ids: tuple[int, ...]
    sampling: Mapping[str, Any]
    max_new_tokens: int | None

    @staticmethod
    def from_args(given: Mapping[str, Any]) -> EngineConfig:
        """Check arguments (see args.py), find the model and settle what depends on its config.

        Raises AiakqError: usage, bad_option, model_*, quantization_mismatch, device.
        """
        args = checked({k: v for k, v in given.items() if v is not None}, server=True)
        if not args["model"]:
            raise error("usage", reason="No model is given.", hint="Name a folder or a hub model with --model.")
        ignored = tuple(args["ignore_patterns"] or ())
        weights = "none" if args["load_format"] == "dummy" else args["load_format"]
        path = resolve_model(args["model"], args["revision"], args["download_dir"], weights, ignored)
        raw = model_config(path, args)
        spec = read_spec(path, raw)
        _check_quantization(args["quantization"], spec)
        hf = ModelConfig.from_hf(raw)
        max_model_len = _context(args, hf)
        if args["disable_sliding_window"]:
            hf = replace(hf, sliding_windows=(None,) * hf.num_layers)
        device = pick_device(args["device"])
        dtype, reason = pick_dtype(args["dtype"], raw, device)
        on_cpu = device.type == "cpu"
        generation = generation_config(path, args)
        return EngineConfig(
            model=path,
            load_format=args["load_format"],
            ignore_patterns=ignored,
            tokenizer=_tokenizer_source(args, path),
            hf=hf,
            spec=spec,
            device=device,
            dtype=dtype,
            dtype_reason=reason,
            kv_dtype=pick_kv_dtype(args["kv_cache_dtype"], dtype, device),
            max_model_len=max_model_len,
            fit_model_len=args["max_model_len"] == "auto",
            page_size=args["block_size"],
            memory_fraction=args["gpu_memory_utilization"],
            num_pages=args["num_gpu_blocks_override"],
            prefix_caching=args["enable_prefix_caching"],
            max_num_seqs=args["max_num_seqs"] or (128 if on_cpu else 256),
            max_num_batched_tokens=_budget(args, max_model_len, on_cpu),
            chunked_prefill=args["enable_chunked_prefill"],
            **_prefills(args, max_model_len),
            by_priority=args["scheduling_policy"] == "priority",
            delay_factor=args["scheduler_delay_factor"],
            async_scheduling=not on_cpu if args["async_scheduling"] is None else args["async_scheduling"],
            max_logprobs=hf.vocab_size if args["max_logprobs"] == -1 else args["max_logprobs"],
            seed=args["seed"],
            model_impl=args["model_impl"],
            dequantize=args["dequantize"],
            cpu_math=args["cpu_math"],
            capture=Capture.of(args["compilation_config"], args["max_seq_len_to_capture"], args["enforce_eager"]),
            trust_remote_code=args["trust_remote_code"],
            eos_token_ids=_eos_ids(generation, raw),
            sampling=default_sampling(generation),
            max_new_tokens=most_new_tokens(generation),
        )


def _context(args: Mapping[str, Any], hf: ModelConfig) -> int:
    """Tokens of prompt plus output; with auto, what memory may still lower. Raises ``bad_option``."""
    limit, whose = hf.max_position, "the model's own limit"
    hint = "Positions beyond it were never trained."
    windows = [window for window in hf.sliding_windows if window is not None]
    if args["disable_sliding_window"] and windows and min(windows) < limit:
        limit, whose = min(windows), "the model's window"
        hint = "Without --disable-sliding-window more are possible."
    wanted = args["max_model_len"]
    if wanted in (None, "auto"):
        return limit
    if wanted > limit:
        expected = f"at most {limit}, {whose}"
        raise error("bad_option", option="--max-model-len", value=wanted, expected=expected, hint=hint)
    return wanted


def _budget(args: Mapping[str, Any], max_model_len: int, on_cpu: bool) -> int:
    """Tokens per step. Raises ``option_conflict`` where a prompt must fit into one and does not."""
    budget = args["max_num_batched_tokens"] or (512 if on_cpu else 8192)
    if args["enable_chunked_prefill"] or budget >= max_model_len:
        return budget
    if args["max_num_batched_tokens"]:
        raise error(
            "option_conflict",
            option="--no-enable-chunked-prefill",
            other=f"--max-num-batched-tokens {budget}",
            reason=f"a prompt may have {max_model_len} tokens and must then fit into one step",
            hint=f"Raise it to {max_model_len}, or lower --max-model-len.",
        )
    return max_model_len


def _prefills(args: Mapping[str, Any], max_model_len: int) -> dict[str, int]:
    """How prompts share a step. Raises ``option_conflict`` for numbers that do not go together."""
    together, long = args["max_num_partial_prefills"], args["max_long_partial_prefills"]
    chunk = args["long_prefill_token_threshold"]
    if together > 1 and not args["enable_chunked_prefill"]:
        raise error(
            "option_conflict",
            option=f"--max-num-partial-prefills {together}",
            other="--no-enable-chunked-prefill",
            reason="prompts are then never split",
            hint="Leave one out.",
        )
    if long > together:
        raise error(
            "option_conflict",
            option=f"--max-long-partial-prefills {long}",
            other=f"--max-num-partial-prefills {together}",
            reason="long prompts are some of all",
            hint=f"At most {together} is possible.",
        )
    # vLLM's share of the context where several prompts run together.
    share = int(max_model_len * 0.04) if together > 1 else 0
    return {"partial_prefills": together, "long_prefills": long, "long_prompt": chunk or share, "long_chunk": chunk}


def _tokenizer_source(args: Mapping[str, Any], model: Path) -> TokenizerSource:
    """Where the tokenizer comes from. A revision of its own needs a hub name: that of the tokenizer, or the model's."""
    name, revision = args["tokenizer"], args["tokenizer_revision"]
    if name or revision:
        revision = revision or (args["revision"] if name in (None, args["model"]) else None)
        folder = resolve_model(name or args["model"], revision, args["download_dir"], weights="none")
    else:
        folder = model
    extension = args["tokenizer_extension_path"]
    if extension is not None and not (Path(extension).is_absolute() and Path(extension).is_file()):
        raise error(
            "bad_option",
            option="--tokenizer-extension-path",
            value=extension,
            expected="the absolute path of a Python file",
            hint="It is run as code, so it has to be named exactly.",
        )
    return TokenizerSource(
        str(folder), args["trust_remote_code"], args["tokenizer_mode"], extension, args["skip_tokenizer_init"]
    )


def _check_quantization(wanted: str | None, spec: QuantSpec | None) -> None:
    if wanted is None or wanted.lower() == "none":
        return
    method = canonical_method(wanted)
    found = spec.method if spec else "unquantized weights"
    # Some formats do not record the method; awq and gptq both mean their 4-bit weights.
    same = found == method or (spec is not None and not records_method(spec.format) and {found, method} <= _INT4)
    if not same:
        raise error("quantization_mismatch", wanted=wanted, found=found)


_INT4 = {"awq", "gptq"}


def _eos_ids(generation: Mapping[str, Any], raw: Mapping[str, Any]) -> tuple[int, ...]:
    value = generation.get("eos_token_id", raw.get("eos_token_id"))
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
