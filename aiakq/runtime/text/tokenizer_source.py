"""TokenizerSource: which tokenizer an engine has, sent to the processes that load it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aiakq.arguments.engine import EngineArguments
from aiakq.errors import error
from aiakq.formats.hub import resolve_model
from aiakq.formats.mistral.choice import has_only_mistral_tokenizer
from aiakq.runtime.text.mistral_tokenizer import MistralTokenizer
from aiakq.runtime.text.tokenizer import NoTokenizer, Tokenizer
from aiakq.runtime.text.tokenizer_extension import extended_tokenizer


@dataclass(frozen=True)
class TokenizerSource:
    """The source of a tokenizer.

    folder     folder with the tokenizer's files.
    mode       auto; hf: never in Mistral's format; slow: transformers' Python tokenizers; mistral.
    extension  Python file named by the operator, whose ``get_tokenizer(folder)`` creates the tokenizer.
    left_out   whether to run without a tokenizer: token ids in, token ids out.
    """

    folder: str
    trust_remote_code: bool = False
    mode: str = "auto"
    extension: str | None = None
    left_out: bool = False

    @staticmethod
    def from_args(args: EngineArguments, model: Path) -> TokenizerSource:
        """That of the model folder, or what the arguments name. A revision of its own needs a hub name: that of the
        tokenizer, or the model's. Raises ``bad_option`` and model_*.
        """
        folder, name = model, args.tokenizer or args.model
        if name and (args.tokenizer or args.tokenizer_revision):
            revision = args.tokenizer_revision or (args.revision if name == args.model else None)
            folder = resolve_model(name, revision, args.download_dir, weights="none", token=args.hf_token)
        extension = args.tokenizer_extension_path
        if extension is not None and not (Path(extension).is_absolute() and Path(extension).is_file()):
            raise error(
                "bad_option",
                option="--tokenizer-extension-path",
                value=extension,
                expected="the absolute path of a Python file",
                hint="It is run as code, so it has to be named exactly.",
            )
        left_out = args.skip_tokenizer_init
        return TokenizerSource(str(folder), args.trust_remote_code, args.tokenizer_mode, extension, left_out)

    def load(self) -> Tokenizer:
        """Load it. Raises ``model_malformed`` for unreadable files, ``tokenizer_extension`` if its code fails."""
        if self.left_out:
            return NoTokenizer()
        if self.extension:
            return Tokenizer(extended_tokenizer(self.extension, self.folder), compiled=False)
        if self.mode == "mistral" or (self.mode == "auto" and has_only_mistral_tokenizer(Path(self.folder))):
            return MistralTokenizer.of(Path(self.folder))
        return Tokenizer.load(self.folder, self.trust_remote_code, self.mode)
