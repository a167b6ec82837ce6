"""SpeechConfig: how a model that transcribes audio (Whisper) is asked, and the keys of its config.json. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiakq.arguments.engine import EngineArguments
from aiakq.constraints import Constraint
from aiakq.errors import AiakqError, error
from aiakq.formats.config_values import SIZE, read_value
from aiakq.formats.model_folder import first_architecture, read_json

#: Architectures whose decoder reads the states of an encoder of audio, and the model_type that has keys for both.
SPEECH_ARCHITECTURES = {"WhisperForConditionalGeneration": "whisper"}
#: Audios whose keys and values are kept at most.
_MAX_AUDIOS = 8
#: Frames of a spectrogram for each state of the encoder: its second convolution has a stride of 2.
FRAMES_PER_STATE = 2
#: Keys of config.json of the decoder -> their usual names.
_DECODER = {
    "decoder_layers": "num_hidden_layers",
    "decoder_attention_heads": "num_attention_heads",
    "decoder_ffn_dim": "intermediate_size",
    "max_target_positions": "max_position_embeddings",
}
#: Keys of generation_config.json that ``SpeechTokens`` are made of, or that it replaces.
GENERATION_KEYS = frozenset(
    {
        *("lang_to_id", "task_to_id", "no_timestamps_token_id", "prev_sot_token_id", "decoder_start_token_id"),
        *("is_multilingual", "suppress_tokens", "begin_suppress_tokens", "max_initial_timestamp_index"),
        *("forced_decoder_ids", "return_timestamps", "language", "task", "alignment_heads"),
        *("median_filter_width", "prompt_condition_type"),
    }
)
_TOKEN = Constraint(type=int, low=0, high=2**31 - 1, expected="a token id")
_TOKENS = Constraint(type=list, entries=_TOKEN, expected="a list of token ids")


def is_speech(architecture: str) -> bool:
    """Whether a model with this architecture in config.json transcribes audio."""
    return architecture in SPEECH_ARCHITECTURES


def decoder_config(raw: Mapping[str, object]) -> dict[str, object]:
    """Return config.json ``raw`` of Whisper with its decoder's sizes under their usual names; its own result is
    unchanged.

    Those names are the encoder's in files, which repeat its sizes under them.
    """
    if "decoder_layers" not in raw:
        return dict(raw)
    config = {name: value for name, value in raw.items() if name not in (*_DECODER.values(), "num_key_value_heads")}
    return {_DECODER.get(name, name): value for name, value in config.items()}


@dataclass(frozen=True)
class SpeechTokens:
    """The tokens that ask for a transcript, of generation_config.json.

    start          the first of every prompt.
    languages      code, such as en -> its token; empty for a model of one language.
    tasks          transcribe and translate -> their tokens; empty for a model of one language.
    no_timestamps  asks for a text without timestamps; behind it are the timestamps, from 0 s on in steps of 20 ms.
    previous       comes before the text that precedes the audio; None: there is none.
    suppressed     never in a transcript.
    first_suppressed  not the first of a transcript.
    max_first_timestamp  the largest number of the first timestamp; None: any.
    language       code of the language of audio whose language a client does not say; None: it is detected.
    """

    start: int
    no_timestamps: int
    languages: Mapping[str, int] = field(default_factory=dict)
    tasks: Mapping[str, int] = field(default_factory=dict)
    previous: int | None = None
    suppressed: tuple[int, ...] = ()
    first_suppressed: tuple[int, ...] = ()
    max_first_timestamp: int | None = None
    language: str | None = None

    @property
    def timestamps(self) -> int:
        """The token of 0 s."""
        return self.no_timestamps + 1

    @property
    def no_speech(self) -> int:
        """The token whose probability as the first one is that there is no speech."""
        return self.no_timestamps - 1

    @staticmethod
    def read(folder: Path, vocab_size: int, model: Mapping[str, object]) -> SpeechTokens:
        """Read generation_config.json; ``model`` is config.json.

        Raises ``model_incomplete`` and ``model_malformed``.
        """
        name = "generation_config.json"
        if not (folder / name).is_file():
            raise error("model_incomplete", path=folder, missing=f"{name} is missing, which names the tokens of tasks")
        raw = read_json(folder / name, name)
        for key in ("decoder_start_token_id", "no_timestamps_token_id"):
            if raw.get(key) is None:
                raise error("model_incomplete", path=folder, missing=f"{name} has no {key}")
        if raw.get("is_multilingual") is False:  # such prompts have neither a language nor a task
            raw = {**raw, "lang_to_id": None, "task_to_id": None}
        languages = {code.strip("<|>"): id for code, id in _named(raw, "lang_to_id").items()}
        found = SpeechTokens(
            start=_stated(raw, "decoder_start_token_id", _TOKEN),
            no_timestamps=_stated(raw, "no_timestamps_token_id", _TOKEN),
            languages=languages,
            tasks=_named(raw, "task_to_id"),
            previous=_stated(raw, "prev_sot_token_id", _TOKEN),
            suppressed=tuple(_stated(raw, "suppress_tokens", _TOKENS) or ()),
            first_suppressed=tuple(_stated(raw, "begin_suppress_tokens", _TOKENS) or ()),
            max_first_timestamp=_stated(raw, "max_initial_timestamp_index", _TOKEN),
            language=_default_language(raw, model, languages) if languages else None,
        )
        prompt = {found.start, found.timestamps, *found.languages.values(), *found.tasks.values()}
        every = {*prompt, *found.suppressed, *found.first_suppressed, found.previous or 0}
        if max(every) >= vocab_size:
            reason = f"it names the token {max(every)}, and the vocabulary ends at {vocab_size - 1}"
            raise error("model_malformed", file=name, reason=reason)
        return found


def _default_language(raw: Mapping[str, Any], model: Mapping[str, object], languages: Mapping[str, int]) -> str | None:
    """Return the language that the files of a fine-tuned model fix, as transformers reads them; None without one.

    ``language`` of generation_config.json ``raw`` is a code or a name; forced_decoder_ids, which that of config.json
    ``model`` replaces, has the tokens of a prompt by their index. Raises ``model_malformed``.
    """
    stated = raw.get("language")
    if isinstance(stated, str):
        from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

        code = stated.lower().strip("<|>")
        code = TO_LANGUAGE_CODE.get(code, code)
        if code not in languages:
            raise _malformed(f"language is {stated!r:.64}, which is not in lang_to_id")
        return code
    if stated is not None:
        raise _malformed(f"language is {stated!r:.64}, not a text")
    forced = raw.get("forced_decoder_ids") or model.get("forced_decoder_ids")
    if raw.get("task") is not None or not forced:
        return None
    try:
        token = dict(forced).get(1)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise _malformed(f"forced_decoder_ids is {forced!r:.64}, not pairs of an index and a token") from None
    codes = [code for code, id in languages.items() if id == token]
    if token is not None and not codes:
        raise _malformed(f"forced_decoder_ids has the token {token!r:.32} where lang_to_id has a language")
    return codes[0] if codes else None


def _malformed(reason: str) -> AiakqError:
    return error("model_malformed", file="generation_config.json", reason=reason)


def _stated(raw: Mapping[str, Any], key: str, constraint: Constraint) -> Any:
    """Return a value of generation_config.json; None without one. Raises ``model_malformed``."""
    value = raw.get(key)
    refused = None if value is None else constraint.refusal(value)
    if refused is not None:
        raise _malformed(f"{key} is {value!r:.64}, not {refused.expected}")
    return value


def _named(raw: Mapping[str, Any], key: str) -> dict[str, int]:
    values = raw.get(key) or {}
    if not isinstance(values, dict) or any(_TOKEN.refusal(value) is not None for value in values.values()):
        raise _malformed(f"{key} is no object of token ids")
    return {str(name): int(value) for name, value in values.items()}


@dataclass(frozen=True, kw_only=True)
class SpectrogramConfig:
    """What an encoder of Whisper's kind reads.

    folder      the model's.
    num_states  states of the encoder for ``num_frames`` frames of a spectrogram.
    num_bins    frequencies of a spectrogram.
    """

    folder: str
    num_states: int
    num_bins: int

    @property
    def num_frames(self) -> int:
        """The frames of a spectrogram that the model reads at once, 3000 in published models: 30 s."""
        return self.num_states * FRAMES_PER_STATE

    @staticmethod
    def of(folder: str, encoder: Mapping[str, object], num_bins: int) -> SpectrogramConfig:
        """Read the config of an encoder; ``num_bins`` is its family's default."""
        return SpectrogramConfig(
            folder=folder,
            num_states=int(read_value(encoder, SIZE, "max_source_positions", default=1500)),
            num_bins=int(read_value(encoder, SIZE, "num_mel_bins", default=num_bins)),
        )


