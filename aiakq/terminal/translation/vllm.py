"""vLLM's options. ``aiakq serve`` has all of them under the same names; its own tables say what each does here.

Rows below are those whose values mean something else, or differ between the two programs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator

from aiakq.terminal.translation.rules import IGNORED, KEPT, LOST, Assumed, Rule, ServerProgram, ignored, kept
from aiakq.terminal.translation.values import (
    drafts,
    files_model,
    json_object,
    kv_cache,
    mapped,
    quantization,
    reasoning_parser,
    tool_parser,
)

VERSION = "0.33.0"

_LOADERS = "weights are read from safetensors, torch and GGUF files; give a folder in the format of Hugging Face"
RULES: tuple[Rule, ...] = (
    kept("MODEL", "model", files_model),
    kept("--config", "config", reason="its keys are read under the names of vLLM and of aiakq"),
    kept("--quantization", "quantization -q", quantization),
    kept("--speculative-model-quantization", "speculative-model-quantization", quantization),
    kept("--speculative-config", "speculative-config -sc", drafts),
    kept("--tool-call-parser", "tool-call-parser", tool_parser),
    kept("--reasoning-parser", "reasoning-parser", reasoning_parser, also=()),
    kept(
        "--kv-cache-dtype",
        "kv-cache-dtype",
        kv_cache({"fp8_inc": "fp8", "int8_per_token_head": "int8", "fp8_per_token_head": "fp8", "float16": "float16"}),
    ),
    kept(
        "--load-format",
        "load-format",
        mapped(
            {kind: kind for kind in ("auto", "safetensors", "pt", "gguf", "mistral", "runai_streamer", "dummy")}
            | {"npcache": "pt", "hf": "auto", "bitsandbytes": "auto"}
            | {"fastsafetensors": "safetensors", "instanttensor": "safetensors"},
            _LOADERS,
        ),
    ),
    kept("--model-loader-extra-config", "model-loader-extra-config", json_object),
    kept("--model-impl", "model-impl", mapped({"vllm": "aiakq"}, "", others=True)),
    kept("--hf-overrides", "hf-overrides", json_object),
    kept(
        "--tokenizer-mode",
        "tokenizer-mode",
        mapped(
            {"auto": "auto", "slow": "slow", "hf": "hf", "mistral": "mistral", "fastokens": "auto"},
            "a Python file can make any tokenizer, with --tokenizer-extension-path",
        ),
    ),
    *ignored("all methods are maintained", "allow-deprecated-quantization?"),
)

#: Variable -> the option that sets the same, or why it has no effect. Others of VLLM_* set up vLLM's own code.
VARIABLES: dict[str, tuple[str, str]] = {
    "VLLM_CPU_KVCACHE_SPACE": ("--cpu-kvcache-space", ""),
    "VLLM_USE_MODELSCOPE": (LOST, "models come from Hugging Face's hub; download it, and give its folder"),
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": (LOST, "no context is longer than the model's; scale it with --rope-scaling"),
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": (LOST, "give --lora-root and --enable-admin-routes instead"),
    "VLLM_SERVER_DEV_MODE": (LOST, "give --enable-admin-routes for /reset_prefix_cache"),
    "VLLM_BATCH_INVARIANT": (IGNORED, "on a CPU answers never depend on the batch"),
}
ASSUMED = (
    Assumed("--host", "0.0.0.0", "vLLM listens at all addresses by default; leave it out for this machine only"),
)


def _own(special: set[str]) -> Iterator[Rule]:
    """Rules for the options that ``aiakq serve`` has, ignores or refuses, except those of ``special``."""
    from aiakq.arguments.commands import COMMANDS

    serve = COMMANDS["serve"]
    for row in serve.rows:
        if special.isdisjoint(row.all_flags):
            arity = "switch" if row.type is bool else "list" if row.type in (list, tuple) else "value"
            off = (row.off_flag,) if row.type is bool else ()
            to = row.long_flag if row.type is bool else row.flag
            yield Rule(row.all_flags, "optional" if row.bare is not None else arity, KEPT, to, off=off)
    for other in serve.unsupported.values():
        if special.isdisjoint(other.flags):
            arity = "switch" if other.switch else "list" if other.many else "value"
            off = (f"--no-{other.flag[2:]}",) if other.switch else ()
            silent = tuple(map(str, other.defaults))
            status = LOST if other.refused else IGNORED
            yield Rule(other.flags, arity, status, reason=other.reason, silent=silent, off=off)
    for old in serve.renamed.values():
        arity = "switch" if old.switch else "list" if old.many else "value"
        reason = f"its name is {old.replacement} now"
        if str(old.value).startswith("{"):
            key = next(iter(json.loads(str(old.value))))
            yield Rule(old.flags, arity, KEPT, old.new_flag, key, reason)
        else:
            yield Rule(old.flags, arity, KEPT, old.new_flag, reason=reason, value=old.value)


@functools.cache
def vllm() -> ServerProgram:
    """Return the table; it takes the time of importing all tables of arguments."""
    special = {flag for rule in RULES for flag in rule.flags}
    extra = (kept("--kv-cache-memory-bytes", "cpu-kvcache-space", lambda value: f"{value}G"),)
    model = Rule((), "value", KEPT, "MODEL", convert=files_model)
    return ServerProgram("vLLM", VERSION, (*RULES, *_own(special), *extra), VARIABLES, ASSUMED, model=model)
