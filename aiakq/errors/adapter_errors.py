"""Errors of LoRA adapters."""

from __future__ import annotations

from aiakq.errors.kind import USAGE, WORKER, ErrorKind

ADAPTER_ERRORS = {
    "adapter_missing": ErrorKind(
        "There is no adapter at '{path}'.",
        "Give a local folder with adapter_config.json and adapter_model.safetensors.",
        USAGE,
        404,
    ),
    "adapter_outside_root": ErrorKind(
        "The adapter path '{path}' is not inside the folder '{root}'.", "Move the adapter there.", USAGE
    ),
    "adapter_malformed": ErrorKind(
        "The adapter '{adapter}' cannot be read: {reason}.", "Save it again with PEFT's save_pretrained."
    ),
    "adapter_unsupported": ErrorKind(
        "The adapter '{adapter}' sets {field}, which is not supported: {reason}.",
        "Merge the adapter into its model with PEFT's merge_and_unload, or train one without it.",
    ),
    "adapter_pattern": ErrorKind(
        "The adapter '{adapter}' has {pattern!r} in {field}, which cannot be used as a regular expression: {reason}.",
        "Correct {field} in its adapter_config.json; PEFT matches module names with Python's re.",
    ),
    "adapter_contradiction": ErrorKind(
        "The adapter '{adapter}' has tensors of {module}, which {field} in its adapter_config.json does not select, so"
        " PEFT ignores them.",
        "Correct {field}, or remove the tensors.",
    ),
    "adapter_mismatch": ErrorKind(
        "The adapter '{adapter}' does not fit the model: {reason}.", "It was trained for {base}.", USAGE
    ),
    "adapter_unmergeable": ErrorKind(
        "The adapter '{adapter}' cannot be merged: {reason}.",
        "Serve it on the quantized model with --enable-lora, or remove those tensors.",
    ),
    "adapter_changed": ErrorKind(
        "The files of the adapter '{adapter}' have changed since they were checked.", "Load it again.", USAGE
    ),
    "adapter_size": ErrorKind(
        "The adapter '{adapter}' has {size} bytes; at most {limit} may be in memory.", "Raise --max-lora-bytes.", USAGE
    ),
    "adapter_lost": ErrorKind(
        "The request's adapter cannot be loaded: {reason}.",
        "The operator must restore its files or load it again.",
        WORKER,
        503,
        "service_unavailable_error",
    ),
    "adapters_in_use": ErrorKind(
        "There is no memory for another version of the adapter {name!r} while requests use earlier ones.",
        "Retry when they have ended, or raise --max-loras or --max-lora-bytes.",
        WORKER,
        503,
        "service_unavailable_error",
    ),
    "adapter_exists": ErrorKind(
        "The name {name!r} is taken.", "Use another name, or load_inplace to replace the adapter.", USAGE
    ),
    "unknown_adapter": ErrorKind("There is no adapter {name!r}.", "Loaded: {known}.", USAGE, 404),
    "lora_root_missing": ErrorKind(
        "Adapters cannot be loaded while the server runs, because it has no folder for them.",
        "The operator can set one with --lora-root.",
        USAGE,
        403,
        "permission_error",
    ),
    "lora_disabled": ErrorKind(
        "The model is served without LoRA adapters.", "Set enable_lora=True, or start with --enable-lora.", USAGE
    ),
    "adapter_rank": ErrorKind(
        "The adapter '{adapter}' has rank {rank}; at most {limit} is allowed.", "Raise --max-lora-rank.", USAGE
    ),
}
