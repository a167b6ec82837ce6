"""Ollama: Modelfiles, ``ollama run`` and ``ollama create``, and the variables of ``ollama serve``."""

from __future__ import annotations

import re
from pathlib import Path

from aiakq.errors import error
from aiakq.system.files import read_named_text
from aiakq.terminal.translation.rules import (
    IGNORED,
    KEPT,
    Assumed,
    Rule,
    ServerProgram,
    Unavailable,
    ignored,
    kept,
    lost,
)
from aiakq.terminal.translation.values import kv_cache, mapped, neutral, number, only_neutral, positive

VERSION = "August 2026"
_INSTRUCTION = re.compile(
    r"(FROM|PARAMETER|TEMPLATE|SYSTEM|ADAPTER|LICENSE|MESSAGE|REQUIRES|DRAFT|RENDERER|PARSER)\s", re.I
)
_MAX_BYTES = 1 << 20
_MEMORY = "memory and threads are laid out when the model is loaded"
_SAMPLING = "requests have no such sampling parameter"
_CLIENT = "it is about the terminal of Ollama's own client; aiakq chat is one for this server"


def _model(value: str) -> object:
    """Return a folder, a GGUF file (those of Ollama's store are called by their hash), or a name on the hub."""
    if value.startswith((".", "/", "~")) or value.endswith(".gguf"):
        return value
    if value.startswith(("hf.co/", "huggingface.co/")):
        return value.partition("/")[2]
    raise Unavailable(f"{value} of Ollama's library is a GGUF file: give the name of the model on Hugging Face's hub")


def _host(value: str) -> object:
    address = re.sub(r"^https?://", "", value).rstrip("/").partition(":")[0]
    return address or "0.0.0.0"


def _sampling(spec: str, key: str, *off: float) -> Rule:
    return kept("--override-generation-config", spec, neutral(*off) if off else number, key=key)


RULES: tuple[Rule, ...] = (
    # --- instructions of a Modelfile ----------------------------------------------------------------------------------
    kept("MODEL", "FROM", _model),
    *lost(
        "templates of Ollama are written in Go; the model's own, or --chat-template with a Jinja file, is used",
        "TEMPLATE",
    ),
    *lost(
        "there is no default system message: put it into the template of --chat-template, or into requests", "SYSTEM"
    ),
    *lost("adapters are merged by aiakq quantize --lora, or named by requests: --lora-modules", "ADAPTER"),
    *lost("conversations begin with the request's own messages", "MESSAGE"),
    *ignored("it is a text about the model", "LICENSE", "REQUIRES"),
    *ignored("drafts never change an answer; answers are the same without, only slower", "DRAFT"),
    *ignored("the model's own template and parsers are used", "RENDERER", "PARSER"),
    # --- parameters ---------------------------------------------------------------------------------------------------
    kept("--max-model-len", "num_ctx", positive),
    kept("--override-generation-config", "num_predict", neutral(-1, -2), key="max_new_tokens"),
    _sampling("temperature", "temperature"),
    _sampling("top_k", "top_k"),
    _sampling("top_p", "top_p"),
    _sampling("min_p", "min_p"),
    _sampling("repeat_penalty", "repetition_penalty"),
    *lost("penalties count all tokens of the prompt and the output", "repeat_last_n =-1"),
    *lost("requests set it; it is no default of a server", "stop"),
    *ignored("a request's own seed makes its answer reproducible", "seed"),
    *(
        kept("--override-generation-config", spec, only_neutral(_SAMPLING, *off), key="temperature")
        for spec, off in (("typical_p", (1,)), ("tfs_z", (1,)), ("mirostat", (0,)))
    ),
    *(
        kept("--override-generation-config", spec, only_neutral("requests set it", 0), key="temperature")
        for spec in ("presence_penalty", "frequency_penalty")
    ),
    *ignored("it has an effect only beside mirostat", "mirostat_eta", "mirostat_tau", "penalize_newline"),
    *ignored(
        _MEMORY,
        *("num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread", "num_keep", "num_gqa", "low_vram", "f16_kv"),
        *(
            "use_mlock",
            "numa",
            "vocab_only",
            "logits_all",
            "embedding_only",
            "rope_frequency_base",
            "rope_frequency_scale",
        ),
    ),
    *ignored("drafts never change an answer here", "draft_num_predict"),
    # --- options of ollama run ----------------------------------------------------------------------------------------
    *ignored("the model stays in memory while the server runs", "keepalive"),
    *ignored(_CLIENT, "verbose?", "nowordwrap?", "hidethinking?", "insecure?", "-f --file"),
    *lost("requests set it: response_format", "format"),
    kept(
        "--default-chat-template-kwargs",
        "think~",
        mapped({"true": True, "false": False}, "requests set the effort"),
        key="enable_thinking",
    ),
    *lost("requests set it", "truncate~", "dimensions"),
    *ignored("files are not written again", "-q --quantize", "draft-quantize", "experimental?"),
    # --- variables of ollama serve ------------------------------------------------------------------------------------
    kept("--host", "env-host", _host),
    kept("--max-model-len", "env-context-length", positive),
    kept("--kv-cache-dtype", "env-kv-cache-type", kv_cache({"f16": "float16", "q8_0": "int8", "f32": "float32"})),
    kept("--max-num-seqs", "env-num-parallel", positive),
    kept("--max-num-queued-reqs", "env-max-queue"),
    kept("--allowed-origins", "env-origins", lambda value: value.split(",")),
)
VARIABLES: dict[str, tuple[str, str]] = {
    "OLLAMA_HOST": ("--env-host", ""),
    "OLLAMA_CONTEXT_LENGTH": ("--env-context-length", ""),
    "OLLAMA_KV_CACHE_TYPE": ("--env-kv-cache-type", ""),
    "OLLAMA_NUM_PARALLEL": ("--env-num-parallel", ""),
    "OLLAMA_MAX_QUEUE": ("--env-max-queue", ""),
    "OLLAMA_ORIGINS": ("--env-origins", ""),
    **dict.fromkeys(("OLLAMA_KEEP_ALIVE", "OLLAMA_LOAD_TIMEOUT"), (IGNORED, "the model stays in memory")),
    "OLLAMA_MAX_LOADED_MODELS": (IGNORED, "one server has one model"),
    **dict.fromkeys(
        ("OLLAMA_MODELS", "OLLAMA_NOPRUNE", "OLLAMA_NO_CLOUD", "OLLAMA_REMOTES"), (IGNORED, "models are folders")
    ),
    **dict.fromkeys(("OLLAMA_FLASH_ATTENTION", "OLLAMA_SCHED_SPREAD", "OLLAMA_GPU_OVERHEAD"), (IGNORED, _MEMORY)),
    **dict.fromkeys(("OLLAMA_VULKAN", "OLLAMA_IGPU_ENABLE", "OLLAMA_LLM_LIBRARY"), (IGNORED, _MEMORY)),
    **dict.fromkeys(("OLLAMA_DEBUG", "OLLAMA_DEBUG_LOG_REQUESTS"), (IGNORED, "see --enable-log-requests")),
    **dict.fromkeys(("OLLAMA_NOHISTORY", "OLLAMA_EDITOR", "OLLAMA_AUTH"), (IGNORED, _CLIENT)),
    **dict.fromkeys(("OLLAMA_GO_TEMPLATE", "OLLAMA_MAX_TRANSFER_STREAMS"), (IGNORED, _CLIENT)),
}
_ANSWERS = "Ollama's default for requests that do not set it"
ASSUMED = (
    Assumed("--port", "11434", "Ollama's default port"),
    Assumed("--override-generation-config", 0.8, _ANSWERS, "temperature"),
    Assumed("--override-generation-config", 40, _ANSWERS, "top_k"),
    Assumed("--override-generation-config", 0.9, _ANSWERS, "top_p"),
)
OLLAMA = ServerProgram(
    "Ollama", VERSION, RULES, VARIABLES, ASSUMED, model=Rule((), "value", KEPT, "MODEL", convert=_model)
)


