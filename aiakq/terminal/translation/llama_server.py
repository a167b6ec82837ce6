"""Options of llama-server (llama.cpp)."""

from __future__ import annotations

from typing import Any

from aiakq.terminal.translation.rules import (
    KEPT,
    LOST,
    Assumed,
    Rule,
    ServerProgram,
    Unavailable,
    WithoutEffect,
    ignored,
    kept,
    lost,
)
from aiakq.terminal.translation.values import (
    NO_DRAFTS,
    comma_list,
    files_model,
    json_object,
    kv_cache,
    mapped,
    neutral,
    number,
    only_neutral,
    positive,
)

#: The README of tools/server, August 2026, and options that were removed before.
VERSION = "2026-08"

_SAMPLING = "requests have no such sampling parameter"
_MEMORY = "memory is laid out when the model is loaded; --gpu-memory-utilization and --max-num-seqs limit it"
_DEVICES = "the model lies whole on one kind of device; -tp and -pp distribute it"
_PROCESSORS = "threads are bound to the processors of a NUMA node; OMP_NUM_THREADS is their number"
_IMAGES = "models in GGUF files read text only"
_ROUTER = "one server has one model"
_TOOLS = "the server runs no tools"
_ROUTES = "there is no such route; /metrics and /health have the state of the server"
_DRAFT_FILE = "draft models in GGUF are not read; answers are the same without drafts, only slower"


def _repository(value: str) -> object:
    return value if ":" in value else f"{value}:Q4_K_M"


def _host(value: str) -> object:
    if value.endswith(".sock"):
        raise Unavailable(f"give --uds {value}")
    if "," in value:
        raise Unavailable("a server listens at one address, or at all")
    return value


def _template(value: str) -> object:
    if "{" not in value:
        raise Unavailable(f"{value} is a template of llama.cpp's own; give a file, or the model's is used")
    return value


def _layers(value: str) -> object:
    if value == "0":
        return "cpu"
    raise WithoutEffect(_DEVICES)


def _reasoning(value: str) -> object:
    if value == "none":
        raise WithoutEffect("without --reasoning-parser, thoughts stay in the content")
    return None


def _thinking(value: str) -> object:
    if value in ("auto", ""):
        raise WithoutEffect("it is the default")
    return value.lower() in ("on", "true", "1")


def _budget(value: str) -> object:
    if value == "-1":
        raise WithoutEffect("it is the default")
    if value == "0":
        return False
    raise Unavailable("requests set it: thinking_token_budget")


def _drafts(value: str) -> object:
    if value.startswith("ngram"):
        return "ngram"
    raise WithoutEffect("it is the default" if value == "none" else NO_DRAFTS)


def _linear(value: str) -> object:
    factor: Any = number(value)
    return 1 / factor


def _sampling(spec: str, key: str, *off: float) -> Rule:
    convert = neutral(*off) if off else number
    return kept("--override-generation-config", spec, convert, key=key)


