"""SGLang's options (``python -m sglang.launch_server``, ``sglang serve``)."""

from __future__ import annotations

import json
from typing import Any

from aiakq.terminal.translation import sglang_without
from aiakq.terminal.translation.rules import (
    KEPT,
    LOST,
    Assumed,
    Changed,
    Rule,
    ServerProgram,
    Unavailable,
    WithoutEffect,
    ignored,
    kept,
)
from aiakq.terminal.translation.values import (
    NO_DRAFTS,
    files_model,
    json_object,
    kv_cache,
    mapped,
    number,
    quantization,
    reasoning_parser,
    tool_parser,
)

VERSION = "0.5.23"


def _quantization(value: str) -> object:
    """The names of schemes that SGLang reads from compressed-tensors, and of its own rounding at load."""
    if value in ("w8a8_int8", "w8a8_fp8", "auto-round-int8"):
        raise WithoutEffect("the checkpoint's own config says how it is quantized")
    return quantization({"modelopt_fp8": "modelopt"}.get(value, value))


def _drafts(value: str) -> object:
    methods = {"EAGLE3": "eagle3", "NGRAM": "ngram", "STANDALONE": "draft_model", "NEXTN": "mtp"}
    if value.upper() not in methods:
        raise WithoutEffect(NO_DRAFTS)
    return methods[value.upper()]


def _template(value: str) -> object:
    """SGLang's own names of templates are not files."""
    if not any(mark in value for mark in (".", "/", "{")):
        raise Unavailable(f"{value} is a template of SGLang's own; give a file, or the model's is used")
    return value


def _chunk(value: str) -> object:
    if value.startswith("-"):
        raise WithoutEffect(
            "whole prompts are computed if they fit into a step; --no-enable-chunked-prefill asks for it"
        )
    return value


