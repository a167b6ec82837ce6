"""The arguments of the engine: keywords of ``LLM(...)``, options of ``aiakq serve`` and of ``bench``.

Names and defaults follow vLLM's engine arguments where those exist. Each class is a part of the configuration;
aiakq/runtime/config settles what depends on the model and the device. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiakq.arguments.argument import Argument, argument, rows_of

#: Headings, in the order of the help page.
GROUPS = ("model", "text", "memory", "scheduling")
_DTYPES = ("auto", "half", "float16", "fp16", "bfloat16", "bf16", "float", "float32", "fp32")


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """Which model, and what of its configuration is replaced."""

    model: str | None = argument(None, "Local folder, or hub name (org/name).")
    revision: str | None = argument(None, "Branch, tag or commit of a hub model.")
    download_dir: str | None = argument(
        None,
        "Folder that hub models are downloaded to; the hub's own cache if not given.",
    )
    hf_config_path: str | None = argument(None, "Folder or hub name whose config.json holds instead of the model's.")
    hf_overrides: dict[str, Any] | None = argument(
        None,
        "Values that replace those of config.json, as a JSON object.",
    )
    rope_scaling: dict[str, Any] | None = argument(
        None,
        'Scaling of rotary positions, like {"rope_type": "yarn", "factor": 4.0}: the context grows by the factor.',
    )
    rope_theta: float | None = argument(None, "Base of rotary positions.", low=1.0)
    disable_sliding_window: bool = argument(
        False,
        "Let every layer see everything, and end the context where the shortest window does.",
    )
    max_model_len: int | str | None = argument(
        None,
        "Tokens of prompt plus output; the model's own limit if not given. auto: as many as fit into "
        "memory, up to that.",
        group="memory",
        low=1,
        suffixes=True,
        automatic=True,
    )
    max_logprobs: int = argument(
        20,
        "Most log-probabilities per position a request may ask for; -1: the whole vocabulary.",
        group="scheduling",
        low=-1,
    )
    quantization: str | None = argument(
        None,
        "Expected method: awq, gptq (or gpt), weight_only_int8 or smooth_quant. The checkpoint decides; "
        "this only checks it.",
        flags=("--quantization", "-q"),
    )
    generation_config: str = argument(
        "auto",
        "auto takes default sampling values from the model's generation_config.json, a folder from the one "
        "in there; vllm takes none. A max_new_tokens in it limits every request.",
    )
    override_generation_config: dict[str, Any] | None = argument(
        None,
        'Values over those, as a JSON object like {"temperature": 0.5}.',
    )
    tensor_parallel_size: int = argument(
        1,
        "GPUs to spread each layer over. More than one is not built yet.",
        flags=("--tensor-parallel-size", "-tp"),
        low=1,
        high=1,
    )
    pipeline_parallel_size: int = argument(
        1,
        "GPUs to spread the layers over. More than one is not built yet.",
        flags=("--pipeline-parallel-size", "-pp"),
        low=1,
        high=1,
    )


@dataclass(frozen=True, kw_only=True)
class LoadArguments:
    """Which files are read, and how their weights are computed."""

    load_format: str = argument(
        "auto",
        "auto reads safetensors, or torch's files where there are none; safetensors and pt read only one "
        "kind (pt: plain tensors, no other pickles); dummy makes up random weights, for benchmarks.",
        choices=("auto", "safetensors", "pt", "dummy"),
    )
    ignore_patterns: tuple[str, ...] = argument(
        (),
        "Weight files that are neither downloaded nor read, as patterns like consolidated*. Folders inside "
        "a model are never looked at.",
    )
    trust_remote_code: bool = argument(False, "Run Python code that the model folder brings.")
    model_impl: str = argument(
        "auto",
        "auto uses aiakq's own model where there is one, else the one in transformers.",
        choices=("auto", "aiakq", "transformers"),
    )
    dequantize: str = argument(
        "auto",
        "Where no kernel computes on quantized weights: auto expands them once at load if they fit in a "
        "quarter of free memory, always does so, never unpacks them at each step (least memory, slowest).",
        choices=("auto", "always", "never"),
    )
    cpu_math: str = argument(
        "fast",
        "How weight-only checkpoints are multiplied on a CPU. fast rounds every 32 activations to 8 bits "
        "with a scale of their own and multiplies integers; exact multiplies floats, at a third of the "
        "speed.",
        choices=("fast", "exact"),
    )
    seed: int = argument(0, "Seed of dummy weights and of everything else that is drawn.", low=0)


@dataclass(frozen=True, kw_only=True)
class DeviceArguments:
    """Where the model runs, and in what arithmetic."""

    device: str = argument("auto", "auto: cuda if there is one, else cpu.", choices=("auto", "cpu", "cuda"))
    dtype: str = argument(
        "auto",
        "Arithmetic of everything not quantized. auto: the checkpoint's on a GPU; on a CPU bf16 where the "
        "processor computes it natively, else float32.",
        choices=_DTYPES,
    )


@dataclass(frozen=True, kw_only=True)
class CompilationArguments:
    """Which steps are captured as CUDA graphs, or recorded on a CPU."""

    enforce_eager: bool = argument(
        False,
        "Run a step operation by operation: no CUDA graphs on a GPU, no recorded list of operations on a CPU.",
    )
    compilation_config: dict[str, Any] | int | None = argument(
        None,
        "Which decoding steps become CUDA graphs: a level (0 is --enforce-eager, 1 to 3 are the default), "
        "or JSON with mode (the same), cudagraph_mode, cudagraph_capture_sizes (numbers of sequences; a "
        "step with more than the largest runs without a graph) and max_cudagraph_capture_size. Models are "
        "not compiled. On a CPU only 0 means something.",
        flags=("--compilation-config", "-O"),
        levels=True,
    )
    max_seq_len_to_capture: int | None = argument(
        None,
        "A step with a sequence of more tokens than this runs without a CUDA graph; --max-model-len if not given.",
        low=1,
    )


@dataclass(frozen=True, kw_only=True)
class TokenizerArguments:
    """Which tokenizer."""

    tokenizer: str | None = argument(None, "Tokenizer folder or hub name; the model's own if not given.")
    tokenizer_revision: str | None = argument(
        None,
        "Branch, tag or commit of a hub tokenizer; as --revision if not given.",
    )
    tokenizer_mode: str = argument(
        "auto",
        "slow goes through transformers' own code, and its tokenizer in Python where it has one; auto calls "
        "the compiled one.",
        choices=("auto", "slow"),
    )
    tokenizer_extension_path: str | None = argument(
        None,
        "Absolute path of a Python file that is run; its get_tokenizer(folder) returns the tokenizer, with "
        "transformers' encode, decode and apply_chat_template.",
    )
    skip_tokenizer_init: bool = argument(False, "Load no tokenizer: prompts and answers are token ids.")


@dataclass(frozen=True, kw_only=True)
class CacheArguments:
    """Size and storage of the KV cache."""

    block_size: int = argument(16, "Tokens per KV page.", low=1, high=256)
    gpu_memory_utilization: float = argument(
        0.9,
        "Part of the device's free memory (of RAM on a CPU) for weights and KV pages together.",
        low=0.01,
        high=1.0,
    )
    kv_cache_dtype: str = argument(
        "auto",
        "How keys and values are stored. auto: as they are computed (see --dtype). int8 and fp8 (e4m3; e5m2 "
        "has a bit less of precision): half of bfloat16, with a scale per token and head. int8 is the most "
        "exact of them, and on a CPU the one that is fast.",
        choices=("auto", "float32", "float16", "bfloat16", "int8", "fp8", "fp8_e4m3", "fp8_e5m2"),
    )
    num_gpu_blocks_override: int | None = argument(None, "Use exactly this many KV pages.", low=2)
    enable_prefix_caching: bool = argument(True, "Reuse KV pages of equal prompt beginnings.")


@dataclass(frozen=True, kw_only=True)
class SchedulerArguments:
    """How many sequences and tokens share a step, and in what order."""

    max_num_seqs: int | None = argument(None, "Sequences per step. 256 on a GPU, 128 on a CPU if not given.", low=1)
    max_num_batched_tokens: int | None = argument(
        None,
        "Tokens per step, prompts and outputs together. 8192 on a GPU, 512 on a CPU if not given.",
        low=1,
        suffixes=True,
    )
    enable_chunked_prefill: bool = argument(
        True,
        "Split long prompts over steps, so that running answers do not stall.",
    )
    async_scheduling: bool | None = argument(
        None,
        "Prepare the next step while the device computes; results are told one step later, and tokens are "
        "the same. On a GPU so if not given; on a CPU, where nothing is gained by it, not.",
    )
    max_num_partial_prefills: int = argument(
        1,
        "Prompts that may be split over steps at the same time; they share what answers leave of a step.",
        low=1,
    )
    max_long_partial_prefills: int = argument(
        1,
        "Of these, long ones. With fewer than --max-num-partial-prefills, shorter prompts overtake long ones.",
        low=1,
    )
    long_prefill_token_threshold: int = argument(
        0,
        "A prompt with more tokens still to come is long, and gets at most so many per step. 0: no limit "
        "per step, and long is more than 4 % of the context.",
        low=0,
        suffixes=True,
    )
    scheduling_policy: str = argument(
        "fcfs",
        "fcfs: in order of arrival. priority: in the order of the requests' priority, lowest first, then of "
        "arrival; when pages run out, the highest gives up its own.",
        choices=("fcfs", "priority"),
    )
    scheduler_delay_factor: float = argument(
        0.0,
        "Let waiting prompts gather for this many times as long as the last step with prompts took.",
        low=0,
    )


_PARTS: tuple[tuple[type, str], ...] = (
    (ModelArguments, "model"),
    (LoadArguments, "model"),
    (DeviceArguments, "model"),
    (CompilationArguments, "model"),
    (TokenizerArguments, "text"),
    (CacheArguments, "memory"),
    (SchedulerArguments, "scheduling"),
)

#: One row per argument, ordered by heading.
ENGINE_ARGUMENTS: tuple[Argument, ...] = tuple(
    sorted((row for part, group in _PARTS for row in rows_of(part, group)), key=lambda row: GROUPS.index(row.group))
)
