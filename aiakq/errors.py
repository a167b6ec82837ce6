"""Registry of all user-facing errors: code, exit code, HTTP status, message and remedy.

Every failure a user can cause is an entry here, with the exit code of the command line and the HTTP status of
the server. Raise one with ``raise error("model_missing", path=path)``; the fields fill the two templates.
Anything else that escapes is a bug in aiakq (exit code 1, HTTP 500).

Standard library only: the command line imports this module before anything heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Exit codes of the command line. 0 is success, 130 and 143 are the signals INT and TERM.
BUG = 1
USAGE = 2
BAD_INPUT = 3
UNSAFE = 4
RESOURCES = 5
CONFLICT = 6
ENVIRONMENT = 7
NUMERIC = 8
WORKER = 9
GATE = 10


@dataclass(frozen=True)
class ErrorKind:
    """One row of the registry. Its texts are ``str.format`` templates over the same fields.

    ``details`` are further lines, for the few failures that do not fit into one sentence.
    """

    message: str
    remedy: str
    exit_code: int = BAD_INPUT
    http_status: int = 400
    type: str = "invalid_request_error"
    details: str = ""


#: Errors of status 503 that pass within a second.
_OVER_SOON = frozenset({"bodies_too_large", "overloaded", "queue_timeout", "too_many_connections"})


class AiakqError(Exception):
    """A failure with an entry in ``REGISTRY``. Its text is one line: the sentence, then the remedy; details follow."""

    def __init__(self, id: str, **fields: Any) -> None:
        kind = REGISTRY[id]
        self.id = id
        self.kind = kind
        self.fields = fields
        self.param: str | None = fields.get("param")
        self.message = kind.message.format(**fields)
        self.remedy = kind.remedy.format(**fields)
        self.exit_code = kind.exit_code
        self.http_status = kind.http_status
        self.details = kind.details.format(**fields)
        super().__init__(f"{self.message} {self.remedy}\n{self.details}".rstrip())

    @property
    def retry_after(self) -> int | None:
        """Seconds for the header Retry-After; None if trying again does not help."""
        if self.http_status != 503:
            return None
        return 1 if self.id in _OVER_SOON else 10

    def body(self) -> dict[str, Any]:
        """The JSON body of an HTTP answer, in the shape OpenAI clients parse."""
        return {
            "error": {
                "message": str(self),
                "type": self.kind.type,
                "param": self.param,
                "code": self.id,
            }
        }


class AiakqValueError(AiakqError, ValueError):
    """A failure for which vLLM raises ValueError: an argument, a sampling parameter or a prompt that cannot be used."""


_VALUE_ERRORS = frozenset(
    {
        *("usage", "bad_option", "option_refused", "option_conflict", "quantization_mismatch", "model_unsupported"),
        *("remote_code", "no_memory", "value_out_of_range", "invalid_type", "unsupported_parameter", "empty_prompt"),
        *("invalid_token_id", "too_many_prompts", "context_length_exceeded", "no_chat_template", "chat_template"),
        "no_tokenizer",
        "unsupported",
    }
)


def error(id: str, **fields: Any) -> AiakqError:
    """Build (not raise) the error ``id``. Raises KeyError for an id that is not in the registry."""
    return (AiakqValueError if id in _VALUE_ERRORS else AiakqError)(id, **fields)


REGISTRY: dict[str, ErrorKind] = {
    # --- the command line -------------------------------------------------------------------------------------
    "usage": ErrorKind("{reason}", "{hint}", USAGE),
    "option_refused": ErrorKind("{option} is not available: {reason}.", "Leave it out.", USAGE),
    "bad_option": ErrorKind("{option} is {value!r}, which is not {expected}.", "{hint}", USAGE),
    # --- model folders ----------------------------------------------------------------------------------------
    "model_missing": ErrorKind(
        "There is no model at '{path}'.",
        "Give a folder with config.json and *.safetensors, or a hub name (org/name) while online.",
    ),
    "model_incomplete": ErrorKind(
        "The model folder '{path}' is incomplete: {missing}.",
        "Copy or download it again; aiakq reads config.json and every shard its index names.",
    ),
    "model_malformed": ErrorKind(
        "{file} cannot be read: {reason}.", "The file is damaged or not what its name says; fetch it again."
    ),
    "model_unsupported": ErrorKind(
        "The architecture {architecture} is not supported: {reason}.",
        "Native families: {known}; any other decoder-only model that transformers can run with a replaceable "
        "attention works through --model-impl transformers.",
    ),
    "unsupported": ErrorKind("{what} is not supported.", "{hint}"),
    "architecture_unsupported": ErrorKind(
        "The architecture {architecture} is not supported: {reason}.",
        "Choose a model of another family; if aiakq should run this one, config.json is damaged: fetch it again.",
    ),
    "model_hub": ErrorKind(
        "'{name}' is not a local folder and could not be fetched from the hub: {reason}.",
        "Check the name and the network, or give a local folder.",
        ENVIRONMENT,
    ),
    "plugin": ErrorKind(
        "A plugin cannot be used: {reason}.", "Repair or uninstall that package; aiakq works without it.", ENVIRONMENT
    ),
    "tokenizer_extension": ErrorKind(
        "The tokenizer extension '{path}' cannot be used: {reason}.",
        "It has to define get_tokenizer(folder), which returns what encodes and decodes.",
    ),
    "tensor_mismatch": ErrorKind(
        "The checkpoint '{path}' does not fit its config: {reason}.",
        "Check that config.json and the weights belong together.",
    ),
    "tensor_inventory": ErrorKind(
        "The checkpoint '{path}' does not hold what its config says: {counts}.",
        "Check that config.json and the weights belong together.",
        details="{table}",
    ),
    "pickle_refused": ErrorKind(
        "The weights in '{path}' are pickles that could run code when they are opened: {reason}.",
        "Fetch the safetensors variant, or convert it where you trust it: transformers' from_pretrained, then "
        "save_pretrained.",
        UNSAFE,
    ),
    "path_outside_model": ErrorKind(
        "The model folder '{path}' names a file outside itself: {file!r}.",
        "Do not trust this folder; fetch the model again from its source.",
        UNSAFE,
    ),
    "format_unsupported": ErrorKind(
        "The checkpoint is quantized in a way aiakq does not read: {reason}.",
        "aiakq reads GPTQ, AWQ (gemm, gemv, gemv_fast), AutoRound, compressed-tensors with integers, and the formats "
        "of installed plugins.",
    ),
    "quantization_mismatch": ErrorKind(
        "--quantization is {wanted} but the checkpoint holds {found}.",
        "Leave --quantization away to use what the checkpoint says.",
        USAGE,
    ),
    "remote_code": ErrorKind(
        "The model '{path}' needs to run its own Python code.",
        "Read that code; if you trust it, repeat with --trust-remote-code.",
        UNSAFE,
    ),
    # --- quantize ---------------------------------------------------------------------------------------------
    "output_exists": ErrorKind(
        "The output '{path}' already exists and is not empty.",
        "Choose another folder, or add --overwrite to replace it.",
        CONFLICT,
    ),
    "output_not_folder": ErrorKind(
        "The output '{path}' exists and is not a folder.",
        "Choose another path; --overwrite only replaces models.",
        CONFLICT,
    ),
    "output_not_model": ErrorKind(
        "The output '{path}' {reason}, so --overwrite does not delete it.",
        "Choose another folder, or remove that one yourself.",
        CONFLICT,
    ),
    "output_is_input": ErrorKind(
        "The output '{path}' is the input folder, or lies inside it, or holds it.",
        "Choose a folder of its own; aiakq never writes into a model it reads.",
        CONFLICT,
    ),
    "output_locked": ErrorKind(
        "Another aiakq is writing to '{path}'.", "Wait for it to end, or choose another folder.", CONFLICT
    ),
    "output_failed": ErrorKind(
        "Writing '{path}' failed: {reason}.", "Nothing was left behind; remove the cause and repeat.", RESOURCES
    ),
    "source_changed": ErrorKind(
        "The model '{path}' changed while it was quantized: {files}.",
        "Nothing was published; repeat when nothing else writes to that folder.",
        CONFLICT,
    ),
    "served_model_changed": ErrorKind(
        "The model '{path}' changed while it was served: {files}.",
        "Start the server anew to serve what lies there now; better, write new models into new folders.",
        CONFLICT,
    ),
    "no_space": ErrorKind(
        "Writing '{path}' needs about {needed}, but {available} are free there.",
        "Free space, or choose a folder on another disk.",
        RESOURCES,
    ),
    "already_quantized": ErrorKind(
        "The model '{path}' is quantized already ({found}).",
        "Quantize from the original 16- or 32-bit checkpoint: a second rounding only adds error.",
    ),
    "group_size": ErrorKind(
        "A group of {group_size} does not divide the {k} inputs of {layer}.",
        "Group sizes that work for every layer of this model: {choices}.",
        USAGE,
    ),
    "layer_shape": ErrorKind(
        "The layer {layer} with {n} outputs and {k} inputs cannot be written: {reason}.",
        "-quant_type weight_only_int8 and smooth_quant take any shape.",
        USAGE,
    ),
    "tensor_parallel": ErrorKind(
        "This model cannot be split over {tp} GPUs: {reason}.", "Values of -tp that work: {choices}.", USAGE
    ),
    "option_conflict": ErrorKind("{option} does not go with {other}: {reason}.", "{hint}", USAGE),
    "calibration": ErrorKind("The calibration data {source} cannot be used: {reason}.", "{hint}"),
    "evaluation_text": ErrorKind(
        "The text for evaluation cannot be used: {reason}.", "Give a UTF-8 text of at least a few hundred words."
    ),
    "not_finite": ErrorKind("{what} holds values that are not finite.", "{hint}", NUMERIC, 500, "server_error"),
    "not_as_written": ErrorKind(
        "{layer} does not read back from the disk as it was written.",
        "Nothing was published. The disk or the memory is failing, or this is a bug: repeat, and report it if it "
        "happens again.",
        RESOURCES,
    ),
    "max_kl": ErrorKind(
        "No widths keep the divergence within {wanted} nats per token; the widest reach {reached}.",
        "Allow more, or use -quant_type weight_only_int8.",
        NUMERIC,
    ),
    # --- the runtime ------------------------------------------------------------------------------------------
    "device": ErrorKind("The device {device} cannot be used: {reason}.", "{hint}", ENVIRONMENT),
    "no_memory": ErrorKind(
        "There is no memory for the KV cache: {available} free, {needed} needed for one request of "
        "{max_model_len} tokens.",
        "Lower --max-model-len (at most {fits} fits){also} or free memory.",
        RESOURCES,
    ),
    "out_of_memory": ErrorKind(
        "There is not enough memory: {reason}.",
        "Use a smaller model or batch, or free memory; --debug shows where it happened.",
        RESOURCES,
        500,
        "server_error",
    ),
    "open_files": ErrorKind("The system lets aiakq open no more files.", "Raise the limit: ulimit -n 4096.", RESOURCES),
    "disk_failed": ErrorKind("'{path}' cannot be read or written: {reason}.", "Check the disk.", RESOURCES),
    "port_in_use": ErrorKind(
        "Port {port} on {host} is in use.", "Choose another with --port, or 0 for any free one.", ENVIRONMENT
    ),
    "engine_dead": ErrorKind(
        "The engine process ended: {reason}.",
        "Its last lines are above; start the server again.",
        WORKER,
        503,
        "service_unavailable_error",
    ),
    "model_broken": ErrorKind(
        "The model computes nothing finite, not even for a prompt of one token.",
        "Load it again; if that happens at once, the weights are damaged or overflow in this --dtype.",
        NUMERIC,
        500,
        "server_error",
    ),
    "no_key": ErrorKind(
        "Anyone who can reach {host} could use this server, because no API key is set.",
        "Set one with --api-key-file or AIAKQ_API_KEY; --allow-no-key if a gateway in front of it asks for keys.",
        UNSAFE,
    ),
    "engine_start": ErrorKind("The engine process could not start: {reason}.", "{hint}", WORKER),
    # --- connections ------------------------------------------------------------------------------------------
    "invalid_api_key": ErrorKind(
        "The request has no valid API key.", "Send it as Authorization: Bearer KEY.", USAGE, 401, "authentication_error"
    ),
    "host_not_allowed": ErrorKind(
        "This server does not answer to the name in the Host header.",
        "The operator adds names with --allowed-hosts.",
        USAGE,
        421,
    ),
    "origin_not_allowed": ErrorKind(
        "Web pages of this origin may not use the server.",
        "The operator allows origins with --allowed-origins.",
        USAGE,
        403,
        "permission_error",
    ),
    "invalid_http": ErrorKind("The request is not valid HTTP: {reason}.", "", USAGE),
    "headers_too_large": ErrorKind(
        "The request has more than {count} headers, or more than {limit} bytes of them.", "Send fewer.", USAGE, 431
    ),
    "unsupported_encoding": ErrorKind(
        "Request bodies are read as they are, not compressed.", "Leave out Content-Encoding.", USAGE, 415
    ),
    "unsupported_media_type": ErrorKind("Request bodies are JSON.", "Send Content-Type: application/json.", USAGE, 415),
    "read_timeout": ErrorKind("The request's {part} did not arrive within {limit:g} s.", "Send it faster.", USAGE, 408),
    "too_many_connections": ErrorKind(
        "There are too many connections: at most {limit} {scope}.",
        "Use fewer at a time, or try again in a moment.",
        WORKER,
        503,
        "service_unavailable_error",
    ),
    # --- requests ---------------------------------------------------------------------------------------------
    "value_out_of_range": ErrorKind("{param} is {value!r}; allowed is {allowed}.", "", USAGE),
    "invalid_type": ErrorKind("{param} has the wrong type: {reason}.", "", USAGE),
    "invalid_json": ErrorKind("The request body is not valid JSON: {reason}.", "", USAGE),
    "duplicate_key": ErrorKind("The request body names {param} twice in one object.", "Name it once.", USAGE),
    "missing_field": ErrorKind("The request field {param} is missing.", "", USAGE),
    "unknown_field": ErrorKind("The request field {param} is not known.", "Remove it, or check its spelling.", USAGE),
    "unsupported_parameter": ErrorKind("{param} is not supported: {reason}.", "", USAGE),
    "invalid_token_id": ErrorKind(
        "{param} holds the token id {value}, outside 0..{last}.", "Use ids of this model's vocabulary.", USAGE
    ),
    "empty_prompt": ErrorKind("The prompt is empty.", "Send at least one token.", USAGE),
    "too_many_prompts": ErrorKind(
        "The request asks for {value} sequences; at most {limit} are allowed.", "Split it.", USAGE
    ),
    "context_length_exceeded": ErrorKind(
        "The prompt has {prompt} tokens and asks for {wanted} more; the context holds {limit}.",
        "Shorten the prompt or lower max_tokens.",
        USAGE,
    ),
    "unknown_model": ErrorKind(
        "The model {name!r} is not served here.", "Served: {known}.", USAGE, 404, "invalid_request_error"
    ),
    "not_found": ErrorKind("There is no route {path}.", "See /docs.", USAGE, 404),
    "method_not_allowed": ErrorKind("{path} does not take {method}.", "See /docs.", USAGE, 405),
    "no_chat_template": ErrorKind(
        "The model has no chat template.", "Start the server with --chat-template FILE, or use /v1/completions."
    ),
    "no_tokenizer": ErrorKind(
        "There is no tokenizer: --skip-tokenizer-init was given.", "Send token ids; answers are token ids too.", USAGE
    ),
    "chat_template": ErrorKind("The chat template refused the messages: {reason}.", ""),
    "tokenization": ErrorKind("The text could not be tokenized: {reason}.", "Send another text.", USAGE),
    "tokenizer_stuck": ErrorKind(
        "A text has waited {limit:g} s to be tokenized.",
        "Wait for the tokenizer's processes to be restarted.",
        WORKER,
        503,
        "service_unavailable_error",
    ),
    "request_too_large": ErrorKind("The request body is larger than {limit} bytes.", "Split it.", USAGE, 413),
    "bodies_too_large": ErrorKind(
        "The bodies of all requests together, or those of one client, are too large: at most {limit} bytes, half of "
        "them from one client.",
        "Try again in a moment, or raise --max-total-body-bytes.",
        WORKER,
        503,
        "service_unavailable_error",
    ),
    "overloaded": ErrorKind(
        "{waiting} {what} are waiting already; at most {limit} are allowed.",
        "Try again in a moment, or raise {flag}.",
        WORKER,
        503,
        "service_unavailable_error",
    ),
    "queue_timeout": ErrorKind(
        "The request waited {limit:g} s without being started.",
        "Try again in a moment; --max-queue-seconds sets the time.",
        WORKER,
        503,
        "service_unavailable_error",
    ),
    "time_limit": ErrorKind(
        "The request was not finished after {limit:g} s.",
        "Ask for fewer tokens; --max-request-seconds sets the time.",
        WORKER,
        503,
        "service_unavailable_error",
    ),
    "slow_reader": ErrorKind(
        "More than {limit} bytes of the answer were not read in time.", "Read faster.", USAGE, 408
    ),
    "numerical_error": ErrorKind("The request failed: {reason}.", "", NUMERIC, 500, "server_error"),
    "request_memory": ErrorKind(
        "The request does not fit into the server's memory, even alone.",
        "Ask for fewer prompt_logprobs, or try again; the operator can lower --max-num-batched-tokens.",
        RESOURCES,
        503,
        "service_unavailable_error",
    ),
    "engine_restarting": ErrorKind(
        "The engine is restarting: {reason}.", "Try again in a moment.", WORKER, 503, "service_unavailable_error"
    ),
    "engine_restarted": ErrorKind(
        "The engine ended before the answer was complete: {reason}.",
        "The engine is restarting; repeat the request.",
        WORKER,
        503,
        "service_unavailable_error",
    ),
    "engine_timeout": ErrorKind(
        "The engine took longer than {limit:g} s for a step.",
        "The engine is restarting; repeat the request.",
        WORKER,
        500,
        "server_error",
    ),
    "request_quarantined": ErrorKind(
        "The engine ended twice while this request ran, so it is not tried again.",
        "The request may be the cause; the server's log says how the engine ended.",
        WORKER,
        500,
        "server_error",
    ),
    "aborted": ErrorKind("The operator of the server stopped the request.", "", WORKER, 410, "request_aborted"),
    "nothing_left": ErrorKind(
        "The request cannot continue: {reason}.", "Allow more token ids, or fewer min_tokens or bad_words.", USAGE
    ),
    "request_failed": ErrorKind("The request failed: {reason}.", "", BUG, 500, "server_error"),
    "loading": ErrorKind(
        "The model is still loading.", "Try again in a moment.", WORKER, 503, "service_unavailable_error"
    ),
    "shutting_down": ErrorKind(
        "The server is shutting down.", "Send the request to another server.", WORKER, 503, "service_unavailable_error"
    ),
    # --- bench ------------------------------------------------------------------------------------------------
    "bad_gate": ErrorKind(
        "The gate {gate!r} cannot be read: {reason}.",
        "Write it like 'tpot_ms.p50>50': a key of the JSON result, an operator, a number.",
        USAGE,
    ),
    "gate_failed": ErrorKind("{failed} of {total} gates failed: {gates}.", "", GATE),
    "server_unreachable": ErrorKind(
        "No server answers at {url}: {reason}.", "Start one with: aiakq serve --model DIR", ENVIRONMENT
    ),
    "bench_failed": ErrorKind("{failed} of {total} requests failed; the first: {reason}.", "", WORKER),
}