def modelfile(text: str) -> list[tuple[str, str, str]] | None:
    """Return the instructions of a Modelfile, given as its path or text: option in the table, as written, value.

    None if ``text`` is neither. Raises ``usage`` for a file that is not one.
    """
    path = Path(text) if len(text) < 1024 and "\n" not in text else None
    if path is not None and path.is_file():
        text = read_named_text(path, _MAX_BYTES, lambda reason: error("usage", reason=f"{path}: {reason}.", hint=""))
        if not _looks(text):
            raise error("usage", reason=f"{path} has no line FROM, as a Modelfile has.", hint="Give a command as text.")
    elif not _looks(text):
        return None
    return [_row(name, value) for name, value in _instructions(text)]


def _looks(text: str) -> bool:
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return bool(_INSTRUCTION.match(f"{first} ")) and bool(re.search(r"^\s*FROM\s", text, re.M | re.I))


def _instructions(text: str) -> list[tuple[str, str]]:
    """Return (name, value) of all instructions; values may be in one or three quotation marks, over several lines."""
    found, rest = [], text
    while rest := rest.lstrip():
        if rest.startswith("#"):
            rest = rest.partition("\n")[2]
            continue
        name, _, rest = rest.partition(" ")
        rest = rest.lstrip(" \t")
        prefix = ""
        if name.upper() in ("PARAMETER", "MESSAGE"):
            prefix, _, rest = rest.partition(" ")
            prefix, rest = prefix + " ", rest.lstrip(" \t")
        mark = '"""' if rest.startswith('"""') else '"' if rest.startswith('"') else ""
        if mark and mark in rest[len(mark) :]:
            value, _, rest = rest[len(mark) :].partition(mark)
        else:
            value, _, rest = rest.partition("\n")
        found.append((name.upper(), prefix + value.strip() if not mark else prefix + value))
    return found


def _row(name: str, value: str) -> tuple[str, str, str]:
    if name == "PARAMETER":
        parameter, _, value = value.partition(" ")
        return f"--{parameter}", f"PARAMETER {parameter}", value.strip()
    return f"--{name}", name, value if len(value) <= 60 or name == "FROM" else f"{value[:57].splitlines()[0]}..."
