"""Engine arguments: keywords of ``LLM(...)``, options of ``aiakq serve`` and ``aiakq bench``.

Names and defaults follow vLLM's engine arguments where those exist. Each class is a part of the configuration;
aiakq/runtime/config resolves what depends on the model and the device. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from aiakq.arguments.argument import Argument, argument, rows_of
from aiakq.arguments.common import MODEL
from aiakq.arguments.lora import LoraArguments
from aiakq.arguments.multimodal import MultimodalArguments
from aiakq.arguments.pooling import PoolingArguments

#: Headings, in the order of the help page.
GROUPS = ("model", "text", "memory", "scheduling")


def _layer_counts(text: str) -> tuple[int, ...]:
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isdecimal() and 0 < int(number) < 10**6 for number in numbers):
        raise ValueError(text)
    return tuple(map(int, numbers))


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """The model, and overrides of its configuration."""

    model: str | None = argument(None, f"The model: {MODEL}.")
    revision: str | None = argument(None, "Branch, tag or commit of a hub model.")
    download_dir: str | None = argument(
        None,
        "Folder to download hub models to; the hub client's cache if not given.",
    )
    hf_token: str | None = argument(
        None,
        "Access token for hub models; if not given, the hub client's own, if any (HF_TOKEN or its login). Without a "
        "value, or empty: the hub client's own, which must exist.",
        environment=False,
        bare="",
    )
    hf_config_path: str | None = argument(None, "Folder or hub name of the config.json to use instead of the model's.")
    hf_overrides: dict[str, object] | None = argument(
        None,
        "Overrides of values in config.json, as a JSON object. In Python also a function, which is called with the "
        "model's config, an object of transformers, and returns it with other values.",
        also=(Callable,),
    )
    rope_scaling: dict[str, object] | None = argument(
        None,
        'RoPE scaling, like {"rope_type": "yarn", "factor": 4.0}; the context length is multiplied by the factor.',
    )
    rope_theta: float | None = argument(None, "RoPE base (theta).", low=1.0)
    disable_sliding_window: bool = argument(
        False,
        "Use full attention in every layer, and limit the context to the shortest window.",
    )
    max_model_len: int | Literal["auto"] | None = argument(
        None,
        "Maximum number of tokens of prompt and output together; the model's own limit if not given. auto: as many as "
        "fit into memory, up to that limit.",
        group="memory",
        low=1,
        suffixes=True,
        automatic=True,
    )
    max_logprobs: int = argument(
        20,
        "Maximum number of log-probabilities per position that a request may ask for; -1: the whole vocabulary.",
        group="scheduling",
        low=-1,
    )
    logprobs_mode: Literal["raw_logprobs"] = argument(
        "raw_logprobs",
        "Which log-probabilities are returned: those of the model, before temperature, penalties and masks.",
        group="scheduling",
        hint="Log-probabilities and logits after sampling parameters are not available.",
    )
    quantization: str | None = argument(
        None,
        "Expected method: awq, gptq (or gpt), weight_only_int8, smooth_quant, or one that a plugin package adds; or "
        "vLLM's name of the checkpoint's format or of a kernel for it, like compressed-tensors or gptq_marlin. "
        "The method is read from the checkpoint; a mismatch is an error. For 16-bit weights, int8 (or "
        "weight_only_int8), fp8 and int4 round them while they are loaded, and so do vLLM's names that mean this.",
        flags=("--quantization", "-q"),
    )
    generation_config: str = argument(
        "auto",
        "Source of default sampling parameters. auto: the model's generation_config.json; a folder: the file in it; "
        "vllm: none. A max_new_tokens in the file limits every request.",
    )
    override_generation_config: dict[str, object] | None = argument(
        None,
        'Overrides of the generation config, as a JSON object like {"temperature": 0.5}.',
    )
    tensor_parallel_size: int = argument(
        1,
        "Tensor-parallel size: number of processes that share each layer, one per GPU or per NUMA node.",
        flags=("--tensor-parallel-size", "-tp"),
        low=1,
        high=64,
    )
    tensor_parallel_math: Literal["auto", "fast", "exact"] = argument(
        "auto",
        "How tensor-parallel ranks share a layer. exact: outputs are sharded and gathered, so that results do not "
        "depend on the number of ranks; fast: half as many synchronizations, with all-reduce of partial sums; auto: "
        "fast on GPUs, exact on CPUs.",
    )
    distributed_executor_backend: Literal["mp", "ray", "uni", "external_launcher"] | None = argument(
        None,
        "What starts the processes of -tp and -pp. mp (the default): this process, on this machine; ray: Ray, on one "
        "or several machines; uni: a single process.",
    )
    distributed_timeout_seconds: float = argument(
        30.0,
        "Seconds that a rank waits for another within a step before the engine exits with an error that names it.",
        above=0,
    )
    pipeline_parallel_size: int = argument(
        1,
        "Pipeline-parallel size: number of stages over which the layers are distributed. Results are the same.",
        flags=("--pipeline-parallel-size", "-pp"),
        low=1,
        high=64,
    )
    pp_layer_partition: tuple[int, ...] | None = argument(
        None,
        "Number of layers of each pipeline stage, in order, like 12,12,8; balanced by duration if not given.",
        type=str,
        convert=_layer_counts,
        expected="whole numbers above 0, like 12,12,8",
    )


@dataclass(frozen=True, kw_only=True)
class LoadArguments:
    """Weight files, and the arithmetic of their weights."""

    load_format: Literal["auto", "safetensors", "pt", "gguf", "mistral", "runai_streamer", "dummy"] = argument(
        "auto",
        "Kind of weight files. auto: safetensors if there are any, else torch files, else a GGUF file; pt: torch "
        "files, of which only plain tensors are read; gguf: a GGUF file; mistral: consolidated*.safetensors; "
        "runai_streamer: safetensors, each read in parts by 16 threads, for network file systems; dummy: random "
        "weights, for benchmarks.",
    )
    config_format: Literal["auto", "hf", "mistral"] = argument(
        "auto",
        "The model's files. hf: config.json; mistral: params.json and consolidated*.safetensors, as with --load-format "
        "mistral; auto: Mistral's format where there is no config.json.",
    )
    model_loader_extra_config: dict[str, object] | None = argument(
        None,
        "Threads that read a file of weights, as a JSON object: concurrency for runai_streamer, else num_threads and "
        "enable_multithread_load. A memory_limit always holds, because parts are read to where they stay.",
    )
    ignore_patterns: tuple[str, ...] = argument(
        (),
        "Patterns of weight files to ignore, which are neither downloaded nor read, like consolidated*. Subfolders "
        "of a model are never read.",
    )
    trust_remote_code: bool = argument(False, "Run Python code from the model folder.")
    model_impl: Literal["auto", "aiakq", "transformers"] = argument(
        "auto",
        "auto: aiakq's own implementation if there is one, else that of transformers.",
    )
    dequantize: Literal["auto", "always", "never"] = argument(
        "auto",
        "When to dequantize weights that no kernel can compute with. auto: at load, if they then fit in a "
        "quarter of the free memory; always: at load; never: in each step (least memory, slowest).",
    )
    cpu_math: Literal["fast", "exact"] = argument(
        "fast",
        "Arithmetic of weight-only quantized layers on a CPU. fast: integers, with activations quantized to 8 bits in "
        "groups of 32; exact: floats, at a third of the speed.",
    )
    seed: int = argument(0, "Seed of the random weights of --load-format dummy.", low=0)


@dataclass(frozen=True, kw_only=True)
class DeviceArguments:
    """Device and dtype of the model."""

    device: Literal["auto", "cpu", "cuda"] = argument("auto", "auto: cuda if available, else cpu.")
    dtype: Literal["auto", "half", "float16", "fp16", "bfloat16", "bf16", "float", "float32", "fp32"] = argument(
        "auto",
        "Dtype of tensors that are not quantized. auto: on a GPU the checkpoint's dtype; on a CPU float32 or, without "
        "the native kernels, bf16 if the processor supports it.",
    )


@dataclass(frozen=True, kw_only=True)
class CompilationArguments:
    """Capture of steps as CUDA graphs, or as recorded programs on a CPU."""

    enforce_eager: bool = argument(
        False,
        "Launch operations one by one: no CUDA graphs on a GPU, no recorded steps on a CPU.",
    )
    compilation_config: dict[str, Any] | int | None = argument(
        None,
        "Which decoding steps are captured as CUDA graphs: a level (0 is --enforce-eager, 1 to 3 are the "
        "default), or JSON with mode (the level), cudagraph_mode, cudagraph_capture_sizes (batch sizes; larger "
        "batches run without a graph) and max_cudagraph_capture_size. Models are not compiled. On a CPU only 0 "
        "has an effect.",
        flags=("--compilation-config", "-O", "-cc"),
    )
    optimization_level: int | None = argument(
        None,
        "vLLM's optimization level. 0: --enforce-eager; 1 to 3: the default.",
        low=0,
        high=3,
    )
    cudagraph_capture_sizes: list[str] | None = argument(
        None, "Batch sizes that are captured as CUDA graphs, as in --compilation-config.", metavar="N", also=(int,)
    )
    max_cudagraph_capture_size: int | None = argument(
        None, "Maximum batch size that is captured as a CUDA graph, as in --compilation-config.", low=0
    )
    max_seq_len_to_capture: int | None = argument(
        None,
        "Steps with a longer sequence run without a CUDA graph; --max-model-len if not given.",
        low=1,
    )


@dataclass(frozen=True, kw_only=True)
class TokenizerArguments:
    """The tokenizer."""

    tokenizer: str | None = argument(None, "Tokenizer folder or hub name; the model's own if not given.")
    tokenizer_revision: str | None = argument(
        None,
        "Branch, tag or commit of a hub tokenizer; that of --revision if not given.",
    )
    tokenizer_mode: Literal["auto", "hf", "slow", "mistral"] = argument(
        "auto",
        "hf: the fast tokenizer, called directly; slow: through transformers, with its Python tokenizer if there is "
        "one; mistral: tekken.json or tokenizer.model.v*, which mistral-common reads (pip install 'aiakq[mistral]'), "
        "conversations too; auto: mistral where there is no other, else hf.",
    )
    tokenizer_extension_path: str | None = argument(
        None,
        "Absolute path of a Python file to run; its get_tokenizer(folder) returns a tokenizer with the methods "
        "encode, decode and apply_chat_template of transformers.",
    )
    skip_tokenizer_init: bool = argument(False, "Do not load a tokenizer: prompts and outputs are token ids.")
    structured_outputs_config: dict[str, object] | None = argument(
        None,
        "Defaults of structured output for requests that do not set them, as a JSON object: disable_any_whitespace, "
        "disable_additional_properties; backend accepts vLLM's names and has no effect.",
    )
    reasoning_config: dict[str, object] | None = argument(
        None,
        "What thinking_token_budget of a request ends a thought with, as a JSON object: reasoning_end_str, which may "
        "have words before the end mark, and reasoning_start_str. The marks of --reasoning-parser if not given.",
    )


@dataclass(frozen=True, kw_only=True)
class CacheArguments:
    """Size and storage of the KV cache."""

    block_size: int | None = argument(
        None,
        "Tokens per KV cache page; if not given 16, or 256 for models with recurrent layers, which keep a state per "
        "page.",
        low=1,
        high=256,
    )
    gpu_memory_utilization: float = argument(
        0.9,
        "Fraction of the device's free memory (on a CPU: of free RAM) to use for weights and KV cache together.",
        flags=("--gpu-memory-utilization", "--device-memory-utilization"),
        low=0.01,
        high=1.0,
    )
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8", "fp8_e4m3", "fp8_e5m2"] = argument(
        "auto",
        "Dtype of the KV cache. auto: the same as --dtype. int8 and fp8 (e4m3, or e5m2 with one bit less precision) "
        "take half the memory of bfloat16, with one scale per token and head. int8 is the most accurate of them, and "
        "the fastest on a CPU.",
    )
    num_gpu_blocks_override: int | None = argument(
        None, "Number of KV cache pages, overriding the one computed from free memory.", low=2
    )
    kv_cache_memory_bytes: int | None = argument(
        None,
        "Size of the KV cache in bytes, like 4G, of each rank; --gpu-memory-utilization then has no effect on it.",
        low=1,
        suffixes=True,
    )
    enable_prefix_caching: bool = argument(True, "Reuse KV cache pages of shared prompt prefixes.")


@dataclass(frozen=True, kw_only=True)
class SchedulerArguments:
    """Limits of a step, and the order of requests."""

    max_num_seqs: int | None = argument(
        None,
        "Maximum number of sequences per step; if not given 256 on a GPU, 128 on a CPU, 32 for models with recurrent "
        "layers, which keep three states per sequence.",
        low=1,
    )
    max_num_batched_tokens: int | None = argument(
        None,
        "Maximum number of tokens per step, of prompts and outputs; 8192 on a GPU, 512 on a CPU if not given.",
        low=1,
        suffixes=True,
    )
    enable_chunked_prefill: bool = argument(
        True,
        "Split long prompts into chunks over several steps, so that decoding does not stall.",
    )
    async_scheduling: bool | None = argument(
        None,
        "Schedule the next step while the device computes; tokens are the same but reported one step later. If not "
        "given: enabled on a GPU, disabled on a CPU, which does not benefit.",
    )
    max_num_partial_prefills: int = argument(
        1,
        "Maximum number of prompts that are prefilled in chunks at the same time; they share the tokens of a step that "
        "decoding leaves.",
        low=1,
    )
    max_long_partial_prefills: int = argument(
        1,
        "Maximum number of long prompts among them. If lower than --max-num-partial-prefills, short prompts may "
        "overtake long ones.",
        low=1,
    )
    long_prefill_token_threshold: int = argument(
        0,
        "A prompt with more uncomputed tokens than this is long, and gets at most this many per step. 0: no limit per "
        "step, and prompts over 4 % of the context are long if several may be prefilled at the same time.",
        low=0,
        suffixes=True,
    )
    scheduling_policy: Literal["fcfs", "priority"] = argument(
        "fcfs",
        "Order of requests. fcfs: by arrival; priority: by their priority, lowest value first, then by arrival; when "
        "KV cache pages run out, the request with the highest value is preempted.",
    )
    scheduler_delay_factor: float = argument(
        0.0,
        "Delay new prompts by this factor times the duration of the last step that computed prompts.",
        low=0,
    )


@dataclass(frozen=True, kw_only=True)
class SpeculationArguments:
    """Speculative decoding: several draft tokens are verified in one step, without changing the output."""

    speculative_config: dict[str, object] | None = argument(
        None,
        "Speculative decoding, as a JSON object: method (ngram, suffix, draft_model, eagle3, mtp), "
        "model, quantization, num_speculative_tokens, prompt_lookup_max, prompt_lookup_min, suffix_decoding_*, "
        "disable_by_batch_size, max_model_len. "
        "The output is bit-identical to that without.",
        flags=("--speculative-config", "-sc"),
    )
    speculative_model: str | None = argument(
        None,
        "Proposer of draft tokens: [ngram] for n-gram lookup in the prompt and output, [suffix] for suffix decoding, "
        "also over earlier outputs, [mtp] for the model's own layer for multi-token prediction, "
        "or the folder or hub name of an EAGLE-3 head, or of a draft model with the same "
        "vocabulary, such as a quantized version of this model.",
        flags=("--speculative-model", "--spec-model"),
    )
    spec_method: str | None = argument(None, "Method of speculative decoding, as in --speculative-config.")
    speculative_model_quantization: str | None = argument(
        None, "Expected quantization method of the draft model, like --quantization."
    )
    num_speculative_tokens: int | None = argument(
        None,
        "Maximum number of draft tokens of a sequence in a step; 4 if not given.",
        flags=("--num-speculative-tokens", "--spec-tokens"),
        low=1,
    )
    ngram_prompt_lookup_max: int | None = argument(
        None,
        "Maximum size of the n-gram that is looked up, the longest first; 3 if not given.",
        low=1,
        high=128,
    )
    ngram_prompt_lookup_min: int | None = argument(
        None,
        "Minimum size of the n-gram that is looked up; 1 if not given.",
        low=1,
        high=128,
    )
    speculative_disable_by_batch_size: int | None = argument(
        None,
        "Disable draft tokens while this many requests or more run; if not given, only the measured cost decides.",
        low=2,
    )
    speculative_max_model_len: int | None = argument(
        None, "Maximum length of sequences that get draft tokens; no limit if not given.", low=1, suffixes=True
    )


@dataclass(frozen=True, kw_only=True, repr=False)  # repr would show the hub token
class EngineArguments(
    ModelArguments,
    PoolingArguments,
    LoadArguments,
    DeviceArguments,
    CompilationArguments,
    LoraArguments,
    MultimodalArguments,
    TokenizerArguments,
    CacheArguments,
    SchedulerArguments,
    SpeculationArguments,
):
    """All arguments of the engine, validated (``aiakq.arguments.server.checked``)."""


_PARTS: tuple[tuple[type, str], ...] = (
    (ModelArguments, "model"),
    (PoolingArguments, "model"),
    (LoadArguments, "model"),
    (DeviceArguments, "model"),
    (CompilationArguments, "model"),
    (LoraArguments, "model"),
    (MultimodalArguments, "model"),
    (TokenizerArguments, "text"),
    (CacheArguments, "memory"),
    (SchedulerArguments, "scheduling"),
    (SpeculationArguments, "scheduling"),
)

#: One row per argument, ordered by heading.
ENGINE_ARGUMENTS: tuple[Argument, ...] = tuple(
    sorted((row for part, group in _PARTS for row in rows_of(part, group)), key=lambda row: GROUPS.index(row.group))
)
