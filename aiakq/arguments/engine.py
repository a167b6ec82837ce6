"""Engine arguments: keywords of ``LLM(...)``, options of ``aiakq serve`` and ``aiakq bench``.

Names and defaults follow vLLM's engine arguments where those exist. Each class is a part of the configuration;
aiakq/runtime/config settles what depends on the model and the device. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiakq.arguments.argument import Argument, argument, rows_of
from aiakq.arguments.lora import LoraArguments

#: Headings, in the order of the help page.
GROUPS = ("model", "text", "memory", "scheduling")
_DTYPES = ("auto", "half", "float16", "fp16", "bfloat16", "bf16", "float", "float32", "fp32")


def _layer_counts(text: str) -> tuple[int, ...]:
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isdecimal() and 0 < int(number) < 10**6 for number in numbers):
        raise ValueError(text)
    return tuple(map(int, numbers))


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """Which model, and what of its configuration is replaced."""

    model: str | None = argument(None, "Local folder, or hub name (org/name).")
    revision: str | None = argument(None, "Branch, tag or commit of a hub model.")
    download_dir: str | None = argument(
        None,
        "Folder that hub models are downloaded to; the hub's own cache if not given.",
    )
    hf_token: str | None = argument(
        None,
        "Access token for hub models; the hub client's own (HF_TOKEN, or that of its login) if not given. Without a "
        "value, or empty: the hub client's own, without which nothing is downloaded.",
        environment=False,
    )
    hf_config_path: str | None = argument(None, "Folder or hub name whose config.json is used instead of the model's.")
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
        "Use full attention in every layer, and limit the context to the shortest window.",
    )
    max_model_len: int | str | None = argument(
        None,
        "Most tokens of prompt and output together; the model's own limit if not given. auto: as many as fit "
        "into memory, up to that limit.",
        group="memory",
        low=1,
        suffixes=True,
        automatic=True,
    )
    task: str = argument(
        "auto",
        "What the model is for. generate: to continue texts; embed (or embedding): an embedding of each text; "
        "classify: probabilities of labels; score: one number for a pair of texts; reward: what it computes for each "
        "token. auto: what its files say.",
        choices=("auto", "generate", "embed", "embedding", "classify", "score", "reward"),
    )
    override_pooler_config: dict[str, Any] | None = argument(
        None,
        "How hidden states become an embedding or scores, in place of what the model's files say, as a JSON object of "
        "pooling_type (LAST, CLS, MEAN, ALL, STEP), normalize, softmax and step_tag_id.",
    )
    max_logprobs: int = argument(
        20,
        "Most log-probabilities per position that a request may have; -1: the whole vocabulary.",
        group="scheduling",
        low=-1,
    )
    quantization: str | None = argument(
        None,
        "Expected method: awq, gptq (or gpt), weight_only_int8, smooth_quant, or one that a package adds. "
        "It is read from the checkpoint; another one than expected is refused.",
        flags=("--quantization", "-q"),
    )
    generation_config: str = argument(
        "auto",
        "Where default sampling values come from. auto: the model's generation_config.json; a folder: the file "
        "in it; vllm: nowhere. A max_new_tokens in the file limits every request.",
    )
    override_generation_config: dict[str, Any] | None = argument(
        None,
        'Values that replace those of the generation config, as a JSON object like {"temperature": 0.5}.',
    )
    tensor_parallel_size: int = argument(
        1,
        "Processes that share each layer: one for each GPU or, with the same results as one, for each NUMA node.",
        flags=("--tensor-parallel-size", "-tp"),
        low=1,
        high=64,
    )
    tensor_parallel_math: str = argument(
        "auto",
        "How these processes share a layer. exact: each computes some of the outputs, which gives the results of any "
        "other number of them; fast: half as many meetings, in which parts of results are added up; auto: fast on "
        "GPUs, exact on CPUs.",
        choices=("auto", "fast", "exact"),
    )
    distributed_executor_backend: str | None = argument(
        None,
        "What starts the processes of -tp and -pp. mp (if not given): this process, on this machine; ray: Ray, on one "
        "or several; uni: nothing, there is one process.",
        choices=("mp", "ray", "uni", "external_launcher"),
    )
    distributed_timeout_seconds: float = argument(
        30.0,
        "Seconds that a rank waits for another within a step before the engine ends with an error that names it.",
        above=0,
    )
    pipeline_parallel_size: int = argument(
        1,
        "Groups of processes that the layers are distributed over, with the same results as one.",
        flags=("--pipeline-parallel-size", "-pp"),
        low=1,
        high=64,
    )
    pp_layer_partition: tuple[int, ...] | None = argument(
        None,
        "Layers of each of these groups, in order, like 12,12,8; if not given, so many that they take equally long.",
        type=str,
        convert=_layer_counts,
        expected="whole numbers above 0, like 12,12,8",
    )


@dataclass(frozen=True, kw_only=True)
class LoadArguments:
    """Which files are read, and how their weights are computed."""

    load_format: str = argument(
        "auto",
        "Kind of weight files. auto: safetensors if there are any, else torch files; pt: torch files, of which "
        "only plain tensors are read; dummy: random weights, for benchmarks.",
        choices=("auto", "safetensors", "pt", "dummy"),
    )
    ignore_patterns: tuple[str, ...] = argument(
        (),
        "Patterns of weight files that are neither downloaded nor read, like consolidated*. Subfolders of a "
        "model are never read.",
    )
    trust_remote_code: bool = argument(False, "Run Python code from the model folder.")
    model_impl: str = argument(
        "auto",
        "auto: aiakq's own implementation if there is one, else that of transformers.",
        choices=("auto", "aiakq", "transformers"),
    )
    dequantize: str = argument(
        "auto",
        "When to dequantize weights that no kernel can compute with. auto: at load, if they then fit in a "
        "quarter of the free memory; always: at load; never: in each step (least memory, slowest).",
        choices=("auto", "always", "never"),
    )
    cpu_math: str = argument(
        "fast",
        "Arithmetic of weight-only checkpoints on a CPU. fast: integers, with activations rounded to 8 bits in "
        "groups of 32; exact: floats, at a third of the speed.",
        choices=("fast", "exact"),
    )
    seed: int = argument(0, "Seed of the random weights of --load-format dummy.", low=0)


@dataclass(frozen=True, kw_only=True)
class DeviceArguments:
    """Where the model runs, and in what arithmetic."""

    device: str = argument("auto", "auto: cuda if available, else cpu.", choices=("auto", "cpu", "cuda"))
    dtype: str = argument(
        "auto",
        "Dtype of everything that is not quantized. auto: on a GPU that of the checkpoint; on a CPU float32, or, "
        "without the native kernels, bf16 if the processor supports it.",
        choices=_DTYPES,
    )


@dataclass(frozen=True, kw_only=True)
class CompilationArguments:
    """Which steps are captured as CUDA graphs, or recorded on a CPU."""

    enforce_eager: bool = argument(
        False,
        "Run operation by operation: no CUDA graphs on a GPU, no recorded steps on a CPU.",
    )
    compilation_config: dict[str, Any] | int | None = argument(
        None,
        "Which decoding steps are captured as CUDA graphs: a level (0 is --enforce-eager, 1 to 3 are the "
        "default), or JSON with mode (the level), cudagraph_mode, cudagraph_capture_sizes (batch sizes; larger "
        "batches run without a graph) and max_cudagraph_capture_size. Models are not compiled. On a CPU only 0 "
        "has an effect.",
        flags=("--compilation-config", "-O"),
        levels=True,
    )
    max_seq_len_to_capture: int | None = argument(
        None,
        "Steps with a longer sequence run without a CUDA graph; --max-model-len if not given.",
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
        "slow: through transformers, with its Python tokenizer if there is one; auto: the compiled tokenizer, "
        "called directly.",
        choices=("auto", "slow"),
    )
    tokenizer_extension_path: str | None = argument(
        None,
        "Absolute path of a Python file to run; its get_tokenizer(folder) returns a tokenizer with the methods "
        "encode, decode and apply_chat_template of transformers.",
    )
    skip_tokenizer_init: bool = argument(False, "Load no tokenizer: prompts and answers are token ids.")
    structured_outputs_config: dict[str, Any] | None = argument(
        None,
        "How structured output is written unless a request says otherwise, as a JSON object: disable_any_whitespace, "
        "disable_additional_properties; backend, with any of vLLM's names, changes nothing.",
    )


@dataclass(frozen=True, kw_only=True)
class CacheArguments:
    """Size and storage of the KV cache."""

    block_size: int | None = argument(
        None,
        "Tokens per KV page; 16, or 256 for models with recurrent layers, which keep a state per page, if not given.",
        low=1,
        high=256,
    )
    gpu_memory_utilization: float = argument(
        0.9,
        "Fraction of the device's free memory (on a CPU: of free RAM) for weights and KV pages together.",
        low=0.01,
        high=1.0,
    )
    kv_cache_dtype: str = argument(
        "auto",
        "Dtype of the KV cache. auto: the same as --dtype. int8 and fp8 (e4m3, or e5m2 with one bit less "
        "precision) take half the memory of bfloat16, with a scale per token and head. int8 is the most exact "
        "of them, and the fast one on a CPU.",
        choices=("auto", "float32", "float16", "bfloat16", "int8", "fp8", "fp8_e4m3", "fp8_e5m2"),
    )
    num_gpu_blocks_override: int | None = argument(None, "Number of KV pages, regardless of the memory.", low=2)
    enable_prefix_caching: bool = argument(True, "Reuse the KV pages of shared prompt prefixes.")


@dataclass(frozen=True, kw_only=True)
class SchedulerArguments:
    """How many sequences and tokens share a step, and in what order."""

    max_num_seqs: int | None = argument(
        None,
        "Most sequences in a step; 256 on a GPU, 128 on a CPU, 32 for models with recurrent layers, which keep "
        "three states for each, if not given.",
        low=1,
    )
    max_num_batched_tokens: int | None = argument(
        None,
        "Most tokens in a step, of prompts and outputs; 8192 on a GPU, 512 on a CPU if not given.",
        low=1,
        suffixes=True,
    )
    enable_chunked_prefill: bool = argument(
        True,
        "Split long prompts over several steps, so that decoding does not stall.",
    )
    async_scheduling: bool | None = argument(
        None,
        "Schedule the next step while the device computes; the tokens are the same, reported one step later. "
        "If not given: on a GPU yes; on a CPU, which gains nothing from it, no.",
    )
    max_num_partial_prefills: int = argument(
        1,
        "Prompts that may be partially computed at the same time; they share the tokens that decoding leaves "
        "in a step.",
        low=1,
    )
    max_long_partial_prefills: int = argument(
        1,
        "Long prompts among them. If fewer than --max-num-partial-prefills, short prompts may overtake long ones.",
        low=1,
    )
    long_prefill_token_threshold: int = argument(
        0,
        "A prompt with more uncomputed tokens is long, and gets at most this many per step. 0: no limit per "
        "step; if several prompts may be partial, more than 4 % of the context is long.",
        low=0,
        suffixes=True,
    )
    scheduling_policy: str = argument(
        "fcfs",
        "fcfs: in order of arrival. priority: in order of the priority of requests, lowest first, then of "
        "arrival; when pages run out, the request with the highest is preempted.",
        choices=("fcfs", "priority"),
    )
    scheduler_delay_factor: float = argument(
        0.0,
        "Delay new prompts by this factor times the duration of the last step with prompts.",
        low=0,
    )


@dataclass(frozen=True, kw_only=True)
class SpeculationArguments:
    """Speculative decoding: several draft tokens are verified in one step, without changing the output."""

    speculative_config: dict[str, Any] | None = argument(
        None,
        "Speculative decoding, as a JSON object: method (ngram, suffix, draft_model, eagle3), "
        "model, quantization, num_speculative_tokens, prompt_lookup_max, prompt_lookup_min, suffix_decoding_*, "
        "disable_by_batch_size, max_model_len. "
        "The output is bit-identical to that without.",
    )
    speculative_model: str | None = argument(
        None,
        "Proposer of draft tokens: [ngram] for n-gram lookup in the prompt and output, [suffix] for suffix decoding, "
        "also over earlier outputs, or the folder or hub name of an EAGLE-3 head, or of a draft model with the same "
        "vocabulary, such as a quantized version of this model.",
    )
    speculative_model_quantization: str | None = argument(
        None, "Expected quantization method of the draft model, like --quantization."
    )
    num_speculative_tokens: int | None = argument(
        None, "Maximum number of draft tokens of a sequence in a step; 4 if not given.", low=1
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


_PARTS: tuple[tuple[type, str], ...] = (
    (ModelArguments, "model"),
    (LoadArguments, "model"),
    (DeviceArguments, "model"),
    (CompilationArguments, "model"),
    (LoraArguments, "model"),
    (TokenizerArguments, "text"),
    (CacheArguments, "memory"),
    (SchedulerArguments, "scheduling"),
    (SpeculationArguments, "scheduling"),
)

#: One row per argument, ordered by heading.
ENGINE_ARGUMENTS: tuple[Argument, ...] = tuple(
    sorted((row for part, group in _PARTS for row in rows_of(part, group)), key=lambda row: GROUPS.index(row.group))
)
