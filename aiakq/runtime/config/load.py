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
from aiakq.formats.model_folder import check_files
from aiakq.formats.separate_head import separate_head
from aiakq.runtime.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class LoadConfig(LoadArguments):
    """Arguments of loading.

    path    the local model folder.
    mapped  whether safetensors files are memory-mapped, see ``Checkpoint``.
    rounds  whether 16-bit weights are rounded while they are loaded (--quantization).
    """

    path: Path
    mapped: bool = True
    rounds: bool = False

    @staticmethod
    def from_args(args: EngineArguments) -> LoadConfig:
        """Find or download the model. Raises ``usage`` if none is given, ``model_*`` and ``path_outside_model``."""
        if not args.model:
            raise error("usage", reason="No model is given.", hint="Name a folder or a hub model with --model.")
        weights = "none" if args.load_format == "dummy" else args.load_format
        cache, ignore = args.download_dir, args.ignore_patterns
        path = resolve_model(args.model, args.revision, cache, weights, ignore, args.hf_token)
        check_files(path)
        return LoadConfig(**part_of(LoadConfig, args) | {"path": path})

    def with_stored_head(self, model: ModelConfig, raw: Mapping[str, object]) -> ModelConfig:
        """Return ``model`` with an output layer of its own, if one is stored that differs from the embedding.

        raw  config.json.
        """
        if not model.tie_word_embeddings or self.load_format == "dummy":
            return model
        try:
            head = separate_head(Checkpoint.open(self.path, self.load_format, self.ignore_patterns, raw))
        except AiakqError:
            return model  # loading the folder will report the error
        return replace(model, tie_word_embeddings=False, stored_head=head) if head else model