RULES: tuple[Rule, ...] = (
    # --- the model ----------------------------------------------------------------------------------------------------
    kept("MODEL", "-m --model", files_model),
    kept("MODEL", "-hf -hfr --hf-repo", _repository, reason="llama-server takes Q4_K_M if no quantization is named"),
    *lost("download the file, and give its path", "-mu --model-url", "-dr --docker-repo", "-hff --hf-file"),
    *lost("give openai/gpt-oss-20b or -120b", "gpt-oss-20b-default?", "gpt-oss-120b-default?"),
    *lost(
        "give the model's name on Hugging Face's hub, like org/name:Q8_0",
        *("embd-gemma-default?", "fim-qwen-1.5b-default?", "fim-qwen-3b-default?", "fim-qwen-7b-default?"),
        *("fim-qwen-7b-spec?", "fim-qwen-14b-spec?", "fim-qwen-30b-default?"),
    ),
    *lost(_IMAGES, "vision-gemma-4b-default?", "vision-gemma-12b-default?"),
    kept("--hf-token", "-hft --hf-token"),
    kept("--served-model-name", "-a --alias", comma_list),
    *lost("values of the file are not overridden; --hf-overrides sets those of config.json", "override-kv"),
    *lost("adapters are merged by aiakq quantize --lora, or named by requests: --lora-modules", "lora", "lora-scaled"),
    *lost("there are no control vectors", "control-vector", "control-vector-scaled", "control-vector-layer-range!"),
    *ignored("requests name their adapters", "lora-init-without-apply?"),
    # --- context and memory -------------------------------------------------------------------------------------------
    kept("--max-model-len", "-c --ctx-size", positive, reason="for each request, however many run at the same time"),
    kept("--max-model-len", "kv-unified-per-slot", positive),
    kept("--max-num-seqs", "-np --parallel", positive),
    kept("--max-num-batched-tokens", "-ub --ubatch-size"),
    kept(
        "--kv-cache-dtype",
        "-ctk --cache-type-k",
        kv_cache({"f32": "float32", "f16": "float16", "bf16": "bfloat16", "q8_0": "int8"}),
    ),
    kept(
        "--kv-cache-dtype",
        "-ctv --cache-type-v",
        kv_cache({"f32": "float32", "f16": "float16", "bf16": "bfloat16", "q8_0": "int8"}),
    ),
    kept("--no-enable-prefix-caching", "no-cache-prompt?"),
    *ignored("prefixes are reused by default", "cache-prompt?"),
    *lost("contexts are not shifted: answers end at the context's length", "context-shift?"),
    *ignored("contexts are not shifted", "no-context-shift?"),
    *ignored(
        _MEMORY,
        *(
            "-b --batch-size",
            "keep =0",
            "swa-full?",
            "-fa~ --flash-attn",
            "-kvo? --kv-offload",
            "-nkvo? --no-kv-offload",
        ),
        *("repack?", "-nr? --no-repack", "no-host?", "-dt --defrag-thold", "-lm --load-mode", "-lzm --lazy-mode"),
        *(
            "mlock?",
            "no-mmap?",
            "mmap?",
            "-dio? --direct-io",
            "-ndio? --no-direct-io",
            "-fit~ --fit",
            "-fitt --fit-target",
        ),
        *(
            "-fitc --fit-ctx",
            "-ctxcp --ctx-checkpoints --swa-checkpoints",
            "-cms --checkpoint-min-step",
            "-cram --cache-ram",
        ),
        *("-kvu? --kv-unified", "-no-kvu? --no-kv-unified", "cache-idle-slots?", "no-cache-idle-slots?", "cache-reuse"),
        *("-cb? --cont-batching", "-nocb? --no-cont-batching", "-sps --slot-prompt-similarity", "slot-save-path"),
        *("check-tensors?", "warmup?", "no-warmup?", "sleep-idle-seconds =-1", "-cpent --checkpoint-every-n-tokens"),
    ),
    # --- devices ------------------------------------------------------------------------------------------------------
    kept("--device", "-ngl --gpu-layers --n-gpu-layers", _layers),
    *ignored(
        _DEVICES,
        *("-dev --device", "list-devices?", "-ot --override-tensor", "-cmoe? --cpu-moe", "-ncmoe --n-cpu-moe"),
        *("moe-cache-mib", "-ncffn --n-cpu-ffn", "-sm --split-mode", "-ts --tensor-split", "-mg --main-gpu"),
        *("op-offload?", "-nopo? --no-op-offload", "-nommq? --no-mul-mat-q"),
    ),
    *lost("ranks of several machines: --distributed-executor-backend ray", "rpc"),
    *ignored(
        _PROCESSORS,
        *("-t --threads", "-tb --threads-batch", "-C --cpu-mask", "-Cr --cpu-range", "cpu-strict", "prio", "poll"),
        *("-Cb --cpu-mask-batch", "-Crb --cpu-range-batch", "cpu-strict-batch", "prio-batch", "poll-batch", "numa"),
        "threads-http",
    ),
    # --- positions ----------------------------------------------------------------------------------------------------
    kept(
        "--rope-scaling",
        "rope-scaling",
        mapped({"none": None, "linear": "linear", "yarn": "yarn"}, "none, linear or yarn"),
        key="rope_type",
    ),
    kept("--rope-scaling", "rope-scale", number, key="factor"),
    kept("--rope-scaling", "rope-freq-scale", _linear, key="factor"),
    kept("--rope-theta", "rope-freq-base", positive),
    kept("--rope-scaling", "yarn-orig-ctx", neutral(0), key="original_max_position_embeddings"),
    kept("--rope-scaling", "yarn-attn-factor", neutral(-1), key="attention_factor"),
    kept("--rope-scaling", "yarn-beta-slow", neutral(-1), key="beta_slow"),
    kept("--rope-scaling", "yarn-beta-fast", neutral(-1), key="beta_fast"),
    kept("--rope-scaling", "yarn-ext-factor", only_neutral("YaRN is always mixed fully", -1.0, 1.0), key="ext"),
    *lost("contexts are extended with --rope-scaling only", "-gan --grp-attn-n =1", "-gaw --grp-attn-w"),
    # --- sampling -----------------------------------------------------------------------------------------------------
    _sampling("temp --temperature", "temperature"),
    _sampling("top-k", "top_k"),
    _sampling("top-p", "top_p"),
    _sampling("min-p", "min_p"),
    _sampling("repeat-penalty", "repetition_penalty"),
    kept("--override-generation-config", "-n --predict --n-predict", neutral(-1, -2), key="max_new_tokens"),
    *(
        kept("--override-generation-config", spec, only_neutral(_SAMPLING, *off), key="temperature")
        for spec, off in (
            ("top-nsigma --top-n-sigma", (-1,)),
            ("xtc-probability", (0,)),
            ("typical --typical-p", (1,)),
            ("dry-multiplier", (0,)),
            ("dynatemp-range", (0,)),
            ("mirostat", (0,)),
            ("adaptive-target", (-1,)),
            ("tfs", (1,)),
        )
    ),
    *(
        kept(
            "--override-generation-config",
            spec,
            only_neutral("a request sets it; it is no default of a server", 0),
            key="temperature",
        )
        for spec in ("presence-penalty", "frequency-penalty")
    ),
    *ignored(
        "it has an effect only beside a parameter that is not available",
        *(
            "xtc-threshold",
            "dry-base",
            "dry-allowed-length",
            "dry-penalty-last-n",
            "dry-sequence-breaker",
            "adaptive-decay",
        ),
        *("dynatemp-exp", "mirostat-lr", "mirostat-ent"),
    ),
    *lost("penalties count all tokens of the prompt and the output", "repeat-last-n =-1"),
    *ignored("a request's own seed makes its answer reproducible", "-s --seed"),
    *lost(
        "the order is that of vLLM: penalties, temperature, top-k, top-p, min-p",
        *("samplers", "sampler-seq --sampling-seq"),
    ),
    *lost(
        "requests set it",
        "ignore-eos?",
        "-l --logit-bias",
        "grammar",
        "grammar-file",
        "-j --json-schema",
        "-jf --json-schema-file",
    ),
    *lost("requests set it: stop", "-r --reverse-prompt"),
    *lost("special tokens are not part of texts; requests set skip_special_tokens", "-sp? --special"),
    *ignored("sampling runs where the model does", "-bs? --backend-sampling"),
    *ignored(
        "prompts come from requests",
        "-e? --escape",
        "no-escape?",
        "-i? --interactive",
        "-cnv? --conversation",
        "-p --prompt",
    ),
    # --- HTTP ---------------------------------------------------------------------------------------------------------
    kept("--host", "host", _host),
    kept("--port", "port"),
    kept("--root-path", "api-prefix"),
    kept("--api-key", "api-key", comma_list),
    kept("--api-key-file", "api-key-file"),
    kept("--ssl-keyfile", "ssl-key-file"),
    kept("--ssl-certfile", "ssl-cert-file"),
    kept("--allowed-origins", "cors-origins"),
    kept("--allowed-methods", "cors-methods"),
    kept("--allowed-headers", "cors-headers"),
    kept("--allow-credentials", "cors-credentials?"),
    *ignored("it is the default", "no-cors-credentials?", "ui? --webui", "reuse-port?"),
    kept("--disable-playground", "no-ui? --no-webui"),
    kept("--write-timeout", "-to --timeout"),
    kept("--sse-keep-alive-interval", "sse-ping-interval", lambda value: "0" if value == "-1" else value),
    *ignored("metrics are always on", "metrics?"),
    *ignored(_ROUTES, "props?", "slots?", "no-slots?"),
    *ignored("the playground has no settings, and no other files are served", "ui-config --webui-config"),
    *ignored(
        "the playground has no settings, and no other files are served", "ui-config-file --webui-config-file", "path"
    ),
    *lost(
        _TOOLS,
        "ui-mcp-proxy? --webui-mcp-proxy",
        "tools",
        "tools-runtime",
        "mcp-servers-config",
        "mcp-servers-json",
        "-ag? --agent",
    ),
    *ignored(_TOOLS, "no-ui-mcp-proxy? --no-webui-mcp-proxy", "-no-ag? --no-agent"),
    *lost(_ROUTER, "models-dir", "models-preset", "models-max", "models-autoload?"),
    *ignored(_ROUTER, "no-models-autoload?", "tags"),
    # --- chats --------------------------------------------------------------------------------------------------------
    *ignored("templates are always Jinja", "jinja?", "no-jinja?"),
    kept("--chat-template", "chat-template", _template),
    kept("--chat-template", "chat-template-file"),
    kept("--default-chat-template-kwargs", "chat-template-kwargs", json_object),
    kept("--enable-reasoning", "reasoning-format", _reasoning),
    kept("--default-chat-template-kwargs", "-rea --reasoning", _thinking, key="enable_thinking"),
    kept("--default-chat-template-kwargs", "reasoning-budget", _budget, key="enable_thinking"),
    kept(
        "--default-chat-template-kwargs",
        "reasoning-effort",
        mapped({"default": None}, "", others=True),
        key="reasoning_effort",
    ),
    *lost("the marks of a thought are the model's", "reasoning-budget-message"),
    *ignored("the template decides", "reasoning-preserve?", "no-reasoning-preserve?", "prefill-assistant?"),
    *lost(
        "requests say whether the last message is continued",
        "no-prefill-assistant?",
        "skip-chat-parsing?",
        "system-prompt-file",
    ),
    *ignored("it is the default", "no-skip-chat-parsing?"),
    *lost("there is no route /infill", "spm-infill?"),
    *lost(_IMAGES, "-mm --mmproj", "-mmu --mmproj-url", "media-path"),
    *ignored(
        _IMAGES,
        *(
            "mmproj-auto?",
            "no-mmproj? --no-mmproj-auto",
            "mmproj-offload?",
            "no-mmproj-offload?",
            "-mmdev --mmproj-device",
        ),
        *("image-min-tokens", "image-max-tokens", "mtmd-batch-max-tokens", "video-fps", "video-timestamp-interval"),
        "video-ffmpeg-dir",
    ),
    # --- embeddings ---------------------------------------------------------------------------------------------------
    kept("--task", "embedding? --embeddings", value="embed"),
    kept("--task", "rerank? --reranking", value="score"),
    kept(
        "--override-pooler-config",
        "pooling",
        mapped({"mean": "MEAN", "cls": "CLS", "last": "LAST", "none": "ALL"}, "give --rerank for rank"),
        key="pooling_type",
    ),
    kept(
        "--override-pooler-config",
        "embd-normalize",
        mapped({"2": True, "-1": False}, "vectors have a Euclidean length of 1, or none"),
        key="normalize",
    ),
    # --- drafts -------------------------------------------------------------------------------------------------------
    kept("--speculative-config", "spec-type", _drafts, key="method"),
    *ignored(_DRAFT_FILE, "spec-draft-model -md --model-draft", "spec-draft-hf -hfd -hfrd --hf-repo-draft"),
    *ignored(
        "drafts are measured, and used while they save time",
        *(
            "spec-draft-n-max",
            "spec-draft-n-min",
            "draft --draft-n --draft-max",
            "draft-min --draft-n-min",
            "spec-default?",
        ),
        *("spec-draft-p-split --draft-p-split", "spec-draft-p-min --draft-p-min", "spec-draft-sampling"),
        *("spec-synth-len", "spec-synth-rates", "spec-draft-backend-sampling?", "no-spec-draft-backend-sampling?"),
        *("spec-draft-threads -td --threads-draft", "spec-draft-threads-batch -tbd --threads-batch-draft"),
        *("spec-draft-cpu-mask -Cd --cpu-mask-draft", "spec-draft-cpu-range -Crd --cpu-range-draft"),
        *("spec-draft-cpu-strict --cpu-strict-draft", "spec-draft-prio --prio-draft", "spec-draft-poll --poll-draft"),
        *(
            "spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft",
            "spec-draft-cpu-strict-batch --cpu-strict-batch-draft",
        ),
        *("spec-draft-prio-batch --prio-batch-draft", "spec-draft-poll-batch --poll-batch-draft"),
        *("spec-draft-override-tensor -otd --override-tensor-draft", "spec-draft-cpu-moe? -cmoed --cpu-moe-draft"),
        *(
            "spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft",
            "spec-draft-device -devd --device-draft",
        ),
        *("spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft", "-cd --ctx-size-draft", "draft-k"),
        *("spec-draft-type-k -ctkd --cache-type-k-draft", "spec-draft-type-v -ctvd --cache-type-v-draft"),
        *("spec-ngram-mod-n-min", "spec-ngram-mod-n-max", "spec-ngram-mod-n-match", "spec-ngram-simple-size-n"),
        *(
            "spec-ngram-simple-size-m",
            "spec-ngram-simple-min-hits",
            "spec-ngram-map-k-size-n",
            "spec-ngram-map-k-size-m",
        ),
        *("spec-ngram-map-k-min-hits", "spec-ngram-map-k4v-size-n", "spec-ngram-map-k4v-size-m"),
        *("spec-ngram-map-k4v-min-hits", "spec-ngram-size-n", "spec-ngram-size-m", "spec-ngram-min-hits"),
        *("-lcs --lookup-cache-static", "-lcd --lookup-cache-dynamic"),
    ),
    # --- logs ---------------------------------------------------------------------------------------------------------
    *ignored(
        "the log is written to stderr: --uvicorn-log-level, --log-format, --log-config-file",
        *(
            "log-disable?",
            "log-enable?",
            "log-file",
            "log-jsonl?",
            "no-log-jsonl?",
            "log-colors~",
            "-v? --verbose --log-verbose",
        ),
        *("-lv --verbosity --log-verbosity", "log-prefix?", "no-log-prefix?", "log-timestamps?", "no-log-timestamps?"),
        *("log-format", "perf?", "no-perf?", "log-prompts-dir", "simple-io?", "display-prompt?", "no-display-prompt?"),
    ),
    *ignored("set HF_HUB_OFFLINE=1 in front of the command", "offline?"),
    *ignored("it starts no server", "-h? --help --usage", "version?", "-cl? --cache-list", "completion-bash?"),
)

