"""LoadConfig: the files to load, and how their weights are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from aiakq.arguments.argument import part_of
from aiakq.arguments.engine import EngineArguments, LoadArguments
from aiakq.errors import AiakqError, error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.hub import resolve_model
from aiakq.formats.made_folder import MISTRAL, source_of
from aiakq.formats.mistral.folder import mistral_folder
from aiakq.formats.model_folder import check_files
from aiakq.formats.separate_head import separate_head
from aiakq.runtime.config.model import ModelConfig

#: Load format -> kind of weight files, where it has another name.
_WEIGHTS = {"dummy": "none", "runai_streamer": "safetensors"}
#: Threads of runai_streamer if none are given, as in vLLM.
_STREAMER_THREADS = 16
_MAX_THREADS = 256


@dataclass(frozen=True, kw_only=True)
class LoadConfig(LoadArguments):
    """Arguments of loading.

    path          the local model folder.
    mapped        whether safetensors files are memory-mapped, see ``Checkpoint``.
    read_threads  threads that read a tensor of files that are not mapped.
    rounds        whether 16-bit weights are rounded while they are loaded (--quantization).
    """

    path: Path
    mapped: bool = True
    read_threads: int = 1
    rounds: bool = False

    @staticmethod
    def from_args(args: EngineArguments) -> LoadConfig:
        """Find or download the model.

        Raises ``usage`` if none is given, ``bad_option``, ``model_*`` and ``path_outside_model``.
        """
        if not args.model:
            raise error("usage", reason="No model is given.", hint="Name a folder or a hub model with --model.")
        threads = read_threads(args.load_format, args.model_loader_extra_config or {})
        weights = _WEIGHTS.get(args.load_format, args.load_format)
        if args.config_format == "mistral" and weights != "none":
            weights = "mistral"
        _check_formats(args)
        cache, ignore = args.download_dir, args.ignore_patterns
        path = resolve_model(args.model, args.revision, cache, weights, ignore, args.hf_token)
        if args.config_format == "mistral" and source_of(path, MISTRAL) is None:
            path = mistral_folder(path, with_weights=False)
        if args.config_format == "hf" and (source := source_of(path, MISTRAL)) is not None:
            raise error("model_incomplete", path=str(source), missing="config.json is missing")
        check_files(path)
        own = {"path": path, "mapped": threads == 1, "read_threads": threads}
        return LoadConfig(**part_of(LoadConfig, args) | own)

    @property
    def weights(self) -> str:
        """The kind of weight files, as ``Checkpoint.open`` and ``resolve_model`` take it."""
        return _WEIGHTS.get(self.load_format, self.load_format)

    def with_stored_head(self, model: ModelConfig, raw: Mapping[str, object]) -> ModelConfig:
        """Return ``model`` with an output layer of its own, if one is stored that differs from the embedding.

        raw  config.json.
        """
        if not model.tie_word_embeddings or self.load_format == "dummy":
            return model
        try:
            head = separate_head(Checkpoint.open(self.path, self.weights, self.ignore_patterns, raw))
        except AiakqError:
            return model  # loading the folder will report the error
        return replace(model, tie_word_embeddings=False, stored_head=head) if head else model


def _check_formats(args: EngineArguments) -> None:
    """Raise ``option_conflict`` for files of weights that do not belong to the config."""
    others = ("pt", "gguf") if args.config_format == "mistral" else ("mistral",)
    if args.config_format != "auto" and args.load_format in others:
        raise error(
            "option_conflict",
            option=f"--load-format {args.load_format}",
            other=f"--config-format {args.config_format}",
            reason="the tensors have the names and the order of the format of the config",
            hint="Leave one of them out.",
        )


def read_threads(load_format: str, extra: Mapping[str, object]) -> int:
    """Return the threads that read a tensor: what ``extra`` says (--model-loader-extra-config), or the default of
    ``load_format``. Raises ``bad_option``.
    """
    streams = load_format == "runai_streamer"
    known = {"concurrency", "memory_limit"} if streams else {"enable_multithread_load", "num_threads"}
    key, default = ("concurrency", _STREAMER_THREADS) if streams else ("num_threads", 8)
    threads, enabled = extra.get(key, default), streams or extra.get("enable_multithread_load", False)
    is_count = not isinstance(threads, bool) and isinstance(threads, int) and 1 <= threads <= _MAX_THREADS
    if not isinstance(threads, int) or not (is_count and isinstance(enabled, bool) and extra.keys() <= known):
        raise error(
            "bad_option",
            option="--model-loader-extra-config",
            value=dict(extra),
            expected=f"a JSON object with {' and '.join(sorted(known))} for --load-format {load_format}",
            hint=f"{key} is a number from 1 to {_MAX_THREADS}.",
        )
    return threads if enabled else 1
