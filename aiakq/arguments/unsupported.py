"""Arguments of vLLM and AIAK that this engine has no use for: what is said when somebody gives one.

A value that asks for nothing (``harmless``) is taken silently, so that scripts and configurations written for other
servers start here. Any other is accepted with a line that says why it does nothing, or, where leaving it out would
change what the user gets, refused with one. Arguments that work are in args.py. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiakq.errors import error


@dataclass(frozen=True)
class Foreign:
    """One argument.

    why       a sentence without its end: what there is instead, or what is missing.
    harmless  values that ask for nothing, besides None, False, and what is empty.
    refused   whether other values are refused; else they are accepted with a line.
    flag      whether it is a switch without a value.
    """

    name: str
    why: str
    harmless: tuple[Any, ...] = ()
    refused: bool = False
    switch: bool = False
    short: str | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether ``value`` is what would happen without it."""
        return value is None or value is False or str(value) in ("", "{}", "[]", *map(str, self.harmless))


_NO_LORA = "LoRA adapters are not built yet"
_NO_SPECULATION = "speculative decoding is not built yet"
_NO_IMAGES = "models see text only"
_NO_PROMPT_ADAPTERS = "prompt adapters are not supported"
_BESIDE = "text is made in the HTTP process, beside the engine"

FOREIGN: tuple[Foreign, ...] = (
    # --- what is loaded ------------------------------------------------------------------------------------------
    Foreign("task", "models generate text, nothing else", ("auto", "generate"), refused=True),
    Foreign("config_format", "models are read from config.json", ("auto", "hf"), refused=True),
    Foreign("code_revision", "code of a model comes from the revision of the model", refused=True),
    Foreign("model_loader_extra_config", "no loader has settings of its own", refused=True),
    Foreign("max_parallel_loading_workers", "one process loads the weights"),
    Foreign("use_tqdm_on_load", "progress is shown where there is a terminal", (True, "true"), switch=True),
    Foreign("qlora_adapter_name_or_path", _NO_LORA, refused=True),
    Foreign("override_neuron_config", "there are no kernels for Neuron devices", refused=True),
    Foreign("override_pooler_config", "models generate text, nothing else", refused=True),
    Foreign("additional_config", "no platform has settings of its own", refused=True),
    Foreign("allowed_local_media_path", _NO_IMAGES),
    Foreign("limit_mm_per_prompt", _NO_IMAGES),
    Foreign("mm_processor_kwargs", _NO_IMAGES),
    Foreign("disable_mm_preprocessor_cache", _NO_IMAGES, switch=True),
    Foreign("image_input_type", _NO_IMAGES),
    Foreign("image_token_id", _NO_IMAGES),
    Foreign("image_input_shape", _NO_IMAGES),
    Foreign("image_feature_size", _NO_IMAGES),
    # --- several devices -----------------------------------------------------------------------------------------
    Foreign("distributed_executor_backend", "a model runs on one device, in one process", ("mp", "uni"), refused=True),
    Foreign("worker_use_ray", "a model runs on one device, without Ray", refused=True, switch=True),
    Foreign("engine_use_ray", "the engine has a process of its own without Ray", switch=True),
    Foreign("ray_workers_use_nsight", "a model runs without Ray", switch=True),
    Foreign("enable_expert_parallel", "a model runs on one device", refused=True, switch=True),
    Foreign("disable_custom_all_reduce", "a model runs on one device, which has nothing to reduce", switch=True),
    Foreign("worker_cls", "there are no plug-ins for workers", ("auto",), refused=True),
    Foreign("worker_extension_cls", "there are no plug-ins for workers", refused=True),
    Foreign("kv_transfer_config", "prompts and answers are computed in one place", refused=True),
    # --- memory and steps ----------------------------------------------------------------------------------------
    Foreign("swap_space", "nothing is swapped: what has to make room is computed again", (0, 4)),
    Foreign("cpu_offload_gb", "weights stay in the memory of the device that computes", (0, 0.0), refused=True),
    Foreign("forced_num_gpu_blocks", "its name is --num-gpu-blocks-override now", refused=True),
    Foreign("max_paddings", "no prompt is padded"),
    Foreign("preemption_mode", "what has to make room is computed again", ("recompute",), refused=True),
    Foreign("use_v2_block_manager", "there is one manager of pages", switch=True),
    Foreign("enable_sleep_mode", "weights and pages stay where they are", refused=True, switch=True),
    Foreign("calculate_kv_scales", "8-bit keys and values get their scales as they are written", switch=True),
    Foreign("num_scheduler_steps", "every step is scheduled; on a CPU it is one call", (1,)),
    Foreign("multi_step_stream_outputs", "every step sends what it made", (True, "true"), switch=True),
    Foreign("num_lookahead_slots", _NO_SPECULATION, (0,)),
    Foreign("disable_async_output_proc", _BESIDE, switch=True),
    Foreign("scheduler_cls", "there are no plug-ins for schedulers", ("vllm.core.scheduler.Scheduler",), refused=True),
    Foreign("max_context_len_to_capture", "it is called --max-seq-len-to-capture now"),
    # --- text ----------------------------------------------------------------------------------------------------
    Foreign("tokenizer_pool_size", _BESIDE, (0,)),
    Foreign("tokenizer_pool_type", _BESIDE, ("ray",)),
    Foreign("tokenizer_pool_extra_config", _BESIDE),
    Foreign("guided_decoding_backend", "guided decoding is not built yet: requests that ask for it are refused"),
    Foreign("logits_processor_pattern", "a request that names Python functions could run anything", refused=True),
    Foreign("enable_reasoning", "reasoning parsers are not built yet", refused=True, switch=True),
    Foreign("reasoning_parser", "reasoning parsers are not built yet", refused=True),
    Foreign("enable_auto_tool_choice", "tool calls are not built yet", refused=True, switch=True),
    Foreign("tool_call_parser", "tool calls are not built yet", refused=True),
    # --- adapters and drafts -------------------------------------------------------------------------------------
    Foreign("enable_lora", _NO_LORA, refused=True, switch=True),
    Foreign("lora_modules", _NO_LORA, refused=True),
    Foreign("enable_lora_bias", _NO_LORA, switch=True),
    Foreign("max_loras", _NO_LORA, (1,)),
    Foreign("max_lora_rank", _NO_LORA, (16,)),
    Foreign("max_cpu_loras", _NO_LORA),
    Foreign("lora_dtype", _NO_LORA, ("auto",)),
    Foreign("lora_extra_vocab_size", _NO_LORA, (256,)),
    Foreign("long_lora_scaling_factors", _NO_LORA),
    Foreign("fully_sharded_loras", _NO_LORA, switch=True),
    Foreign("enable_prompt_adapter", _NO_PROMPT_ADAPTERS, refused=True, switch=True),
    Foreign("prompt_adapters", _NO_PROMPT_ADAPTERS, refused=True),
    Foreign("max_prompt_adapters", _NO_PROMPT_ADAPTERS, (1,)),
    Foreign("max_prompt_adapter_token", _NO_PROMPT_ADAPTERS, (0,)),
    Foreign("speculative_model", _NO_SPECULATION, refused=True),
    Foreign("speculative_config", _NO_SPECULATION, refused=True),
    Foreign("num_speculative_tokens", _NO_SPECULATION),
    Foreign("speculative_model_quantization", _NO_SPECULATION),
    Foreign("speculative_draft_tensor_parallel_size", _NO_SPECULATION, short="-spec-draft-tp"),
    Foreign("speculative_disable_mqa_scorer", _NO_SPECULATION, switch=True),
    Foreign("speculative_max_model_len", _NO_SPECULATION),
    Foreign("speculative_disable_by_batch_size", _NO_SPECULATION),
    Foreign("ngram_prompt_lookup_max", _NO_SPECULATION),
    Foreign("ngram_prompt_lookup_min", _NO_SPECULATION),
    Foreign("spec_decoding_acceptance_method", _NO_SPECULATION, ("rejection_sampler",)),
    Foreign("typical_acceptance_sampler_posterior_threshold", _NO_SPECULATION),
    Foreign("typical_acceptance_sampler_posterior_alpha", _NO_SPECULATION),
    Foreign("disable_logprobs_during_spec_decoding", _NO_SPECULATION, (True, "true"), switch=True),
    # --- logs ----------------------------------------------------------------------------------------------------
    Foreign("disable_log_requests", "requests are logged with --enable-log-requests only", switch=True),
    Foreign("middleware", "there are no plug-ins for the server", refused=True),
    Foreign("otlp_traces_endpoint", "there are no traces yet", refused=True),
    Foreign("collect_detailed_traces", "there are no traces yet", refused=True),
    Foreign("show_hidden_metrics_for_version", "no metric is hidden"),
)

