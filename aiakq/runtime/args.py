"""Every engine and server argument, once: its name, type, default and help.

The options of ``aiakq serve`` and ``aiakq bench``, the keywords of ``LLM(...)``, their checks and docs/arguments.md all
come from this table. Names and defaults follow vLLM's engine arguments where those exist. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aiakq.errors import error
from aiakq.runtime.foreign import BY_NAME as FOREIGN
from aiakq.runtime.foreign import refuse


@dataclass(frozen=True)
class Argument:
    """One row.

    name      keyword of LLM(...); the flag is ``--`` plus the name with dashes.
    type      str, int, float or bool; a list of str for ``list``.
    default   None where the engine decides; ``help`` says how.
    group     model, memory, scheduling or server; server rows are not engine arguments.
    short     one-dash alias, like ``-q``.
    choices   allowed values, if they can be listed.
    low, high inclusive bounds of numbers.
    """

    name: str
    type: type
    default: Any
    help: str
    group: str
    short: str | None = None
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


#: Environment variable with API keys of the server, joined with commas.
API_KEY_VARIABLE = "AIAKQ_API_KEY"

_DTYPES = ("auto", "half", "float16", "fp16", "bfloat16", "bf16", "float", "float32", "fp32")

ARGUMENTS: tuple[Argument, ...] = (
    # --- model ---------------------------------------------------------------------------------------------------
    Argument("model", str, None, "Local folder, or hub name (org/name).", "model"),
    Argument("tokenizer", str, None, "Tokenizer folder or hub name; the model's own if not given.", "model"),
    Argument("revision", str, None, "Branch, tag or commit of a hub model.", "model"),
    Argument("trust_remote_code", bool, False, "Run Python code that the model folder brings.", "model"),
    Argument(
        "dtype",
        str,
        "auto",
        "Arithmetic of everything not quantized. auto: the checkpoint's on a GPU; on a CPU bf16 where the "
        "processor computes it natively, else float32.",
        "model",
        choices=_DTYPES,
    ),
    Argument(
        "quantization",
        str,
        None,
        "Expected method: awq, gptq, weight_only_int8 or smooth_quant. The checkpoint decides; this only checks it.",
        "model",
        short="-q",
    ),
    Argument(
        "load_format",
        str,
        "auto",
        "auto and safetensors read the checkpoint; dummy fills random weights, for benchmarks.",
        "model",
        choices=("auto", "safetensors", "dummy"),
    ),
    Argument(
        "model_impl",
        str,
        "auto",
        "auto uses aiakq's own model where there is one, else the one in transformers.",
        "model",
        choices=("auto", "aiakq", "transformers"),
    ),
    Argument(
        "generation_config",
        str,
        "auto",
        "auto takes default sampling values from generation_config.json; vllm ignores that file.",
        "model",
        choices=("auto", "vllm"),
    ),
    Argument("device", str, "auto", "auto: cuda if there is one, else cpu.", "model", choices=("auto", "cpu", "cuda")),
    Argument("seed", int, 0, "Seed of dummy weights and of everything else that is drawn.", "model", low=0),
    Argument(
        "dequantize",
        str,
        "auto",
        "Where no kernel computes on quantized weights: auto expands them once at load if they fit in a quarter "
        "of free memory, always does so, never unpacks them at each step (least memory, slowest).",
        "model",
        choices=("auto", "always", "never"),
    ),
    Argument(
        "cpu_math",
        str,
        "fast",
        "How weight-only checkpoints are multiplied on a CPU. fast rounds every 32 activations to 8 bits with a scale "
        "of their own and multiplies integers; exact multiplies floats, at a third of the speed.",
        "model",
        choices=("fast", "exact"),
    ),
    Argument(
        "enforce_eager",
        bool,
        False,
        "Run a step operation by operation: no CUDA graphs on a GPU, no recorded list of operations on a CPU.",
        "model",
    ),
    Argument(
        "tensor_parallel_size",
        int,
        1,
        "GPUs to spread each layer over. More than one is not built yet.",
        "model",
        short="-tp",
        low=1,
        high=1,
    ),
    Argument(
        "pipeline_parallel_size",
        int,
        1,
        "GPUs to spread the layers over. More than one is not built yet.",
        "model",
        short="-pp",
        low=1,
        high=1,
    ),
    # --- memory --------------------------------------------------------------------------------------------------
    Argument(
        "max_model_len", int, None, "Tokens of prompt plus output; the model's own limit if not given.", "memory", low=1
    ),
    Argument("block_size", int, 16, "Tokens per KV page.", "memory", low=1, high=256),
    Argument(
        "gpu_memory_utilization",
        float,
        0.9,
        "Part of the device's free memory (of RAM on a CPU) for weights and KV pages together.",
        "memory",
        low=0.01,
        high=1.0,
    ),
    Argument(
        "kv_cache_dtype",
        str,
        "auto",
        "How keys and values are stored. auto: as they are computed (see --dtype). int8: a quarter of float32, with a "
        "scale per token and head.",
        "memory",
        choices=("auto", "float32", "float16", "bfloat16", "int8"),
    ),
    Argument("num_gpu_blocks_override", int, None, "Use exactly this many KV pages.", "memory", low=2),
    Argument("enable_prefix_caching", bool, True, "Reuse KV pages of equal prompt beginnings.", "memory"),
    # --- scheduling ----------------------------------------------------------------------------------------------
    Argument(
        "max_num_seqs", int, None, "Sequences per step. 256 on a GPU, 128 on a CPU if not given.", "scheduling", low=1
    ),
    Argument(
        "max_num_batched_tokens",
        int,
        None,
        "Tokens per step, prompts and outputs together. 8192 on a GPU, 2048 on a CPU if not given.",
        "scheduling",
        low=1,
    ),
    Argument(
        "enable_chunked_prefill",
        bool,
        True,
        "Split long prompts over steps, so that running answers do not stall.",
        "scheduling",
    ),
    Argument(
        "max_logprobs", int, 20, "Most log-probabilities per position a request may ask for.", "scheduling", low=0
    ),
    # --- server --------------------------------------------------------------------------------------------------
    Argument("host", str, "127.0.0.1", "Address to listen on.", "server"),
    Argument("port", int, 8000, "Port to listen on; 0 takes any free one.", "server", low=0, high=65535),
    Argument(
        "served_model_name", list, None, "Names clients use for the model; the folder as given if not given.", "server"
    ),
    Argument(
        "chat_template", str, None, "Jinja template, as a file or one line; the tokenizer's own if not given.", "server"
    ),
    Argument("response_role", str, "assistant", "Role of chat answers.", "server"),
    # who may use it
    Argument(
        "api_key",
        list,
        None,
        "Key that requests must bring as Authorization: Bearer KEY. Others see it in the list of processes: "
        "--api-key-file and the environment variable AIAKQ_API_KEY keep it from them.",
        "server",
    ),
    Argument("api_key_file", str, None, "File with one key per line; lines that begin with # are skipped.", "server"),
    Argument("allow_no_key", bool, False, "Listen without a key on an address that others can reach.", "server"),
    Argument("metrics_without_key", bool, False, "Show /metrics without a key.", "server"),
    Argument(
        "allowed_hosts",
        list,
        None,
        "Names the Host header may hold. On a loopback address only this machine's own if not given.",
        "server",
    ),
    Argument(
        "allowed_origins", list, None, "Origins whose web pages may use the server, or *; none if not given.", "server"
    ),
    Argument("allowed_methods", list, None, "Methods allowed to those pages; all if not given.", "server"),
    Argument("allowed_headers", list, None, "Headers allowed to those pages; all if not given.", "server"),
    Argument("allow_credentials", bool, False, "Let those pages send credentials.", "server"),
    Argument("ssl_keyfile", str, None, "Private key for TLS.", "server"),
    Argument("ssl_certfile", str, None, "Certificate chain for TLS; with it the server speaks HTTPS only.", "server"),
    Argument("ssl_ca_certs", str, None, "Certificates that clients' own certificates are checked against.", "server"),
    Argument("ssl_cert_reqs", int, 0, "Client certificates: 0 none, 1 optional, 2 required.", "server", low=0, high=2),
    # limits
    Argument("max_connections", int, 1024, "Connections at a time; more are answered 503.", "server", low=1),
    Argument("max_connections_per_address", int, 256, "Of those from one address.", "server", low=1),
    Argument("header_timeout", float, 10.0, "Seconds for a request's headers to arrive.", "server", low=0.1),
    Argument("body_timeout", float, 30.0, "Seconds for its body.", "server", low=0.1),
    Argument("idle_timeout", float, 75.0, "Seconds a connection is kept without a request.", "server", low=0.1),
    Argument("write_timeout", float, 60.0, "Seconds to wait for a client that takes nothing.", "server", low=0.1),
    Argument(
        "max_body_bytes",
        int,
        None,
        "Bytes of a request body. 4 MiB, or 8 per token of context if not given.",
        "server",
        low=1,
    ),
    Argument(
        "max_num_queued_reqs",
        int,
        256,
        "Sequences that may wait for a place in the batch; beyond it a request is answered 503 at once.",
        "server",
        low=1,
    ),
    Argument(
        "max_num_queued_tokens",
        int,
        None,
        "Prompt tokens of all that wait; beyond it likewise. Four times what the KV pages hold if not given.",
        "server",
        low=1,
    ),
    Argument(
        "max_queue_seconds", float, 60.0, "Seconds a request may wait; then it is answered 503.", "server", low=0.1
    ),
    Argument("max_request_seconds", float, 600.0, "Seconds from a request's arrival to its end.", "server", low=0.1),
    Argument(
        "step_timeout",
        float,
        60.0,
        "Seconds for a step of the engine; then its stacks are written to standard error and it is started again.",
        "server",
        low=0.1,
    ),
    Argument("first_step_timeout", float, 600.0, "The same for an engine's first step.", "server", low=0.1),
    Argument(
        "max_engine_restarts",
        int,
        5,
        "Times within ten minutes that an engine that ended is started again; then the server ends.",
        "server",
        low=0,
    ),
    Argument("shutdown_timeout", float, 30.0, "Seconds to finish running requests after SIGTERM.", "server", low=0),
    Argument(
        "uvicorn_log_level",
        str,
        "warning",
        "Log level of the HTTP server.",
        "server",
        choices=("critical", "error", "warning", "info", "debug"),
    ),
    Argument("disable_log_stats", bool, False, "No line of statistics every ten seconds.", "server"),
)

BY_NAME = {argument.name: argument for argument in ARGUMENTS}


def engine_arguments() -> Iterable[Argument]:
    """The rows that ``LLM(...)`` takes."""
    return (argument for argument in ARGUMENTS if argument.group != "server")


def checked(given: Mapping[str, Any], *, server: bool) -> dict[str, Any]:
    """All arguments with defaults filled in and every given value checked.

    Those of other engines (foreign.py) are left out. Raises ``usage`` for an unknown name, ``option_refused`` for what
    there is not, and ``bad_option`` for a wrong type or value.
    """
    known = {argument.name: argument for argument in ARGUMENTS if server or argument.group != "server"}
    refuse(given)
    for name in given:
        if name not in known and name not in FOREIGN:
            raise error("usage", reason=f"There is no engine argument {name!r}.", hint="See docs/arguments.md.")
    return {name: _check(argument, given.get(name, argument.default)) for name, argument in known.items()}


def _check(argument: Argument, value: Any) -> Any:
    if value is None:
        return None
    expected = {str: "a string", int: "an integer", float: "a number", bool: "true or false", list: "a list"}
    right_type = isinstance(value, (int, float) if argument.type is float else argument.type)
    if not right_type or (isinstance(value, bool) and argument.type is not bool):
        raise _bad(argument, value, expected[argument.type])
    if argument.choices and value not in argument.choices:
        raise _bad(argument, value, "one of " + ", ".join(argument.choices))
    if argument.low is not None and not value >= argument.low:
        raise _bad(argument, value, f"at least {argument.low}")
    if argument.high is not None and not value <= argument.high:
        raise _bad(argument, value, f"at most {argument.high}")
    return value


def _bad(argument: Argument, value: Any, expected: str) -> Exception:
    return error("bad_option", option=argument.flag, value=value, expected=expected, hint=argument.help)
