"""The arguments of the engine: what ``LLM(...)`` takes, and ``aiakq serve`` and ``bench`` as well. See args.py.

Names and defaults follow vLLM's engine arguments where those exist. Standard library only.
"""

from __future__ import annotations

from aiakq.arguments.argument import Argument

_DTYPES = ("auto", "half", "float16", "fp16", "bfloat16", "bf16", "float", "float32", "fp32")

ENGINE_ARGUMENTS: tuple[Argument, ...] = (
    # --- model ---------------------------------------------------------------------------------------------------
    Argument("model", str, None, "Local folder, or hub name (org/name).", "model"),
    Argument("revision", str, None, "Branch, tag or commit of a hub model.", "model"),
    Argument(
        "download_dir",
        str,
        None,
        "Folder that hub models are downloaded to; the hub's own cache if not given.",
        "model",
    ),
    Argument(
        "ignore_patterns",
        list,
        None,
        "Weight files that are neither downloaded nor read, as patterns like consolidated*. Folders inside a model are "
        "never looked at.",
        "model",
    ),
    Argument(
        "hf_config_path", str, None, "Folder or hub name whose config.json holds instead of the model's.", "model"
    ),
    Argument("hf_overrides", dict, None, "Values that replace those of config.json, as a JSON object.", "model"),
    Argument(
        "rope_scaling",
        dict,
        None,
        'Scaling of rotary positions, like {"rope_type": "yarn", "factor": 4.0}: the context grows by the factor.',
        "model",
    ),
    Argument("rope_theta", float, None, "Base of rotary positions.", "model", low=1.0),
    Argument(
        "disable_sliding_window",
        bool,
        False,
        "Let every layer see everything, and end the context where the shortest window does.",
        "model",
    ),
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
        "Expected method: awq, gptq (or gpt), weight_only_int8 or smooth_quant. The checkpoint decides; this only "
        "checks it.",
        "model",
        short="-q",
    ),
    Argument(
        "load_format",
        str,
        "auto",
        "auto reads safetensors, or torch's files where there are none; safetensors and pt read only one kind (pt: "
        "plain "
        "tensors, no other pickles); dummy makes up random weights, for benchmarks.",
        "model",
        choices=("auto", "safetensors", "pt", "dummy"),
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
        "auto takes default sampling values from the model's generation_config.json, a folder from the one in there; "
        "vllm "
        "takes none. A max_new_tokens in it limits every request.",
        "model",
    ),
    Argument(
        "override_generation_config",
        dict,
        None,
        'Values over those, as a JSON object like {"temperature": 0.5}.',
        "model",
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
        levels=True,
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
    # --- text ----------------------------------------------------------------------------------------------------
    Argument("tokenizer", str, None, "Tokenizer folder or hub name; the model's own if not given.", "text"),
    Argument(
        "tokenizer_revision", str, None, "Branch, tag or commit of a hub tokenizer; as --revision if not given.", "text"
    ),
    Argument(
        "tokenizer_mode",
        str,
        "auto",
        "slow goes through transformers' own code, and its tokenizer in Python where it has one; auto calls the "
        "compiled one.",
        "text",
        choices=("auto", "slow"),
    ),
    Argument(
        "tokenizer_extension_path",
        str,
        None,
        "Absolute path of a Python file that is run; its get_tokenizer(folder) returns the tokenizer, with "
        "transformers' "
        "encode, decode and apply_chat_template.",
        "text",
    ),
    Argument("skip_tokenizer_init", bool, False, "Load no tokenizer: prompts and answers are token ids.", "text"),
    # --- memory --------------------------------------------------------------------------------------------------
    Argument(
        "max_model_len",
        int,
        None,
        "Tokens of prompt plus output; the model's own limit if not given. auto: as many as fit into memory, up to "
        "that.",
        "memory",
        low=1,
        spelled=True,
        automatic=True,
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
        "Tokens per step, prompts and outputs together. 8192 on a GPU, 512 on a CPU if not given.",
        "scheduling",
        low=1,
        spelled=True,
    ),
    Argument(
        "enable_chunked_prefill",
        bool,
        True,
        "Split long prompts over steps, so that running answers do not stall.",
        "scheduling",
    ),
    Argument(
        "async_scheduling",
        bool,
        None,
        "Prepare the next step while the device computes; results are told one step later, and tokens are the same. On "
        "a GPU so if not given; on a CPU, where nothing is gained by it, not.",
        "scheduling",
    ),
    Argument(
        "max_num_partial_prefills",
        int,
        1,
        "Prompts that may be split over steps at the same time; they share what answers leave of a step.",
        "scheduling",
        low=1,
    ),
    Argument(
        "max_long_partial_prefills",
        int,
        1,
        "Of these, long ones. With fewer than --max-num-partial-prefills, shorter prompts overtake long ones.",
        "scheduling",
        low=1,
    ),
    Argument(
        "long_prefill_token_threshold",
        int,
        0,
        "A prompt with more tokens still to come is long, and gets at most so many per step. 0: no limit per step, and "
        "long is more than 4 % of the context.",
        "scheduling",
        low=0,
        spelled=True,
    ),
    Argument(
        "scheduling_policy",
        str,
        "fcfs",
        "fcfs: in order of arrival. priority: in the order of the requests' priority, lowest first, then of arrival; "
        "when "
        "pages run out, the highest gives up its own.",
        "scheduling",
        choices=("fcfs", "priority"),
    ),
    Argument(
        "scheduler_delay_factor",
        float,
        0.0,
        "Let waiting prompts gather for this many times as long as the last step with prompts took.",
        "scheduling",
        low=0,
    ),
    Argument(
        "max_logprobs",
        int,
        20,
        "Most log-probabilities per position a request may ask for; -1: the whole vocabulary.",
        "scheduling",
        low=-1,
    ),
)
