"""EngineConfig: validated engine arguments, with every default that can be resolved before the model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from aiakq.arguments.engine import EngineArguments
from aiakq.arguments.server import engine_arguments
from aiakq.runtime.config.cache import CacheConfig
from aiakq.runtime.config.compilation import CompilationConfig
from aiakq.runtime.config.device import DeviceConfig
from aiakq.runtime.config.hf_config import GenerationConfig, model_config, with_overrides_as_values
from aiakq.runtime.config.load import LoadConfig
from aiakq.runtime.config.model import ModelConfig, OutputHead, length_limit
from aiakq.runtime.config.multimodal import (
    GENERATION_KEYS,
    MAX_ENCODER_CACHE_TOKENS,
    MultimodalConfig,
    SpeechConfig,
    transcribes_audio,
)
from aiakq.runtime.config.parallel import ParallelConfig
from aiakq.runtime.config.quantization import check_rotation, check_scales, checked_spec, rounding_spec
from aiakq.runtime.config.scheduler import SchedulerConfig
from aiakq.runtime.pooling.config import PoolingConfig
from aiakq.runtime.text.tokenizer_source import TokenizerSource
from aiakq.spec import QuantSpec


@dataclass(frozen=True)
class EngineConfig:
    """The validated engine arguments, with every default resolved that needs no loaded model.

    model          dimensions of the model.
    spec           quantization of its weights in memory; None if they are not quantized.
    max_model_len  maximum number of tokens of prompt plus output.
    fit_model_len  whether max_model_len may be reduced to fit into memory.
    max_logprobs   maximum number of log-probabilities per position.
    pooling        how the model pools prompts; None if it generates text.
    draft          config of the draft model; None without one.
    multimodal     what the model reads besides text; None if nothing.
    speech         how the model is asked to transcribe audio; None for all other models.
    """

    model: ModelConfig
    load: LoadConfig
    spec: QuantSpec | None
    tokenizer: TokenizerSource
    device: DeviceConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    compilation: CompilationConfig
    generation: GenerationConfig
    max_model_len: int
    fit_model_len: bool
    max_logprobs: int
    pooling: PoolingConfig | None = None
    draft: EngineConfig | None = None
    multimodal: MultimodalConfig | None = None
    speech: SpeechConfig | None = None

    @property
    def architecture(self) -> str:
        """The architecture that config.json names."""
        return self.model.architecture if self.pooling is None else self.pooling.stated

    @staticmethod
    def from_args(given: EngineArguments | Mapping[str, object]) -> EngineConfig:
        """Find the model, and resolve defaults that depend on its config.

        given  validated arguments, or keywords (docs/arguments.md) to validate.

        Raises AiakqError: usage, bad_option, option_conflict, model_*, quantization_mismatch, device.
        """
        args = given if isinstance(given, EngineArguments) else engine_arguments(given)
        load = LoadConfig.from_args(args)
        args = with_overrides_as_values(args, load.path)
        raw = model_config(load.path, args)
        rounding = rounding_spec(load.path, raw, args.quantization)
        spec = rounding or checked_spec(load.path, raw, args.quantization)
        load = replace(load, rounds=rounding is not None)
        transcribes = transcribes_audio(args, raw)
        pooling = None if transcribes else PoolingConfig.from_args(args, load.path, raw)
        model = ModelConfig.from_hf(raw if pooling is None else pooling.model_config(raw))
        stated, raw = raw, dict(model.raw)
        max_model_len = length_limit(args, model, None if pooling is None else pooling.max_length)
        model = replace(model, context=max_model_len, num_positions=max_model_len)
        head = None if pooling is None else OutputHead(pooling.num_labels, pooling.label_tokens, pooling.projection)
        model = load.with_stored_head(replace(model, head=head), raw)
        if args.disable_sliding_window:
            model = replace(model, sliding_windows=(None,) * model.num_layers)
        device = DeviceConfig.from_args(args, raw)
        reads_both_ways = pooling is not None and pooling.limits.reads_both_ways
        cache = CacheConfig.from_args(args, device, model.is_recurrent)
        if reads_both_ways:
            cache = replace(cache, enable_prefix_caching=False)  # every token depends on those behind it, too
        on_cpu = device.device.type == "cpu"
        config = EngineConfig(
            model=model,
            load=load,
            spec=spec,
            tokenizer=TokenizerSource.from_args(args, load.path),
            device=device,
            cache=cache,
            scheduler=SchedulerConfig.from_args(args, max_model_len, on_cpu, model.is_recurrent, reads_both_ways),
            parallel=ParallelConfig.from_args(args, device.device.type),
            compilation=CompilationConfig.from_args(args),
            generation=GenerationConfig.from_args(
                load.path, args, raw, model.vocab_size, GENERATION_KEYS if transcribes else ()
            ),
            max_model_len=max_model_len,
            fit_model_len=args.max_model_len == "auto",
            max_logprobs=model.vocab_size if args.max_logprobs == -1 else args.max_logprobs,
            pooling=pooling,
        )
        config = _with_media(config, args, stated)
        embeds = pooling is not None and not pooling.label_tokens
        check_rotation(stated, config.scheduler.lora is not None, embeds)
        if config.scheduler.lora is not None:
            check_scales(spec, stated)
        return _with_draft(config, args)


#: Arguments that apply to the draft model too: those of devices, loading and the KV cache.
_SHARED = {
    *("device", "dtype", "kv_cache_dtype", "block_size", "enable_prefix_caching", "num_gpu_blocks_override"),
    *("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "max_seq_len_to_capture", "enforce_eager"),
    *("trust_remote_code", "hf_token", "download_dir", "model_impl"),
}


def _with_media(config: EngineConfig, args: EngineArguments, stated: Mapping[str, object]) -> EngineConfig:
    """Return ``config`` with what the model of config.json ``stated`` reads besides text.

    Raises what ``SpeechConfig.from_args`` and ``MultimodalConfig.from_args`` raise.
    """
    model, folder, device = config.model, config.load.path, config.device.device.type
    speech = SpeechConfig.from_args(args, folder, stated, model.vocab_size, device)
    if speech is not None:
        tokens = speech.cache_tokens(config.scheduler.max_num_seqs)
        return replace(config, speech=speech, scheduler=replace(config.scheduler, encoder_cache_tokens=tokens))
    if config.pooling is not None:
        return config
    speculation = config.scheduler.speculation
    has_draft_model = speculation is not None and speculation.model is not None
    multimodal = MultimodalConfig.from_args(args, str(folder), stated, has_draft_model)
    config = replace(config, multimodal=multimodal)
    if multimodal is None or multimodal.refusal:
        return config
    tokens = min(config.max_model_len, MAX_ENCODER_CACHE_TOKENS)
    scheduler = replace(config.scheduler, encoder_cache_tokens=tokens)
    grid = multimodal.grid(scheduler.max_num_batched_tokens)
    return replace(config, scheduler=scheduler, model=replace(model, grid=grid))


def _with_draft(config: EngineConfig, args: EngineArguments) -> EngineConfig:
    """Return ``config`` with the draft model's, if there is one. Raises ``option_conflict``, ``unsupported``, and as
    ``from_args``.
    """
    speculation = config.scheduler.speculation
    if speculation is None or speculation.model is None:
        return config
    shared = {name: getattr(args, name) for name in _SHARED}
    draft = EngineArguments(model=speculation.model, quantization=speculation.quantization, **shared)
    with_draft: EngineConfig = speculation.load_method().configure(config, draft)
    return with_draft