def _pages(value: str) -> object:
    found = number(value)
    return str(-(-int(str(found)) // 16))


def _adapters(value: str) -> object:
    if value.startswith("{"):
        found: Any = json_object(value)
        return json.dumps({"name": found["lora_name"], "path": found["lora_path"]})
    return value if "=" in value else f"{value}={value}"


def _priority(value: str) -> object:
    raise Changed(value, "here the lowest number is served first, as with --schedule-low-priority-values-first")


def _nodes(value: str) -> object:
    if value == "1":
        raise WithoutEffect("it is the default")
    raise Unavailable("one command starts the ranks of several machines: --distributed-executor-backend ray")


_SPEED = "it changes speed or memory only; drafts never change an answer here"
RULES: tuple[Rule, ...] = (
    # --- the model ----------------------------------------------------------------------------------------------------
    kept("MODEL", "model-path model", files_model),
    kept("--tokenizer", "tokenizer-path"),
    kept("--tokenizer-mode", "tokenizer-mode"),
    kept("--skip-tokenizer-init", "skip-tokenizer-init?"),
    kept(
        "--load-format",
        "load-format",
        mapped(
            {
                "auto": "auto",
                "safetensors": "safetensors",
                "pt": "pt",
                "npcache": "pt",
                "dummy": "dummy",
                "layered": "auto",
            }
            | {"fastsafetensors": "safetensors", "instanttensor": "safetensors"},
            "weights are read from safetensors and torch files; give a folder in the format of Hugging Face",
        ),
    ),
    kept("--trust-remote-code", "trust-remote-code?"),
    kept("--max-model-len", "context-length"),
    kept("--task", "is-embedding?", value="embed"),
    kept("--revision", "revision"),
    kept("--download-dir", "download-dir"),
    kept(
        "--model-impl",
        "model-impl impl",
        mapped(
            {"auto": "auto", "sglang": "aiakq", "transformers": "transformers"},
            "there are auto, aiakq and transformers",
        ),
    ),
    kept("--hf-overrides", "json-model-override-args =", json_object),
    kept("--dtype", "dtype"),
    kept("--quantization", "quantization", _quantization),
    kept("--kv-cache-dtype", "kv-cache-dtype", kv_cache({"bf16": "bfloat16"})),
    kept("--device", "device"),
    # --- HTTP ---------------------------------------------------------------------------------------------------------
    kept("--host", "host"),
    kept("--port", "port"),
    kept("--root-path", "fastapi-root-path"),
    kept("--api-key", "api-key"),
    kept("--admin-api-key", "admin-api-key", also=("--enable-admin-routes",)),
    kept("--served-model-name", "served-model-name"),
    kept("--ssl-keyfile", "ssl-keyfile"),
    kept("--ssl-certfile", "ssl-certfile"),
    kept("--ssl-ca-certs", "ssl-ca-certs"),
    kept("--enable-ssl-refresh", "enable-ssl-refresh?"),
    kept("--chat-template", "chat-template", _template),
    kept("--default-chat-template-kwargs", "default-chat-template-kwargs", json_object),
    kept("--tool-call-parser", "tool-call-parser", tool_parser, also=("--enable-auto-tool-choice",)),
    kept("--reasoning-parser", "reasoning-parser", reasoning_parser),
    kept("--generation-config", "sampling-defaults", mapped({"model": "auto", "openai": "vllm"}, "model or openai")),
    kept("--override-generation-config", "preferred-sampling-params", json_object),
    kept("--structured-outputs-config", "constrained-json-disable-any-whitespace?", key="disable_any_whitespace"),
    kept("--stream-interval", "stream-interval"),
    kept("--enable-force-include-usage", "stream-response-default-include-usage?"),
    kept("--max-num-queued-reqs", "max-queued-requests"),
    kept("--step-timeout", "watchdog-timeout"),
    # --- memory and steps ---------------------------------------------------------------------------------------------
    kept("--gpu-memory-utilization", "mem-fraction-static", reason="here a fraction of the free memory"),
    kept("--max-num-seqs", "max-running-requests"),
    kept("--num-gpu-blocks-override", "max-total-tokens", _pages, reason="in pages of 16 tokens"),
    kept("--max-num-batched-tokens", "chunked-prefill-size", _chunk),
    kept("--block-size", "page-size", mapped({"1": None}, "", others=True)),
    kept("--no-enable-prefix-caching", "disable-radix-cache?"),
    kept("--no-async-scheduling", "disable-overlap-schedule?"),
    kept("--scheduling-policy", "enable-priority-scheduling?", _priority, value="priority"),
    *ignored("the lowest number is always served first", "schedule-low-priority-values-first?"),
    kept("--enforce-eager", "disable-cuda-graph?"),
    kept("--max-cudagraph-capture-size", "cuda-graph-max-bs-decode cuda-graph-max-bs"),
    kept("--cudagraph-capture-sizes", "cuda-graph-bs-decode* cuda-graph-bs"),
    # --- several devices ----------------------------------------------------------------------------------------------
    kept("--tensor-parallel-size", "tp-size tensor-parallel-size tp"),
    kept("--pipeline-parallel-size", "pp-size pipeline-parallel-size pp"),
    kept("--data-parallel-size", "dp-size data-parallel-size dp"),
    kept("--nnodes", "nnodes", _nodes),
    kept("--distributed-executor-backend", "use-ray?", value="ray"),
    kept("--distributed-timeout-seconds", "dist-timeout"),
    # --- adapters -----------------------------------------------------------------------------------------------------
    kept("--enable-lora", "enable-lora?"),
    kept("--lora-modules", "lora-paths*", _adapters, also=("--enable-lora",)),
    kept("--max-lora-rank", "max-lora-rank"),
    kept("--max-loras", "max-loras-per-batch"),
    kept("--max-cpu-loras", "max-loaded-loras"),
    # --- drafts -------------------------------------------------------------------------------------------------------
    kept("--speculative-config", "speculative-algorithm speculative-algo", _drafts, key="method"),
    kept("--speculative-config", "speculative-draft-model-path speculative-draft-model", key="model"),
    kept(
        "--speculative-config",
        "speculative-num-steps",
        number,
        key="num_speculative_tokens",
        reason="drafts are chains, without branches",
    ),
    kept("--speculative-config", "speculative-draft-model-quantization", key="quantization"),
    *ignored(_SPEED, "speculative-num-draft-tokens", "speculative-eagle-topk"),
    # --- logs ---------------------------------------------------------------------------------------------------------
    kept("--uvicorn-log-level", "log-level", str.lower),
    kept("--uvicorn-log-level", "log-level-http", str.lower),
    kept("--enable-log-requests", "log-requests?"),
    kept(
        "--otlp-traces-endpoint", "otlp-traces-endpoint", lambda value: value if "://" in value else f"grpc://{value}"
    ),
    kept("--disable-access-log-for-endpoints", "uvicorn-access-log-exclude-prefixes*"),
    kept("--config", "config"),
    kept(
        "--speculative-config",
        "speculative-ngram-max-trie-depth",
        lambda value: min(128, int(value)),
        key="prompt_lookup_max",
    ),
)
VARIABLES: dict[str, tuple[str, str]] = {
    "SGLANG_USE_MODELSCOPE": (LOST, "models come from Hugging Face's hub; download it, and give its folder"),
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": (LOST, "no context is longer than the model's; see --rope-scaling"),
    "SGLANG_API_KEY": ("--api-key", ""),
}
ASSUMED = (Assumed("--port", "30000", "SGLang's default port"),)

SGLANG = ServerProgram(
    "SGLang",
    VERSION,
    (*sglang_without.rules(), *RULES),
    VARIABLES,
    ASSUMED,
    shortens=True,
    model=Rule((), "value", KEPT, "MODEL", convert=files_model),
)