@dataclass(frozen=True, kw_only=True)
class SpeechConfig(SpectrogramConfig):
    """A model that transcribes audio.

    raw     config.json as it is.
    tokens  the tokens of prompts.
    """

    raw: Mapping[str, Any]
    tokens: SpeechTokens

    def cache_tokens(self, max_num_seqs: int) -> int:
        """Return how many states of encoders are kept."""
        return self.num_states * min(max_num_seqs, _MAX_AUDIOS)

    @staticmethod
    def from_args(
        args: EngineArguments, folder: Path, raw: Mapping[str, object], vocab_size: int, device_type: str
    ) -> SpeechConfig | None:
        """Return the settings of a model that transcribes; None for others. ``raw`` is config.json.

        Raises ``unsupported`` and ``option_conflict`` for what is not computed with such a model, ``model_incomplete``
        and ``model_malformed``.
        """
        architecture = first_architecture(raw)
        if not is_speech(architecture):
            return None
        _check(args, device_type)
        read = SpectrogramConfig.of(str(folder), raw, num_bins=80)
        tokens = SpeechTokens.read(folder, vocab_size, raw)
        return SpeechConfig(**vars(read), raw=dict(raw), tokens=tokens)


def transcribes_audio(args: EngineArguments, raw: Mapping[str, object]) -> bool:
    """Return whether the model of config.json ``raw`` transcribes audio.

    Raises ``option_conflict`` if --task, --runner or --convert ask for what it does not do: a model that transcribes
    does nothing else, and no other model does.
    """
    architecture = first_architecture(raw)
    transcribes = is_speech(architecture)
    if args.task == "transcription" and not transcribes:
        raise _conflict("--task transcription", f"{architecture:.64} does not transcribe audio")
    if not transcribes:
        return False
    if args.task not in ("auto", "transcription"):
        raise _conflict(f"--task {args.task}", "the model transcribes audio")
    if args.runner == "pooling":
        raise _conflict("--runner pooling", "the model transcribes audio")
    if args.convert not in ("auto", "none"):
        raise _conflict(f"--convert {args.convert}", "the model transcribes audio")
    return True


def _check(args: EngineArguments, device_type: str) -> None:
    """Raise an error for an argument that does not go together with a model that transcribes."""
    if device_type != "cpu":
        raise error("unsupported", what="A model that transcribes audio on a GPU", hint="Use --device cpu.")
    alone = {
        f"-tp {args.tensor_parallel_size}": args.tensor_parallel_size > 1,
        f"-pp {args.pipeline_parallel_size}": args.pipeline_parallel_size > 1,
        "--speculative-config": args.speculative_config is not None,
        "--enable-lora": args.enable_lora,
        "--model-impl transformers": args.model_impl == "transformers",
        "--load-format dummy": args.load_format == "dummy",
    }
    for option, is_given in alone.items():
        if is_given:
            raise _conflict(option, "a model that transcribes audio is computed without it")


def _conflict(option: str, reason: str) -> AiakqError:
    return error("option_conflict", option=option, other="this model", reason=reason, hint="Leave it out.")