VARIABLES: dict[str, tuple[str, str]] = {
    "LLAMA_API_KEY": ("--api-key", ""),
    "LLAMA_ARG_MODEL": ("--model", ""),
    "LLAMA_ARG_HF_REPO": ("--hf-repo", ""),
    "LLAMA_ARG_MODEL_URL": ("--model-url", ""),
    "LLAMA_ARG_CTX_SIZE": ("--ctx-size", ""),
    "LLAMA_ARG_N_PARALLEL": ("--parallel", ""),
    "LLAMA_ARG_N_GPU_LAYERS": ("--gpu-layers", ""),
    "LLAMA_ARG_PORT": ("--port", ""),
    "LLAMA_ARG_HOST": ("--host", ""),
    "LLAMA_ARG_ALIAS": ("--alias", ""),
    "LLAMA_ARG_EMBEDDINGS": ("--embedding", ""),
    "LLAMA_ARG_CHAT_TEMPLATE": ("--chat-template", ""),
    "LLAMA_ARG_CACHE_TYPE_K": ("--cache-type-k", ""),
    "LLAMA_ARG_CACHE_TYPE_V": ("--cache-type-v", ""),
    "LLAMA_ARG_TEMPERATURE": ("--temp", ""),
    "LLAMA_ARG_MMPROJ": ("--mmproj", ""),
    "LLAMA_CACHE": (LOST, "give --download-dir, the folder of downloaded models"),
}
_ANSWERS = "llama-server's default for requests that do not set it"
ASSUMED = (
    Assumed("--port", "8080", "llama-server's default port"),
    Assumed("--override-generation-config", 0.8, _ANSWERS, "temperature"),
    Assumed("--override-generation-config", 40, _ANSWERS, "top_k"),
    Assumed("--override-generation-config", 0.95, _ANSWERS, "top_p"),
    Assumed("--override-generation-config", 0.05, _ANSWERS, "min_p"),
)
LLAMA_SERVER = ServerProgram(
    "llama-server", VERSION, RULES, VARIABLES, ASSUMED, model=Rule((), "value", KEPT, "MODEL", convert=files_model)
)