BY_NAME = {row.name: row for row in FOREIGN}


def taken_out(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The words of a command line without these arguments, and what was given for them.

    They are no options of the command line's own: eighty more would double the time it takes to start.
    """
    names = {row.flag: row for row in FOREIGN} | {row.short: row for row in FOREIGN if row.short}
    kept: list[str] = []
    given: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        if word == "--":
            return [*kept, word, *rest], given
        name, has_value, value = word.partition("=")
        off = name.startswith("--no-") and name not in names
        row = names.get("--" + name.removeprefix("--no-") if off else name)
        if row is None or off and not row.switch:
            kept.append(word)
        elif row.switch:
            given[row.name] = value if has_value else not off
        else:
            given[row.name] = value if has_value else next(rest, None)
    return kept, given


def refuse(given: Mapping[str, Any]) -> None:
    """Raise ``option_refused`` for the first argument that asks for what there is not."""
    for name, value in given.items():
        row = BY_NAME.get(name)
        if row is not None and row.refused and not row.asks_for_nothing(value):
            said = row.flag if row.switch else f"{row.flag} {value}"
            raise error("option_refused", option=said, reason=row.why)


def remarks(given: Mapping[str, Any]) -> list[str]:
    """A line for each argument that is accepted and does nothing."""
    rows = [(BY_NAME[name], value) for name, value in given.items() if name in BY_NAME]
    return [
        f"{row.flag} does nothing here: {row.why}."
        for row, value in rows
        if not row.refused and not row.asks_for_nothing(value)
    ]
