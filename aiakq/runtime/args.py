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
    type      str, int, float or bool; a list of str for ``list``; a number, an object or its JSON for ``dict``.
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
        "compilation_config",
        dict,
        None,
        "Which decoding steps become CUDA graphs: a level (0 is --enforce-eager, 1 to 3 are the default), or JSON with "
        "mode (the same), cudagraph_mode, cudagraph_capture_sizes (numbers of sequences; a step with more than the "
        "largest runs without a graph) and max_cudagraph_capture_size. Models are not compiled. On a CPU only 0 means "
        "something.",
        "model",
        short="-O",
    ),
    Argument(
        "max_seq_len_to_capture",
        int,
        None,
        "A step with a sequence of more tokens than this runs without a CUDA graph; --max-model-len if not given.",
        "model",
        low=1,
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
        "How keys and values are stored. auto: as they are computed (see --dtype). int8 and fp8 (e4m3; e5m2 has a bit "
        "less of precision): half of bfloat16, with a scale per token and head. int8 is the most exact of them, and "
        "on a CPU the one that is fast.",
        "memory",
        choices=("auto", "float32", "float16", "bfloat16", "int8", "fp8", "fp8_e4m3", "fp8_e5m2"),
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
    Argument(
        "max_num_queued_reqs",
        int,
        1024,
        "Sequences that may wait for their first step; beyond it a request is answered 503 at once.",
        "server",
        low=1,
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
    expected[dict] = "a number, an object, or its JSON"
    also = {float: (int, float), dict: (int, str, Mapping)}
    right_type = isinstance(value, also.get(argument.type, argument.type))
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
